"""The tables of ``scanvas bench mixers``: all figures, and the few that tell most."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

Rows = list[dict[str, Any]]

_FACTORS = {"kept": 100, "recovered_fraction": 100, "parameters": 1e-6, "flops": 1e-9}


def table(rows: Rows) -> str:
    """All figures: one line a mixer, the most accurate first, in Markdown; what failed is named below it."""
    mixers = _ordered(rows)
    columns: dict[str, dict[str, str]] = {"mixer": {name: f"`{name}`" for name in mixers}}
    notes = []

    def add(title: str, cells: dict[str, str]) -> None:
        if any(cells.values()):
            columns[title] = cells

    timed = [row for row in rows if row["what"] == "time"]
    budgets = list(dict.fromkeys(row["budget"] for row in timed))
    for number, budget in enumerate(budgets):
        ours = [row for row in timed if row["budget"] == budget]
        sides = sorted({row["side"] for row in ours})
        at, device = " / ".join(f"{side}²" for side in sides), budget.split(",")[0]
        unit, per_ms = _unit(ours)
        if number == 0:
            counted = {
                name: _over(ours, name, [sides[-1]], "parameters", lambda value, _: value / 1e3) for name in mixers
            }
            add("parameters of a layer (k)", counted)
            add(f"GFLOPs of a layer, {at}", {n: _over(ours, n, sides, "flops", lambda v, _: v / 1e9) for n in mixers})
        for key, what in (("forward", "forward"), ("forward_backward", "forward and backward")):

            def per_token(value: float, row: dict[str, Any], per_ms: float = per_ms) -> float:
                return value * per_ms / _tokens(row)

            cells = {name: _over(ours, name, sides, f"{key}_ms", per_token) for name in mixers}
            add(f"{what}, {unit} a token, {device}, {at}", cells)
        # The batches hold equally many tokens, so that memory is much the same at all sides: the file has the others.
        cells = {name: _over(ours, name, sides[-1:], "forward_backward_mb", lambda value, _: value) for name in mixers}
        add(f"peak memory of both, MiB, {device}, {sides[-1]}²", cells)
        batches = ", ".join(f"{row['batch']} × {row['side']}²" for row in ours if row["mixer"] == ours[0]["mixer"])
        notes.append(f"Time and memory: one layer, {budget}; batches of {batches} tokens.")
    for what, shown in (
        ("speed", {"parameters": "parameters (M)", "flops": "GFLOPs", "images_per_second": "images/s",
                   "trained_per_second": "trained/s", "trained_mb": "peak memory of training, MiB"}),
        ("accuracy", {"accuracy": "accuracy (%)"}),
        ("recovery", {"kept": "kept weights (%)", "swapped": "after the exchange (%)", "recovered": "recovered (%)",
                      "recovered_fraction": "of the teacher (%)"}),
    ):  # fmt: skip
        ours = of_kind(rows, what)
        for key, title in shown.items():
            factor = _FACTORS.get(key, 1)
            add(title, {name: _spread([factor * value for value in values(ours, name, key)]) for name in mixers})
        if ours:
            notes.append(f"{what.capitalize()}: {ours[0]['budget']}.")
    return _written(columns, mixers, notes, rows)


def short_table(rows: Rows) -> str:
    """The most telling figures of ``table``, in few columns; memory is a GPU's where there is one."""
    mixers = _ordered(rows)
    speed, reached, recovery = (of_kind(rows, what) for what in ("speed", "accuracy", "recovery"))
    timed = [row for row in rows if row["what"] == "time"]
    columns = {"mixer": {name: f"`{name}`" for name in mixers}}
    for title, ours, key in (
        ("parameters (M)", speed, "parameters"),
        ("accuracy (%)", reached, "accuracy"),
        ("images/s, inference", speed, "images_per_second"),
        ("images/s, training", speed, "trained_per_second"),
    ):
        columns[title] = {n: _spread([_FACTORS.get(key, 1) * v for v in values(ours, n, key)]) for n in mixers}
    columns["teacher's weights: at once → trained on (%)"] = {
        name: " → ".join(f"{mean(found):.1f}" if found else "×" for found in both)
        for name in mixers
        if any(both := [values(recovery, name, key) for key in ("swapped", "recovered")])
    }
    notes = []
    for ours in (by_device := machines(timed)):
        sides = sorted({row["side"] for row in ours})
        sides = sides if len(sides) < 3 else [sides[0], sides[-1]]
        unit, per_ms = _unit(ours)
        device, at = ours[0]["budget"].split(",")[0], " / ".join(f"{side}²" for side in sides)
        columns[f"{unit} a token, {device}, {at}"] = {
            name: _over(
                ours,
                name,
                sides,
                "forward_backward_ms",
                lambda value, row, per_ms=per_ms: value * per_ms / _tokens(row),
            )
            for name in mixers
        }
        if ours is by_device[0]:
            columns[f"MiB, {sides[-1]}²"] = {
                name: _over(ours, name, sides[-1:], "forward_backward_mb", lambda value, _: value) for name in mixers
            }
        tokens = max(_tokens(row) for row in ours)
        notes.append(f"Time and memory: forward and backward of one layer, {ours[0]['budget']}, {tokens:,} tokens.")
    for title, ours in (("Images/s", speed), ("Accuracy", reached), ("Teacher's weights", recovery)):
        if ours:
            notes.append(f"{title}: {ours[0]['budget']}.")
    shown = {title: cells for title, cells in columns.items() if any(cells.values())}
    return _written(shown, mixers, notes, speed + reached + recovery + timed)


def machines(rows: Rows) -> list[Rows]:
    """Rows by what they were measured on and with, those of a GPU first."""
    budgets = sorted({row["budget"] for row in rows}, key=lambda budget: (budget.startswith("CPU"), budget))
    return [[row for row in rows if row["budget"] == budget] for budget in budgets]


def of_kind(rows: Rows, what: str) -> Rows:
    """The rows of one kind and, where that was measured on several machines, of the first of ``machines``."""
    return next(iter(machines([row for row in rows if row["what"] == what])), [])


def _written(columns: dict[str, dict[str, str]], mixers: list[str], notes: list[str], rows: Rows) -> str:
    """Columns by title and mixer in Markdown, and below them the notes and what failed."""
    failures = [
        f"- `{row['mixer']}`, {row['what']} ({row.get('side', row.get('seed', 'model'))}): {row['failed']}"
        for row in rows
        if row["failed"]
    ]
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cells.get(name) or "–" for cells in columns.values()] for name in mixers]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, *notes, *(["Failed:\n\n" + "\n".join(failures)] if failures else [])]) + "\n"


def _ordered(rows: Rows) -> list[str]:
    return sorted({row["mixer"] for row in rows}, key=lambda name: (-_accuracy(rows, name), name))


def _unit(timed: Rows) -> tuple[str, float]:
    """Of a token's time, and how many of it a millisecond has."""
    return ("µs", 1e3) if timed[0]["budget"].startswith("CPU") else ("ns", 1e6)


def _tokens(row: dict[str, Any]) -> int:
    return row["batch"] * row["side"] ** 2


def _over(rows: Rows, name: str, sides: list[int], key: str, scale: Callable[[float, dict], float]) -> str:
    """The values at all sides, ``×`` for what failed and ``–`` for what was not measured."""
    at = {row["side"]: row for row in rows if row["mixer"] == name}
    cells = []
    for side in sides:
        row = at.get(side)
        value = None if row is None else row.get(key)
        cells.append(_short(scale(value, row)) if value is not None else "–" if row is None else "×")
    return " / ".join(cells) if at else ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: list[float]) -> str:
    """Mean, and of several seeds their standard deviation and number."""
    if not values:
        return ""
    centre = f"{mean(values):,.0f}" if mean(values) >= 1000 else f"{mean(values):.1f}"
    if len(values) < 2 or mean(values) >= 1000:
        return centre
    return f"{centre} ± {stdev(values):.1f} ({len(values)})"


def values(rows: Rows, name: str, key: str) -> list[float]:
    """A mixer's values of a column where they were measured."""
    return [row[key] for row in rows if row["mixer"] == name and row.get(key) is not None]


def _accuracy(rows: Rows, name: str) -> float:
    return mean(values(rows, name, "accuracy") or [0.0])

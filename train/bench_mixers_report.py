"""What ``scanvas bench mixers`` writes: rows as they come, and one table and one plot of all of them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from .errors import ConfigError

Rows = list[dict[str, Any]]


def identity(row: dict[str, Any]) -> tuple:
    """What a row is a measurement of: two rows of the same are one."""
    return tuple(row.get(key) for key in ("what", "mixer", "side", "seed", "budget"))


def save_rows(rows: Rows, versions: Any, place: Path) -> None:
    """``place`` (.json) with rows and versions, and the rows beside it as .csv; each whole or not written at all."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    place.parent.mkdir(parents=True, exist_ok=True)

    def write_table(file) -> None:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)

    _write(place, lambda file: json.dump({"versions": versions, "rows": rows}, file, indent=1))
    _write(place.with_suffix(".csv"), write_table)


def _write(place: Path, fill: Callable[[Any], Any]) -> None:
    fresh = place.with_name(f".{os.getpid()}-{place.name}")
    with fresh.open("w", encoding="utf-8", newline="") as file:
        fill(file)
    fresh.replace(place)


def _read(place: Path) -> dict[str, Any]:
    try:
        stored = json.loads(place.read_text(encoding="utf-8"))
        stored["rows"] = [row for row in stored["rows"] if {"what", "mixer", "budget", "failed"} <= row.keys()]
        return stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{place} does not hold rows of scanvas bench mixers: {type(error).__name__} {error}"
        ) from error


def stored_rows(places: Iterable[Path]) -> Rows:
    """The rows of files, each measurement once: the first that did not fail."""
    kept: dict[tuple, dict[str, Any]] = {}
    for place in places:
        for row in _read(place)["rows"]:
            if identity(row) not in kept or kept[identity(row)]["failed"]:
                kept[identity(row)] = row
    return list(kept.values())


def files_of(folder: Path) -> list[Path]:
    """Files of rows in a folder; the joined one where there are no others."""
    shards = sorted(folder.glob("rows-*.json"))
    return shards or [place for place in [folder / "mixers.json"] if place.exists()]


def merge(folders: Iterable[Path], out: Path) -> Rows:
    """Join the rows of ``folders`` into ``out``: ``mixers.json`` and ``.csv``, the table ``mixers.md``, which is also
    printed, and the plot ``mixers.png``.

    Raises ConfigError: there are none, or accuracies of different budgets.
    """
    folders = list(folders)
    places = [place for folder in folders for place in files_of(folder)]
    rows = stored_rows(places)
    if not rows:
        raise ConfigError(f"no rows of scanvas bench mixers lie in {', '.join(map(str, folders))}")
    for what in ("accuracy", "recovery"):
        budgets = sorted({row["budget"] for row in rows if row["what"] == what})
        if len(budgets) > 1:
            raise ConfigError(f"{what} of different budgets does not belong into one table: {' | '.join(budgets)}")
    versions = []
    for place in places:
        known = _read(place)["versions"]
        versions += [one for one in (known if isinstance(known, list) else [known]) if one not in versions]
    save_rows(rows, versions, out / "mixers.json")
    text = table(rows)
    _write(out / "mixers.md", lambda file: file.write(text))
    print(text)
    print(f"saved {out / 'mixers'}.json, .csv and .md{_plotted(rows, out / 'mixers.png')}")
    return rows


def table(rows: Rows) -> str:
    """One line a mixer, the most accurate first, in Markdown; what failed is named below it."""
    mixers = sorted({row["mixer"] for row in rows}, key=lambda name: (-_accuracy(rows, name), name))
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
        unit, per_ms = ("µs", 1e3) if device == "CPU" else ("ns", 1e6)
        if number == 0:
            counted = {
                name: _over(ours, name, [sides[-1]], "parameters", lambda value, _: value / 1e3) for name in mixers
            }
            add("parameters of a layer (k)", counted)
            add(f"GFLOPs of a layer, {at}", {n: _over(ours, n, sides, "flops", lambda v, _: v / 1e9) for n in mixers})
        for key, what in (("forward", "forward"), ("forward_backward", "forward and backward")):

            def per_token(value: float, row: dict[str, Any], per_ms: float = per_ms) -> float:
                return value * per_ms / (row["batch"] * row["side"] ** 2)

            cells = {name: _over(ours, name, sides, f"{key}_ms", per_token) for name in mixers}
            add(f"{what}, {unit} a token, {device}, {at}", cells)
        # The batches hold equally many tokens, so that memory is much the same at all sides: the file has the others.
        cells = {name: _over(ours, name, sides[-1:], "forward_backward_mb", lambda value, _: value) for name in mixers}
        add(f"peak memory of both, MiB, {device}, {sides[-1]}²", cells)
        batches = ", ".join(f"{row['batch']} × {row['side']}²" for row in ours if row["mixer"] == ours[0]["mixer"])
        notes.append(f"Time and memory: one layer, {budget}; batches of {batches} tokens.")
    for what, shown in (
        ("accuracy", {"accuracy": "accuracy (%)", "images_per_second": "images/s", "trained_per_second": "trained/s"}),
        ("recovery", {"kept": "kept weights (%)", "swapped": "after the exchange (%)", "recovered": "recovered (%)",
                      "recovered_fraction": "of the teacher (%)"}),
    ):  # fmt: skip
        ours = [row for row in rows if row["what"] == what]
        for key, title in shown.items():
            factor = 100 if key in ("kept", "recovered_fraction") else 1
            add(title, {name: _spread([factor * value for value in _values(ours, name, key)]) for name in mixers})
        if ours:
            notes.append(f"{what.capitalize()}: {ours[0]['budget']}.")
    failures = [
        f"`{row['mixer']}`, {row['what']} ({row.get('side', row.get('seed'))}): {row['failed']}"
        for row in rows
        if row["failed"]
    ]
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cells.get(name) or "–" for cells in columns.values()] for name in mixers]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        "\n\n".join(
            [text, *notes, *(["Failed:\n\n" + "\n".join(f"- {line}" for line in failures)] if failures else [])]
        )
        + "\n"
    )


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


def _values(rows: Rows, name: str, key: str, what: str | None = None) -> list[float]:
    """A mixer's values of a column where they were measured."""
    return [
        row[key] for row in rows if row["mixer"] == name and what in (None, row["what"]) and row.get(key) is not None
    ]


def _accuracy(rows: Rows, name: str) -> float:
    return mean(_values(rows, name, "accuracy") or [0.0])


def _plotted(rows: Rows, place: Path) -> str:
    """Draw accuracy against throughput; says so, or why not."""
    points = {}
    for name in sorted({row["mixer"] for row in rows}):
        speeds, reached = (_values(rows, name, key, "accuracy") for key in ("images_per_second", "accuracy"))
        if speeds and reached:
            points[name] = (mean(speeds), mean(reached), stdev(reached) if len(reached) > 1 else 0.0)
    if not points:
        return ""
    try:
        draw(points, place)
    except ImportError:
        return "; for the plot: pip install 'scanvas[demo]'"
    return f" and {place}"


def draw(points: dict[str, tuple[float, float, float]], place: Path) -> None:
    """``points``: name → images a second, accuracy in percent and its standard deviation. The softmax is marked, and
    labels stand where they cover neither points nor one another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for name, (x, y, wide) in points.items():
        style = {"color": "C3", "marker": "s"} if name == "softmax" else {"color": "C0", "marker": "o"}
        axis.errorbar(x, y, wide or None, **style, markersize=5, elinewidth=1, linestyle="none")
    axis.set(xscale="log", xlabel="images a second, inference", ylabel="accuracy (%)")
    for ticks in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        ticks(lambda x, _: f"{x:,.0f}" if f"{x:.0e}"[0] in "12357" else "")
    axis.margins(0.12)
    axis.grid(alpha=0.3, which="both")
    figure.draw_without_rendering()
    taken = [axis.transData.transform((x, y)) for x, y, _ in points.values()]
    boxes = [(x - 6, y - 6, x + 6, y + 6) for x, y in taken]
    scale = figure.dpi / 72
    for name, (x, y) in zip(points, taken):
        width, height = 5.2 * len(name) * scale, 10 * scale
        for distance, (right, up) in _around():
            left = x + distance * scale * right - (width if right < 0 else width / 2 if right == 0 else 0)
            low = y + distance * scale * up - height / 2
            box = (left, low, left + width, low + height)
            if not any(_cover(box, other) for other in boxes):
                break
        boxes.append(box)
        axis.annotate(
            name,
            xy=points[name][:2],
            xytext=(left, low + height / 2),
            textcoords="figure pixels",
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "lw": 0.5, "alpha": 0.5, "shrinkA": 0, "shrinkB": 3}
            if distance > 8
            else None,
        )
    figure.savefig(place)


def _around():
    """Distances in points, and directions, near ones first."""
    directions = [(1, 0), (-1, 0), (0, 1.4), (0, -1.4), (0.8, 0.9), (-0.8, 0.9), (0.8, -0.9), (-0.8, -0.9)]
    return [(distance, way) for distance in (7, 14, 22, 32, 44, 58) for way in directions]


def _cover(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]

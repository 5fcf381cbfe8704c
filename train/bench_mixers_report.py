"""What ``scanvas bench mixers`` writes: rows as they come, and tables and one plot of all of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scanvas.backbones.mixers import MIXERS

from .bench_mixers_plot import draw
from .bench_mixers_tables import Rows, of_kind, short_table, table, values
from .checkpoint import fresh_file
from .errors import ConfigError


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
    with fresh_file(place) as fresh, fresh.open("w", encoding="utf-8", newline="") as file:  # closed before it is moved
        fill(file)


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
    """Join the rows of ``folders`` into ``out``: ``mixers.json`` and ``.csv``, all figures in ``mixers.md``, the most
    telling ones in ``table.md``, which is also printed, and the plot ``mixers.png``.

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
    short = short_table(rows)
    for name, text in (("mixers.md", table(rows)), ("table.md", short)):
        _write(out / name, lambda file, text=text: file.write(text))
    print(short)
    print(f"saved {out / 'mixers'}.json, .csv and .md, {out / 'table.md'}{_plotted(rows, out / 'mixers.png')}")
    return rows


def _plotted(rows: Rows, place: Path) -> str:
    """Draw accuracy against the throughput of the backbone or, where that was not measured, of a layer; says so, or why
    not."""
    throughput, label = {}, "images a second, inference"
    for row in of_kind(rows, "speed"):
        throughput[row["mixer"]] = row.get("images_per_second")
    if not any(throughput.values()):
        timed = of_kind(rows, "time")
        side = min((row["side"] for row in timed), default=0)
        label = f"tokens a second, a layer forward at {side}²"
        for row in timed:
            if row["side"] == side and row.get("forward_ms"):
                throughput[row["mixer"]] = 1e3 * row["batch"] * side**2 / row["forward_ms"]
    points = {}
    for name, speed in throughput.items():
        reached = values(rows, name, "accuracy")
        if speed and reached:
            kind = "softmax" if name == "softmax" else "scan" if MIXERS[name].needs_scan else "other"
            points[name] = (speed, mean(reached), stdev(reached) if len(reached) > 1 else 0.0, kind)
    if not points:
        return ""
    try:
        draw(points, label, place)
    except ImportError:
        return "; for the plot: pip install 'scanvas[demo]'"
    return f" and {place}"

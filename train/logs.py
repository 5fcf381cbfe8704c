"""What a run says: a progress bar, CSV files, TensorBoard, and a picture of the curves."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_EVERY = 15.0  # seconds between lines where there is no terminal to draw a bar in


class Table:
    """A CSV file with a ``step`` column. A resumed run first drops the rows after the step it resumes from."""

    def __init__(self, path: Path, resume_step: int | None):
        self.path = path
        self.rows = []
        if resume_step is not None and path.exists():
            self.rows = [row for row in read_table(path) if row["step"] <= resume_step]
        self._rewrite()

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; a row with a new column rewrites the file with it."""
        new_columns = not self.rows or set(row) != set(self.rows[-1])
        self.rows.append(row)
        if new_columns:
            self._rewrite()
        else:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerow(row)

    def _rewrite(self) -> None:
        self.columns = list(dict.fromkeys(key for row in self.rows for key in row))
        with self.path.open("w", newline="", encoding="utf-8") as file:
            if self.columns:
                writer = csv.DictWriter(file, self.columns)
                writer.writeheader()
                writer.writerows(self.rows)


def read_table(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV file of numbers; empty cells are left out, a last line cut short by a kill is dropped."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                rows.append({k: _number(v) for k, v in row.items() if v not in ("", None)})
            except ValueError:
                continue
    return [row for row in rows if "step" in row]


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value


class Logs:
    """All outputs of the main process; silent on the others."""

    def __init__(self, out: Path, *, main: bool, resume_step: int | None, tensorboard: bool, console: Console):
        self.main, self.console, self.writer, self.bar = main, console, None, None
        self.said = 0.0
        if not main:
            return
        self.out = out
        self.train = Table(out / "train.csv", resume_step)
        self.eval = Table(out / "eval.csv", resume_step)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.say("TensorBoard logs are left out: pip install 'scanvas[train]' for them.")
            else:
                purge = None if resume_step is None else resume_step + 1
                self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=purge)

    def say(self, text: str) -> None:
        """Print one line."""
        if self.main:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, total: int, done: int) -> None:
        """Open the progress bar over ``total`` optimiser steps."""
        self.total = total
        self.began, self.began_at = time.monotonic(), done
        if self.main and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar_id = self.bar.add_task("", total=total, completed=done)
            self.bar.start()

    def progress(self, step: int, epoch: int, loss: float, rate: float) -> None:
        """Show where the run is. ``rate``: images per second over all processes."""
        if not self.main:
            return
        text = f"epoch {epoch + 1}  loss {loss:.4f}  {rate:,.0f} images/s"
        if self.bar is not None:
            self.bar.update(self.bar_id, completed=step, description=text)
        elif time.monotonic() - self.said > _PLAIN_EVERY or step == self.total:
            self.said = time.monotonic()
            per_step = (self.said - self.began) / max(1, step - self.began_at)
            self.say(f"step {step}/{self.total}  {text}  {_duration(per_step * (self.total - step))} left")

    def row(self, table: str, row: dict[str, Any]) -> None:
        """Write ``row`` (with ``step``) to ``train`` or ``eval``, to CSV and TensorBoard."""
        if not self.main:
            return
        getattr(self, table).add(row)
        if self.writer is not None:
            for key, value in row.items():
                if key != "step":
                    self.writer.add_scalar(f"{table}/{key}", value, row["step"])

    def close(self, *, plot: bool = False) -> Path | None:
        """Close bar and files; with ``plot`` draw curves.png and return its path."""
        if not self.main:
            return None
        if self.bar is not None:
            self.bar.stop()
        if self.writer is not None:
            self.writer.close()
        if plot:
            try:
                return plot_curves(self.out / "curves.png", self.train.rows, self.eval.rows)
            except ImportError:
                self.say("The plot of the curves is left out: pip install 'scanvas[demo]' for matplotlib.")
        return None


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = divmod(seconds // 60, 60)[::-1]
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds % 60:02d} s"


def plot_curves(path: Path, train: list[dict[str, float]], evaluations: list[dict[str, float]]) -> Path:
    """Loss and its terms, what evaluation measured, and the learning rate, side by side, as a PNG."""
    from matplotlib.figure import Figure

    skip = {"step", "epoch", "lr", "images_per_second"}
    terms = [k for k in _keys(train) if k not in skip | {"gradient_norm", "loss"}]
    panels = [("training loss", train, ["loss", *terms] if len(terms) > 1 else ["loss"])]
    panels += [("gradient norm", train, [k for k in _keys(train) if k == "gradient_norm"])]
    measured = [k for k in _keys(evaluations) if k not in skip]
    panels += [(f"validation {key}", evaluations, [key]) for key in measured]
    panels += [("learning rate", train, ["lr"])]
    panels = [(title, rows, keys) for title, rows, keys in panels if rows and keys]
    columns = min(3, max(1, len(panels)))
    lines = math.ceil(len(panels) / columns) or 1
    figure = Figure(figsize=(4.2 * columns, 3.0 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (title, rows, keys) in zip(axes, panels):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if key in row]
            axis.plot(*zip(*points), label=key, marker="o" if len(points) < 40 else None, markersize=3, linewidth=1.2)
        axis.set(title=title, xlabel="optimiser step")
        axis.grid(alpha=0.3)
        if len(keys) > 1:
            axis.legend(fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110)
    return path


def _keys(rows: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))

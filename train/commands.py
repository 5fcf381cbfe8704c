"""How a command of the command line is declared; cli.py runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COMMANDS: dict[str, tuple[Callable, str, list]] = {}
"""Name → (function, summary, arguments)."""


def argument(*flags: str, **options: Any):
    """One argument of a command, in argparse's terms."""
    return flags, options


def command(name: str, summary: str, *arguments):
    """Register a command: its function takes the parsed arguments and returns an exit code or None for 0."""

    def register(function: Callable) -> Callable:
        COMMANDS[name] = (function, summary, list(arguments))
        return function

    return register


DEVICE = argument("--device", help="cuda, cuda:1, cpu, …; by default the accelerator if there is one")
JSON = argument("--json", action="store_true", help="print JSON")
OVERRIDES = argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe, e.g. optim.lr=1e-3")
CONFIG = argument("--config", metavar="CONFIG", help="a YAML file, or the name of a shipped recipe")


def print_table(columns: list[str], rows: list[list[str]], title: str = "") -> None:
    """Rows under their columns, the first to the left, the others to the right."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    if title:
        print(title)
    for row in [columns, *rows] if any(columns) else rows:
        cells = [str(row[0]).ljust(widths[0]), *(str(c).rjust(w) for c, w in zip(row[1:], widths[1:]))]
        print("  ".join(cells).rstrip())


def print_result(result: dict[str, Any]) -> None:
    """Names and values under one another."""
    shown = {key: f"{value:,.4g}" if isinstance(value, float) else str(value) for key, value in result.items()}
    print_table(["", ""], [[key.replace("_", " "), value] for key, value in shown.items()])

"""The command ``scanvas train distill``; see commands.py."""

from __future__ import annotations

from .commands import CONFIG, OVERRIDES, command, print_table


@command(
    "train distill",
    "make a softmax model linear and train it to do what that did",
    CONFIG,
    OVERRIDES,
)
def _train_distill(args) -> None:
    from .distill import train_distill
    from .distill_config import load_distill

    result, measured = train_distill(load_distill(args.config, args.overrides))
    if result.main:
        columns = list(dict.fromkeys(key for row in measured.values() for key in row))
        rows = [[name, *(f"{row[key]:.4g}" if key in row else "" for key in columns)] for name, row in measured.items()]
        print_table(["", *columns], rows)
        print(f"the linear model: {result.out / 'best'} and {result.out / 'final'}")

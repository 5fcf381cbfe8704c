"""The command ``scanvas linearize``; see commands.py."""

from __future__ import annotations

import json
from typing import Any

from .commands import JSON, argument, command


@command(
    "linearize",
    "give the softmax attention of a saved diffusers pipeline or model linear attention",
    argument("source", metavar="DIR", help="a pipeline or a model, as save_pretrained wrote it"),
    argument("--out", required=True, metavar="DIR", help="where the linearised one is written, with linearize.json"),
    argument("--mixer", default="lit", help="a target of docs/linearize.md, by default lit"),
    argument(
        "--layers",
        nargs="+",
        default=["all"],
        metavar="PATTERN",
        help="paths of layers, such as 'single_*'; or indices",
    ),
    argument("--heads", type=int, help="heads of the linear attention; must divide the softmax's"),
    argument("--inherit", default="qkvo", help="projections that keep their weights: qkvo (default), vo or none"),
    argument("--set", nargs="+", default=[], metavar="key=value", help="options of the mixer, such as kernel_size=3"),
    argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights"),
    argument("--seed", type=int, default=0, help="of weights that are new"),
    JSON,
)
def _linearize(args) -> None:
    from .linearize import linearize_directory

    report = linearize_directory(
        args.source,
        args.out,
        mixer=args.mixer,
        layers=_layers(args.layers),
        heads=args.heads,
        inherit=args.inherit,
        dtype=args.dtype,
        seed=args.seed,
        options=dict(_option(text) for text in args.set),
    )
    print(json.dumps(report.to_dict(), indent=1) if args.json else f"{report}\nwritten to {args.out}")


def _layers(words: list[str]) -> Any:
    if words == ["all"]:
        return "all"
    return [int(word) if word.lstrip("-").isdigit() else word for word in words]


def _option(text: str) -> tuple[str, Any]:
    from .errors import ConfigError

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--set takes key=value, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value

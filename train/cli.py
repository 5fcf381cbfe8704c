"""The command line: parsing only. A command is one small function here; its work is in a module of its own, which is
imported when the command is run, so that ``scanvas --help`` stays quick.

To add a command: a function decorated with ``@command("name", help)`` that takes the parsed arguments, preceded by its
arguments (``argument(...)``). ``"train classify"`` is a command of the group ``train``. Those of painting are in
cli_paint.py, of looking inside in cli_maps.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from . import cli_distill, cli_linearize, cli_maps, cli_mixers, cli_paint  # noqa: F401 - they register their commands
from .commands import COMMANDS, CONFIG, DEVICE, JSON, OVERRIDES, argument, command, print_table

_GROUPS = {
    "train": "train a model from a recipe",
    "evaluate": "measure a trained model",
    "bench": "measure speed and memory, as ratios",
}
_DEFAULTS = {"evaluate": "classify"}  # `scanvas evaluate --checkpoint …` means `scanvas evaluate classify …`

_CHECKPOINT = argument("--checkpoint", required=True, metavar="DIR", help="directory that training wrote: RUN/best")


@command(
    "models",
    "list the models: parameters, FLOPs (the scan included), input size",
    argument("pattern", nargs="?", default="*", help="names to show, e.g. 'vig_h_*'"),
    JSON,
)
def _models(args) -> None:
    from .models import table

    rows = table(args.pattern)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print_table(
        ["model", "parameters (M)", "GFLOPs", "GMACs", "input"],
        [
            [
                r["name"],
                f"{r['parameters'] / 1e6:.2f}",
                f"{r['flops'] / 1e9:.2f}",
                f"{r['flops'] / 2e9:.2f}",
                "×".join(map(str, r["input_size"])),
            ]
            for r in rows
        ],
        title="One image, forward, scans included; a multiply-add is 2 FLOPs or 1 MAC (papers give MACs).",
    )


@command("train classify", "train an image classifier", CONFIG, OVERRIDES)
def _train_classify(args) -> None:
    from .classify import ClassifyConfig, train_classifier
    from .config import load

    config = load(ClassifyConfig, args.config, args.overrides, task="classify")
    result = train_classifier(config)
    if result.main:
        print(f"best: {json.dumps(result.best)}\nweights: {result.out / 'best'} and {result.out / 'final'}")


@command(
    "evaluate classify",
    "top-1 and top-5 accuracy and throughput of a classifier",
    _CHECKPOINT,
    argument("--data", metavar="ROOT", help="folder, Hugging Face id or shard folder; by default the training data"),
    argument("--format", choices=("folder", "hfds", "wds"), help="how --data is stored"),
    argument("--split", help="by default the validation split"),
    argument("--batch-size", type=int, default=64),
    argument("--workers", type=int, help="processes that read images"),
    argument("--on-error", choices=("skip", "stop"), help="what to do with an image that cannot be read"),
    argument("--samples", type=int, help="how many samples webdataset shards hold"),
    DEVICE,
    JSON,
)
def _evaluate_classify(args) -> None:
    from dataclasses import asdict

    from .evaluate import evaluate

    data = {
        "root": args.data,
        "format": args.format,
        "workers": args.workers,
        "on_error": args.on_error,
        "val_samples": args.samples,
    }
    options = {"split": args.split, "batch_size": args.batch_size, "device": args.device}
    result = asdict(evaluate(args.checkpoint, data, **options))
    if args.json:
        print(json.dumps(result))
    else:
        print_table(["", ""], [[k.replace("_", " "), _short(v)] for k, v in result.items()])


@command(
    "predict",
    "the most probable classes of images",
    argument("images", nargs="+", metavar="IMAGE"),
    _CHECKPOINT,
    argument("--top-k", type=int, default=5),
    argument("--on-error", choices=("skip", "stop"), default="stop", help="an image that cannot be read"),
    DEVICE,
    JSON,
)
def _predict(args) -> int:
    from .predict import predict

    results, skipped = predict(
        args.images, args.checkpoint, top_k=args.top_k, device=args.device, on_error=args.on_error
    )
    if args.json:
        print(json.dumps({"images": results, "skipped": skipped}, indent=1))
    else:
        for result in results:
            print(result["image"])
            for top in result["top"]:
                print(f"  {100 * top['probability']:6.2f} %  {top['class']}")
    if skipped:
        print(f"{len(skipped)} image(s) skipped: {'; '.join(skipped)}", file=sys.stderr)
    return 0 if results else 1


@command(
    "convert",
    "turn an original DiG checkpoint into a diffusers model",
    argument("source", metavar="CHECKPOINT", help="a .safetensors or PyTorch file with the original's tensor names"),
    argument("--out", required=True, metavar="DIR", help="where the model is written, as save_pretrained does"),
)
def _convert(args) -> None:
    from scanvas.diffusion.convert import convert_file

    from .errors import CheckpointError

    try:
        model = convert_file(args.source, args.out)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    c = model.config
    skips = ", with long skips (in the original's scan order)" if c.long_skip else ""
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {c.num_layers} blocks of width {model.inner_dim}{skips}")
    print(f"written to {args.out}; load it with LinearDiTTransformer2DModel.from_pretrained")


@command(
    "bench ops",
    "the operations against their peers: time, time per token, memory",
    argument("--out", default="runs/bench", metavar="DIR", help="where ops.json and ops.png go"),
    argument("--quick", action="store_true", help="short sequences only"),
    DEVICE,
)
def _bench_ops(args) -> None:
    from .bench import bench_ops

    bench_ops(args.out, device=args.device, quick=args.quick)


@command(
    "bench models",
    "backbones against timm's: time and peak memory",
    argument("--out", default="runs/bench", metavar="DIR", help="where models.json and models.png go"),
    argument("--quick", action="store_true", help="the small resolution only"),
    DEVICE,
)
def _bench_models(args) -> None:
    from .bench import bench_models

    bench_models(args.out, device=args.device, quick=args.quick)


@command(
    "bench denoisers",
    "DiG against diffusers' DiT on a GPU: time and peak memory, by resolution",
    argument("--out", default="runs/bench", metavar="DIR", help="where denoisers.json and denoisers.png go"),
)
def _bench_denoisers(args) -> None:
    from .bench import bench_denoisers

    bench_denoisers(args.out)


@command(
    "bench linearize",
    "Flux and PixArt transformers before and after linearize on a GPU: time and peak memory, by resolution",
    argument("--out", default="runs/bench", metavar="DIR", help="where linearize.json and linearize.png go"),
    argument("--models", nargs="+", default=["flux", "pixart"], help="flux, pixart or both"),
    argument("--mixers", nargs="+", default=["lit"], help="targets of linearize, by default lit"),
    argument("--sides", nargs="+", type=int, metavar="PIXELS", help="sides of the images, by default 1024 2048 4096"),
    argument("--quick", action="store_true", help="small transformers of the same kinds, for any machine"),
    DEVICE,
)
def _bench_linearize(args) -> None:
    from .bench_linearize import bench_linearize

    options = {name: getattr(args, name) for name in ("device", "models", "mixers", "sides", "quick")}
    bench_linearize(args.out, **options)


@command("doctor", "check that every operation computes what it should on this machine; a minute or two")
def _doctor(args) -> int:
    from .doctor import doctor

    return 0 if doctor() else 1


@command(
    "demo",
    "train, save, reload and judge small models on real images, on a laptop",
    argument("--out", default="runs/demo", metavar="DIR", help="where everything is written"),
)
def _demo(args) -> None:
    from .demo import demo

    demo(args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scanvas", description="Linear attention for seeing and painting.")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    top = parser.add_subparsers(dest="command", metavar="COMMAND")
    groups = {}
    for name, (function, summary, arguments) in COMMANDS.items():
        group, _, leaf = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = top.add_parser(group, help=_GROUPS[group], description=_GROUPS[group]).add_subparsers(
                dest="subcommand", metavar="WHAT", required=True
            )
        sub = (groups[group] if group else top).add_parser(leaf, help=summary, description=summary)
        for flags, options in arguments:
            sub.add_argument(*flags, **options)
        sub.set_defaults(function=function)
    return parser


def _with_defaults(argv: list[str]) -> list[str]:
    if argv and argv[0] in _DEFAULTS:
        kinds = {name.split(" ")[1] for name in COMMANDS if name.startswith(argv[0] + " ")}
        if len(argv) < 2 or argv[1] not in kinds | {"-h", "--help"}:
            return [argv[0], _DEFAULTS[argv[0]], *argv[1:]]
    return argv


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 an error said in one paragraph, 2 wrong usage, 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(_with_defaults(sys.argv[1:] if argv is None else argv))
    if args.version:
        from scanvas import __version__

        print(__version__)
        sys.exit(0)
    if not args.command:
        parser.print_help()
        sys.exit(2)
    sys.exit(run(lambda: args.function(args), traceback=args.traceback))


def run(work: Callable[[], int | None], *, traceback: bool = False) -> int:
    """``work()``'s exit code; what it raises becomes one paragraph on stderr."""
    from .errors import Interrupted, UserError

    try:
        return work() or 0
    except UserError as error:
        if traceback:
            raise
        _complain(f"error: {error}")
        return 1
    except Interrupted as stop:
        _complain(str(stop))
        return 130
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C; nothing more was saved")
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if traceback:
            raise
        text = " ".join(str(error).split())[:800]
        _complain(f"error: {type(error).__name__}: {text} (scanvas --traceback … shows where it came from)")
        return 1


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _short(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

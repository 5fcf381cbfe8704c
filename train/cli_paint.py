"""The commands that have to do with painting. See cli.py."""

from __future__ import annotations

import json

from .commands import CONFIG, DEVICE, JSON, OVERRIDES, argument, command, print_result

_STEPS = argument("--steps", type=int, help="steps of the scheduler; by default those of the pictures in training")
_GUIDANCE = argument("--guidance", type=float, help="strength of classifier-free guidance, 1 for none; likewise")
_SCHEDULER = argument("--scheduler", help="a diffusers scheduler in place of the saved one, e.g. DDIMScheduler")
_SEED = argument("--seed", type=int, default=0, help="of the first image; the others follow it")
_DTYPE = argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")


@command("train denoise", "train a denoiser, by class or text; the result is a diffusers pipeline", CONFIG, OVERRIDES)
def _train_denoise(args) -> None:
    from .config import load
    from .denoise import DenoiseConfig, train_denoiser

    config = load(DenoiseConfig, args.config, args.overrides, task="denoise")
    result = train_denoiser(config)
    if result.main:
        print(f"best: {json.dumps(result.best)}\npipelines: {result.out / 'best'} and {result.out / 'final'}")


@command("latents", "encode a data set once, into data.latents of a denoiser's recipe", CONFIG, OVERRIDES)
def _latents(args) -> None:
    from .config import load
    from .denoise_config import DenoiseConfig
    from .denoise_parts import write_latents

    print(write_latents(load(DenoiseConfig, args.config, args.overrides, task="denoise")))


@command(
    "evaluate denoise",
    "Fréchet distance, precision, recall and KID of a pipeline's images",
    argument("--pipeline", required=True, metavar="DIR", help="directory that training wrote: RUN/best"),
    argument(
        "--features", required=True, metavar="MODEL", help="directory of a timm classifier, or a timm model's name"
    ),
    argument("--data", metavar="ROOT", help="by default the training data"),
    argument("--format", choices=("folder", "hfds", "wds"), help="how --data is stored"),
    argument("--split", help="by default the training split"),
    argument("--num", type=int, default=5000, help="images to paint"),
    argument("--real", type=int, help="at most so many real images; by default all"),
    argument("--batch-size", type=int, default=64),
    argument("--workers", type=int, help="processes that read images"),
    argument("--grid", metavar="PNG", help="a picture of the first hundred"),
    argument("--real-cache", metavar="DIR", help="keep the real images' features here, for the next pipeline"),
    _STEPS,
    _GUIDANCE,
    _SCHEDULER,
    _SEED,
    _DTYPE,
    DEVICE,
    JSON,
)
def _evaluate_denoise(args) -> None:
    from dataclasses import asdict

    from .evaluate_denoise import evaluate_denoiser

    same = ("split", "num", "real", "steps", "guidance", "scheduler", "seed", "batch_size", "device", "dtype", "grid",
            "real_cache")  # fmt: skip
    data = {"root": args.data, "format": args.format, "workers": args.workers}
    options = {name: getattr(args, name) for name in same}
    result = asdict(evaluate_denoiser(args.pipeline, args.features, data, **options))
    if args.json:
        print(json.dumps(result))
    else:
        print_result(result)


@command(
    "sample",
    "paint images by prompt or class",
    argument("--pipeline", metavar="DIR", help="a saved pipeline; by default that of the demo"),
    argument("--prompt", action="append", dest="prompts", help="what to paint; may be given many times"),
    argument("--label", action="append", dest="labels", help="a class by number or name; likewise"),
    argument("--negative-prompt", help="what to steer away from"),
    argument("--out", required=True, metavar="PNG", help="one image; many get numbers"),
    argument("--num", type=int, default=1, help="images of each prompt or label"),
    argument("--grid", action="store_true", help="one picture of all images"),
    argument("--enlarge", type=int, default=1, metavar="TIMES", help="write them larger, for looking at small images"),
    argument("--height", type=int, help="pixels"),
    argument("--width", type=int, help="pixels"),
    argument("--batch-size", type=int, default=16),
    _STEPS,
    _GUIDANCE,
    _SCHEDULER,
    _SEED,
    _DTYPE,
    DEVICE,
)
def _sample(args) -> None:
    from .sample import sample

    options = {k: v for k, v in vars(args).items() if k not in ("command", "function", "version", "traceback", "out")}
    for file in sample(args.out, **options):
        print(file)

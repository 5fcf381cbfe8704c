"""The command that looks inside a model. See cli.py."""

from __future__ import annotations

import sys

from .commands import DEVICE, argument, command

_OF_IMAGES = ("model", "checkpoint", "pretrained", "no_heads", "size", "html", "beside", "why", "target")
_OF_PIPELINES = ("prompt", "label", "words", "steps", "guidance", "seed", "gif")


@command(
    "attention-map",
    "which tokens does each head look at, how far, and why: pictures, or a page to move over",
    argument("image", nargs="?", metavar="IMAGE", help="a photograph of any size and shape"),
    argument("--model", metavar="NAME", help="a timm model, e.g. vig_tiny_patch16_224"),
    argument("--checkpoint", metavar="DIR", help="instead: a directory that training wrote, such as RUN/best"),
    argument("--pretrained", action="store_true", help="load the weights that timm has for --model"),
    argument("--query", default="middle", metavar="ROW,COL", help="the patch that looks; or middle, mean, class"),
    argument("--layers", metavar="LIST", help="numbers, names or patterns, with commas; or all. By default four"),
    argument("--no-heads", action="store_true", help="only the mean of the heads"),
    argument("--size", type=int, help="pixels of the longer side; by default those of the image"),
    argument("--out", metavar="PNG", help="the figure; map.png by default, if there is no --html"),
    argument("--html", metavar="HTML", help="a page that needs no network: move over a patch to see what it looks at"),
    argument(
        "--beside", metavar="MODEL", help="a timm model or directory whose layers are drawn below, e.g. the teacher"
    ),
    argument("--why", metavar="PNG", help="which patches speak for a class, tested against chance"),
    argument("--target", metavar="CLASS", help="for --why: number or name; by default the class predicted"),
    argument("--pipeline", metavar="DIR", help="instead of an image: watch a saved pipeline paint one, step by step"),
    argument("--prompt", help="what it paints; maps of each word"),
    argument("--label", help="or the class, by number or name; maps of --query"),
    argument("--words", metavar="LIST", help="words of the prompt to show, with commas; by default all"),
    argument("--steps", type=int, help="of the scheduler"),
    argument("--guidance", type=float, help="strength of classifier-free guidance"),
    argument("--seed", type=int, help="of the noise, 0 by default"),
    argument("--gif", metavar="GIF", help="an animation of the steps"),
    DEVICE,
)
def _attention_map(args) -> None:
    from .errors import UserError

    if (args.image is None) == (args.pipeline is None):
        raise UserError("give either an image or --pipeline")
    foreign = _OF_PIPELINES if args.pipeline is None else _OF_IMAGES
    used = [name for name in foreign if getattr(args, name) not in (None, False)]
    if used:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in used)
        raise UserError(f"{shown}: only {'with --pipeline' if args.pipeline is None else 'with an image'}")
    if args.pipeline is not None:
        from .attention_steps import watch

        same = ("prompt", "label", "words", "query", "layers", "steps", "guidance", "out", "gif", "device")
        _, files = watch(args.pipeline, **{name: getattr(args, name) for name in same}, seed=args.seed or 0)
        print("\n".join(files))
        return
    from .attention_map import look

    same = (
        "model",
        "checkpoint",
        "pretrained",
        "query",
        "layers",
        "out",
        "html",
        "beside",
        "why",
        "target",
        "size",
        "device",
    )
    maps, explanation, files = look(args.image, **{name: getattr(args, name) for name in same}, heads=not args.no_heads)
    print(maps)
    if explanation is not None:
        print(explanation)
    if args.checkpoint is None and not args.pretrained:
        print("the weights are random: give --checkpoint or --pretrained to look into a trained model", file=sys.stderr)
    for file in files:
        print(file)

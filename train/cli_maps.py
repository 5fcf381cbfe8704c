"""The command that looks inside a model. See cli.py."""

from __future__ import annotations

import sys

from .commands import DEVICE, argument, command


@command(
    "attention-map",
    "which tokens does each head look at, and how far: a picture, or a page to move over",
    argument("image", metavar="IMAGE", help="a photograph of any size and shape"),
    argument("--model", metavar="NAME", help="a timm model, e.g. vig_tiny_patch16_224"),
    argument("--checkpoint", metavar="DIR", help="instead: a directory that training wrote, such as RUN/best"),
    argument("--pretrained", action="store_true", help="load the weights that timm has for --model"),
    argument("--query", default="middle", metavar="ROW,COL", help="the patch that looks; or middle, mean, class"),
    argument("--layers", metavar="LIST", help="numbers, names or patterns, with commas; or all. By default four"),
    argument("--no-heads", action="store_true", help="only the mean of the heads"),
    argument("--size", type=int, help="pixels of the longer side; by default those of the image"),
    argument("--out", metavar="PNG", help="the figure; map.png by default, if there is no --html"),
    argument("--html", metavar="HTML", help="a page that needs no network: move over a patch to see what it looks at"),
    DEVICE,
)
def _attention_map(args) -> None:
    from .attention_map import look

    same = ("model", "checkpoint", "pretrained", "query", "layers", "out", "html", "size", "device")
    maps, files = look(args.image, **{name: getattr(args, name) for name in same}, heads=not args.no_heads)
    print(maps)
    if args.checkpoint is None and not args.pretrained:
        print("the weights are random: give --checkpoint or --pretrained to look into a trained model", file=sys.stderr)
    for file in files:
        print(file)

"""``scanvas attention-map``: what the patches of an image look at, as a picture or as a page to move over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

import scanvas

from .config import ModelConfig
from .errors import CheckpointError, DataError, UserError
from .evaluate import pick_device
from .maps import AttentionMaps, Explanation, attention_maps, explain
from .maps.inputs import fixed_size, stride_of
from .models import build_model, load_classifier
from .samples import UNREADABLE, read_image

SHOWN = 4
"""Layers of the figure, if none are asked for, spread over the depth."""


def parse_query(text: str) -> tuple[int, int] | str:
    """``"5,20"`` → ``(5, 20)``; ``"mean"`` and ``"class"`` as they are. Raises UserError for anything else."""
    if text in ("mean", "class", "middle"):
        return text
    numbers = text.split(",")
    if len(numbers) != 2 or not all(n.strip().isdigit() for n in numbers):
        raise UserError(f"--query must be ROW,COLUMN in patches, 'middle', 'mean' or 'class'; got {text!r}")
    return int(numbers[0]), int(numbers[1])


def parse_layers(text: str | None) -> list[int | str] | None:
    """``"0,5,-1"`` or names and patterns → a list; ``"all"`` → ``None``."""
    return None if text in (None, "all") else [part.strip() for part in text.split(",")]


def load_model(name: str | None, checkpoint: str | None, pretrained: bool):
    """A timm model by name, or from a directory that training or ``save_linearized`` wrote."""
    if (name is None) == (checkpoint is None):
        raise UserError("give either --model, a timm model's name, or --checkpoint, a directory that training wrote")
    if checkpoint is None:
        return build_model(ModelConfig(name=name, pretrained=pretrained), num_classes=1000)
    config = Path(checkpoint) / "config.json"
    if config.is_file() and "linearization" in json.loads(config.read_text(encoding="utf-8")):
        try:
            return scanvas.load_linearized(checkpoint)
        except (ValueError, RuntimeError, OSError) as error:
            raise CheckpointError(f"cannot read checkpoint {checkpoint!r}: {error}") from error
    return load_classifier(checkpoint)


def look(
    image: str,
    *,
    model: str | None = None,
    checkpoint: str | None = None,
    pretrained: bool = False,
    query: str = "middle",
    layers: str | None = None,
    out: str | None = None,
    html: str | None = None,
    beside: str | None = None,
    why: str | None = None,
    target: str | None = None,
    heads: bool = True,
    size: int | None = None,
    device: str | None = None,
) -> tuple[AttentionMaps, Explanation | None, list[str]]:
    """Write the figure ``out`` (``map.png`` if nothing is asked for), the page ``html`` and the figure ``why`` of what
    speaks for the class ``target``; returns the maps, the explanation and the files. ``beside`` is a timm model's name
    or a directory; its layers are drawn below those of the model in ``out``.

    Raises UserError for a query, layer, class or model that is not there, DataError for an unreadable image.
    """
    wanted = parse_query(query)
    if target is not None and why is None:
        raise UserError("--target is for --why, the figure of what speaks for a class")
    figures = (".png", ".pdf", ".svg", ".jpg")
    for name, path, endings in (("--out", out, figures), ("--why", why, figures), ("--html", html, (".html", ".htm"))):
        if path is not None and Path(path).suffix.lower() not in endings:
            raise UserError(f"{name} must end in {', '.join(endings)}; got {path!r}")
    try:
        picture = read_image(Path(image))
    except UNREADABLE as error:
        raise DataError(f"cannot read image {image}: {type(error).__name__}: {error}") from error
    built = _fitted(load_model(model, checkpoint, pretrained).to(pick_device(device)).eval(), picture, size)
    other = None
    if beside is not None:
        place = (None, beside) if Path(beside).is_dir() else (beside, None)
        other = _fitted(load_model(*place, pretrained).to(pick_device(device)).eval(), picture, size)
    try:
        maps = attention_maps(built, picture, query="mean", size=size)
        maps.query = tuple(n // 2 for n in maps.grid) if wanted == "middle" else wanted
        for layer in maps if wanted != "mean" else ():
            layer.token(maps.query_for(layer))
        chosen = _choose(maps, parse_layers(layers), everything=layers == "all")
        others = None
        if other is not None:
            others = attention_maps(other, picture, query="mean", size=size)
            for layer in others if wanted != "mean" else ():
                layer.token(maps.query_for(layer))
            others.layers = _choose(others, parse_layers(layers), everything=layers == "all")
        explanation = None if why is None else explain(built, picture, target, size=size)
    except ValueError as error:
        raise UserError(str(error)) from error
    files = []
    if html is not None:
        page = AttentionMaps(maps.layers if layers is None else chosen, maps.query, maps.picture, maps.skipped)
        files.append(str(page.page(html, title=f"What does each patch of {Path(image).name} look at?")))
    if explanation is not None:
        explanation.plot(why)
        files.append(why)
    if out is not None or not files:
        shown = AttentionMaps(chosen, maps.query, maps.picture, maps.skipped)
        shown.plot(out or "map.png", heads=heads, beside=others)
        files.append(out or "map.png")
    return maps, explanation, files


def _fitted(model: nn.Module, picture: Image.Image, size: int | None) -> nn.Module:
    """A model that is made for one size, made for the photograph's: it keeps its shape."""
    if fixed_size(model) and hasattr(model, "set_input_size"):
        factor = 1.0 if size is None else size / max(picture.size)
        stride = stride_of(model)
        height, width = (max(1, round(n * factor / stride)) * stride for n in (picture.height, picture.width))
        model.set_input_size((height, width))
    return model


def _choose(maps: AttentionMaps, wanted: list[Any] | None, everything: bool) -> list[Any]:
    from .maps.inputs import pick_layers

    if wanted is not None or everything:
        return pick_layers(maps.layers, wanted)
    last = len(maps) - 1
    return [maps[i] for i in sorted({round(i * last / (SHOWN - 1)) for i in range(SHOWN)})]

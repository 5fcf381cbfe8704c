"""What ``attention_maps`` is given: images, names of layers, places."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torchvision.transforms.functional import normalize, to_tensor

from .layers import LayerMap

Layers = None | int | str | Sequence[int | str]


def stride_of(model: nn.Module) -> int:
    """Pixels of an image that one side of the coarsest token covers, so the divisor of its height and width."""
    if hasattr(model, "feature_info"):
        reductions = [info["reduction"] for info in model.feature_info]
        if reductions:
            return max(reductions)
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", 1)
    return max(patch) if isinstance(patch, tuple) else patch


def fixed_size(model: nn.Module) -> tuple[int, int] | None:
    """The only (height, width) that a timm model takes, ``None`` for one that takes any."""
    embed = getattr(model, "patch_embed", None)
    dynamic = getattr(model, "dynamic_img_size", False) or not getattr(embed, "strict_img_size", False)
    size = getattr(embed, "img_size", None)
    return None if dynamic or size is None else tuple(size)


def prepare(model: nn.Module, image: Image.Image, size: int | None = None) -> tuple[Tensor, Image.Image]:
    """An image as the model wants it, with its own aspect ratio where the model allows that.

    Args:
        model: a timm model.
        image: any size.
        size: pixels of the longer side; by default those of the image.

    Returns:
        The normalised ``(1, C, H, W)``, and the image as it was resized: each side to the nearest multiple of the
        model's stride, or to the only size the model takes.
    """
    width, height = image.size
    factor = 1.0 if size is None else size / max(width, height)
    stride = stride_of(model)
    wanted = fixed_size(model) or tuple(max(1, round(n * factor / stride)) * stride for n in (height, width))
    config = resolve_model_data_config(model)
    channels = config["input_size"][0]
    image = image.convert("RGB").resize((wanted[1], wanted[0]), Image.Resampling.BICUBIC)
    pixels = to_tensor(image if channels == 3 else image.convert("L"))
    if channels not in (1, 3):
        raise ValueError(f"image: the model takes {channels} channels; give a tensor")
    mean, std = (tuple(config[key])[:channels] for key in ("mean", "std"))
    parameter = next(model.parameters())
    return normalize(pixels, mean, std)[None].to(parameter.device, parameter.dtype), image


def open_image(image: Any) -> Any:
    """A path as a PIL image; anything else as it is."""
    if isinstance(image, str | os.PathLike):
        with Image.open(Path(image)) as opened:
            return opened.convert("RGB")
    return image


def to_picture(pixels: Tensor) -> Image.Image:
    """``(C, H, W)`` of any range as an image to draw on, its values stretched to what can be shown."""
    x = pixels.detach().float().cpu()
    x = x[:3] if x.shape[0] >= 3 else x[:1].expand(3, -1, -1)
    low, high = x.min(), x.max()
    x = (x - low) / (high - low).clamp(min=1e-8)
    return Image.fromarray((x * 255).round().byte().permute(1, 2, 0).numpy())


def pick_layers(layers: list[LayerMap], wanted: Layers) -> list[LayerMap]:
    """Layers by number (negative from the end), name or pattern, all for ``None``, in the order of the model.

    Raises:
        ValueError: nothing answers to that; the message lists what there is.
    """
    if wanted is None:
        return layers
    if isinstance(wanted, int | str):
        wanted = [wanted]
    chosen = set()
    for one in wanted:
        if isinstance(one, str) and one.lstrip("-").isdigit():
            one = int(one)
        if isinstance(one, int):
            found = [layers[one]] if -len(layers) <= one < len(layers) else []
        else:
            found = [layer for layer in layers if layer.name == one or fnmatch(layer.name, one)]
        if not found:
            names = ", ".join(layer.name for layer in layers)
            raise ValueError(
                f"layers: {one!r} is none of the {len(layers)} that ran; give numbers from {-len(layers)} to "
                f"{len(layers) - 1}, names or patterns: {names}"
            )
        chosen.update(id(layer) for layer in found)
    return [layer for layer in layers if id(layer) in chosen]


def on_grid(query: Any, reference: tuple[int, int], grid: tuple[int, int]) -> Any:
    """A patch ``(row, column)`` of one grid as the patch of another that covers its centre; else unchanged."""
    if not isinstance(query, tuple | list) or tuple(reference) == tuple(grid):
        return tuple(query) if isinstance(query, list) else query
    for name, at, n in zip(("row", "column"), query, reference):
        if not 0 <= at < n:
            raise ValueError(
                f"query: {name} must be within 0…{n - 1} of the grid {reference[0]}×{reference[1]}, got {at}"
            )
    return tuple(int((at + 0.5) * n / m) for at, m, n in zip(query, reference, grid))


def call(model: nn.Module, inputs: Any, keywords: dict[str, Any]) -> Any:
    """Run a model on a tensor, or on a dictionary of keywords."""
    return model(**inputs, **keywords) if isinstance(inputs, dict) else model(inputs, **keywords)


def first_image(inputs: Any) -> Tensor | None:
    """The tensor ``(B, C, H, W)`` among the inputs."""
    if isinstance(inputs, dict):
        return next((x for x in inputs.values() if isinstance(x, Tensor) and x.ndim == 4), None)
    return inputs if isinstance(inputs, torch.Tensor) and inputs.ndim == 4 else None

"""Maps as pictures: what is looked at laid over the image, and the patch that looks."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

POSITIVE = ((214, 78, 12), (255, 226, 92))
"""Colours of weak and strong positive weights; ``NEGATIVE`` likewise."""
NEGATIVE = ((20, 84, 200), (120, 214, 255))
_DIMMED = 0.55
_CLIPPED = 0.995  # weights above this quantile look alike, or a single patch would leave all others dark


def spread(values: np.ndarray, signed: bool) -> tuple[float, float]:
    """The weights that are shown darkest and brightest. Negative entries make zero the darkest."""
    magnitude = np.abs(values)
    high = float(np.quantile(magnitude, _CLIPPED)) or float(magnitude.max())
    low = 0.0 if signed else float(values.min())
    return (low, high) if high > low else (low, low + max(abs(low), 1e-12))


def overlay(picture: Image.Image, values: Tensor | np.ndarray, *, signed: bool = False) -> Image.Image:
    """The picture in grey, and over each patch its weight: yellow for much, blue for negative weights.

    Args:
        picture: what to draw on.
        values: ``(H, W)`` weights.
        signed: weights below zero are negative, not merely small.
    """
    values = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    low, high = spread(values, signed)
    strength = np.clip((np.abs(values) - low) / (high - low), 0, 1)[..., None]
    colours = [np.asarray(a) + (np.asarray(b) - np.asarray(a)) * strength for a, b in (POSITIVE, NEGATIVE)]
    colour = np.where(values[..., None] < 0, colours[1], colours[0]) if signed else colours[0]
    patches = Image.fromarray(np.concatenate((colour, 235 * strength), -1).round().astype(np.uint8), "RGBA")
    grey = np.asarray(picture.convert("L"), dtype=np.float32) * _DIMMED
    ground = Image.fromarray(grey.astype(np.uint8)).convert("RGBA")
    return Image.alpha_composite(ground, patches.resize(picture.size, Image.Resampling.NEAREST)).convert("RGB")


def mark(picture: Image.Image, query: object, grid: tuple[int, int]) -> Image.Image:
    """A copy with a frame around the patch ``(row, column)``; for other queries without."""
    picture = picture.convert("RGB")
    if not isinstance(query, tuple | list):
        return picture.copy()
    height, width = picture.height / grid[0], picture.width / grid[1]
    row, column = query
    box = [column * width, row * height, (column + 1) * width, (row + 1) * height]
    line = max(1, round(max(picture.size) / 200))
    marked = picture.copy()
    draw = ImageDraw.Draw(marked)
    draw.rectangle([box[0] - line, box[1] - line, box[2] + line, box[3] + line], outline="black", width=line)
    draw.rectangle(box, outline="white", width=line)
    return marked

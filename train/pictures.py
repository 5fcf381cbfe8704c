"""Many images as one."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image


def grid(images: list[Image.Image], columns: int | None = None, *, gap: int = 2, smallest: int = 64) -> Image.Image:
    """Images of one size in rows of ``columns``, by default as square as can be, ``gap`` pixels apart on white.

    Images less than ``smallest`` pixels wide are enlarged by whole numbers, so that each pixel shows.
    """
    columns = columns or math.ceil(math.sqrt(len(images)))
    width, height = images[0].size
    times = max(1, -(-smallest // width))
    width, height = width * times, height * times
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    for i, image in enumerate(images):
        place = (gap + i % columns * (width + gap), gap + i // columns * (height + gap))
        sheet.paste(image.convert("RGB").resize((width, height), Image.Resampling.NEAREST), place)
    return sheet


def save_grid(images: list[Image.Image], path: Path, columns: int | None = None) -> None:
    """Write ``grid(images)`` to ``path`` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(images, columns).save(path)

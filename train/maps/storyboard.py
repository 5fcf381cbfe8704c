"""``StepMaps`` as one picture and as an animation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from .overlay import overlay

if TYPE_CHECKING:
    from .steps import StepMaps

_SMALLEST, _LARGEST, _GAP, _INK, _QUIET = 112, 256, 8, (30, 30, 30), (110, 110, 110)


def _font(size: int):
    return ImageFont.load_default(size=size)


def _shown(image: Image.Image) -> Image.Image:
    """Small images larger, their pixels still to be seen; large ones smaller."""
    width, height = image.size
    if max(width, height) > _LARGEST:
        factor = _LARGEST / max(width, height)
        return image.convert("RGB").resize((round(width * factor), round(height * factor)))
    times = max(1, -(-_SMALLEST // min(width, height)))
    return image.convert("RGB").resize((width * times, height * times), Image.Resampling.NEAREST)


def _panels(maps: StepMaps, step: int) -> list[Image.Image]:
    picture = _shown(maps.pictures[step])
    return [picture, *(overlay(picture, values, signed=maps.signed) for values in maps.maps[step])]


def _percent(maps: StepMaps, step: int, row: int) -> str:
    return "" if maps.signed or row == 0 else f"up to {100 * maps.maps[step, row - 1].max():.0f} %"


def board(maps: StepMaps, path: str | Path | None, columns: int) -> Image.Image:
    """See ``StepMaps.grid``."""
    last = len(maps.timesteps) - 1
    count = min(columns, last + 1)
    steps = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    cells = [_panels(maps, step) for step in steps]
    width, height = cells[0][0].size
    label, head, foot = max(90, _GAP + _widest(maps)), 26, 18
    rows = 1 + len(maps.rows)
    sheet = Image.new(
        "RGB", (label + len(steps) * (width + _GAP) + _GAP, head + rows * (height + foot) + _GAP), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for i, (step, panels) in enumerate(zip(steps, cells)):
        x = label + i * (width + _GAP)
        draw.text((x, 6), f"step {step + 1} of {last + 1}", fill=_QUIET, font=_font(12))
        for j, panel in enumerate(panels):
            y = head + j * (height + foot)
            sheet.paste(panel, (x, y))
            draw.text((x, y + height + 1), _percent(maps, step, j), fill=_QUIET, font=_font(11))
    for j, name in enumerate(["estimate", *maps.rows]):
        draw.text((_GAP, head + j * (height + foot) + height // 2 - 9), name, fill=_INK, font=_font(14))
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    return sheet


def _widest(maps: StepMaps) -> int:
    return round(max(_font(14).getlength(name) for name in ("estimate", *maps.rows))) + _GAP


def animation(maps: StepMaps, path: str | Path, milliseconds: int) -> Path:
    """See ``StepMaps.gif``."""
    frames = []
    for step, time in enumerate(maps.timesteps):
        panels = _panels(maps, step)
        width, height = panels[0].size
        columns = min(len(panels), 4)
        rows = -(-len(panels) // columns)
        size = (_GAP + columns * (width + _GAP), 28 + rows * (height + 24) + _GAP)
        frame = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(frame)
        draw.text((_GAP, 6), f"step {step + 1} of {len(maps.timesteps)} (t = {time:.3g})", fill=_QUIET, font=_font(12))
        for j, (name, panel) in enumerate(zip(["estimate", *maps.rows], panels)):
            x, y = _GAP + j % columns * (width + _GAP), 28 + j // columns * (height + 24)
            frame.paste(panel, (x, y))
            draw.text((x, y + height + 2), name, fill=_INK, font=_font(14))
        frames.append(frame)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    durations = [milliseconds] * (len(frames) - 1) + [4 * milliseconds]
    palette = [frame.quantize(255, Image.Quantize.MAXCOVERAGE) for frame in frames]
    palette[0].save(path, save_all=True, append_images=palette[1:], duration=durations, loop=0)
    return path

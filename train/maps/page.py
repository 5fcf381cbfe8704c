"""One HTML page that shows, for the patch under the mouse, what every layer and head looks at. No network is needed."""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from . import statistics
from .layers import LayerMap

if TYPE_CHECKING:
    from .api import AttentionMaps

_LONGEST = 1000
"""Pixels of the picture's longer side, and the most keys that are kept apart in one map."""
_MOST_KEYS = 2400


def write(maps: AttentionMaps, path: str | Path, *, title: str = "", limit: int = 16 << 20) -> Path:
    """Write the page.

    Args:
        maps: of any layers; those that look at text only are left out.
        path: of the HTML file.
        title: heading; by default it says what there is to see.
        limit: bytes of maps, one for each weight, before compression. Where all pairs of patches would be more, only
            every second, third, … patch along each axis can be asked, and keys are averaged over small squares.

    Returns:
        The path.

    Raises:
        ValueError: there is no picture, or no layer that looks at the image.
    """
    layers = [layer for layer in maps if layer.kind == "self" and layer.grid is not None]
    if maps.picture is None or not layers:
        raise ValueError("a page needs a picture and a layer that looks at the image")
    steps = _steps(layers, limit)
    blobs, entries, offset = [], [], 0
    for layer, (ask, pool) in zip(layers, steps):
        entry, data = _encode(layer, ask, pool)
        entries.append({**entry, "offset": offset})
        blobs.append(data)
        offset += len(data)
    first = maps.query if isinstance(maps.query, tuple | list) else tuple(n // 2 for n in layers[0].grid)
    data = {
        "picture": _jpeg(maps.picture),
        "size": _shrunk(maps.picture).size,
        "query": [(at + 0.5) / n for at, n in zip(first, layers[0].grid)],
        "layers": entries,
        "maps": base64.b64encode(gzip.compress(b"".join(blobs), 6)).decode(),
    }
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = page.replace("{{title}}", html.escape(title or "What does each patch look at?"))
    # "</" would end the script that holds the data
    page = page.replace("{{data}}", json.dumps(data, ensure_ascii=False).replace("</", "<\\/"))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _cells(grid: tuple[int, int], step: int) -> tuple[int, int]:
    return math.ceil(grid[0] / step), math.ceil(grid[1] / step)


def _steps(layers: list[LayerMap], limit: int) -> list[tuple[int, int]]:
    """For each layer, which patches can be asked (every n-th), and the side of the squares keys are averaged over."""
    pools = [next(p for p in range(1, 1 << 12) if math.prod(_cells(x.grid, p)) <= _MOST_KEYS) for x in layers]
    asks = [1] * len(layers)

    def cost(i: int) -> int:
        return (
            layers[i].heads * math.prod(_cells(layers[i].grid, asks[i])) * math.prod(_cells(layers[i].grid, pools[i]))
        )

    while sum(map(cost, range(len(layers)))) > limit and max(asks) < 1 << 12:
        asks[max(range(len(layers)), key=cost)] += 1  # of the layer that takes most
    return list(zip(asks, pools))


def _encode(layer: LayerMap, ask: int, pool: int) -> tuple[dict[str, Any], bytes]:
    """Facts about a layer, and its rows as int8 ``[head][query][key]``, each row by its largest weight;
    then as float32 ``[head][query]`` those weights, and what share of each row lies beside the image."""
    H, W = layer.grid
    h, w = _cells(layer.grid, ask)
    rows = torch.clamp(torch.arange(h) * ask + ask // 2, max=H - 1)
    columns = torch.clamp(torch.arange(w) * ask + ask // 2, max=W - 1)
    queries = (rows[:, None] * W + columns).flatten() + layer.prefix
    parts, largest, elsewhere = [], [], []
    for _, block in layer.blocks(index=queries):
        block = block[0].float().cpu()
        image = layer.on_image(block)
        total = block.abs().sum(-1).clamp(min=1e-30)
        elsewhere.append(1 - image.abs().sum((-2, -1)) / total)
        image = F.avg_pool2d(image, pool, ceil_mode=True, count_include_pad=False) if pool > 1 else image
        image = image.flatten(-2)
        top = image.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        parts.append((image / top * 127).round().to(torch.int8))
        largest.append(top[..., 0])
    found = statistics.describe(layer)
    entry = {
        "name": layer.name if layer.exact else f"{layer.name} (|∂output/∂value|)",
        "grid": [H, W],
        "heads": layer.heads,
        "ask": [h, w, ask],
        "keys": list(_cells(layer.grid, pool)),
        "signed": layer.signed,
        "prefix": layer.keys - H * W,
        "facts": {key: _numbers(found[key]) for key, _ in statistics.COLUMNS if found[key] is not None},
    }
    beside = torch.cat((torch.cat(largest, 1), torch.cat(elsewhere, 1))).float()
    return entry, torch.cat(parts, 1).numpy().tobytes() + beside.numpy().astype("<f4").tobytes()


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _shrunk(picture: Image.Image) -> Image.Image:
    factor = min(1.0, _LONGEST / max(picture.size))
    return picture.convert("RGB").resize(tuple(max(1, round(n * factor)) for n in picture.size))


def _jpeg(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture = _shrunk(picture)
    if np.prod(picture.size) < 128**2:  # small images would suffer from JPEG
        picture.save(buffer, "PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()

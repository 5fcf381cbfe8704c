"""The figure of ``AttentionMaps.plot``: layers below one another, heads beside one another."""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import statistics
from .layers import LayerMap, Query
from .overlay import mark, overlay

if TYPE_CHECKING:
    from .api import AttentionMaps

MOST_HEADS = 6
_LINE = 0.14  # inches
_LETTERS_PER_INCH = 18.5  # of small print
_NOTE = (
    "Yellow: most weight; grey: least; blue: negative. Under a panel: the range of the weights as multiples of their "
    "average size; reach = mean distance of what is looked at, in patches; decay = tokens until a scan has forgotten "
    "all but 1/e. Of a layer's output, local is what a convolution gives, linear what linear attention beside a sparse "
    "one does; each direction gives its share of the scans."
)


def draw(
    maps: AttentionMaps,
    path: str | Path | None = None,
    *,
    query: Query | None = None,
    heads: bool = True,
    title: str = "",
    beside: AttentionMaps | None = None,
):
    """One row for each layer: the mean of its heads, the directions of its scan, up to six heads, with what
    ``describe`` says of them; below it, if there is one, the layer in the same place of ``beside``. Arguments as for
    ``AttentionMaps.plot``; returns a matplotlib figure.

    Raises:
        ValueError: there is no picture, or the layers look at text only.
        ImportError: matplotlib is not installed.
    """
    layers, pictures = _layers(maps), {}
    if beside is not None:
        others = _layers(beside)
        pictures = {id(layer): beside.picture for layer in others}
        layers = [layer for pair in zip_longest(layers, others) for layer in pair if layer is not None]
    told = [statistics.describe(layer) for layer in layers]
    panels = [_panels(layer, maps.query_for(layer, query), heads, found) for layer, found in zip(layers, told)]
    columns = 1 + max(len(row) for row in panels)
    ratio = maps.picture.height / maps.picture.width
    width = 2.3
    below = 0.24 + _LINE * len(_lines(_NOTE, width * columns))
    height = (width * ratio + 0.48) * len(layers) + 0.64 + below
    figure = new_figure(width * columns, height)
    grid = figure.add_gridspec(
        len(layers),
        columns,
        left=0.012,
        right=0.988,
        top=1 - 0.62 / height,
        bottom=(0.06 + below) / height,
        wspace=0.05,
        hspace=0.30,
    )
    asked = maps.query if query is None else query
    figure.suptitle(title or f"What {_words(asked)} looks at", x=0.012, ha="left", y=1 - 0.12 / height, fontsize=13)
    text_below(figure, _NOTE)
    for i, (layer, row) in enumerate(zip(layers, panels)):
        place, picture = maps.query_for(layer, query), pictures.get(id(layer), maps.picture)
        first = figure.add_subplot(grid[i, 0])
        first.imshow(mark(picture, place, layer.grid))
        name = layer.name if beside is None else f"{layer.name}: {layer.what}"
        caption(first, name, f"{layer.grid[0]}×{layer.grid[1]} patches" + _of_layer(told[i], layer.exact))
        for j, (name, values, note) in enumerate(row):
            axes = figure.add_subplot(grid[i, 1 + j])
            axes.imshow(mark(overlay(picture, values, signed=layer.signed), place, layer.grid))
            caption(axes, name, note)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _layers(maps: AttentionMaps) -> list[LayerMap]:
    """Those that can be drawn."""
    if maps.picture is None:
        raise ValueError("there is no picture to draw on: the model was given no image and no latents")
    layers = [layer for layer in maps if layer.kind == "self" and layer.grid is not None]
    if not layers:
        raise ValueError("none of the layers looks at the image; word_maps() shows attention to text")
    return layers


def _words(query: Any) -> str:
    known = {"mean": "the average patch", "class": "the class token"}
    if isinstance(query, str):
        return known.get(query, query)
    return f"token {query}" if isinstance(query, int) else f"the patch in row {query[0]}, column {query[1]}"


def new_figure(width: float, height: float):
    """An empty white matplotlib figure, inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # and no pyplot: a notebook keeps its own way of showing figures

    return Figure(figsize=(width, height), dpi=110, layout="none", facecolor="white")


def _lines(text: str, width: float) -> list[str]:
    """Small print, in lines for a figure of that many inches."""
    return textwrap.wrap(text, int(width * _LETTERS_PER_INCH))


def text_below(figure, text: str) -> None:
    """Small print at the foot of a figure."""
    lines = "\n".join(_lines(text, figure.get_figwidth()))
    figure.text(0.012, 0.12 / figure.get_figheight(), lines, fontsize=7.5, color="0.35", va="bottom", linespacing=1.25)


def caption(axes, title: str, note: str) -> None:
    """Title above and a note below a picture, and no axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, fontsize=8.5, pad=3, loc="left")
    axes.set_xlabel(note, fontsize=7, labelpad=2, color="0.3", loc="left")


def _of_layer(found: dict[str, Any], exact: bool) -> str:
    shares = {name: found[f"{name}_share"] for name in ("local", "linear")}
    kind = "" if exact else " · |∂output/∂value|"
    return kind + "".join(f" · {name} {100 * x.mean():.0f} %" for name, x in shares.items() if x is not None)


def _panels(layer: LayerMap, query: Query, heads: bool, found: dict[str, Any]) -> list[tuple[str, Tensor, str]]:
    """``(title, (H, W), note)`` for the panels of a layer that ``describe`` found this of; the first sample of a
    batch."""
    both = layer.map(query)[0].float().cpu()
    panels = [("mean of heads", both.mean(0), _note(both.mean(0), found, None))]
    if len(layer.directions) > 1:
        names = {"forward": "from the left and above", "backward": "from the right and below"}
        for part in layer.directions:
            values = layer.map(query, part)[0].float().cpu().mean(0)
            note = _note(values, None, None)
            if (share := found["forward_share"]) is not None:
                percent = 100 * (share if part == "forward" else 1 - share).mean()
                note += f" · {percent:.0f} % of the scans"
            panels.append((names[part], values, note))
    if heads and layer.heads > 1:
        for head in range(min(layer.heads, MOST_HEADS)):
            more = f" of {layer.heads}" if layer.heads > MOST_HEADS else ""
            panels.append((f"head {head + 1}{more}", both[head], _note(both[head], found, head)))
    return panels


def _note(values: Tensor, found: dict[str, Any] | None, head: int | None) -> str:
    relative = values / values.abs().mean().clamp(min=1e-30)
    parts = [" to ".join(f"{x:.0f}" if abs(x) >= 10 else f"{x:.1f}" for x in (relative.min(), relative.max())) + "×"]
    for key, form in (("distance", "reach {:.1f}"), ("decay_length", "decay {:.0f}")):
        if found is not None and found[key] is not None:
            parts.append(form.format((found[key].mean() if head is None else found[key][head]).item()))
    return " · ".join(parts)

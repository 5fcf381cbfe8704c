"""``scanvas.attention_maps``: one call, and an object to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from . import statistics
from .inputs import Layers, call, first_image, on_grid, open_image, pick_layers, prepare, to_picture
from .layers import LayerMap, Part, Query
from .recording import Recorder


class AttentionMaps:
    """The attention of some layers for one input, and a query to show it for.

    ``maps[3]``, ``maps["blocks.3.mixer"]`` and iteration give ``LayerMap``; ``print(maps)`` tells of every layer how
    far and how sharply it looks. Attributes: ``layers``, ``query``, ``picture`` (the image to draw on), ``skipped``
    (name of a layer that could not be recorded → why).
    """

    def __init__(self, layers: list[LayerMap], query: Query, picture: Image.Image | None, skipped: dict[str, str]):
        self.layers, self.query, self.picture, self.skipped = layers, query, picture, skipped

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerMap]:
        return iter(self.layers)

    def __getitem__(self, key: int | str) -> LayerMap:
        if isinstance(key, int):
            return self.layers[key]
        found = [layer for layer in self.layers if layer.name == key]
        if not found:
            raise KeyError(f"no layer {key!r}; there are {', '.join(layer.name for layer in self.layers)}")
        return found[0]

    @property
    def grid(self) -> tuple[int, int]:
        """``(H, W)`` in patches of the first layer, which ``(row, column)`` of a query counts in."""
        return next(layer.grid for layer in self.layers if layer.grid is not None)

    def query_for(self, layer: LayerMap, query: Query | None = None) -> Query:
        """The query in patches of a layer, whose grid may be coarser than that of the first."""
        query = self.query if query is None else query
        return on_grid(query, self.grid, layer.grid) if isinstance(query, tuple | list) else query

    def maps(self, query: Query | None = None, part: Part = "both") -> list[Tensor]:
        """For each layer what the query looks at, ``(B, heads, H, W)``; by default the query that was asked for."""
        return [layer.map(self.query_for(layer, query), part) for layer in self.layers]

    def statistics(self, samples: int = 256) -> list[dict[str, Any]]:
        """One row for each layer, see ``scanvas.train.maps.statistics.describe``."""
        return [statistics.describe(layer, samples) for layer in self.layers]

    def __str__(self) -> str:
        return statistics.table(self.statistics())

    def error(self) -> float:
        """The largest of the layers' ``error()``: map × values against what the model computed. Layers that have no map
        are left out.

        Raises:
            ValueError: no layer has one.
        """
        exact = [layer for layer in self.layers if layer.exact]
        if not exact:
            raise ValueError("none of the layers has an attention map that could be exact")
        return max(layer.error() for layer in exact)

    def plot(
        self,
        path: str | Path | None = None,
        *,
        query: Query | None = None,
        heads: bool = True,
        title: str = "",
        beside: AttentionMaps | None = None,
    ):
        """A figure: the picture with the query, and over it what each layer and head looks at. See ``figure.draw``.

        Args:
            path: where to write it (PNG, PDF, SVG); ``None`` to only return it.
            query: another query than the one asked for.
            heads: one panel for each head, or else their mean and the directions of the scan.
            title: above all.
            beside: maps of another model for the same image, such as the teacher: each of its layers is drawn below
                the one in its place here.

        Returns:
            A matplotlib figure.
        """
        from .figure import draw

        return draw(self, path, query=query, heads=heads, title=title, beside=beside)

    def page(self, path: str | Path, *, title: str = "", limit: int = 16 << 20) -> Path:
        """Write one self-contained HTML page: the patch under the mouse shows what it looks at. See ``page.write``."""
        from .page import write

        return write(self, path, title=title, limit=limit)


def attention_maps(
    model: nn.Module,
    image_or_latents: Any,
    layers: Layers = None,
    query: Query = "mean",
    *,
    kind: str = "self",
    size: int | None = None,
    **inputs: Any,
) -> AttentionMaps:
    """Which tokens each layer and head of a model looks at, exactly as it computes it, in float32.

    For backbones and denoisers of scanvas with any mixer, softmax ViTs of timm, denoisers of diffusers (softmax, SANA's
    linear attention, attention to text) and what ``linearize`` made of either. For linear attention the map is the
    matrix whose product with the values is the layer's output, though the model never forms it (implicit attention).
    Rows are computed when they are asked for, so that 4,096 tokens need no ``N²`` memory. A mixer that has no map
    (``t5``) shows how much each output depends on each value instead. The model is left as it is.

    Args:
        model: an ``nn.Module``; it runs once, in eval mode, without gradients.
        image_or_latents: a path or PIL image for a timm model, prepared with its own normalisation and its own aspect
            ratio; a tensor as the model takes it, ``(B, C, H, W)``; or a dictionary of all the model's keywords.
        layers: numbers (negative from the end), names or patterns of attention layers; all by default.
        query: what looks: ``(row, column)``, a patch of the first of the layers (in coarser layers the patch around its
            centre); ``"mean"``, the mean over all patches; ``"class"``, the class token; or a token's number.
        kind: ``"self"`` for attention of the image to itself (text of a joint sequence included), ``"cross"`` for
            attention to text alone, ``"all"``.
        size: pixels of the image's longer side, for a path or PIL image.
        inputs: further keywords of the model: ``timestep``, ``encoder_hidden_states``, ``class_labels``, ….

    Returns:
        ``AttentionMaps``.

    Raises:
        ValueError: there is no such layer, no such query, or no attention that can be recorded.
    """
    if kind not in ("self", "cross", "all"):
        raise ValueError(f"kind must be 'self', 'cross' or 'all', got {kind!r}")
    given = open_image(image_or_latents)
    picture = None
    if isinstance(given, Image.Image):
        given, picture = prepare(model, given, size)
    elif isinstance(given, Tensor) and given.ndim == 3:
        given = given[None]
    elif first_image(given) is None and not isinstance(given, dict | Tensor):
        raise ValueError(f"image_or_latents must be an image, its path, a tensor or a dict; got {type(given).__name__}")
    if picture is None and (pixels := first_image(given)) is not None:
        picture = to_picture(pixels[0])
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), Recorder(model) as recorder:
            call(model, given, inputs)
    finally:
        model.train(training)
    found = [layer for layer in recorder.layers if kind == "all" or layer.kind == kind]
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in recorder.skipped.items())
        raise ValueError(
            f"no {'attention' if kind == 'all' else kind + '-attention'} of {type(model).__name__} could be recorded"
            f"{': ' + why if why else ''}"
        )
    maps = AttentionMaps(pick_layers(found, layers), query, picture, recorder.skipped)
    if query != "mean" and kind != "cross":
        for layer in maps:
            layer.token(maps.query_for(layer))  # complains now, not when the map is wanted
    return maps

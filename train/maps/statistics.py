"""How far, how sharply and along which way a layer looks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .layers import LayerMap

COLUMNS = (
    ("entropy", "entropy"),
    ("distance", "reach (patches)"),
    ("decay_length", "decay (tokens)"),
    ("forward_share", "forward"),
    ("local_share", "local"),
    ("linear_share", "linear"),
    ("prefix_share", "prefix"),
    ("negative_share", "negative"),
)


def _sampled(layer: LayerMap, samples: int) -> Tensor:
    queries = layer.image_queries
    places = torch.linspace(0, len(queries) - 1, min(samples, len(queries))).round().long()
    return queries[places]


def _weights(rows: Tensor) -> Tensor:
    """Rows as shares: absolute values that sum to one."""
    rows = rows.abs()
    return rows / rows.sum(-1, keepdim=True).clamp(min=1e-30)


def describe(layer: LayerMap, samples: int = 256) -> dict[str, Any]:
    """Statistics of one layer, tensors ``(heads,)`` averaged over the batch and over queries spread over the image.

    Signed maps are measured by the absolute values of their entries, as shares of their row.

    Returns:
        ``name``, ``index``, ``grid``, and
        ``entropy``: of a row, over log of the number of keys: 0 for one token, 1 for all alike;
        ``distance``: mean distance of what is looked at, in patches (image keys only);
        ``decay_length``: tokens after which a scan has forgotten all but 1/e, median over channels and directions;
        ``forward_share``: norm of what the scan from the first token gives over the sum of the norms of both scans;
        ``local_share``, ``linear_share``: norm of the local branch, or of the linear attention beside a sparse one,
        over the sum of its norm and that of the attention;
        ``prefix_share``: weight on class, register or text tokens;
        ``negative_share``: weight of negative entries;
        ``None`` where a layer has no such thing.
    """
    H, W = layer.grid or (0, 0)
    result: dict[str, Any] = {"name": layer.name, "index": layer.index, "grid": layer.grid}
    queries = _sampled(layer, samples) if layer.grid else torch.arange(layer.tokens)[:samples]
    place = torch.stack(torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij"), -1).view(-1, 2).float()
    sums: dict[str, Tensor] = {}
    for index, rows in layer.blocks(index=queries):
        rows = rows.float().cpu()
        shares = _weights(rows)
        found = {"entropy": -(shares * shares.clamp(min=1e-30).log()).sum(-1) / math.log(max(layer.keys, 2))}
        if layer.signed:
            found["negative_share"] = (shares * (rows < 0)).sum(-1)
        if layer.grid and layer.kind == "self":
            image = layer.on_image(shares).flatten(-2)
            away = torch.cdist(place[index - layer.prefix], place)
            found["distance"] = (image * away).sum(-1) / image.sum(-1).clamp(min=1e-30)
            if layer.keys > H * W:
                found["prefix_share"] = 1 - image.sum(-1)
        for key, value in found.items():
            sums[key] = sums.get(key, 0) + value.sum(2).mean(0)
    for key, _ in COLUMNS:
        result[key] = sums[key] / len(queries) if key in sums else None
    result["decay_length"] = decay_length(layer)
    result.update(branch_shares(layer))
    return result


def decay_lengths(layer: LayerMap) -> Tensor | None:
    """Tokens after which a channel of the state has decayed to 1/e, ``−1 / mean log decay``: ``(directions, heads,
    Dk)``; ``None`` for a layer without decay."""
    decays = layer.log_decays()
    if not decays:
        return None
    return torch.stack([-1 / d.float().mean((0, 1)).clamp(max=-1e-12) for d in decays]).cpu()


def decay_length(layer: LayerMap) -> Tensor | None:
    """The median of ``decay_lengths`` over channels and directions: ``(heads,)``."""
    lengths = decay_lengths(layer)
    return None if lengths is None else lengths.transpose(0, 1).flatten(1).median(-1).values


def branch_shares(layer: LayerMap) -> dict[str, Tensor | None]:
    """How much of what goes into the output projection comes from where: ``forward_share``, ``local_share`` and
    ``linear_share`` of ``describe``, each ``(heads,)``, mean over tokens; ``None`` for what a layer does not have."""
    parts = layer.branches()
    scans = [parts.pop(name) for name in ("forward", "backward") if name in parts]
    result: dict[str, Tensor | None] = dict.fromkeys(("forward_share", "local_share", "linear_share"))
    if scans:
        result["forward_share"] = _share(layer, *scans)
        parts["attention"] = scans[0] + scans[1]
    for name in ("local", "linear"):
        if name in parts:
            result[f"{name}_share"] = _share(layer, parts[name], parts["attention"])
    return result


def _share(layer: LayerMap, part: Tensor, other: Tensor) -> Tensor:
    a, b = (x.float().unflatten(-1, (layer.heads, -1)).norm(dim=-1) for x in (part, other))
    return (a / (a + b).clamp(min=1e-30)).mean((0, 1)).cpu()


def table(rows: list[dict[str, Any]]) -> str:
    """Statistics as text, one line a layer: the mean over heads, and the lowest and highest head where they differ."""
    shown = [(key, title) for key, title in COLUMNS if any(row[key] is not None for row in rows)]
    lines = [["layer", "grid", *(title for _, title in shown)]]
    for row in rows:
        grid = "?" if row["grid"] is None else "×".join(map(str, row["grid"]))
        lines.append([row["name"], grid, *(_cell(row[key]) for key, _ in shown)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))]) for line in lines
    )


def _cell(value: Tensor | None) -> str:
    if value is None:
        return "–"
    mean, low, high = value.mean().item(), value.min().item(), value.max().item()
    form = ".2f" if abs(high) < 10 else ".0f"
    return f"{mean:{form}}" if len(value) == 1 or high - low < 5e-3 else f"{mean:{form}} ({low:{form}}…{high:{form}})"

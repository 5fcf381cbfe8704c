"""Tile by tile in plain PyTorch: each tile of queries sees one box of keys. Runs, and exports, everywhere; time and
memory grow with the number of tokens, not with its square."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast

from .disc import Grid, covers, join_tiles, tiles

_QUERIES = 1024  # at a time, where scores are kept in memory


def _others(x: Tensor, start: int, tokens: int) -> Tensor:
    """The tokens before and after the image; ``x`` is ``(…, N, D)``."""
    return torch.cat((x[..., :start, :], x[..., start + tokens :, :]), dim=-2)


def _bias(mask: Tensor | None, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask for ``scaled_dot_product_attention`` of visible keys ``(Q, K)`` and log weights ``(B, 1, 1, K)``."""
    if weight is None:
        return mask
    weight = weight.to(dtype)
    return weight if mask is None else weight.masked_fill(~mask, torch.finfo(dtype).min)


def windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    radius: int,
    start: int,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    log_weight: Tensor | None,
    scale: float,
) -> Tensor:
    tokens, N = math.prod(grid), q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weight = None if log_weight is None else log_weight[:, None, None]  # (B, 1, 1, N)
    if extra_k is None and covers(grid, radius):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=_bias(None, weight, q.dtype), scale=scale)
        return out.transpose(1, 2)
    image = slice(start, start + tokens)
    other_k, other_v = _others(k, start, tokens), _others(v, start, tokens)
    if extra_k is not None:
        other_k = torch.cat((other_k, extra_k.transpose(1, 2)), dim=2)
        other_v = torch.cat((other_v, extra_v.transpose(1, 2)), dim=2)
    other_weight = None
    if weight is not None:
        other_weight = _others(weight.mT, start, tokens).mT
        other_weight = F.pad(other_weight, (0, other_k.shape[2] - other_weight.shape[3]))
    q_grid, k_grid, v_grid = (x[:, :, image].unflatten(2, grid) for x in (q, k, v))
    weight_grid = None if weight is None else weight[..., image].unflatten(3, grid)
    last = len(grid) + 1
    parts = []
    for queries, box, mask in tiles(grid, radius, q.device):
        here, there = (slice(None), slice(None), *queries), (slice(None), slice(None), *box)
        keys, values = (
            torch.cat((x[there].flatten(2, last), other), dim=2) for x, other in ((k_grid, other_k), (v_grid, other_v))
        )
        mask = F.pad(mask, (0, other_k.shape[2]), value=True)
        near = None
        if weight is not None:
            near = torch.cat((weight_grid[(..., *box)].flatten(3), other_weight), dim=3)
        bias = _bias(mask, near, q.dtype)
        parts.append(
            F.scaled_dot_product_attention(q_grid[here].flatten(2, last), keys, values, attn_mask=bias, scale=scale)
        )
    out = join_tiles(parts, grid, radius)
    if N > tokens:
        rest = F.scaled_dot_product_attention(
            _others(q, start, tokens), k, v, attn_mask=_bias(None, weight, q.dtype), scale=scale
        )
        out = torch.cat((rest[:, :, :start], out, rest[:, :, start:]), dim=2)
    return out.transpose(1, 2)


@outside_autocast
def hybrid_windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features_q: Tensor,
    features_k: Tensor,
    factor: Tensor,
    grid: Grid,
    radius: int | None,
    every: int | None,
    start: int,
    log_weight: Tensor | None,
    scale: float,
) -> Tensor:
    tokens, N, result = math.prod(grid), q.shape[1], v.dtype
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, features_q, features_k = (x.transpose(1, 2).to(dtype) for x in (q, k, v, features_q, features_k))
    weight = None if log_weight is None else log_weight.to(dtype)[:, None, None]  # (B, 1, 1, N)
    image = slice(start, start + tokens)
    # Values with a column of ones: numerator and divisor in one product.
    v = F.pad(v, (0, 1), value=1.0)
    others = (_others(k, start, tokens), _others(v, start, tokens))
    other_weight = None if weight is None else _others(weight.mT, start, tokens).mT
    features_q, features_k = features_q[:, :, image], features_k[:, :, image]
    if weight is not None:
        features_k = features_k * weight[..., image].mT.exp()
    q_image, k_image, v_image = (x[:, :, image] for x in (q, k, v))
    image_weight = None if weight is None else weight[..., image]

    def spiky(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """``factor · exp(score − largest score)`` times values, of those keys and of the others."""
        keys, values = torch.cat((keys, others[0]), dim=2), torch.cat((values, others[1]), dim=2)
        scores = queries @ keys.mT * scale
        if bias is not None:
            scores = scores + torch.cat((bias, other_weight), dim=3)
        if mask is not None:
            scores = scores.masked_fill(~F.pad(mask, (0, others[0].shape[2]), value=True), -torch.inf)
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        return factor.to(dtype)[:, None, None] * (scores @ values)

    if every is not None:
        chosen = slice(None, None, every)
        bias = None if weight is None else image_weight[..., chosen]
        exact = (k_image[:, :, chosen], v_image[:, :, chosen])
        flat = torch.arange(tokens, device=q.device) % every != 0
        state = (features_k * flat[:, None]).mT @ v_image
        parts = [
            spiky(part, *exact, None, bias) + features @ state
            for part, features in zip(q_image.split(_QUERIES, dim=2), features_q.split(_QUERIES, dim=2))
        ]
        out = torch.cat(parts, dim=2)
    else:
        state = features_k.mT @ v_image
        q_grid, k_grid, v_grid, fq_grid, fk_grid = (
            x.unflatten(2, grid) for x in (q_image, k_image, v_image, features_q, features_k)
        )
        weight_grid = None if weight is None else image_weight.unflatten(3, grid)
        last = len(grid) + 1
        parts = []
        for queries, box, mask in tiles(grid, radius, q.device):
            here, there = (slice(None), slice(None), *queries), (slice(None), slice(None), *box)
            keys, values = k_grid[there].flatten(2, last), v_grid[there].flatten(2, last)
            bias = None if weight is None else weight_grid[(..., *box)].flatten(3)
            part = spiky(q_grid[here].flatten(2, last), keys, values, mask, bias)
            # The state of all tokens, less what the disc's have brought to it; nothing where the disc holds all, but
            # even then features get a gradient, which distributed training insists on.
            features = fq_grid[here].flatten(2, last)
            inside = (features @ fk_grid[there].flatten(2, last).mT).masked_fill(~mask, 0.0)
            parts.append(part + features @ state - inside @ values)
        out = join_tiles(parts, grid, radius)
    out = out[..., :-1] / out[..., -1:]
    if N > tokens:
        bias = None if weight is None else weight
        rest = F.scaled_dot_product_attention(
            _others(q, start, tokens), k, v[..., :-1].contiguous(), attn_mask=bias, scale=scale
        )
        out = torch.cat((rest[:, :, :start], out, rest[:, :, start:]), dim=2)
    return out.transpose(1, 2).to(result)

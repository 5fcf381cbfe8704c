"""The definitions: dense matrices with a mask."""

import math

import torch
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast

from .disc import Grid, near, places


def _dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def in_disc(N: int, grid: Grid, radius: int, start: int, rows: Tensor) -> Tensor:
    """``(R, N)`` bool for queries ``rows``: the key is in the disc, or one of the two is no token of the image."""
    tokens, at = math.prod(grid), places(grid, rows.device)
    index = rows - start
    is_image = (index >= 0) & (index < tokens)
    close = near(at[index.clamp(0, tokens - 1)], at, radius) | ~is_image[:, None]
    return torch.nn.functional.pad(close, (start, N - start - tokens), value=True)


def _rows(q: Tensor, rows: Tensor | None) -> Tensor:
    rows = torch.arange(q.shape[1], device=q.device) if rows is None else rows.to(q.device)
    return rows % q.shape[1]  # negative ones count from the end


@outside_autocast
def attention_matrix(
    q: Tensor,
    k: Tensor,
    grid: Grid,
    radius: int,
    *,
    start: int = 0,
    extra_k: Tensor | None = None,
    log_weight: Tensor | None = None,
    scale: float | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The matrix A for which ``A @ v``, with the extra values after the others, is ``local_attention``:
    ``(B, H, R, N + M)``, float32 or float64."""
    dtype, N = _dtype(q, k), q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    index = _rows(q, rows)
    seen = in_disc(N, grid, radius, start, index)
    bias = None if log_weight is None else log_weight.to(dtype)
    if extra_k is not None:
        k = torch.cat((k, extra_k), dim=1)
        image = (index >= start) & (index < start + math.prod(grid))
        seen = torch.cat((seen, image[:, None].expand(-1, extra_k.shape[1])), dim=1)
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, extra_k.shape[1]))
    if rows is not None:
        q = q[:, rows]
    scores = torch.einsum("brhd,bnhd->bhrn", q.to(dtype), k.to(dtype)) * scale
    if bias is not None:
        scores = scores + bias[:, None, None]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


@outside_autocast
def hybrid_matrix(
    q: Tensor,
    k: Tensor,
    features_q: Tensor,
    features_k: Tensor,
    factor: Tensor,
    grid: Grid,
    *,
    radius: int | None = None,
    every: int | None = None,
    start: int = 0,
    log_weight: Tensor | None = None,
    scale: float | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The matrix A for which ``A @ v`` is ``hybrid_attention``: ``(B, H, R, N)``, float32 or float64."""
    dtype, N, tokens = _dtype(q, k), q.shape[1], math.prod(grid)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    index = _rows(q, rows)
    if radius is not None:
        exact = in_disc(N, grid, radius, start, index)
    else:
        image = torch.arange(N, device=q.device) - start
        inside = (image >= 0) & (image < tokens)
        exact = ~inside[index, None] | ~inside | (image % every == 0)
    # Queries of other tokens are those of a plain softmax, whose factor cancels.
    features_q, features_k = features_q.to(dtype), features_k.to(dtype)
    if rows is not None:
        q, features_q = q[:, rows], features_q[:, rows]
    scores = torch.einsum("brhd,bnhd->bhrn", q.to(dtype), k.to(dtype)) * scale
    if log_weight is not None:
        scores = scores + log_weight.to(dtype)[:, None, None]
        features_k = features_k * log_weight.to(dtype).exp()[..., None, None]
    scores = scores.masked_fill(~exact, -torch.inf)
    spiky = (scores - scores.amax(-1, keepdim=True)).exp() * factor.to(dtype)[:, None, None]
    flat = torch.einsum("brhd,bnhd->bhrn", features_q, features_k).masked_fill(exact, 0.0)
    matrix = spiky + flat
    return matrix / matrix.sum(-1, keepdim=True)


def dense(q, k, v, grid, radius, start, extra_k, extra_v, log_weight, scale) -> Tensor:
    """``local_attention`` through its matrix."""
    matrix = attention_matrix(q, k, grid, radius, start=start, extra_k=extra_k, log_weight=log_weight, scale=scale)
    values = v if extra_v is None else torch.cat((v, extra_v), dim=1)
    return _apply(matrix, values)


def hybrid_dense(q, k, v, features_q, features_k, factor, grid, radius, every, start, log_weight, scale) -> Tensor:
    """``hybrid_attention`` through its matrix."""
    options = {"radius": radius, "every": every, "start": start, "log_weight": log_weight, "scale": scale}
    return _apply(hybrid_matrix(q, k, features_q, features_k, factor, grid, **options), v)


@outside_autocast
def _apply(matrix: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhrn,bnhv->brhv", matrix, v.to(matrix.dtype)).to(v.dtype)

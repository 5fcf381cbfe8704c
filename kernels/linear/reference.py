"""Linear attention in plain PyTorch: the quadratic definition and the form that is linear in N."""

import torch
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast


def _dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _cast(dtype: torch.dtype, q: Tensor, k: Tensor, normalizer_q: Tensor | None, normalizer_k: Tensor | None):
    """All four in ``dtype``, each tensor cast once: the gradients of numerator and divisor nearly cancel, and would be
    rounded to q's dtype before they are added if each had a cast of its own."""
    q_, k_ = q.to(dtype), k.to(dtype)
    normalizer_q = q_ if normalizer_q is None or normalizer_q is q else normalizer_q.to(dtype)
    normalizer_k = k_ if normalizer_k is None or normalizer_k is k else normalizer_k.to(dtype)
    return q_, k_, normalizer_q, normalizer_k


@outside_autocast
def attention_matrix(
    q: Tensor,
    k: Tensor,
    *,
    normalizer_q: Tensor | None = None,
    normalizer_k: Tensor | None = None,
    eps: float = 1e-6,
    rows: Tensor | None = None,
) -> Tensor:
    """The matrix A for which ``A @ v`` is ``linear_attention``: ``(B, H, R, N)``, float32 or float64."""
    dtype = _dtype(q, k)
    q, k, normalizer_q, normalizer_k = _cast(dtype, q, k, normalizer_q, normalizer_k)
    if rows is not None:
        q, normalizer_q = q[:, rows], normalizer_q[:, rows]
    scores = torch.einsum("brhd,bnhd->bhrn", q, k)
    total = torch.einsum("brhd,bhd->bhr", normalizer_q, normalizer_k.sum(1))
    return scores / (total + eps).unsqueeze(-1)


@outside_autocast
def quadratic(q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, eps: float) -> Tensor:
    matrix = attention_matrix(q, k, normalizer_q=normalizer_q, normalizer_k=normalizer_k, eps=eps)
    return torch.einsum("bhrn,bnhv->brhv", matrix, v.to(matrix.dtype)).to(v.dtype)


_AT_A_TIME = 8192
"""Tokens whose float32 copies are held at once where no gradient is recorded."""


def _records_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@outside_autocast
def linear(q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, eps: float) -> Tensor:
    dtype = _dtype(q, k, v)
    if q.shape[1] > _AT_A_TIME and not _records_gradient(q, k, v, normalizer_q, normalizer_k):
        return _in_parts(q, k, v, normalizer_q, normalizer_k, eps, dtype)
    q, k, normalizer_q, normalizer_k = _cast(dtype, q, k, normalizer_q, normalizer_k)
    # Heads before tokens, so that both products are batched matrix products. float32 holds the sums over N tokens.
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v.to(dtype)))
    out = q_ @ (k_.mT @ v_)
    divisor = normalizer_q.transpose(1, 2) @ normalizer_k.sum(1).unsqueeze(-1) + eps
    return (out / divisor).transpose(1, 2).to(v.dtype)


def _in_parts(
    q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """The same for long sequences: float32 copies of all tokens at once would take more memory than anything else."""
    parts = [slice(i, i + _AT_A_TIME) for i in range(0, q.shape[1], _AT_A_TIME)]

    def heads_first(x: Tensor, part: slice) -> Tensor:
        return x[:, part].to(dtype).transpose(1, 2)

    state = sum(heads_first(k, part).mT @ heads_first(v, part) for part in parts)
    total = sum(normalizer_k[:, part].to(dtype).sum(1) for part in parts).unsqueeze(-1)
    out = torch.empty_like(v)
    for part in parts:
        divisor = heads_first(normalizer_q, part) @ total + eps
        out[:, part] = (heads_first(q, part) @ state / divisor).transpose(1, 2).to(v.dtype)
    return out

"""Linear attention in plain PyTorch: the quadratic definition and the form that is linear in N."""

import torch
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast


def _dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


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
    normalizer_q = q if normalizer_q is None else normalizer_q
    normalizer_k = k if normalizer_k is None else normalizer_k
    if rows is not None:
        q, normalizer_q = q[:, rows], normalizer_q[:, rows]
    scores = torch.einsum("brhd,bnhd->bhrn", q.to(dtype), k.to(dtype))
    total = torch.einsum("brhd,bhd->bhr", normalizer_q.to(dtype), normalizer_k.to(dtype).sum(1))
    return scores / (total + eps).unsqueeze(-1)


@outside_autocast
def quadratic(q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, eps: float) -> Tensor:
    matrix = attention_matrix(q, k, normalizer_q=normalizer_q, normalizer_k=normalizer_k, eps=eps)
    return torch.einsum("bhrn,bnhv->brhv", matrix, v.to(matrix.dtype)).to(v.dtype)


@outside_autocast
def linear(q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, eps: float) -> Tensor:
    dtype = _dtype(q, k, v)
    # Heads before tokens, so that both products are batched matrix products. float32 holds the sums over N tokens.
    q_, k_, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    out = q_ @ (k_.mT @ v_)
    total = normalizer_k.to(dtype).sum(1).unsqueeze(-1)
    divisor = normalizer_q.to(dtype).transpose(1, 2) @ total + eps
    return (out / divisor).transpose(1, 2).to(v.dtype)

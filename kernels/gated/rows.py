"""Rows of the attention matrix of gated linear attention, quickly: what maps of attention are drawn from.

``reference.attention_matrix`` forms an exponent for each (query, key, channel). Here only keys near the query are done
so; all others lie on the far side of a fixed token s, where ``exp(G_i − G_j) = exp(G_i − G_s) · exp(G_s − G_j)``, both
factors at most 1, and the sum over channels is a matrix product.
"""

import torch
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast

from .reference import accumulation_dtype

_CHUNK = 32


def _scores(q: Tensor, k: Tensor, total: Tensor, rows: Tensor) -> Tensor:
    """``Σ_c q_ic k_jc exp(G_ic − G_jc)`` for j ≤ i; ``q, k`` ``(B, H, N, Dk)``, ``total`` = G in float64. ``rows``
    ascending. → ``(B, H, R, N)``."""
    N = k.shape[2]
    chunk_of = rows // _CHUNK
    parts = []
    for chunk in chunk_of.unique().tolist():
        r = rows[chunk_of == chunk]
        start, stop = chunk * _CHUNK, min(N, (chunk + 1) * _CHUNK)
        query, here = q[:, :, r], total[:, :, r]
        exponent = here.unsqueeze(3) - total[:, :, None, start:stop]
        later = torch.arange(start, stop, device=k.device) > r[:, None]
        weight = exponent.masked_fill(later[..., None], -torch.inf).exp().to(k.dtype)
        near = torch.einsum("bhrc,bhjc,bhrjc->bhrj", query, k[:, :, start:stop], weight)
        pieces = [near, near.new_zeros(*near.shape[:-1], N - stop)]
        if start:
            edge = total[:, :, start - 1 : start]
            far_query = query * (here - edge).exp().to(k.dtype)
            far_key = k[:, :, :start] * (edge - total[:, :, :start]).exp().to(k.dtype)
            pieces.insert(0, far_query @ far_key.mT)
        parts.append(torch.cat(pieces, dim=-1))
    return torch.cat(parts, dim=2)


@outside_autocast
def attention_rows(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    rows: Tensor | None = None,
    *,
    reverse: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Rows of the matrix A for which ``A @ v`` is the scan from the left, or with ``reverse`` from the right.

    Args:
        q, k, log_decay: ``(B, N, H, Dk)``, as for ``gated_linear_attention``; with ``reverse`` the decays are those of
            the reverse scan.
        rows: indices of the wanted rows (queries) in any order, all by default.
        scale: factor on the scores, ``Dk ** -0.5`` by default.

    Returns:
        ``(B, H, R, N)`` in float32, or float64 when an input is float64; differentiable. Memory is that of the result
        and ``O(N·H·Dk)``.
    """
    dtype = accumulation_dtype(q, k, log_decay)
    N = q.shape[1]
    q = q.to(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    k, g = k.to(dtype), log_decay.double()
    rows = torch.arange(N, device=q.device) if rows is None else rows.to(q.device)
    if reverse:
        q, k, g, rows = q.flip(1), k.flip(1), g.flip(1), N - 1 - rows
    order = rows.argsort()
    q, k, total = (x.transpose(1, 2) for x in (q, k, g.cumsum(1)))
    scores = _scores(q, k, total, rows[order])[:, :, order.argsort()]
    return scores.flip(-1) if reverse else scores

"""Rows of the matrix which a gated delta rule multiplies the values with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.gated import attention_rows as decayed_rows

_CHUNK = 16
_AT_ONCE = 16  # chunks whose part of L is formed together


@outside_autocast
def attention_rows(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    erase_gate: Tensor,
    rows: Tensor | None = None,
    *,
    reverse: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Rows of the matrix ``P (I + L)⁻¹`` which, times v, gives the scan from the left, or with ``reverse`` from the
    right: P are the decayed scores of q and k, L those of ``e = erase_gate ⊙ k`` and k without the diagonal.

    Args:
        q, k, log_decay, erase_gate: as for ``gated_delta_rule``.
        rows: indices of the wanted rows in any order, all by default.
        scale: factor on the scores, ``Dk ** -0.5`` by default.

    Returns:
        ``(B, H, R, N)`` in float32, or float64 when an input is float64. Memory is that of the result and
        ``O(H·Dk·(N + R))``: L is never formed whole.
    """
    N, size = q.shape[1], min(_CHUNK, q.shape[1])
    log_decay, erase = log_decay.expand_as(k), erase_gate * k
    if reverse:
        q, k, log_decay, erase = (x.flip(1) for x in (q, k, log_decay, erase))
        rows = N - 1 - (torch.arange(N, device=q.device) if rows is None else rows.to(q.device))
    scores = decayed_rows(q, k, log_decay, rows, scale=scale)
    # X (I + L) = P, from the last chunk of columns to the first. Of the columns behind a chunk it needs no more than
    # Σ_t x_t e_t exp(G_t − G), a row of width Dk for each of the rows, G being the sum of decays at the chunk's end.
    k, log_decay, erase = (
        F.pad(x, (0, 0, 0, 0, 0, -N % size)).unflatten(1, (-1, size)) for x in (k, log_decay.double(), erase)
    )
    total = log_decay.cumsum(2)
    to_end = ((total[:, :, -1:] - total).exp() * k).to(scores.dtype).permute(0, 1, 3, 4, 2)  # (B, chunks, H, Dk, size)
    from_start = (total.exp() * erase).to(scores.dtype).transpose(2, 3)
    whole = total[:, :, -1, :, None].exp().to(scores.dtype)  # (B, chunks, H, 1, Dk)
    behind = scores.new_zeros(*scores.shape[:3], k.shape[-1])
    solved = []
    for i, part in reversed(list(enumerate(F.pad(scores, (0, -N % size)).split(size, dim=-1)))):
        first = i // _AT_ONCE * _AT_ONCE
        if not solved or i % _AT_ONCE == _AT_ONCE - 1:
            here = slice(first, i + 1)
            within = decayed_rows(*(x[:, here].flatten(0, 1) for x in (erase, k, log_decay)), scale=1.0)
            within = within.to(scores.dtype).unflatten(0, (-1, i + 1 - first))  # (B, chunks, H, size, size)
        left = part - behind @ to_end[:, i]
        x = torch.linalg.solve_triangular(within[:, i - first], left, upper=False, left=False, unitriangular=True)
        behind = behind * whole[:, i] + x @ from_start[:, i]
        solved.append(x)
    out = torch.cat(solved[::-1], dim=-1)[..., :N]
    return out.flip(-1) if reverse else out

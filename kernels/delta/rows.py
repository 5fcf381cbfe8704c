"""Rows of the attention matrix of the gated delta rule."""

import torch
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.gated import attention_rows as decayed_rows


@outside_autocast
def attention_rows(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    rows: Tensor | None = None,
    *,
    reverse: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Rows of the matrix ``P (I + L)⁻¹`` which, times v, gives the scan from the left, or with ``reverse`` from the
    right: P are the decayed scores of q and k, L those of e and k without the diagonal.

    Args:
        q, k, log_decay, erase: as for ``gated_delta_rule``.
        rows: indices of the wanted rows, all by default; L is formed whole for any of them.
        scale: factor on the scores, ``Dk ** -0.5`` by default.

    Returns:
        ``(B, H, R, N)`` in float32, or float64 when an input is float64.
    """
    log_decay = log_decay.expand_as(k)
    scores = decayed_rows(q, k, log_decay, rows, reverse=reverse, scale=scale)
    lower = decayed_rows(erase, k, log_decay, reverse=reverse, scale=1.0).to(scores.dtype)
    return torch.linalg.solve_triangular(lower, scores, upper=reverse, left=False, unitriangular=True)

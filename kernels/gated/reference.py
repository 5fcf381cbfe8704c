"""Gated linear attention written as its definition: the oracle for every other implementation.

Both forms work in any floating dtype. They compute in float64 when an input is float64 and in float32 otherwise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels import dispatch

# Rows of the attention matrix are formed in blocks of at most this many (query, key, channel) exponents.
_MAX_PAIRWISE = 1 << 24


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is float64, else float32: the dtype in which sums are formed."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def log_decay_from_logits(logits: Tensor, normalizer: float) -> Tensor:
    """``logsigmoid(logits) / normalizer`` in at least float32: the gate of GLA (arXiv:2312.06635, section 4.4)."""
    # PyTorch's logsigmoid is the same, but runs on one thread of a CPU.
    return F.softplus(-logits.to(accumulation_dtype(logits)), threshold=40) / -normalizer


def _scan(q, k, v, log_decay, state, positions):
    outputs = [None] * q.shape[1]
    for t in positions:
        update = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = log_decay[:, t, :, :, None].exp() * state + update
        outputs[t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return torch.stack(outputs, dim=1), state


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    reverse_log_decay: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token by token (GLA, arXiv:2312.06635, eq. 3; ViG, arXiv:2405.18425, for the two directions).

    ``S_t = diag(exp(g_t)) S_{t-1} + k_tᵀ v_t``, ``o_t = scale · q_t S_t``, and the same from the right with
    ``reverse_log_decay``; the result is the mean of the two.

    Returns:
        Output ``(B, N, H, Dv)`` in v's dtype and the final states ``(B, H, Dk, Dv)`` of the forward and, if there is
        one, of the reverse scan.
    """
    dtype = accumulation_dtype(q, k, v, log_decay, reverse_log_decay)
    B, N, H, Dk = q.shape
    zero = q.new_zeros(B, H, Dk, v.shape[-1], dtype=dtype)
    q_, k_, v_ = q.to(dtype) * scale, k.to(dtype), v.to(dtype)
    start = zero if initial_state is None else initial_state.to(dtype)
    out, final = _scan(q_, k_, v_, log_decay.to(dtype), start, range(N))
    if reverse_log_decay is None:
        return out.to(v.dtype), final, None
    start = zero if reverse_initial_state is None else reverse_initial_state.to(dtype)
    out_r, final_r = _scan(q_, k_, v_, reverse_log_decay.to(dtype), start, range(N - 1, -1, -1))
    return ((out + out_r) / 2).to(v.dtype), final, final_r


def _one_direction(q, k, log_decay, rows, reverse):
    """Weights ``(B, H, R, N)`` of one scan. Exponents are differences of float64 sums, so a decay of -1e4 somewhere
    does not blur the others, and they are masked before ``exp``, so that none is positive."""
    N, Dk = k.shape[1], k.shape[-1]
    total = log_decay.double().cumsum(1)
    keys = torch.arange(N, device=k.device)
    block = max(1, _MAX_PAIRWISE // max(1, k.shape[0] * k.shape[2] * N * Dk))
    parts = []
    for r in rows.split(block):
        if reverse:  # decay of the tokens r, r+1, …, j-1
            before = total - log_decay.double()
            exponent = before[:, None] - before[:, r, None]
            visible = keys >= r[:, None]
        else:  # decay of the tokens j+1, …, r
            exponent = total[:, r, None] - total[:, None]
            visible = keys <= r[:, None]
        weight = exponent.masked_fill(~visible[None, :, :, None, None], -torch.inf).exp().to(q.dtype)
        parts.append(torch.einsum("brhk,bnhk,brnhk->bhrn", q[:, r], k, weight))
    return torch.cat(parts, dim=2)


@dispatch.outside_autocast
def attention_matrix(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    reverse_log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The matrix A for which ``A @ v`` is gated linear attention: ``A_ij = scale Σ_c q_ic k_jc exp(G_ic − G_jc)``.

    Args:
        q, k, log_decay, reverse_log_decay: ``(B, N, H, Dk)``, as for ``gated_linear_attention``.
        scale: factor on the scores, ``Dk ** -0.5`` by default.
        rows: indices of the wanted rows (queries), all by default. One row costs ``O(N Dk)`` time and memory.

    Returns:
        ``(B, H, R, N)`` in float32, or float64 when an input is float64. Entries may be negative and rows need not
        sum to one: gated linear attention has no normaliser.
    """
    dtype = accumulation_dtype(q, k, log_decay, reverse_log_decay)
    q = q.to(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    k = k.to(dtype)
    rows = torch.arange(q.shape[1], device=q.device) if rows is None else rows.to(q.device)
    forward = _one_direction(q, k, log_decay, rows, reverse=False)
    if reverse_log_decay is None:
        return forward
    return (forward + _one_direction(q, k, reverse_log_decay, rows, reverse=True)) / 2


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    reverse_log_decay: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same through the full attention matrix; ``O(N² Dk)`` memory. Arguments and results as ``recurrent``."""
    dtype = accumulation_dtype(q, k, v, log_decay, reverse_log_decay)
    matrix = attention_matrix(q, k, log_decay, reverse_log_decay, scale=scale)
    out = torch.einsum("bhij,bjhv->bihv", matrix.to(dtype), v.to(dtype))
    directions = 1 if reverse_log_decay is None else 2

    def with_state(out, decay, start, reverse):
        g = decay.double()
        from_left = g.cumsum(1)
        from_right = g.flip(1).cumsum(1).flip(1)
        # decay of a state that was there before the scan, and of token j's update until the end of the scan
        before, after = (from_right, from_left - g) if reverse else (from_left, from_right - g)
        final = torch.einsum("bnhk,bnhv->bhkv", k.to(dtype) * after.exp().to(dtype), v.to(dtype))
        if start is not None:
            seen = q.to(dtype) * (scale / directions) * before.exp().to(dtype)
            out = out + torch.einsum("bnhk,bhkv->bnhv", seen, start.to(dtype))
            final = final + g.sum(1).exp().to(dtype)[..., None] * start.to(dtype)
        return out, final

    out, final = with_state(out, log_decay, initial_state, reverse=False)
    final_r = None
    if reverse_log_decay is not None:
        out, final_r = with_state(out, reverse_log_decay, reverse_initial_state, reverse=True)
    return out.to(v.dtype), final, final_r

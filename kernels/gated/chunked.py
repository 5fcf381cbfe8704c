"""Gated linear attention in chunks, in plain PyTorch: differentiable, traceable, linear in N, right for every gate.

Within a chunk every pair (query i, key j) is met exactly once in a binary tree: at the level where i and j first fall
into different halves of a block. The decay between them is cut at the border of the halves,

    exp(g_{j+1} + … + g_i) = exp(sum from the border to i) · exp(sum from j to the border),

so a level is one batched matrix product of scaled queries with scaled keys. Both exponents are sums of log decays of
one sign, never a difference of long sums: none is positive, and a decay of -1e4 does not blur its neighbours. Pairwise
exponents would cost L·Dk exponentials a token, this form 2·log2(L)·Dk, and it traces into a graph without a branch on
values. States are passed between chunks by a work-efficient prefix scan (Blelloch, 1990) of 2·log2(N/L) steps.

Eager code on a CPU can look at the gates for free and takes the quicker form of ``factorised.py`` where it is safe.
"""

import torch
from torch import Tensor

from .factorised import factorised, split
from .reference import accumulation_dtype

_CHUNK_SIZES = (64, 32)
# On a CPU, heads are taken in groups whose tensors have about this many elements, so that they stay in the cache; but
# not where a gradient is recorded, which keeps all of them anyway.
_CACHED = 1 << 18


def _least_padding(length: int) -> int:
    """64, or 32 where that pads less; for a short sequence the power of two that holds it."""
    if length <= _CHUNK_SIZES[0]:
        return 1 << (length - 1).bit_length()
    return min(_CHUNK_SIZES, key=lambda size: -(-length // size) * size)


class _Sums:
    """Sums of log decays inside blocks that double in size; tensors ``(…, blocks, size, D)``.

    ``inclusive[i]``: from where the scan enters the block up to and including token i. ``exclusive[j]``: from behind
    token j to where the scan leaves the block. A reverse scan enters on the right.
    """

    def __init__(self, log_decay: Tensor, reverse: bool):
        self.reverse = reverse
        self.inclusive = log_decay.unsqueeze(-2)
        self.exclusive = torch.zeros_like(self.inclusive)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """First and second half of each pair of blocks in the order of the scan, each ``(…, blocks/2, size, D)``."""
        left, right = x[..., 0::2, :, :], x[..., 1::2, :, :]
        return (right, left) if self.reverse else (left, right)

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((second, first) if self.reverse else (first, second), dim=-2)

    def merge(self) -> None:
        last = slice(0, 1) if self.reverse else slice(-1, None)
        in_first, in_second = self.halves(self.inclusive)
        ex_first, ex_second = self.halves(self.exclusive)
        self.exclusive = self._join(ex_first + in_second[..., last, :], ex_second)
        self.inclusive = self._join(in_first, in_second + in_first[..., last, :])


def _tree(q: Tensor, k: Tensor, v: Tensor, log_decays: list[Tensor]):
    """Scores ``(…, L, L)`` of each chunk and, per direction, the queries as they read the state from before the
    chunk, the chunk's addition to the state ``(…, Dk, Dv)``, and the decay of the whole chunk ``(…, Dk, 1)``."""
    sums = [_Sums(g, reverse=bool(index)) for index, g in enumerate(log_decays)]
    scores = (q * k).sum(-1)[..., None, None] * len(sums)  # the token itself belongs to every direction
    size, length = 1, q.shape[-2]
    while size < length:
        q_blocks, k_blocks = q.unflatten(-2, (-1, size)), k.unflatten(-2, (-1, size))
        cross = []
        for s in sums:
            q_second, in_second = s.halves(q_blocks)[1], s.halves(s.inclusive)[1]
            k_first, ex_first = s.halves(k_blocks)[0], s.halves(s.exclusive)[0]
            cross.append((q_second * in_second.exp()) @ (k_first * ex_first.exp()).mT)
            s.merge()
        lower, upper = cross if len(cross) == 2 else (cross[0], torch.zeros_like(cross[0]))
        left, right = scores[..., 0::2, :, :], scores[..., 1::2, :, :]
        scores = torch.cat((torch.cat((left, upper), dim=-1), torch.cat((lower, right), dim=-1)), dim=-2)
        size *= 2
    parts = []
    for s in sums:
        inclusive, exclusive = s.inclusive.squeeze(-3), s.exclusive.squeeze(-3)
        whole = inclusive[..., 0 if s.reverse else -1, :, None].exp()
        parts.append((q * inclusive.exp(), (k * exclusive.exp()).mT @ v, whole))
    return scores.squeeze(-3), parts


def _exclusive_scan(update: Tensor, decay: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """States before each chunk and after the last one, by pairwise combination.

    ``update`` ``(B, H, n, Dk, Dv)``, ``decay`` ``(B, H, n, Dk, 1)``, ``start`` ``(B, H, Dk, Dv)``.
    """
    n = update.shape[2]
    if n == 1:
        return start.unsqueeze(2), decay[:, :, 0] * start + update[:, :, 0]
    even = n // 2 * 2
    u0, u1 = update[:, :, 0:even:2], update[:, :, 1:even:2]
    d0, d1 = decay[:, :, 0:even:2], decay[:, :, 1:even:2]
    before, final = _exclusive_scan(d1 * u0 + u1, d0 * d1, start)
    states = torch.stack((before, d0 * before + u0), dim=3).flatten(2, 3)
    if n > even:
        states = torch.cat((states, final.unsqueeze(2)), dim=2)
        final = decay[:, :, -1] * final + update[:, :, -1]
    return states, final


def _chunked(q, k, v, log_decays, starts, scale, dtype, chunk_size):
    B, N, H, Dk = q.shape
    if q.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        result = factorised(q, k, v, log_decays, starts, scale, dtype, chunk_size)
        if result is not None:
            return result
    if torch.jit.is_tracing():  # to a tracer sizes are tensors
        N = int(N)
    size = chunk_size or _least_padding(N)
    q, k, v = (split(x, size, dtype) for x in (q, k, v))
    scores, parts = _tree(q * (scale / len(log_decays)), k, v, [split(g, size, dtype) for g in log_decays])
    out = scores @ v
    finals = []
    for index, (q_decayed, update, whole) in enumerate(parts):
        start = starts[index]
        start = q.new_zeros(B, H, Dk, v.shape[-1]) if start is None else start.to(dtype)
        if index == 1:
            states, final = _exclusive_scan(update.flip(2), whole.flip(2), start)
            states = states.flip(2)
        else:
            states, final = _exclusive_scan(update, whole, start)
        out = out + q_decayed @ states
        finals.append(final)
    return out.flatten(2, 3)[:, :, :N].transpose(1, 2), finals


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    reverse_log_decay: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Chunked form; arguments and results as ``recurrent``. ``chunk_size``, a power of two, changes speed only."""
    dtype = accumulation_dtype(q, k, v, log_decay, reverse_log_decay)
    decays = [log_decay] if reverse_log_decay is None else [log_decay, reverse_log_decay]
    starts = [initial_state, reverse_initial_state]
    H = q.shape[2]
    group = H
    if q.device.type == "cpu" and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        group = max(1, min(H, _CACHED // (v[:, :, :1].numel() or 1)))
    parts = []
    for first in range(0, H, group):
        heads = slice(first, first + group)
        part = [x[:, :, heads] for x in (q, k, v)]
        part_starts = [None if start is None else start[:, heads] for start in starts]
        parts.append(_chunked(*part, [g[:, :, heads] for g in decays], part_starts, scale, dtype, chunk_size))
    if len(parts) == 1:
        out, finals = parts[0]
    else:
        out = torch.cat([part[0] for part in parts], dim=2)
        finals = [torch.cat(states, dim=1) for states in zip(*(part[1] for part in parts))]
    return out.to(v.dtype), finals[0], finals[1] if len(finals) == 2 else None

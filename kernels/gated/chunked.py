"""Gated linear attention in chunks, in plain PyTorch: differentiable, traceable, linear in N, quick on a CPU.

Two ways to form the scores of a chunk give the same result:

*Tree.* Every pair (query i, key j) is met exactly once in a binary tree: at the level where i and j first fall into
different halves of a block. The decay between them is cut at the border of the halves,

    exp(g_{j+1} + … + g_i) = exp(sum from the border to i) · exp(sum from j to the border),

so a level is one batched matrix product of scaled queries with scaled keys. Both exponents are sums of log decays of
one sign, never a difference of long sums: none is positive, and a decay of -1e4 does not blur its neighbours. This
holds for every gate and traces into a graph without a branch on values.

*Factorised.* exp(G_i) · exp(-G_j) with one cumulative sum G for the chunk: half the work of the tree, but exp(-G_j)
overflows at strong gates. It is taken where values can be looked at for free (eager, on the CPU) and are harmless.

States are passed between chunks by a work-efficient prefix scan (Blelloch, 1990) of 2·log2(N/L) steps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import accumulation_dtype

_CHUNK_SIZES = (64, 32)
# A sequence up to this length is one chunk of the factorised form: there are no states to pass.
_ONE_CHUNK = 256
# exp(±60) leaves a factor 1e12 of float32's range on either side for the queries and keys.
_FACTORISED_RANGE = -60.0


def _least_padding(length: int) -> int:
    """64, or 32 where that pads less; for a short sequence the power of two that holds it."""
    if length <= _CHUNK_SIZES[0]:
        return 1 << (length - 1).bit_length()
    return min(_CHUNK_SIZES, key=lambda size: -(-length // size) * size)


def _split(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """``(B, N, H, D)`` → ``(B, H, n, size, D)``. Padding with zeros neither decays a state nor adds to it."""
    pad = -x.shape[1] % size
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, pad)) if pad else x.to(dtype)
    return x.transpose(1, 2).unflatten(2, (-1, size))


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


def _factorised(q: Tensor, k: Tensor, v: Tensor, log_decays: list[Tensor]):
    """The same results as ``_tree``, or ``None`` if some chunk decays too strongly for exp(-G)."""
    if min(g.detach().sum(-2).min() for g in log_decays) < _FACTORISED_RANGE:
        return None
    scores, parts = None, []
    for index, g in enumerate(log_decays):
        inclusive = g.flip(-2).cumsum(-2).flip(-2) if index else g.cumsum(-2)
        decay = inclusive.exp()
        q_decayed, k_grown = q * decay, k / decay
        whole = decay[..., 0 if index else -1, :, None]
        parts.append((q_decayed, whole * (k_grown.mT @ v), whole))
        product = q_decayed @ k_grown.mT
        scores = product.tril() if scores is None else scores + product.triu()
    return scores, parts


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
    B, N, H, Dk = q.shape
    Dv = v.shape[-1]
    dtype = accumulation_dtype(q, k, v, log_decay, reverse_log_decay)
    decays = [log_decay] if reverse_log_decay is None else [log_decay, reverse_log_decay]
    starts = [initial_state, reverse_initial_state]

    def prepare(size: int):
        q_, k_, v_ = (_split(x, size, dtype) for x in (q, k, v))
        return q_ * (scale / len(decays)), k_, v_, [_split(g, size, dtype) for g in decays]

    result = None
    # Only eager code on a CPU may look at the gates: a graph must hold for all, and a GPU would have to be waited for.
    if q.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        q_, k_, v_, g_ = prepare(chunk_size or (N if N <= _ONE_CHUNK else _CHUNK_SIZES[0]))
        result = _factorised(q_, k_, v_, g_)
    if result is None:
        q_, k_, v_, g_ = prepare(chunk_size or _least_padding(N))
        result = _tree(q_, k_, v_, g_)
    scores, parts = result

    out = scores @ v_
    finals: list[Tensor | None] = [None, None]
    for index, (q_decayed, update, whole) in enumerate(parts):
        start = starts[index]
        if start is None and update.shape[2] == 1:  # one chunk and nothing before it: no state to read
            finals[index] = update[:, :, 0]
            continue
        start = q.new_zeros(B, H, Dk, Dv, dtype=dtype) if start is None else start.to(dtype)
        if index == 1:
            states, finals[index] = _exclusive_scan(update.flip(2), whole.flip(2), start)
            states = states.flip(2)
        else:
            states, finals[index] = _exclusive_scan(update, whole, start)
        out = out + q_decayed @ states
    out = out.flatten(2, 3)[:, :, :N].transpose(1, 2)
    return out.to(v.dtype), finals[0], finals[1]

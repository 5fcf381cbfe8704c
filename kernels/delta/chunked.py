"""The gated delta rule in chunks, in plain PyTorch: differentiable, traceable, linear in N, right for every decay.

In a chunk that is entered with state S, with G the sum of log decays from its first token on, the updates U solve

    (I + L) U = V − (e ⊙ exp(G)) S,    L_ij = Σ_c e_ic k_jc exp(G_ic − G_jc) for j < i, else 0

(Gated DeltaNet, arXiv:2412.06464, section 3.3). Scores are met in a binary tree, as in gated linear attention: at the
level where i and j first fall into different halves of a block, the decay between them is cut at the border of the
halves, so that no exponent is positive. The blocks of that tree are those of which the inverse of I + L is made,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],

which is forward substitution by blocks: as stable, and only matrix products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import sum_dtype

_CHUNK = 64


def _split(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """``(B, N, H, D)`` → ``(B, H, chunks, size, D)``, filled up with zeros, which change no state."""
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.transpose(1, 2).unflatten(2, (-1, size))


def _join(left: Tensor, lower: Tensor, right: Tensor) -> Tensor:
    """``[[left, 0], [lower, right]]``."""
    above = torch.cat((left, torch.zeros_like(lower)), dim=-1)
    return torch.cat((above, torch.cat((lower, right), dim=-1)), dim=-2)


def _tree(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decayed scores of ``q`` and ``k`` ``(…, L, L)``, the inverse of I + L, and the sums of log decays from the
    chunk's begin up to each token and from behind each token to the chunk's end, ``(…, L, Dk or 1)``."""
    queries = torch.stack((q, erase))
    inclusive = log_decay.unsqueeze(-2)
    exclusive = torch.zeros_like(inclusive)
    scores = (q * k).sum(-1)[..., None, None]
    inverse = torch.ones_like(scores)
    size, length = 1, q.shape[-2]
    while size < length:
        in_first, in_second = inclusive[..., 0::2, :, :], inclusive[..., 1::2, :, :]
        ex_first, ex_second = exclusive[..., 0::2, :, :], exclusive[..., 1::2, :, :]
        late = queries.unflatten(-2, (-1, size))[..., 1::2, :, :] * in_second.exp()
        early = k.unflatten(-2, (-1, size))[..., 0::2, :, :] * ex_first.exp()
        cross, lower = (late @ early.mT).unbind(0)
        scores = _join(scores[..., 0::2, :, :], cross, scores[..., 1::2, :, :])
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _join(first, -(second @ lower @ first), second)
        exclusive = torch.cat((ex_first + in_second[..., -1:, :], ex_second), dim=-2)
        inclusive = torch.cat((in_first, in_second + in_first[..., -1:, :]), dim=-2)
        size *= 2
    return scores.squeeze(-3), inverse.squeeze(-3), inclusive.squeeze(-3), exclusive.squeeze(-3)


def chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, scale: float) -> Tensor:
    """Arguments and result as ``recurrent``."""
    dtype, result = sum_dtype(q, k, v, log_decay, erase), v.dtype
    N = q.shape[1]
    if torch.jit.is_tracing():  # to a tracer sizes are tensors
        N = int(N)
    size = min(_CHUNK, 1 << (N - 1).bit_length())
    q, k, v, log_decay, erase = (_split(x, size, dtype) for x in (q * scale, k, v, log_decay, erase))
    scores, inverse, inclusive, exclusive = _tree(q, k, erase, log_decay)
    reads = inverse @ (erase * inclusive.exp())  # what the updates take out of the state
    writes = inverse @ v
    out = scores @ writes
    chunks = q.shape[2]
    if chunks > 1 or N == 1:  # a token alone: its decay gets a gradient, zero, which distributed training insists on
        keys = (k * exclusive.exp()).mT
        whole = inclusive[..., -1, :].expand(*inclusive.shape[:-2], q.shape[-1]).exp()
        transition = torch.diag_embed(whole) - keys @ reads
        added = keys @ writes
        states = [torch.zeros_like(added[:, :, 0])]
        for index in range(chunks - 1):
            states.append(transition[:, :, index] @ states[-1] + added[:, :, index])
        out = out + (q * inclusive.exp() - scores @ reads) @ torch.stack(states, dim=2)
    return out.flatten(2, 3)[:, :, :N].transpose(1, 2).to(result)

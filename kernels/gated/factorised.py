"""The chunk form with factorised decays, exp(G_i) · exp(-G_j): the quick path of the ``torch`` implementation on a CPU.

One cumulative sum a chunk and direction gives the scores by one matrix product, where the tree of ``chunked.py`` needs
one for every level. The price: exp(-G_j) overflows when a chunk decays strongly, so the gates are looked at first.
A CPU waits for memory and for calls, so there are few passes and all heads are in one call.
"""

import torch
from torch import Tensor

# The gradient of k / e^P holds e^-2P: exp(80) leaves a factor 1e3 of float32's range for the queries and keys.
RANGE = -40.0
CHUNK = 64


def split(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """``(B, N, H, D)`` → ``(B, H, n, size, D)``. Padding with zeros neither decays a state nor adds to it."""
    pad = -x.shape[1] % size
    x = x.to(dtype)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x
    return x.transpose(1, 2).unflatten(2, (-1, size))


def _states(updates: Tensor, wholes: Tensor, start: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """What each chunk reads, ``(B, H, n, Dk, Dv)``, and the state after the last, chunk by chunk: each step is small
    enough to stay in the cache, unlike the levels of a parallel scan. See ``factorised`` for the two directions."""
    updates, wholes = updates.unbind(2), wholes.unsqueeze(-1).unbind(2)
    state = torch.zeros_like(updates[0]) if start is None else start.to(updates[0].dtype)
    read = [state] * len(updates)
    for i in range(len(updates) - 1, -1, -1) if reverse else range(len(updates)):
        if reverse:
            read[i] = wholes[i] * state
            state = read[i] + updates[i]
        else:
            read[i] = state
            state = wholes[i] * (state + updates[i])
    return torch.stack(read, dim=2), state


def factorised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: list[Tensor],
    starts: list[Tensor | None],
    scale: float,
    dtype: torch.dtype,
    chunk_size: int | None,
) -> tuple[Tensor, list[Tensor]] | None:
    """Output ``(B, N, H, Dv)`` in ``dtype`` and the final state of each direction.

    With P the sum of log decays in a chunk up to and including a token, the scan from the left reads the state before
    the chunk with ``q e^P``, and ``whole · (state + (k e^-P)ᵀ v)`` goes on to the next, where ``whole`` is the decay of
    the chunk. With E the sum up to but excluding a token, the scan from the right reads ``whole · state`` with
    ``q e^-E``, and that plus ``(k e^E)ᵀ v`` goes on to the left. In a chunk the products of the same queries and keys
    are the scores, below the diagonal of the one and above that of the other.

    Returns ``None`` if a chunk decays by more than exp(-40): the caller must take another path.
    """
    N = q.shape[1]
    # Chunks of equal length leave little to pad: 196 tokens are four chunks of 49.
    size = chunk_size or -(-N // -(-N // CHUNK))
    decays = [split(g, size, dtype) for g in log_decays]
    sums = [g.cumsum(-2) for g in decays]
    totals = [g[..., -1, :] for g in sums]
    if q.numel() and min(total.detach().min() for total in totals) < RANGE:
        return None

    q, k, v = (split(x, size, dtype).contiguous() for x in (q, k, v))
    q = q * (scale / len(log_decays))
    factor = sums[0].exp()
    queries, keys = [q * factor], [k / factor]
    scores = queries[0] @ keys[0].mT
    if len(log_decays) == 1:
        scores = scores.tril()
    else:
        factor = (sums[1] - decays[1]).exp()
        queries.append(q / factor)
        keys.append(k * factor)
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        scores = torch.where(lower, scores, queries[1] @ keys[1].mT)
        scores.diagonal(dim1=-2, dim2=-1).mul_(2)  # the token itself belongs to both directions
    out = scores @ v

    finals = []
    for index, (query, key, total, start) in enumerate(zip(queries, keys, totals, starts)):
        read, final = _states(key.mT @ v, total.exp(), start, reverse=bool(index))
        finals.append(final)
        if out.shape[2] > 1 or start is not None:
            out.flatten(0, 2).baddbmm_(query.flatten(0, 2), read.flatten(0, 2))
    return out.flatten(2, 3)[:, :, :N].transpose(1, 2), finals

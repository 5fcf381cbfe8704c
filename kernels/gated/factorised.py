"""The chunk form with factorised decays, exp(G_i) · exp(-G_j): the quick path of the ``torch`` implementation on a CPU.

One cumulative sum a chunk and direction gives the scores by one matrix product, where the tree of ``chunked.py`` needs
one for every level. The price: exp(-G_j) overflows when a chunk decays strongly, so the gates are looked at first.
Both directions lie side by side in one tensor, which halves the passes over memory; that is what a CPU waits for.
"""

import torch
from torch import Tensor

# exp(±60) leaves a factor 1e12 of float32's range on either side for the queries and keys.
RANGE = -60.0
CHUNK = 64


def split(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """``(B, N, H, D)`` → ``(B, H, n, size, D)``. Padding with zeros neither decays a state nor adds to it."""
    pad = -x.shape[1] % size
    x = x.to(dtype)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x
    return x.transpose(1, 2).unflatten(2, (-1, size))


def _states(updates: Tensor, decays: Tensor, start: Tensor, order: range) -> tuple[Tensor, Tensor]:
    """States before each chunk ``(B, H, n, Dk, Dv)`` and after the last, chunk by chunk: each step is small enough to
    stay in the cache, unlike the levels of a parallel scan."""
    updates, decays = updates.unbind(2), decays.unbind(2)
    before, state = [start] * len(order), start
    for i in order:
        before[i] = state
        state = torch.addcmul(updates[i], decays[i], state)
    return torch.stack(before, dim=2), state


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

    Returns ``None`` if a chunk decays by more than exp(-60): the caller must take another path.
    """
    N, Dk = q.shape[1], q.shape[-1]
    # Chunks of equal length leave little to pad: 196 tokens are four chunks of 49.
    size = chunk_size or -(-N // -(-N // CHUNK))
    directions = len(log_decays)
    decays = [split(g, size, dtype) for g in log_decays]
    inclusive = [g.cumsum(-2) for g in decays]
    totals = [g[..., -1, :] for g in inclusive]
    if min(total.detach().min() for total in totals) < RANGE:
        return None
    if directions == 2:  # from the right: the total less what lies to the left; short sums, so little is lost
        inclusive[1] = totals[1].unsqueeze(-2) - (inclusive[1] - decays[1])

    q, k, v = split(q, size, dtype), split(k, size, dtype), split(v, size, dtype).contiguous()
    decay = torch.stack(inclusive, dim=-2).exp()
    q_decayed = ((q * (scale / directions)).unsqueeze(-2) * decay).flatten(-2)
    k_grown = (k.unsqueeze(-2) / decay).flatten(-2)
    scores = q_decayed[..., :Dk] @ k_grown[..., :Dk].mT
    if directions == 1:
        scores = scores.tril()
    else:
        upper = q_decayed[..., Dk:] @ k_grown[..., Dk:].mT
        scores = torch.where(torch.ones(size, size, dtype=torch.bool, device=q.device).tril(), scores, upper)
        scores.diagonal(dim1=-2, dim2=-1).mul_(2)  # the token itself belongs to both directions
    out = scores @ v

    whole = torch.cat(totals, dim=-1).exp().unsqueeze(-1)
    updates = (whole * (k_grown.mT @ v)).split(Dk, dim=-2)
    chunks = out.shape[2]
    before, finals = [], []
    for index, (update, decay_of_chunk) in enumerate(zip(updates, whole.split(Dk, dim=-2))):
        start = update.new_zeros(update[:, :, 0].shape) if starts[index] is None else starts[index].to(dtype)
        order = range(chunks - 1, -1, -1) if index else range(chunks)
        states, final = _states(update, decay_of_chunk, start, order)
        before.append(states)
        finals.append(final)
    if chunks > 1 or any(start is not None for start in starts):
        states = torch.cat(before, dim=-2)
        out = torch.baddbmm(out.flatten(0, 2), q_decayed.flatten(0, 2), states.flatten(0, 2)).view_as(out)
    return out.flatten(2, 3)[:, :, :N].transpose(1, 2), finals

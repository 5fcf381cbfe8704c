"""The gated delta rule token by token: the oracle."""

import torch
from torch import Tensor


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, scale: float) -> Tensor:
    """``S ← exp(g) ⊙ S``, ``S ← S + kᵀ (v − e S)``, ``o = scale · q S``; ``erase`` is
    e = b ⊙ k, and v what is written; the rest as for ``gated_delta_rule``."""
    dtype, result = sum_dtype(q, k, v, log_decay, erase), v.dtype
    q, k, v, log_decay, erase = (x.to(dtype) for x in (q, k, v, log_decay, erase))
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        state = log_decay[:, t, :, :, None].exp() * state
        update = v[:, t] - torch.einsum("bhk,bhkv->bhv", erase[:, t], state)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1).to(result)

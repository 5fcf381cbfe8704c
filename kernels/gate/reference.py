"""The gated mix in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # One reduction instead of a square and a mean: fewer passes over memory, which is what a CPU waits for.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    normed = x * torch.rsqrt(norm * norm / x.shape[-1] + eps)
    return normed * weight if torch.is_grad_enabled() else normed.mul_(weight)


def mix(
    o: Tensor, local: Tensor, gate: Tensor, o_weight: Tensor, local_weight: Tensor, eps: float, activation: str | None
) -> Tensor:
    B, N, H, D = o.shape
    dtype = torch.promote_types(gate.dtype, torch.float32)
    o = _rms_norm(o.to(dtype), o_weight.to(dtype), eps)
    normed = _rms_norm(local.reshape(B, N, H, D).to(dtype), local_weight.to(dtype), eps)
    weight = gate.reshape(B, N, H, D).to(dtype).sigmoid()
    # Without a gradient to record, temporaries are used again: here is a block's peak of memory.
    recorded = torch.is_grad_enabled()
    mixed = normed.lerp(o, weight) if recorded else normed.lerp_(o, weight)
    if activation == "silu":
        mixed = F.silu(mixed, inplace=not recorded)
    return mixed.flatten(2).to(gate.dtype)


def swish_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(o, o.shape[-1:], weight, eps).flatten(2) * F.silu(gate)

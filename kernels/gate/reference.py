"""The gated mix in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def mix(
    o: Tensor, local: Tensor, gate: Tensor, o_weight: Tensor, local_weight: Tensor, eps: float, activation: str | None
) -> Tensor:
    B, N, H, D = o.shape
    dtype = torch.promote_types(gate.dtype, torch.float32)
    o = F.rms_norm(o.to(dtype), (D,), o_weight.to(dtype), eps)
    normed = F.rms_norm(local.reshape(B, N, H, D).to(dtype), (D,), local_weight.to(dtype), eps)
    weight = gate.reshape(B, N, H, D).to(dtype).sigmoid()
    mixed = normed.lerp(o, weight)
    if activation == "silu":
        mixed = F.silu(mixed)
    return mixed.flatten(2).to(gate.dtype)

"""The layer step by step, whichever code takes the steps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels.gate import gated_mix
from scanvas.kernels.gated import gated_linear_attention_from_logits


def compose(
    readers: list[Tensor], down: Tensor, up: Tensor, gate: Tensor, up_bias: Tensor | None, gate_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    weight = torch.cat([*readers, up @ down, gate])
    ends = [up.new_zeros(len(x)) if b is None else b for x, b in ((up, up_bias), (gate, gate_bias))]
    return weight, torch.cat([up.new_zeros(sum(len(x) for x in readers)), *ends])


def split(projected: Tensor, C: int, heads: int) -> list[Tensor]:
    """``(B, N, 4·K + 2·C)`` → queries, keys, values and gates of both directions, each ``(B, N, heads, …)``, and the
    output gate ``(B, N, C)``: views."""
    K = (projected.shape[-1] - 2 * C) // 4
    *parts, out_gate = projected.split((K, K, C, K, K, C), dim=-1)
    return [part.unflatten(-1, (heads, -1)) for part in parts] + [out_gate]


def layer(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    heads: int,
    normalizer: float,
    eps: float,
    activation: str | None,
) -> Tensor:
    projected = F.linear(features, weight, F.pad(bias, (len(weight) - len(bias), 0)))
    *inputs, out_gate = split(projected, features.shape[2], heads)
    o = gated_linear_attention_from_logits(*inputs, normalizer=normalizer, impl="torch")
    return gated_mix(o, features, out_gate, o_weight, local_weight, eps=eps, activation=activation, impl="torch")

"""Norms of tokens in plain PyTorch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels.scan_order import from_order, to_order


class Norm(NamedTuple):
    """What a norm does, and in which order of tokens: see ``api.token_norm``."""

    layer: bool  # LayerNorm, else RMSNorm
    eps: float
    order: str
    grid: tuple[int, int]


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x·(1 + scale) + shift`` for tokens ``(B, N, C)`` and a condition ``(B, 1, C)``.

    Computed as ``x + (x·scale + shift)``: in bfloat16 the sum ``1 + scale`` would lose a scale below 2⁻⁹.
    """
    return x + torch.addcmul(shift, x, scale)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shift: Tensor | None, scale: Tensor | None, norm: Norm
) -> Tensor:
    if norm.layer:
        x = F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], weight, norm.eps)
    if shift is None or scale is None:
        return x
    return modulate(x, shift, scale)


def gated_add(x: Tensor, branch: Tensor, gate: Tensor | None, order: str, grid: tuple[int, int]) -> Tensor:
    branch = from_order(branch, order, grid)
    return x + branch if gate is None else torch.addcmul(x, gate, branch)


def token_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shift: Tensor | None, scale: Tensor | None, norm: Norm
) -> Tensor:
    return to_order(normalise(x, weight, bias, shift, scale, norm), norm.order, norm.grid)[0]


def add_norm(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    x = gated_add(x, branch, gate, norm.order, norm.grid)
    return x, normalise(x, weight, bias, shift, scale, norm)

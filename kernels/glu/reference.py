"""The product of SwiGLU in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def product_(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a, inplace=True).mul_(b)


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    return product(F.linear(x, weight))

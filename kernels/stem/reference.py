"""The stem's convolution, norm and activation through ``torch.nn.functional``."""

import torch.nn.functional as F
from torch import Tensor


def stem(
    x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, stride: int, eps: float
) -> Tensor:
    tokens = F.conv2d(x, weight, bias, stride, padding=1).flatten(2).transpose(1, 2)
    return F.silu(F.layer_norm(tokens, tokens.shape[-1:], norm_weight, norm_bias, eps))

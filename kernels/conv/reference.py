"""Depthwise convolution through ``torch.nn.functional.conv2d``."""

import torch.nn.functional as F
from torch import Tensor


def convolve(x: Tensor, weight: Tensor, grid: tuple[int, int], bias: Tensor | None, activation: str | None) -> Tensor:
    # A view: tokens (B, H·W, C) are an image in channels-last memory.
    image = x.transpose(1, 2).unflatten(2, grid)
    image = F.conv2d(
        image, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), padding="same", groups=x.shape[2]
    )
    if activation == "silu":
        image = F.silu(image)
    return image.flatten(2).transpose(1, 2)

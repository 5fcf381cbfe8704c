"""Parameters that belong to the places of an image."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast


class PlaceParameter(nn.Module):
    """One number per channel and place of an image, learned on one grid and interpolated (bilinear) for others.

    Args:
        channels: numbers per place.
        grid: ``(H, W)`` of the parameters.
        initial: their first value, also that of tokens without a place.
    """

    def __init__(self, channels: int, grid: tuple[int, int], initial: float, device=None, dtype=None):
        super().__init__()
        if len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"the grid of parameters must be (H, W), both at least 1; got {grid}")
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(channels, *grid, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.initial)

    def forward(self, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(prefix + H·W, channels)``, float32 (float64 for a float64 model)."""
        return _places(self.weight, grid, prefix, self.initial)


@torch.jit.ignore
@outside_autocast
def _places(weight: Tensor, grid: tuple[int, int], prefix: int, initial: float) -> Tensor:
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if tuple(weight.shape[1:]) != tuple(grid):
        weight = F.interpolate(weight[None], size=tuple(grid), mode="bilinear", align_corners=False)[0]
    return F.pad(weight.flatten(1).T, (0, 0, prefix, 0), value=initial)

"""2-D rotary position embedding of image tokens (RoFormer, arXiv:2104.09864; axial as in MLLA, arXiv:2405.16605)."""

import torch
from torch import Tensor


def axial_angles(
    grid: tuple[int, int], dim: int, device: torch.device, base: float = 10000.0, endpoint: bool = False
) -> Tensor:
    """Angles ``(H·W, dim/2)`` in float32: the first half of them turns with the row, the second with the column.

    The n frequencies of each are ``base^(-i/n)``, or with ``endpoint`` ``base^(-i/(n-1))``, as in RMT
    (arXiv:2309.11523) and what builds on it.
    """
    H, W = grid
    count = dim // 4
    steps = max(count - 1, 1) if endpoint else count
    frequency = base ** (-torch.arange(count, device=device, dtype=torch.float32) / steps)
    rows = torch.arange(H, device=device, dtype=torch.float32)[:, None] * frequency
    columns = torch.arange(W, device=device, dtype=torch.float32)[:, None] * frequency
    return torch.cat((rows.repeat_interleave(W, dim=0), columns.repeat(H, 1)), dim=-1)


def apply_rope(x: Tensor, grid: tuple[int, int], prefix: int = 0, endpoint: bool = False) -> Tensor:
    """Rotate channel pairs (2i, 2i+1) of ``x`` ``(B, prefix + H·W, heads, D)`` by position; prefix tokens stay.

    ``endpoint``: see ``axial_angles``.

    Nothing is cached, so the result cannot depend on an earlier grid, dtype or device.

    Raises:
        ValueError: D is not divisible by 4.
    """
    D = x.shape[-1]
    if D % 4:
        raise ValueError(f"2-D RoPE needs a head dimension divisible by 4, got {D}")
    angles = axial_angles(grid, D, x.device, endpoint=endpoint)[:, None]
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[:, prefix:, :, 0::2].to(torch.promote_types(x.dtype, torch.float32)), x[:, prefix:, :, 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((x[:, :prefix], rotated), dim=1) if prefix else rotated

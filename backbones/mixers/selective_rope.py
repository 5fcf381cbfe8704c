"""Rotary positions whose angles the tokens choose."""

import torch
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast

from .base import TokenConv


class SelectiveRope(nn.Module):
    """Angles ``θ_c · Σ_{s ≤ t} φ_s`` with ``φ = DWConv3×3(W₂ W₁ x̂)``, x̂ the token with heads of length one, and
    ``θ_c = 500000^(−2c/d)``: a rotation between two tokens by the sum of what the tokens between them say.

    Selective RoPE (arXiv:2511.17388) in its released form: low rank, no phase gate, no bias. Its causal convolution
    over the sequence becomes one over the image; prefix tokens pass it unchanged. Both directions of a scan use the
    same running sum: only differences of angles count.

    Args:
        dim, num_heads: of the mixer.
        width: of a head's queries and keys, even.
        rank: inner width of ``W₂ W₁``.
        base: the 500000.

    Raises:
        ValueError: ``width`` is odd.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        width: int,
        *,
        rank: int = 16,
        base: float = 500000.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if width % 2:
            raise ValueError(f"selective_rope needs heads of an even width, got {width}")
        factory = {"device": device, "dtype": dtype}
        self.num_heads, self.base = num_heads, base
        self.proj = nn.Sequential(
            nn.Linear(dim, rank, bias=False, **factory),
            nn.Linear(rank, num_heads * width // 2, bias=False, **factory),
        )
        self.conv = TokenConv(num_heads * width // 2, 3, bias=False, **factory)

    def reset_parameters(self) -> None:
        """As PyTorch initialises linear layers and convolutions, whatever the mixer does to its others."""
        for layer in (*self.proj, self.conv):
            layer.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(B, N, dim)`` → angles ``(B, N, heads, width/2)``, float32 (float64 for a float64 model)."""
        steps = self.proj(_unit_heads(x, self.num_heads))
        image = self.conv(steps[:, prefix:], grid)
        return _running_angles(torch.cat((steps[:, :prefix], image), dim=1), self.num_heads, self.base)


@torch.jit.ignore
@outside_autocast
def _unit_heads(x: Tensor, heads: int) -> Tensor:
    z = x.unflatten(-1, (heads, -1)).to(torch.promote_types(x.dtype, torch.float32))
    return (z * (z.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2).to(x.dtype)


@torch.jit.ignore
@outside_autocast
def _running_angles(steps: Tensor, heads: int, base: float) -> Tensor:
    dtype = torch.promote_types(steps.dtype, torch.float32)
    total = steps.to(dtype).cumsum(1).unflatten(-1, (heads, -1))
    half = total.shape[-1]
    return total * base ** (-torch.arange(half, device=steps.device, dtype=dtype) / half)


@outside_autocast
def rotate(z: Tensor, angles: Tensor) -> Tensor:
    """Turn channels c and c + d/2 of ``(B, N, heads, d)`` by ``angles`` ``(B, N, heads, d/2)``; z's dtype."""
    first, second = z.to(angles.dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(z.dtype)

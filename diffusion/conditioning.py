"""What the denoiser is told beside the image: time, class, text and place."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.norm import add_norm, token_norm


def sinusoid(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """Cosines and sines of ``t`` ``(B,)`` at ``dim/2`` frequencies, ``(B, dim)`` in float32 (arXiv:1706.03762; cosines
    first, as in DiT, arXiv:2212.09748)."""
    count = dim // 2
    frequency = torch.exp(-math.log(max_period) / count * torch.arange(count, device=t.device, dtype=torch.float32))
    angle = t.to(torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def sincos_positions(grid: tuple[int, int], dim: int, base_grid: tuple[int, int], device: torch.device) -> Tensor:
    """Fixed 2-D positions ``(H·W, dim)`` in float32: half of the channels tells the column, then half the row.

    On the grid of training, ``base_grid``, positions are 0, 1, 2, …, as in DiT and DiG. Another grid is laid over the
    same range, ``i · base / size`` along each axis (as PixArt does, arXiv:2310.00426), so that any H×W works.
    """

    def axis(size: int, base: int) -> Tensor:
        # The original table was made in float64, which not every device has.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        frequency = 10000.0 ** (-torch.arange(dim // 4, device=device, dtype=dtype) / (dim / 4))
        angle = torch.arange(size, device=device, dtype=dtype)[:, None] * (base / size) * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=-1).to(torch.float32)

    H, W = grid
    rows, columns = axis(H, base_grid[0]), axis(W, base_grid[1])
    table = torch.cat((columns[None].expand(H, W, -1), rows[:, None].expand(H, W, -1)), dim=-1)
    return table.flatten(0, 1)


class TimeEmbedding(nn.Module):
    """Timesteps ``(B,)``, integers or not, → ``(B, C)``: 256 sinusoids through a two-layer network (DiT)."""

    def __init__(self, dim: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.linear_1 = nn.Linear(frequencies, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        # The sinusoids are made in float32: bfloat16 does not even hold the integers up to 1000.
        return self.linear_2(F.silu(self.linear_1(sinusoid(timestep, self.frequencies).to(dtype))))


class TextProjection(nn.Module):
    """Features of a text encoder ``(B, T, D)`` → ``(B, T, C)``: two layers (PixArt), then RMSNorm, since the features
    of language models have outliers (SANA, arXiv:2410.10629, section 2.3)."""

    def __init__(self, text_dim: int, dim: int):
        super().__init__()
        self.linear_1 = nn.Linear(text_dim, dim)
        self.linear_2 = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(dim, eps=1e-5)

    def forward(self, text: Tensor) -> Tensor:
        return self.norm(self.linear_2(F.gelu(self.linear_1(text), approximate="tanh")))


class AdaLayerNormZero(nn.Module):
    """``W SiLU(c) + b`` for a condition ``(B, C)``, split into ``parts`` shifts, scales and gates ``(B, 1, C)``
    (adaLN-Zero, DiT section 3.2; see ``LinearDiTTransformer2DModel.zero_init``)."""

    def __init__(self, dim: int, parts: int):
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(dim, parts * dim)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(condition)).unsqueeze(1).chunk(self.parts, dim=-1)


class AdaLayerNormSingle(nn.Module):
    """A learned table of ``parts`` vectors, added to a condition ``(B, parts·C)`` which all blocks share
    (adaLN-single, PixArt-α, arXiv:2310.00426, section 2.3)."""

    def __init__(self, dim: int, parts: int):
        super().__init__()
        self.parts = parts
        self.scale_shift_table = nn.Parameter(torch.randn(parts, dim) / dim**0.5)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return (condition + self.scale_shift_table.flatten().to(condition.dtype)).unsqueeze(1).chunk(self.parts, dim=-1)


class AdaptiveLayerNorm(nn.Module):
    """``shift + (1 + scale) · LayerNorm(x)`` with the shift and scale of a condition (DiT, section 3.2), in one pass
    over memory with the residual sum before it and the scan order around it."""

    def __init__(self, dim: int, eps: float = 1e-6, device=None, dtype=None):
        super().__init__()
        self.dim = dim
        self.eps = eps

    def forward(
        self, x: Tensor, shift: Tensor, scale: Tensor, order: str = "raster", grid: tuple[int, int] | None = None
    ) -> Tensor:
        """``(B, N, C)`` in raster order → the same in the scan order ``order`` of ``grid``; ``shift`` and ``scale`` are
        ``(B, 1, C)``."""
        return token_norm(x, kind="layer", shift=shift, scale=scale, eps=self.eps, order=order, grid=grid)

    def after(
        self,
        x: Tensor,
        branch: Tensor,
        gate: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        order: str = "raster",
        grid: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``x + gate·branch`` and its norm, both in raster order; the branch is in the scan order ``order``."""
        options = {"kind": "layer", "shift": shift, "scale": scale, "eps": self.eps}
        return add_norm(x, branch, gate, **options, order=order, grid=grid)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"

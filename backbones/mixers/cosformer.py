"""cosFormer: ReLU features weighted by the cosine of the distance between two tokens."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast

from .kernel import AffineMixer, full


def _quarter_turns(places: Tensor, count: int, prefix: int) -> Tensor:
    """Angles from 0 to π/2, with π/4 for prefix tokens, ``(prefix + N, 1)``."""
    return torch.cat((places.new_full((prefix,), math.pi / 4), places * (math.pi / 2 / count)))[:, None]


def angles(grid: tuple[int, int], prefix: int, width: int, two_d: bool, device: torch.device, dtype) -> Tensor:
    """The angle of each token and channel, ``(prefix + H·W, width)`` or ``(prefix + H·W, 1)``."""
    H, W = grid
    raster = torch.arange(H * W, device=device, dtype=dtype)
    if not two_d:
        return _quarter_turns(raster, H * W, prefix)
    rows = torch.arange(H, device=device, dtype=dtype).repeat_interleave(W)
    columns = torch.arange(W, device=device, dtype=dtype).repeat(H)
    half = width // 2
    row, column = _quarter_turns(rows, H, prefix), _quarter_turns(columns, W, prefix)
    return torch.cat((row.expand(-1, half), column.expand(-1, width - half)), dim=-1)


@outside_autocast
def _features(q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int, two_d: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k = full(q).relu(), full(k).relu()
    theta = angles(grid, prefix, q.shape[-1], two_d, q.device, q.dtype)[:, None]
    q, k = (torch.cat((z * theta.sin(), z * theta.cos()), dim=-1) for z in (q, k))
    total = (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
    return q, k, 1 / total.clamp_min(1e-6)


class CosformerAttention(AffineMixer):
    """``y_i = Σ_j w_ij v_j / max(Σ_j w_ij, 1e-6)``, ``w_ij = ReLU(q_i)·ReLU(k_j) cos(θ_i − θ_j)``; ``O(N)`` in time.

    cosFormer (arXiv:2202.08791), by features ``[z sin θ; z cos θ]`` of width 2·d. As released θ is ``π j / 2M`` for the
    j-th of M tokens in raster order, the default here. ``positions="2d"`` is our extension to images at the same cost:
    the first half of a head's channels has the row's angle, ``π row / 2H``, the second the column's, so that nearness
    in both counts. Prefix tokens have no place: theirs is the angle in the middle, π/4.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        positions: ``"1d"`` or ``"2d"``.
        qkv_bias: biases in the projections, the output's too.
        proj_drop: dropout after the output projection.
    """

    row_stochastic: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2202.08791"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        positions: str = "1d",
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if positions not in ("1d", "2d"):
            raise ValueError(f"positions must be '1d' or '2d', got {positions!r}")
        self.positions = positions
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, device=device, dtype=dtype)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        return _features(q, k, grid, prefix, self.positions == "2d")

"""SLAB's simplified linear attention."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels.linear import attention_matrix, linear_attention

from .base import TokenMixer
from .places import PlaceParameter


class SlabAttention(TokenMixer):
    """``φ(q) Σ_j φ(k_j + p_j)ᵀ v_j / (φ(q) · Σ_j φ(k_j + p_j) + ε)`` with φ = ReLU and learned positions p, plus
    ``DWConv5×5(v)`` with one kernel per channel of a head, which heads share. ``O(N)`` in time.

    The simplified linear attention of SLAB (arXiv:2405.11582, section 3.3). Positions are at first zero, learned on
    ``pos_grid`` and interpolated for any other grid. Released models use it in the first two stages, a softmax in the
    others. The convolution runs over the image's tokens only. SLAB's norm of blocks is ``PRepBN``, ``norm="prepbn"``
    of ViG.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        pos_grid: ``(H, W)`` of the positions' parameters; ``None`` for no positions.
        kernel_size: of the depthwise convolution, odd; 0 leaves it out.
        qkv_bias: biases in the projections, the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.

    Raises:
        ValueError: ``pos_grid`` is not two positive numbers, or ``kernel_size`` is even.
    """

    row_stochastic: ClassVar[bool] = True
    fixed_grid: ClassVar[bool] = True
    reads_by_projections: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2405.11582"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        pos_grid: tuple[int, int] | None = (14, 14),
        kernel_size: int = 5,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        factory = {"device": device, "dtype": dtype}
        self.eps = eps
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.position = PlaceParameter(dim, pos_grid, 0.0, **factory) if pos_grid else None
        self.conv = self.local_conv(dim // num_heads, kernel_size, **factory)

    def _inputs(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and of keys, and values."""
        q, k, v = self.qkv(x)
        if self.position is not None:
            k = k + self.position(grid, prefix).unflatten(-1, (self.num_heads, -1))
        return F.relu(q), F.relu(k), v

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self._inputs(x, grid, prefix)
        return self._project(v, linear_attention(q, k, v, eps=self.eps), grid, prefix)

    def _local(self, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        image = v[:, prefix:].transpose(1, 2)
        mixed = self.convolve(self.conv, image.flatten(0, 1), grid, 0).unflatten(0, (-1, self.num_heads))
        return F.pad(mixed.transpose(1, 2).flatten(2), (0, 0, prefix, 0))

    def _project(self, v: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        out = attended.flatten(2)
        if self.conv is not None:
            out = out + self._local(v, grid, prefix)
        return self.to_out(out)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self._inputs(x, grid, prefix)
        return linear_attention(q, k, v, eps=self.eps)

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._project(self.qkv(x)[2], attended, grid, prefix)

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self._inputs(x, grid, prefix)
        return attention_matrix(q, k, eps=self.eps, rows=rows)

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        if self.conv is None:
            return {}
        q, k, v = self._inputs(x, grid, prefix)
        attended = linear_attention(q, k, v, eps=self.eps).flatten(2)
        return {"attention": attended, "local": self._local(v, grid, prefix)}

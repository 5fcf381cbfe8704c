"""LINA: linear attention with a gate for each place on keys and values."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.backbones.rope import apply_rope
from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.linear import attention_matrix, linear_attention

from .base import TokenMixer
from .places import PlaceParameter


class LinaAttention(TokenMixer):
    """``φ(q) Σ_j κ_j φ(k_j)ᵀ ν_j v_j / (φ(q) · Σ_j κ_j φ(k_j) + ε)`` with ``φ(z) = ReLU(RoPE(z)) + 10⁻⁶``, plus
    ``DWConv5×5(x)`` of the mixer's input. ``O(N)`` in time.

    LINA (arXiv:2601.22630) in the form its authors recommend for scaling: division, and a convolution. κ and ν, the KV
    gate, are parameters: one per head and place, at first 1, learned on ``gate_grid`` and interpolated for any other
    grid. Released are numbers by index of a fixed sequence, in decoder blocks only; the others have no gate. The
    convolution runs over the image's tokens only.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        gate_grid: ``(H, W)`` of the gates' parameters; ``None`` for no gates.
        kernel_size: of the depthwise convolution, odd; 0 leaves it out.
        rope: rotate queries and keys by 2-D position.
        qkv_bias: biases in the projections, the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.

    Raises:
        ValueError: ``gate_grid`` is not two positive numbers, or ``kernel_size`` is even.
    """

    fixed_grid: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2601.22630"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        gate_grid: tuple[int, int] | None = (14, 14),
        kernel_size: int = 5,
        rope: bool = False,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if rope:
            self.check_rope(dim)
        factory = {"device": device, "dtype": dtype}
        self.rope, self.eps = rope, eps
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.k_gate = PlaceParameter(num_heads, gate_grid, 1.0, **factory) if gate_grid else None
        self.v_gate = PlaceParameter(num_heads, gate_grid, 1.0, **factory) if gate_grid else None
        self.conv = self.local_conv(dim, kernel_size, **factory)

    def _inputs(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and of keys, and values, gated."""
        q, k, v = self.qkv(x)
        if self.rope:
            q, k = apply_rope(q, grid, prefix), apply_rope(k, grid, prefix)
        q, k = _features(q), _features(k)
        if self.k_gate is not None:
            k = k * self.k_gate(grid, prefix).unsqueeze(-1)
            v = (v * self.v_gate(grid, prefix).unsqueeze(-1)).to(v.dtype)
        return q, k, v

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self._inputs(x, grid, prefix)
        return linear_attention(q, k, v, eps=self.eps)

    def _local(self, x: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        return F.pad(self.convolve(self.conv, x[:, prefix:], grid, 0), (0, 0, prefix, 0))

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        out = attended.flatten(2)
        if self.conv is not None:
            out = out + self._local(x, grid, prefix)
        return self.to_out(out)

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._inputs(x, grid, prefix)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self._inputs(x, grid, prefix)
        return attention_matrix(q, k, eps=self.eps, rows=rows)

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        if self.conv is None:
            return {}
        return {"attention": self.attend(x, grid, prefix).flatten(2), "local": self._local(x, grid, prefix)}


@outside_autocast
def _features(z: Tensor) -> Tensor:
    """``ReLU(z) + 10⁻⁶`` in at least float32, where half precision would lose the 10⁻⁶."""
    return F.relu(z.to(torch.promote_types(z.dtype, torch.float32))) + 1e-6

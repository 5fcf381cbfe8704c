"""Softmax attention: the teacher and the yardstick."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope
from scanvas.kernels.dispatch import outside_autocast

from .base import TokenMixer


class UnitNorm(nn.Module):
    """Vectors of length one along the last axis; with ``heads`` multiplied by ``√d·exp(min(s, ln 100))`` with a learned
    s for each head, at first ln 10 (cosine attention, Swin v2, arXiv:2111.09883, section 3.3)."""

    def __init__(self, heads: int = 0, device=None, dtype=None):
        super().__init__()
        self.log_scale = nn.Parameter(torch.empty(heads, 1, device=device, dtype=dtype)) if heads else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, math.log(10))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, N, heads, d)`` → the same shape and dtype."""
        unit = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
        if self.log_scale is not None:
            unit = unit * (x.shape[-1] ** 0.5 * self.log_scale.to(unit.dtype).clamp(max=math.log(100)).exp())
        return unit.to(x.dtype)


class SoftmaxAttention(TokenMixer):
    """``softmax(d^-½ q kᵀ) v`` (arXiv:1706.03762, eq. 1), ``O(N²)`` in time, through PyTorch's fused kernels.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        qkv_bias: biases in the projections, the output's too.
        qk_norm: RMSNorm on the queries and keys of each head, as in ViT-22B (arXiv:2302.05442) and SD3.
        cosine: instead of ``d^-½ q·k`` their cosine, times a learned factor of each head (see ``UnitNorm``).
        rope: rotate queries and keys by 2-D position.
        norm_eps: of those norms.
        proj_drop: dropout after the output projection.
    """

    row_stochastic: ClassVar[bool] = True
    reads_by_projections: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/1706.03762"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        cosine: bool = False,
        rope: bool = False,
        norm_eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        factory = {"device": device, "dtype": dtype}
        if rope:
            self.check_rope(dim)
        if cosine and qk_norm:
            raise ValueError("cosine attention normalises queries and keys itself; leave out qk_norm")
        self.rope = rope
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.q_norm = nn.RMSNorm(dim // num_heads, eps=norm_eps, **factory) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim // num_heads, eps=norm_eps, **factory) if qk_norm else nn.Identity()
        if cosine:
            self.q_norm, self.k_norm = UnitNorm(num_heads, **factory), UnitNorm()

    def _qkv(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = apply_rope(q, grid, prefix), apply_rope(k, grid, prefix)
        # Under autocast the norms return float32; the fused kernels want one dtype.
        return q.to(v.dtype), k.to(v.dtype), v

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self._qkv(x, grid, prefix))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(attended.flatten(2))

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self._qkv(x, grid, prefix)
        q = q if rows is None else q[:, rows]
        return softmax_map(q, k)


@outside_autocast
def softmax_map(q: Tensor, k: Tensor) -> Tensor:
    """``softmax(d^-½ q kᵀ)`` of ``(B, R, H, d)`` and ``(B, N, H, d)``: ``(B, H, R, N)``, float32 or float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("brhd,bnhd->bhrn", q.to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5
    return scores.softmax(-1)

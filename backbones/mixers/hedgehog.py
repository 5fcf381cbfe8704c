"""Linear attention with learned, spiky features."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.linear import attention_matrix, linear_attention

from .base import TokenMixer


class HedgehogFeatures(nn.Module):
    """``φ(z) = [softmax(z W); softmax(−z W)]`` with one ``W`` per head, at first the identity (arXiv:2402.04347).

    Args:
        num_heads, head_dim: of the queries or keys it is applied to; the features are twice as wide.
    """

    def __init__(self, num_heads: int, head_dim: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.weight.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def forward(self, z: Tensor) -> Tensor:
        """``(B, N, heads, D)`` → ``(B, N, heads, 2·D)``, float32 (float64 for float64 inputs), positive."""
        return _spiky(z, self.weight)


@outside_autocast
def _spiky(z: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(z.dtype, torch.float32)
    z = torch.einsum("bnhd,hde->bnhe", z.to(dtype), weight.to(dtype))
    return torch.cat((z.softmax(-1), (-z).softmax(-1)), dim=-1)


class HedgehogAttention(TokenMixer):
    """``φ_q(q) Σ_j φ_k(k_j)ᵀ v_j / (φ_q(q) · Σ_j φ_k(k_j) + ε)`` with the features of ``HedgehogFeatures``.

    The features are trained to imitate the maps of a softmax (arXiv:2402.04347; LoLCATs, arXiv:2410.10254).

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        qkv_bias: biases in the projections, the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    row_stochastic: ClassVar[bool] = True
    reads_by_projections: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.04347"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
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
        self.q_features = HedgehogFeatures(num_heads, dim // num_heads, **factory)
        self.k_features = HedgehogFeatures(num_heads, dim // num_heads, **factory)

    def _features(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)
        return self.q_features(q), self.k_features(k), v

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self._features(x)
        return linear_attention(q, k, v, eps=self.eps)

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(attended.flatten(2))

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self._features(x)
        return attention_matrix(q, k, eps=self.eps, rows=rows)

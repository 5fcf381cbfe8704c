"""SANA's linear attention: ReLU features, no position, no convolution."""

from typing import ClassVar

from torch import Tensor, nn

from .linear import LinearAttention


class SanaAttention(LinearAttention):
    """``ReLU(q) Σ_j ReLU(k_j)ᵀ v_j / (ReLU(q) · Σ_j ReLU(k_j) + ε)``; ``O(N)`` in time.

    The attention of SANA (arXiv:2410.10629, section 2.2). What is local there is the feed-forward: its 3×3 convolution
    (``MixFFN`` in ``backbones.block``) belongs to the block. As released: no biases but the output's, heads of width
    32, so ``num_heads = dim // 32``; SANA-1.5 and SANA-Sprint (arXiv:2501.18427, section 2.2; arXiv:2503.09641)
    set ``qk_norm``.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        qk_norm: RMSNorm on queries and keys before the ReLU, across heads.
        qkv_bias: biases in the projections of queries, keys and values.
        eps: ε, added to the divisor.
        norm_eps: of the norms.
        proj_drop: dropout after the output projection.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.10629"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        eps: float = 1e-15,
        norm_eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            dim,
            num_heads,
            fused_projections=fused_projections,
            kernel_size=0,
            qkv_bias=qkv_bias,
            eps=eps,
            proj_drop=proj_drop,
            **factory,
        )
        if not qkv_bias:
            self.to_out[0] = nn.Linear(dim, dim, **factory)
        self.q_norm = nn.RMSNorm(dim, eps=norm_eps, **factory) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, eps=norm_eps, **factory) if qk_norm else nn.Identity()

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        q, k = (norm(z.flatten(2)).view_as(z).to(v.dtype) for norm, z in ((self.q_norm, q), (self.k_norm, k)))
        return q, k, v

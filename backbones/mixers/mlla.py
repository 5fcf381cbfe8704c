"""The mixer of MLLA: linear attention in the place of Mamba's state space, with its gate and its convolution."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope

from .base import TokenConv
from .kernel import KernelMixer
from .linfusion import positive


class MLLAAttention(KernelMixer):
    """``W_o ((R(φ(q)) Σ_j R(φ(k_j))ᵀ v_j / (φ(q) · Σ_j φ(k_j) + ε) + DWConv3×3(v)) ⊙ SiLU(W_a x))``, ``O(N)`` in time.

    MLLA (arXiv:2405.16605), now called MILA. ``v = SiLU(DWConv3×3(W_v x))`` is what queries and keys are projected
    from, ``φ = ELU + 1``, and R is 2-D RoPE over all channels before they are split into heads, in the numerator only:
    entries of the map may be negative. The two convolutions around it and the feed-forward belong to the block.

    Args:
        dim, num_heads: see ``TokenMixer``; with ``rope`` ``dim`` must be divisible by 4.
        fused_projections: changes nothing, since queries and keys are taken from the values.
        gated: multiply by ``SiLU(W_a x)``.
        local: take everything from the activated convolution of ``W_v x``; else from ``W_v x``.
        rope: rotate queries and keys in the numerator.
        kernel_size: of the convolution of the values, odd; 0 leaves it out.
        qkv_bias: biases in the projections, the gate's and the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    fusible: ClassVar[bool] = False
    paper: ClassVar[str] = "https://arxiv.org/abs/2405.16605"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        gated: bool = True,
        local: bool = True,
        rope: bool = True,
        kernel_size: int = 3,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if rope and dim % 4:
            raise ValueError(f"MLLAAttention: rope needs dim divisible by 4, got {dim}")
        factory = {"device": device, "dtype": dtype}
        self.eps = eps
        self.rope = rope
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.value_conv = TokenConv(dim, 3, **factory) if local else None
        self.gate_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory) if gated else None
        self.make_conv(kernel_size, dim, **factory)

    def heads(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        u = self.to_v(x)
        if self.value_conv is not None:
            u = F.silu(self.convolve(self.value_conv, u, grid, prefix))
        q, k, v = (z.unflatten(-1, (self.num_heads, -1)) for z in (self.to_q(u), self.to_k(u), u))
        return q, k, v

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        q, k = positive(q), positive(k)
        if not self.rope:
            return q, k, q, k
        rotated = (apply_rope(z.flatten(2)[:, :, None], grid, prefix).view_as(z) for z in (q, k))
        return *rotated, q, k

    def gate(self, x: Tensor) -> Tensor | None:
        return None if self.gate_proj is None else F.silu(self.gate_proj(x))

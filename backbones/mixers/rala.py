"""Rank-augmented linear attention: keys weighted by how well they match the mean query."""

from typing import ClassVar

from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope
from scanvas.kernels.dispatch import outside_autocast

from .kernel import KernelMixer, full
from .linfusion import positive
from .sums import mean_one, token_mean


@outside_autocast
def weighted_keys(q: Tensor, k: Tensor, weight: Tensor | None = None) -> Tensor:
    """``α_j k_j`` with ``α = N softmax_j(s q̄ · k_j)``; float32 or float64. With a ``weight`` of tokens ``(B or 1, N)``
    q̄, N and the softmax's divisor are sums of so much of each."""
    k, scale = full(k), q.shape[-1] ** -0.5
    scores = (token_mean(q, weight) * k).sum(-1, keepdim=True) * scale
    return k * mean_one(scores, weight)


class RALAAttention(KernelMixer):
    """``y = W_o ((R(q) Σ_j R(k_j)ᵀ v_j / (q · Σ_j k_j + ε) + DWConv5×5(v)) ⊙ W_g x)``, ``O(N)`` in time, two passes.

    RALA (arXiv:2411.07635). ``q = φ(W_q x)``, ``k_j = α_j φ(W_k x_j)`` with ``φ = ELU + 1`` and
    ``α = N softmax_j(d^-½ q̄ · φ(W_k x_j))``, which raises the rank of the sum; R is the 2-D RoPE of each head, in the
    numerator only: entries of the map may be negative. The gate has no activation. In the models as released stages 3
    and 4 keep softmax.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        rope: rotate queries and keys in the numerator; needs heads of a width divisible by 4.
        kernel_size: of the depthwise convolution of the values, odd; 0 leaves it out.
        gated: multiply by ``W_g x``.
        qkv_bias: biases in the projections, the gate's and the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2411.07635"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        rope: bool = True,
        kernel_size: int = 5,
        gated: bool = True,
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
        self.eps = eps
        self.rope = rope
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.gate_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory) if gated else None
        self.make_conv(kernel_size, dim, **factory)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        q, k = positive(q), positive(k)
        k = weighted_keys(q, k)
        if not self.rope:
            return q, k, q, k
        return *(apply_rope(z, grid, prefix, endpoint=True) for z in (q, k)), q, k

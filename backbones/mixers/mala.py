"""Magnitude-aware linear attention: the length of a query counts again."""

from typing import ClassVar

from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope
from scanvas.kernels.dispatch import outside_autocast

from .kernel import AffineMixer, full
from .linfusion import positive
from .sums import token_count, token_mean


@outside_autocast
def mala_factors(q: Tensor, k: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """r = (1 + 1/(z + 1e-6)) s/N and c = −z/N with ``z_i = s q_i · k̄``, each ``(B, N, H, 1)``; ``weight`` ``(B or 1,
    N)`` of keys in N and k̄."""
    N, scale = token_count(k, weight), q.shape[-1] ** -0.5
    z = (full(q) * token_mean(k, weight)).sum(-1, keepdim=True) * scale
    return (1 + 1 / (z + 1e-6)) * (scale / N), -z / N


class MALAAttention(AffineMixer):
    """``y = W_o ((A v + DWConv5×5(v)) ⊙ W_g x)`` with a map A normalised by a factor and an offset, ``O(N)`` in time.

    MALA (arXiv:2507.00698): ``A_ij = (1 + 1/z_i) s/N R(φ(q_i))·R(φ(k_j)) − z_i/N`` with
    ``z_i = s φ(q_i)·mean_j φ(k_j)``, ``φ = ELU + 1``, ``s = d^-½`` and R the 2-D RoPE of each head. Without R rows sum
    to one; entries may be negative. The gate has no activation. In the models as released stages 3 and 4 keep softmax.
    The output grows with the fourth power of the input: float16 holds it for inputs up to some 25 times unit variance.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        rope: rotate queries and keys in the product; needs heads of a width divisible by 4.
        kernel_size: of the depthwise convolution of the values, odd; 0 leaves it out.
        gated: multiply by ``W_g x``.
        qkv_bias: biases in the projections, the gate's and the output's too.
        proj_drop: dropout after the output projection.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2507.00698"

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
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if rope:
            self.check_rope(dim)
        factory = {"device": device, "dtype": dtype}
        self.rope = rope
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.gate_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory) if gated else None
        self.make_conv(kernel_size, dim, **factory)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        q, k = positive(q), positive(k)
        coefficients = mala_factors(q, k)
        if self.rope:
            q, k = (apply_rope(z, grid, prefix, endpoint=True) for z in (q, k))
        return q, k, *coefficients

"""NaLaFormer's attention: features as sharp as their query is long."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope
from scanvas.kernels.dispatch import outside_autocast

from .kernel import KernelMixer, full, gate_normed


@outside_autocast
def query_features(q: Tensor) -> Tensor:
    """``[ReLU(u)^p; ReLU(−u)^p]``, ``u = q / (‖q‖ + 1e-6)``, ``p = 3 (½ + tanh ‖q‖)``; float32 or float64."""
    q = full(q)
    length = q.norm(dim=-1, keepdim=True)
    u, power = q / (length + 1e-6), 3 * (0.5 + length.tanh())
    return torch.cat((u.relu() ** power, (-u).relu() ** power), dim=-1)


@outside_autocast
def key_features(k: Tensor) -> Tensor:
    """``[ReLU(k³); ReLU(−k³)]``; float32 or float64."""
    k = full(k) ** 3
    return torch.cat((k.relu(), (-k).relu()), dim=-1)


class NaLaAttention(KernelMixer):
    """``y = W_o (LayerNorm(R(φ_q) Σ_j R(φ_k)_jᵀ v_j / (φ_q · Σ_j φ_k,j + ε) + DWConv5×5(v)) ⊙ SiLU(W_g x))``.

    NaLaFormer (arXiv:2506.21137): a norm-aware linear attention, ``O(N)`` in time with features of width 2·d. Positive
    and negative parts stay apart, ``φ_q = [ReLU(u)^p; ReLU(−u)^p]`` with ``u = q/‖q‖`` and ``p = 3 (½ + tanh ‖q‖)``, so
    that a long query asks sharply; ``φ_k = [ReLU(k³); ReLU(−k³)]``. R is the 2-D RoPE of each head, of both halves and
    in the numerator only: entries of the map may be negative. This is the released code's feature map, not the paper's
    map of directions by cosines; 1e-6 is added to ``‖q‖``, which the code does not guard. In the models as released
    stages 3 and 4 keep softmax.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        rope: rotate features in the numerator; needs heads of a width divisible by 4.
        kernel_size: of the depthwise convolution of the values, odd; 0 leaves it out.
        qkv_bias: biases in the projections, the gate's and the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2506.21137"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        rope: bool = True,
        kernel_size: int = 5,
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
        self.gate_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.out_norm = nn.LayerNorm(dim, **factory)
        self.make_conv(kernel_size, dim, **factory)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        q, k = query_features(q), key_features(k)
        if not self.rope:
            return q, k, q, k
        return *(self._rotate(z, grid, prefix) for z in (q, k)), q, k

    @staticmethod
    def _rotate(z: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        return torch.cat([apply_rope(half, grid, prefix, endpoint=True) for half in z.chunk(2, dim=-1)], dim=-1)

    def gate(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x))

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        return self.to_out(self.out_norm(out) * self.gate(x))

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        return gate_normed(self.addends(x, grid, prefix), self.out_norm, self.gate(x))

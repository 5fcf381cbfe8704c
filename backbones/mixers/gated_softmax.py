"""Softmax attention with a local branch and a gate: what late stages of hierarchical linear models have."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope

from .kernel import KernelMixer, gate_normed
from .softmax import softmax_map


class GatedSoftmaxAttention(KernelMixer):
    """``y = W_o ((softmax(d^-½ R(q) R(k)ᵀ) v + DWConv5×5(v)) ⊙ W_g x)``, ``O(N²)`` in time.

    The attention of stages 3 and 4 in the released code of RAVLT (arXiv:2411.07635), MAViT (arXiv:2507.00698) and
    NaLaFormer (arXiv:2506.21137): all of ``rala``, ``mala`` or ``nala`` but the sums, which are a softmax's, through
    PyTorch's fused kernels. R is the 2-D RoPE of each head. With ``out_norm``, as NaLaFormer has it, the sum of both
    branches goes through a LayerNorm and the gate through SiLU.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        rope: rotate queries and keys; needs heads of a width divisible by 4.
        kernel_size: of the depthwise convolution of the values, odd; 0 leaves it out.
        out_norm: ``W_o (LayerNorm(…) ⊙ SiLU(W_g x))``.
        qkv_bias: biases in the projections, the gate's and the output's too.
        proj_drop: dropout after the output projection.
    """

    row_stochastic: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2411.07635"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        rope: bool = True,
        kernel_size: int = 5,
        out_norm: bool = False,
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
        self.gate_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.out_norm = nn.LayerNorm(dim, **factory) if out_norm else None
        self.make_conv(kernel_size, dim, **factory)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        if self.rope:
            q, k = (apply_rope(z, grid, prefix, endpoint=True) for z in (q, k))
        return q, k

    def reduce(self, v: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def matrix(self, q: Tensor, k: Tensor, rows: Tensor | None = None) -> Tensor:
        return softmax_map(q if rows is None else q[:, rows], k)

    def gate(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return gate if self.out_norm is None else F.silu(gate)

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        return self.to_out((out if self.out_norm is None else self.out_norm(out)) * self.gate(x))

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        if self.out_norm is None:
            return super().branches(x, grid, prefix=prefix)
        return gate_normed(self.addends(x, grid, prefix), self.out_norm, self.gate(x))

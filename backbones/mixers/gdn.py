"""Gated DeltaNet, from both sides."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .delta import DeltaDecay, DeltaMixer, sigmoid


class GatedDeltaNet(DeltaMixer):
    """``o_t = d^-½ q_t S_t``, ``S_t = α_t S_{t-1} + k_tᵀ β_t (v_t − k_t α_t S_{t-1})``: the state forgets by a scalar
    α per head and token, and what it says at a key is replaced, by the share β, by the token's value. ``O(N)`` in time.

    Gated DeltaNet (arXiv:2412.06464, eq. 10) with ``β = σ(W_b x)``, ``log α = −exp(A) softplus(W_a x + b)`` and the
    output ``W_o (RMSNorm(o) ⊙ SiLU(W_g x))``. See ``DeltaMixer`` for how the two directions and the image's two
    dimensions come in; the paper's layer is causal. There is no normaliser: entries of the map may be negative.

    Args:
        dim, num_heads, fused_projections, bidirectional, selective_rope, norm_eps, proj_drop, impl: see
            ``DeltaMixer``.
        expand_k, expand_v: width of the keys and of the values as a multiple of ``dim``; 0.75 and twice that as
            released, which gives 6·dim² parameters.
        negative_eigenvalues: ``β = 2 σ(W_b x)``, so that the state may be reflected (arXiv:2411.12537).
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.06464"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        expand_k: float = 0.75,
        expand_v: float = 1.5,
        negative_eigenvalues: bool = False,
        device=None,
        dtype=None,
        **delta,
    ):
        factory = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, expand_k=expand_k, expand_v=expand_v, **factory, **delta)
        self.strength = 2.0 if negative_eigenvalues else 1.0
        self.decay = DeltaDecay(dim, self.directions, num_heads, 1, **factory)
        self.beta_proj = nn.Linear(dim, self.directions * num_heads, bias=False, **factory)
        self.gate_proj = nn.Linear(dim, self.value_dim, bias=False, **factory)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        beta = self.strength * sigmoid(self.beta_proj(x).unflatten(-1, (self.directions, self.num_heads, 1)))
        return self.decay(x), beta, beta

    def gate(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x))

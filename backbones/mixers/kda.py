"""Kimi Delta Attention, from both sides."""

from typing import ClassVar

from torch import Tensor, nn

from .delta import DeltaDecay, DeltaMixer, sigmoid


class KimiDeltaAttention(DeltaMixer):
    """``o_t = d^-½ q_t S_t``, ``S_t = (I − β_t k_tᵀ k_t) diag(α_t) S_{t-1} + β_t k_tᵀ v_t``: Gated DeltaNet with a
    decay per channel. ``O(N)`` in time.

    Kimi Linear (arXiv:2510.26692, eq. 1) with ``β = σ(W_b x)`` per head, ``log α = −exp(A) softplus(W₂ W₁ x + b)`` and
    the output ``W_o (RMSNorm(o) ⊙ σ(W₄ W₃ x))``, both low-rank inner widths those of a head's values. See
    ``DeltaMixer`` for how the two directions and the image's two dimensions come in; the paper's layer is causal. The
    released layer has heads of 128 channels. There is no normaliser: entries of the map may be negative.

    Args:
        dim, num_heads, fused_projections, expand_k, expand_v, bidirectional, selective_rope, norm_eps,
            proj_drop, impl: see ``DeltaMixer``.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.26692"

    def __init__(self, dim: int, num_heads: int, *, device=None, dtype=None, **delta):
        factory = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, **factory, **delta)
        key_width, rank = self.key_dim // num_heads, self.value_dim // num_heads
        self.decay = DeltaDecay(dim, self.directions, num_heads, key_width, rank=rank, least_rate=1.0, **factory)
        self.make_gates(**factory)
        self.gate_proj = nn.Sequential(
            nn.Linear(dim, rank, bias=False, **factory), nn.Linear(rank, self.value_dim, **factory)
        )

    def make_gates(self, **factory) -> None:
        """Create the projections of the gates, other than decay and output."""
        self.beta_proj = nn.Linear(self.dim, self.directions * self.num_heads, bias=False, **factory)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        beta = sigmoid(self.beta_proj(x).unflatten(-1, (self.directions, self.num_heads, 1)))
        return self.decay(x), beta, beta

    def gate(self, x: Tensor) -> Tensor:
        return self.gate_proj(x).sigmoid()

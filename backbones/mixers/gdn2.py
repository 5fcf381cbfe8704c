"""Gated DeltaNet-2, from both sides: erasing and writing have gates of their own, channel by channel."""

from typing import ClassVar

from torch import Tensor, nn

from .delta import sigmoid
from .kda import KimiDeltaAttention


class GatedDeltaNet2(KimiDeltaAttention):
    """``o_t = d^-½ q_t S_t``, ``S_t = (I − k_tᵀ (b_t ⊙ k_t)) diag(α_t) S_{t-1} + k_tᵀ (w_t ⊙ v_t)`` with an erase gate
    ``b = σ(W_b x)`` per channel of the keys and a write gate ``w = σ(W_w x)`` per channel of the values. ``O(N)`` in
    time. ``b = w = β`` is Kimi Delta Attention, whose decays and output this has; with one decay per head that is Gated
    DeltaNet.

    See ``DeltaMixer`` for how the two directions and the image's two dimensions come in; the released layer is causal.
    Decays and erase gates belong to a direction; the write gate belongs to the values, which both share, so that there
    is one attention map of the values ``w ⊙ v``.

    Args:
        dim, num_heads, fused_projections, expand_k, expand_v, bidirectional, selective_rope, norm_eps,
            proj_drop, impl: see ``DeltaMixer``.
    """

    paper: ClassVar[str] = "https://github.com/NVlabs/GatedDeltaNet-2"

    def make_gates(self, **factory) -> None:
        self.erase_proj = nn.Linear(self.dim, self.directions * self.key_dim, bias=False, **factory)
        self.write_proj = nn.Linear(self.dim, self.value_dim, bias=False, **factory)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        erase = self.erase_proj(x).unflatten(-1, (self.directions, self.num_heads, self.key_dim // self.num_heads))
        return self.decay(x), sigmoid(erase), None

    def write(self, x: Tensor, v: Tensor) -> Tensor:
        return (sigmoid(self.write_proj(x).unflatten(-1, (self.num_heads, -1))) * v).to(v.dtype)

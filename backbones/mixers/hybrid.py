"""Softmax attention to some tokens and linear attention to the others, under one divisor."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from scanvas.kernels.local import hybrid_attention, hybrid_matrix

from .hedgehog import HedgehogFeatures
from .softmax import SoftmaxAttention


class SoftmaxFactor(nn.Module):
    """``γ = σ(w)`` per head, the weight of the softmax's part (LoLCATs, arXiv:2410.10254, section 3.3).

    Args:
        num_heads: of the attention.
        initial: γ at the start, between 0 and 1; LoLCATs' is 0.1.
    """

    def __init__(self, num_heads: int, initial: float = 0.1, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_heads,), factor_logit(initial), device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """``(heads,)``, float32 (float64 for a float64 model)."""
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).sigmoid()


def factor_logit(factor: float) -> float:
    """The w of a factor γ.

    Raises:
        ValueError: the factor is not between 0 and 1.
    """
    if not 0 < factor < 1:
        raise ValueError(f"softmax_factor must be between 0 and 1, got {factor}")
    return math.log(factor / (1 - factor))


def check_choice(radius: int | None, every: int | None) -> None:
    """Raise ValueError unless one of them says which tokens are the softmax's."""
    if every is not None:
        if not isinstance(every, int) or every < 2:
            raise ValueError(f"every must be a whole number, at least 2, or None for a window; got {every!r}")
    elif not isinstance(radius, int) or radius < 1:
        raise ValueError(f"radius must be a whole number of tokens, at least 1; got {radius!r}")


class HybridAttention(SoftmaxAttention):
    """``(Σ_{j ∈ S} γ e^{s_ij − max} v_j + Σ_{j ∉ S} φ(q_i)·φ(k_j) v_j) / (Σ_{j ∈ S} γ e^{s_ij − max} + Σ_{j ∉ S}
    φ(q_i)·φ(k_j))`` with the scores s of a softmax, Hedgehog's features φ and ``γ = σ(w)``, ``O(N)`` in time.

    S is a disc around the query, the form of LoLCATs (arXiv:2410.10254, section 3.3) in two dimensions; or every n-th
    token, the same for all queries, the form of Attention Surgery (arXiv:2509.24899), which costs 1/n of a softmax.
    Prefix tokens are always in S, and see all by a softmax.

    Args:
        dim, num_heads, fused_projections, qkv_bias, qk_norm, rope, norm_eps, proj_drop: see ``SoftmaxAttention``.
        radius: of the disc, in tokens; 5 holds 69 of them, about LoLCATs' 64.
        every: n; takes the place of the disc.
        softmax_factor: γ at the start.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.10254"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        radius: int | None = 5,
        every: int | None = None,
        softmax_factor: float = 0.1,
        device=None,
        dtype=None,
        **softmax,
    ):
        super().__init__(dim, num_heads, device=device, dtype=dtype, **softmax)
        check_choice(radius, every)
        self.radius = radius if every is None else None
        self.every = every
        factory = {"device": device, "dtype": dtype}
        self.q_features = HedgehogFeatures(num_heads, dim // num_heads, **factory)
        self.k_features = HedgehogFeatures(num_heads, dim // num_heads, **factory)
        self.factor = SoftmaxFactor(num_heads, softmax_factor, **factory)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self._qkv(x, grid, prefix)
        features = self.q_features(q), self.k_features(k)
        place = {"radius": self.radius, "every": self.every, "start": prefix}
        return hybrid_attention(q, k, v, *features, self.factor(), grid, **place)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self._qkv(x, grid, prefix)
        features = self.q_features(q), self.k_features(k)
        place = {"radius": self.radius, "every": self.every, "start": prefix}
        return hybrid_matrix(q, k, *features, self.factor(), grid, rows=rows, **place)

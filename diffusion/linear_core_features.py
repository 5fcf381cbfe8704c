"""Cores made of a feature map: sums, masks of keys, fused heads, rotary positions and maps are here once."""

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from scanvas.backbones.mixers.kernel import affine_attention, affine_matrix, full
from scanvas.backbones.mixers.places import PlaceParameter
from scanvas.kernels.linear import attention_matrix, linear_attention

from .linear_core import LinearCore, Rotate
from .linear_cores_placed import Grid


class FeatureCore(LinearCore):
    """A core whose ``features`` ``reduce`` sums up over all keys. Rotary positions are in the numerator only, whose
    features may be negative after them while those of the divisor stay positive, unless a target says otherwise."""

    @abstractmethod
    def features(
        self, q: Tensor, k: Tensor, turn: Rotate, weight: Tensor | None, start: int, grid: Grid | None
    ) -> tuple[Tensor, ...]:
        """What ``reduce`` and ``matrix`` take.

        Args:
            q, k: ``(B, N, heads, D)``, fused.
            turn: puts the model's rotary positions on such a tensor.
            weight: ``(B or 1, N)`` ≥ 0, how much of each key there is, for means and divisors that are made here.
            start, grid: where the image is; see ``LinearCore.forward``. Known to a ``PlacedCore`` only.
        """

    @abstractmethod
    def reduce(self, v: Tensor, weight: Tensor | None, *features: Tensor) -> Tensor:
        """``(B, N, heads, D)`` of fused values."""

    @abstractmethod
    def matrix(self, rows: Tensor | None, weight: Tensor | None, *features: Tensor) -> Tensor:
        """What ``reduce`` multiplies the values with, ``(B, heads, R, N)``."""

    def _features(
        self, q: Tensor, k: Tensor, rotate: Rotate | None, weight: Tensor | None, start: int, grid: Grid | None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        before, weight = q.shape[2], None if weight is None else full(weight)

        def turn(z: Tensor) -> Tensor:
            return z if rotate is None else self.fuse(rotate(z.flatten(2).unflatten(2, (before, -1))))

        return weight, self.features(self.fuse(q), self.fuse(k), turn, weight, start, grid)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        rotate: Rotate | None,
        weight: Tensor | None,
        start: int = 0,
        grid: Grid | None = None,
    ) -> Tensor:
        weight, features = self._features(q, k, rotate, weight, start, grid)
        return self.reduce(self.fuse(v), weight, *features)

    def mix(self, *args: Any) -> Tensor:
        return self.attend(*args)

    def attention_map_parts(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor,
        rotate: Rotate | None,
        weight: Tensor | None,
        rows: Tensor | None = None,
        start: int = 0,
        grid: Grid | None = None,
    ) -> dict[str, Tensor]:
        weight, features = self._features(q, k, rotate, weight, start, grid)
        return {"map": self.matrix(rows, weight, *features)}

    @staticmethod
    def at_places(parameter: PlaceParameter, start: int, grid: Grid, tokens: int) -> Tensor:
        """A parameter of places for each token, ``(N, channels)``, the same in all frames of a video."""
        table = parameter(tuple(grid[-2:])).repeat(math.prod(grid[:-2]), 1)
        rest = tokens - start - table.shape[0]
        return F.pad(table, (0, 0, start, rest), value=parameter.initial)


class DividedCore(FeatureCore):
    """``features`` are queries and keys of the numerator, then of the divisor: the sums of ``linear_attention``."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 0, "eps": 1e-6}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, eps: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        self.eps = eps

    @staticmethod
    def _weighted(weight: Tensor | None, *keys: Tensor) -> list[Tensor]:
        return [full(k) if weight is None else full(k) * weight[..., None, None] for k in keys]

    def reduce(
        self, v: Tensor, weight: Tensor | None, q: Tensor, k: Tensor, normalizer_q: Tensor, normalizer_k: Tensor
    ) -> Tensor:
        k, normalizer_k = self._weighted(weight, k, normalizer_k)
        normalizers = {"normalizer_q": full(normalizer_q), "normalizer_k": normalizer_k}
        return linear_attention(full(q), k, v, **normalizers, eps=self.eps)

    def matrix(
        self,
        rows: Tensor | None,
        weight: Tensor | None,
        q: Tensor,
        k: Tensor,
        normalizer_q: Tensor,
        normalizer_k: Tensor,
    ) -> Tensor:
        k, normalizer_k = self._weighted(weight, k, normalizer_k)
        return attention_matrix(q, k, normalizer_q=normalizer_q, normalizer_k=normalizer_k, eps=self.eps, rows=rows)


class AffineCore(FeatureCore):
    """``features`` are queries, keys, a factor and perhaps an offset of each row: the sums of ``affine_attention``."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 0}

    def reduce(self, v: Tensor, weight: Tensor | None, *features: Tensor) -> Tensor:
        given = v if weight is None else full(v) * weight[..., None, None]
        return affine_attention(features[0], features[1], given, *features[2:]).to(v.dtype)

    def matrix(self, rows: Tensor | None, weight: Tensor | None, *features: Tensor) -> Tensor:
        matrix = affine_matrix(*features, *[None] * (4 - len(features)), rows)
        return matrix if weight is None else matrix * weight[:, None, None]

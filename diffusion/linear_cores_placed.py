"""Targets of ``linearize`` that must know where in the sequence the image lies, and its height and width."""

import math
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenConv
from scanvas.backbones.mixers.hedgehog import HedgehogFeatures
from scanvas.backbones.mixers.hybrid import SoftmaxFactor, check_choice
from scanvas.backbones.mixers.local import TokenPool, attention_scale, check_window
from scanvas.backbones.mixers.t5 import InnerNetwork, instance_norm
from scanvas.kernels.local import attention_matrix, hybrid_attention, hybrid_matrix, local_attention

from .linear_core import LinearCore, Rotate

Grid = tuple[int, ...]


class PlacedCore(LinearCore):
    """Its ``mix``, ``attend`` and ``attention_map_parts`` take, after the arguments of the others, what ``place``
    gives: ``start`` and ``grid`` as for ``forward``."""

    @property
    def needs_grid(self) -> bool:
        return True

    def place(self, start: int, grid: Grid | None) -> tuple:
        return start, grid

    def attend(self, *args: Any) -> Tensor:
        return self.mix(*args)


def _log(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.log()


class LocalCore(PlacedCore):
    """CLEAR (arXiv:2412.16112): the softmax, restricted to keys less than ``radius`` tokens away; a ball where the grid
    has three axes. Tokens of no image (text, class, registers) see all, and all see them. Needs no new weights.

    ``pool`` > 0 adds one key for each square of so many tokens a side, for all queries of the image; ``base_tokens`` is
    the number of tokens in training, for a scale that grows with their number. See ``LocalAttention``.
    """

    defaults: ClassVar[dict[str, Any]] = {"radius": 8, "pool": 0, "base_tokens": None, "kernel_size": 0}
    fuses_heads: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        value_dim: int,
        heads: int,
        streams: int,
        *,
        radius: int,
        pool: int,
        base_tokens: int | None,
        **options,
    ):
        super().__init__(dim, value_dim, heads, streams, **options)
        check_window(radius, pool, base_tokens)
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.radius, self.base_tokens = radius, base_tokens
        self.pool = TokenPool(pool, **factory) if pool else None

    def _pooled(self, x: Tensor, start: int, grid: Grid) -> Tensor:
        return self.pool(x[:, start : start + math.prod(grid)], *grid[-2:])

    def mix(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None, start: int, grid: Grid) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        extra = {}
        if self.pool is not None:
            extra = {"extra_k": self._pooled(k, start, grid), "extra_v": self._pooled(v, start, grid)}
        scale = attention_scale(q.shape[-1], q.shape[1], self.base_tokens, self.pool is not None)
        return local_attention(q, k, v, grid, self.radius, start=start, log_weight=_log(weight), scale=scale, **extra)

    def attention_map_parts(
        self, q, k, x, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None, start: int, grid: Grid
    ) -> dict[str, Tensor]:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        N = q.shape[1]
        options = {"start": start, "log_weight": _log(weight), "rows": rows}
        options["scale"] = attention_scale(q.shape[-1], N, self.base_tokens, self.pool is not None)
        if self.pool is None:
            return {"map": attention_matrix(q, k, grid, self.radius, **options)}
        matrix = attention_matrix(q, k, grid, self.radius, extra_k=self._pooled(k, start, grid), **options)
        # A pooled value is a sum of values: hand its share on to them.
        shares = self.pool.spread(matrix[..., N:], *grid[-2:])
        return {"map": matrix[..., :N] + F.pad(shares, (start, N - start - math.prod(grid)))}


class TTTCore(PlacedCore):
    """T⁵ (arXiv:2605.02772): a small network per head, fitted to keys and values by one step of gradient descent at
    every call, and applied to the queries. Keys, after their rotary positions, are normalised over the tokens;
    depthwise convolutions of ``qk_kernel_size`` are added to queries and keys of the image, and start at zero.
    """

    defaults: ClassVar[dict[str, Any]] = {"qk_kernel_size": 3, "kernel_size": 0}
    has_map: ClassVar[bool] = False

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, qk_kernel_size: int, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        if qk_kernel_size < 0 or (qk_kernel_size and qk_kernel_size % 2 == 0):
            raise ValueError(f"qk_kernel_size must be odd, or 0 for no convolutions; got {qk_kernel_size}")
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.inner = InnerNetwork(heads, value_dim // heads, **factory)
        self.q_conv = TokenConv(value_dim, qk_kernel_size, **factory) if qk_kernel_size else None
        self.k_conv = TokenConv(value_dim, qk_kernel_size, **factory) if qk_kernel_size else None
        for conv in (self.q_conv, self.k_conv):
            if conv is not None:
                nn.init.zeros_(conv.weight)
                nn.init.zeros_(conv.bias)

    @property
    def needs_grid(self) -> bool:
        return self.conv is not None or self.q_conv is not None

    def mix(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None, start: int, grid: Grid | None) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        k = instance_norm(k, weight).to(v.dtype)
        if self.q_conv is not None:
            q = self._convolve(self.q_conv, q, start, grid)
            k = self._convolve(self.k_conv, k, start, grid)
        return self.inner(self.fuse(q), self.fuse(k), self.fuse(v), weight)

    @staticmethod
    def _convolve(conv: TokenConv, x: Tensor, start: int, grid: Grid) -> Tensor:
        """``x + conv(x)`` on the image's tokens, frame by frame."""
        (H, W), tokens = grid[-2:], math.prod(grid)
        image = x[:, start : start + tokens].flatten(2)
        local = conv(image.reshape(-1, H * W, image.shape[-1]), (H, W)).reshape(image.shape)
        return (x + F.pad(local, (0, 0, start, x.shape[1] - start - tokens)).view_as(x)).to(x.dtype)

    def attention_map_parts(self, *args: Any) -> dict[str, Tensor]:
        raise NotImplementedError(
            "TTTCore has no attention map: values act on the weights of its inner network, not on the output alone"
        )


class HybridCore(PlacedCore):
    """Softmax attention to some tokens and linear attention to the rest, under one divisor, with Hedgehog's features
    after the rotary positions and a learned weight of the softmax's part per head; see ``HybridAttention``.

    The softmax's tokens are a disc of ``radius`` around the query (LoLCATs, arXiv:2410.10254) or, if ``every`` = n is
    given, every n-th token of the image (Attention Surgery, arXiv:2509.24899). Tokens of no image are always among
    them, and see all by a softmax.
    """

    defaults: ClassVar[dict[str, Any]] = {"radius": 5, "every": None, "softmax_factor": 0.1, "kernel_size": 0}
    fuses_heads: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        value_dim: int,
        heads: int,
        streams: int,
        *,
        radius: int | None,
        every: int | None,
        softmax_factor: float,
        **options,
    ):
        super().__init__(dim, value_dim, heads, streams, **options)
        check_choice(radius, every)
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.choice = {"radius": radius} if every is None else {"every": every}
        self.q_features = HedgehogFeatures(heads, value_dim // heads, **factory)
        self.k_features = HedgehogFeatures(heads, value_dim // heads, **factory)
        self.factor = SoftmaxFactor(heads, softmax_factor, **factory)

    def mix(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None, start: int, grid: Grid) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        features = self.q_features(q), self.k_features(k)
        options = {"start": start, "log_weight": _log(weight), **self.choice}
        return hybrid_attention(q, k, v, *features, self.factor(), grid, **options)

    def attention_map_parts(
        self, q, k, x, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None, start: int, grid: Grid
    ) -> dict[str, Tensor]:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        features = self.q_features(q), self.k_features(k)
        options = {"start": start, "log_weight": _log(weight), "rows": rows, **self.choice}
        return {"map": hybrid_matrix(q, k, *features, self.factor(), grid, **options)}

"""What every target of ``linearize`` is: a core, which mixes values once queries, keys and values are there.

A core knows nothing of a model family. It gets queries and keys after their norms and before their rotary positions,
in the heads of the softmax model, and fuses neighbouring heads when it has fewer.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from scanvas.backbones.mixers import TokenConv

Rotate = Callable[[Tensor], Tensor]


class LinearCore(nn.Module, ABC):
    """Args:
    dim: channels of the tokens that queries and keys are projected from.
    value_dim: channels of queries, keys and values: heads × head dimension.
    heads: heads after fusing; divides the heads of the softmax attention.
    streams: 1, or 2 where text and image have projections of their own.
    kernel_size: of the depthwise convolution on the image's values, added to the result; 0 leaves it out.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    """Options with their default values."""
    fuses_heads: ClassVar[bool] = True
    """It can have fewer heads than the softmax."""
    signed: ClassVar[bool] = False
    """Entries of its map may be negative even without rotary positions."""
    has_map: ClassVar[bool] = True
    """There is an attention map; otherwise ``attention_map_parts`` raises NotImplementedError and says why."""

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, kernel_size: int = 0, **factory):
        super().__init__()
        if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be odd, or 0 for no convolution; got {kernel_size}")
        self.heads = heads
        self.conv = TokenConv(value_dim, kernel_size, **factory) if kernel_size else None
        if self.conv is not None:  # the softmax model has no such branch: let it start as nothing
            nn.init.zeros_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

    @classmethod
    def default_heads(cls, heads: int) -> int:
        """Heads for a softmax attention of so many."""
        return heads

    @property
    def needs_grid(self) -> bool:
        """Whether ``forward`` reads ``start`` and ``grid``."""
        return self.conv is not None

    def place(self, start: int, grid: tuple[int, ...] | None) -> tuple:
        """What ``mix``, ``attend`` and ``attention_map_parts`` take after their other arguments: nothing, or both of
        these where the core is a ``PlacedCore``."""
        return ()

    def query_input(self, x: Tensor, stream: int) -> Tensor:
        """What queries of a stream (0: image, 1: text) are projected from."""
        return x

    def key_input(self, x: Tensor, stream: int) -> Tensor:
        """What keys of a stream are projected from."""
        return x

    def fuse(self, x: Tensor) -> Tensor:
        """``(B, N, heads before, D)`` → ``(B, N, heads, D')``."""
        return x.flatten(2).unflatten(2, (self.heads, -1))

    @abstractmethod
    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None) -> Tensor:
        """``(B, N, heads, D')``; arguments as for ``forward``."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None
    ) -> Tensor:
        """``mix`` without what comes after the product of map and values (a norm, a scale): the same shape."""
        return self.mix(q, k, v, x, rotate, weight)

    def attention_map_parts(
        self, q: Tensor, k: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The map whose product with the fused values is ``attend``, or its addends by direction: name →
        ``(B, heads, R, N)`` in float32. Arguments as for ``forward``; ``rows`` are the wanted queries, all by default.
        """
        raise NotImplementedError(f"{type(self).__name__} does not tell its map: it has no attention_map_parts")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        rotate: Rotate | None,
        weight: Tensor | None,
        start: int,
        grid: tuple[int, ...] | None,
    ) -> Tensor:
        """
        Args:
            q, k, v: ``(B, N, heads before, D)``.
            x: ``(B, N, C)``, what they were projected from.
            rotate: puts rotary positions on ``(B, N, heads before, D)``.
            weight: ``(B or 1, N)`` ≥ 0, weight of each key: the exponential of what a mask adds to its scores.
            start: index of the first image token.
            grid: ``(H, W)`` or ``(T, H, W)`` of the image's tokens, for the convolution.

        Returns:
            ``(B, N, heads·D)``, before the output projection.
        """
        out = self.mix(q, k, v, x, rotate, weight, *self.place(start, grid)).flatten(2)
        if self.conv is not None:
            H, W = grid[-2:]
            tokens = math.prod(grid)
            image = v.flatten(2)[:, start : start + tokens]
            image = self.conv(image.reshape(-1, H * W, image.shape[-1]), (H, W)).reshape(image.shape)
            out = out + nn.functional.pad(image, (0, 0, start, out.shape[1] - start - tokens)).to(out.dtype)
        return out

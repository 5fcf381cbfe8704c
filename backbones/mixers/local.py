"""Softmax attention to the tokens nearby: linear in the number of tokens, and with all weights of a softmax layer."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.local import attention_matrix, local_attention

from .softmax import SoftmaxAttention


class TokenPool(nn.Module):
    """One token of each square of ``size`` × ``size`` of an image, with weights that keys, values and heads share; at
    first the mean (CLEAR, arXiv:2412.16112, section 3.3). Squares that the image's edge cuts are filled up by what is
    there: their sum is scaled by how many tokens are missing.

    Args:
        size: side of a square, at least 2.
    """

    def __init__(self, size: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size, size), size**-2, device=device, dtype=dtype))

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """``(B, frames·height·width, H, D)``, of an image or the frames of a video → ``(B, pooled, H, D)``."""
        return _pool(x, self.weight, height, width)

    def spread(self, shares: Tensor, height: int, width: int) -> Tensor:
        """The transpose of ``forward``: what the tokens get of the weights of their squares, ``(…, pooled)`` → ``(…,
        frames·height·width)``."""
        size = self.weight.shape[0]
        y, x = (torch.arange(n, device=shares.device) for n in (height, width))
        shares = shares.unflatten(-1, (-1, -(-height // size), -(-width // size)))
        shares = shares * _completion(size, height, width).to(shares)
        weight = self.weight.to(shares)[y % size][:, x % size]
        return (shares[..., y // size, :][..., x // size] * weight).flatten(-3)


def _completion(size: int, height: int, width: int) -> Tensor:
    """By how much the sum of each square is scaled: size² over the number of tokens that are there."""
    there = [(n - torch.arange(0, n, size)).clamp(max=size) for n in (height, width)]
    return size**2 / (there[0][:, None] * there[1])


@torch.jit.ignore
def _pool(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    size = weight.shape[0]
    pad = (-height % size, -width % size)
    x = x.unflatten(1, (-1, height, width))
    x = F.pad(x, (0, 0, 0, 0, 0, pad[1], 0, pad[0])).unflatten(3, (-1, size)).unflatten(2, (-1, size))
    pooled = torch.einsum("btiyjxhd,yx->btijhd", x, weight.to(x.dtype))
    if any(pad):
        pooled = pooled * _completion(size, height, width)[..., None, None].to(x.device, x.dtype)
    return pooled.flatten(1, 3)


def attention_scale(width: int, tokens: int, base_tokens: int | None, pooled: bool) -> float:
    """``width^-½``, or with ``base_tokens`` ``√(log_base(n) / width)`` for n keys, which keeps the entropy of a softmax
    over more keys than in training; n is ten times the tokens where pooled keys join them (both as in CLEAR's code)."""
    if base_tokens is None:
        return width**-0.5
    return math.sqrt(math.log(max((10 if pooled else 1) * tokens, 2), base_tokens) / width)


def check_window(radius: int, pool: int, base_tokens: int | None) -> None:
    """Raise ValueError for options of local attention that mean nothing."""
    if not isinstance(radius, int) or radius < 1:
        raise ValueError(f"radius must be a whole number of tokens, at least 1; got {radius!r}")
    if pool < 0 or pool == 1:
        raise ValueError(f"pool must be the side of a square of tokens, at least 2, or 0 for none; got {pool}")
    if base_tokens is not None and base_tokens < 2:
        raise ValueError(f"base_tokens must be the number of tokens in training, or None; got {base_tokens}")


class LocalAttention(SoftmaxAttention):
    """``softmax(d^-½ q_i k_jᵀ) v_j`` over the j with ``|place_i − place_j| < radius``: a disc of π·radius² tokens, not
    the whole image (CLEAR, arXiv:2412.16112). ``O(N·radius²)`` in time. Prefix tokens see all, and all see them.

    It has the weights of softmax attention, and needs nothing new. On a GPU it runs by PyTorch's flex attention with a
    mask of blocks, elsewhere tile by tile; see ``local_attention``.

    Args:
        dim, num_heads, fused_projections, qkv_bias, qk_norm, rope, norm_eps, proj_drop: see ``SoftmaxAttention``.
        radius: of the disc, in tokens; the paper's are 8, 16 and 32.
        pool: side of the squares of tokens whose weighted mean is one more key for every image token (the paper's is
            4); 0 for none. Of these keys there are N / pool², so that time grows with N² again, if slowly.
        base_tokens: tokens in training, for a scale that fits more of them: √(log_base(N) / d); the paper's is 4608.
        impl: implementation, see ``local_attention``.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.16112"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        radius: int = 8,
        pool: int = 0,
        base_tokens: int | None = None,
        impl: str = "auto",
        device=None,
        dtype=None,
        **softmax,
    ):
        super().__init__(dim, num_heads, device=device, dtype=dtype, **softmax)
        check_window(radius, pool, base_tokens)
        self.radius = radius
        self.base_tokens = base_tokens
        self.impl = impl
        self.pool = TokenPool(pool, device=device, dtype=dtype) if pool else None
        # What is pooled is weighted by weights that may be trained to any sign.
        self.row_stochastic = not pool

    def _inputs(
        self, x: Tensor, grid: tuple[int, int], prefix: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float]:
        """Queries, keys, values, pooled keys, pooled values and the scale."""
        q, k, v = self._qkv(x, grid, prefix)
        scale = attention_scale(q.shape[-1], x.shape[1], self.base_tokens, self.pool is not None)
        if self.pool is None:
            return q, k, v, None, None, scale
        return q, k, v, self.pool(k[:, prefix:], *grid), self.pool(v[:, prefix:], *grid), scale

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v, extra_k, extra_v, scale = self._inputs(x, grid, prefix)
        return local_attention(
            q, k, v, grid, self.radius, start=prefix, extra_k=extra_k, extra_v=extra_v, scale=scale, impl=self.impl
        )

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _, extra_k, _, scale = self._inputs(x, grid, prefix)
        matrix = attention_matrix(q, k, grid, self.radius, start=prefix, extra_k=extra_k, scale=scale, rows=rows)
        if self.pool is None:
            return matrix
        # A pooled value is a sum of values: hand its share on to them.
        N = x.shape[1]
        return matrix[..., :N] + F.pad(self.pool.spread(matrix[..., N:], *grid), (prefix, 0))

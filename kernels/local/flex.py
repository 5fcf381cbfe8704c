"""PyTorch's flex attention: tokens in the order of tiles, so that a disc touches few blocks, and a mask of blocks."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .disc import Grid, places

_TILES = {1: (128,), 2: (8, 16), 3: (2, 8, 8)}  # 128 tokens, as many as a block
_BLOCK = 128


@lru_cache(maxsize=1)
def _compiled() -> Callable:
    return torch.compile(flex_attention)


def _plan(N: int, grid: Grid, radius: int, start: int, extra: int, device: torch.device) -> tuple[Tensor, BlockMask]:
    """The order of the tokens, those of no image first, and the blocks of keys that each block of queries needs. Extra
    keys come after all others."""
    tokens, axes = math.prod(grid), len(grid)
    at = places(grid, device)
    sides = torch.tensor(_TILES[axes], device=device)
    rank = torch.zeros(tokens, dtype=torch.int64, device=device)
    for column, counts in ((at // sides, [-(-n // s) for n, s in zip(grid, _TILES[axes])]), (at % sides, _TILES[axes])):
        for axis in range(axes):
            rank = rank * counts[axis] + column[:, axis]
    by_tile = rank.argsort()
    everything = torch.arange(N, device=device)
    others = torch.cat((everything[:start], everything[start + tokens :]))
    order = torch.cat((others, by_tile + start))
    count = N - tokens

    at = torch.cat((at.new_zeros(count, axes), at[by_tile], at.new_zeros(extra, axes))).to(torch.int32)
    columns = [column.contiguous() for column in at.unbind(1)]
    is_image = torch.arange(N + extra, device=device)
    is_image = (is_image >= count) & (is_image < N)
    is_extra = torch.arange(N + extra, device=device) >= N

    # A power of it in the mask would not compile once radii vary: Triton has none of an integer argument (torch 2.11).
    limit = radius * radius

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = sum((column[i] - column[j]) * (column[i] - column[j]) for column in columns)
        return torch.where(is_image[i], ~is_image[j] | (distance < limit), ~is_extra[j])

    some, every = _blocks(at, is_image, is_extra, N, radius)
    partial = some & ~every
    mask = BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(every), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(N, N + extra)
    )
    return order, mask


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept may be used in training later
def _cached_plan(
    N: int, grid: Grid, radius: int, start: int, extra: int, device: torch.device
) -> tuple[Tensor, BlockMask]:
    return _plan(N, grid, radius, start, extra, device)


def _blocks(at: Tensor, is_image: Tensor, is_extra: Tensor, N: int, radius: int) -> tuple[Tensor, Tensor]:
    """``(query blocks, key blocks)`` bool: some pair may be visible, from the boxes around the blocks' places; and
    all pairs are."""

    def blocked(x: Tensor, fill: int) -> Tensor:
        missing = -len(x) % _BLOCK
        return torch.cat((x, x.new_full((missing, *x.shape[1:]), fill))).unflatten(0, (-1, _BLOCK))

    image, extra = blocked(is_image, 0).any(1), blocked(is_extra, 0).any(1)
    other = blocked(~is_image & ~is_extra, 0).any(1)
    far = 1 << 15
    low = blocked(torch.where(is_image[:, None], at, far), far).amin(1).long()
    high = blocked(torch.where(is_image[:, None], at, -far), -far).amax(1).long()
    queries = -(-N // _BLOCK)
    gap = torch.maximum(low[:queries, None] - high, low - high[:queries, None]).clamp_min(0)
    span = torch.maximum(high[:queries, None] - low, high - low[:queries, None]).clamp_min(0)
    both = image[:queries, None] & image
    some = (
        (other[:queries, None] & (other | image))
        | (image[:queries, None] & (other | extra))
        | (both & (gap.square().sum(-1) < radius**2))
    )
    every = some & ~(other[:queries, None] & extra) & (~both | (span.square().sum(-1) < radius**2))
    if len(at) % _BLOCK:  # what lies beyond the last key must be masked
        every = every & (torch.arange(every.shape[1], device=at.device) < every.shape[1] - 1)
    return some, every


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of the blocks of keys, those that count first, as ``BlockMask`` takes them."""
    indices = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[None, None], indices.to(torch.int32)[None, None]


def flex(q, k, v, grid, radius, start, extra_k, extra_v, log_weight, scale) -> Tensor:
    extra = 0 if extra_k is None else extra_k.shape[1]
    plan = _plan if torch.compiler.is_compiling() else _cached_plan
    order, mask = plan(q.shape[1], tuple(grid), radius, start, extra, q.device)
    q, k, v = (x[:, order] for x in (q, k, v))
    if extra_k is not None:
        k, v = torch.cat((k, extra_k), dim=1), torch.cat((v, extra_v), dim=1)
    score = None
    if log_weight is not None:
        weight = torch.nn.functional.pad(log_weight[:, order].float(), (0, extra)).expand(q.shape[0], -1).contiguous()

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return value + weight[b, j]

    run = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    out = run(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score, block_mask=mask, scale=scale)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return out.transpose(1, 2)[:, inverse]

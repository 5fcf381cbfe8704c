"""Which tokens of a grid lie within a disc around another, and how a grid is cut into tiles."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

Grid = tuple[int, ...]


def places(grid: Grid, device: torch.device) -> Tensor:
    """Coordinates of the tokens of a grid in raster order, ``(tokens, axes)``."""
    axes = [torch.arange(n, device=device) for n in grid]
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)


def near(queries: Tensor, keys: Tensor, radius: int) -> Tensor:
    """Whether places are less than ``radius`` apart: ``(Q, axes)`` and ``(K, axes)`` → ``(Q, K)`` bool."""
    return (queries[:, None] - keys).square().sum(-1) < radius**2


def covers(grid: Grid, radius: int) -> bool:
    """Whether every token has all others in its disc."""
    return sum((n - 1) ** 2 for n in grid) < radius**2


def count_pairs(grid: Grid, radius: int) -> int:
    """Pairs of a token and one in its disc, itself included."""
    reach = [range(-min(radius, n) + 1, min(radius, n)) for n in grid]
    return sum(
        math.prod(n - abs(d) for n, d in zip(grid, offset))
        for offset in itertools.product(*reach)
        if sum(d * d for d in offset) < radius**2
    )


def tile_sides(grid: Grid, radius: int) -> Grid:
    """Sides of the tiles that ``tiles`` cuts. Small ones waste fewer keys on the corners of their windows, large ones
    make fewer and larger matrix products."""
    side = max(8, radius) if len(grid) < 3 else max(4, radius // 2)
    return tuple(min(side, n) for n in grid)


def tiles(
    grid: Grid, radius: int, device: torch.device
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], Tensor]]:
    """Cut a grid into tiles of queries, in raster order. For each: its slices; those of the smallest box that holds
    the discs of all of them; and ``(queries, keys of the box)`` bool, which key is in the disc of which query."""
    corners = [range(0, n, side) for n, side in zip(grid, tile_sides(grid, radius))]
    for corner in itertools.product(*corners):
        ends = [min(a + side, n) for a, side, n in zip(corner, tile_sides(grid, radius), grid)]
        box = [(max(a - radius + 1, 0), min(b + radius - 1, n)) for a, b, n in zip(corner, ends, grid)]
        queries = places(tuple(b - a for a, b in zip(corner, ends)), device) + torch.tensor(corner, device=device)
        keys = places(tuple(b - a for a, b in box), device) + torch.tensor([a for a, _ in box], device=device)
        yield (
            tuple(slice(a, b) for a, b in zip(corner, ends)),
            tuple(slice(a, b) for a, b in box),
            near(queries, keys, radius),
        )


def join_tiles(parts: list[Tensor], grid: Grid, radius: int) -> Tensor:
    """Results of ``tiles``, ``(B, H, queries, D)`` each → ``(B, H, tokens, D)`` in raster order."""
    sides = tile_sides(grid, radius)
    counts = [math.ceil(n / side) for n, side in zip(grid, sides)]
    shapes = itertools.product(*([min(side, n - a) for a in range(0, n, side)] for n, side in zip(grid, sides)))
    parts = [part.unflatten(2, shape) for part, shape in zip(parts, shapes)]
    for axis in reversed(range(len(grid))):
        count = counts[axis]
        parts = [torch.cat(parts[i : i + count], dim=2 + axis) for i in range(0, len(parts), count)]
    return parts[0].flatten(2, 1 + len(grid))

"""The orders in which a scan may visit the tokens of an image.

Between blocks tokens always lie in raster order, row by row. A block whose mixer depends on the order of its tokens may
rearrange them for that mixer only. The four orders of DiG (arXiv:2405.18428, section 3.3) visit rows or columns, from
the first token or from the last; any grid will do.
"""

import torch
from torch import Tensor

ORDERS: dict[str, tuple[bool, bool]] = {
    "raster": (False, False),
    "reversed": (False, True),
    "column": (True, False),
    "reversed_column": (True, True),
}
"""Name → (visits columns instead of rows, starts at the last token)."""


def check_order(order: str) -> None:
    """Raise ValueError unless ``order`` is one of ``ORDERS``."""
    if order not in ORDERS:
        raise ValueError(f"scan order must be one of {', '.join(ORDERS)}; got {order!r}")


def ordered_grid(order: str, grid: tuple[int, int]) -> tuple[int, int]:
    """The grid which tokens in that order form row by row: ``(W, H)`` if columns are visited."""
    return (grid[1], grid[0]) if ORDERS[order][0] else grid


def to_order(x: Tensor, order: str, grid: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Rearrange tokens from raster order.

    Args:
        x: ``(B, H·W, C)`` in raster order.
        order: one of ``ORDERS``.
        grid: ``(H, W)``.

    Returns:
        The tokens in that order, ``(B, H·W, C)``, and the grid they then form row by row: ``(W, H)`` if columns are
        visited.
    """
    columns, backwards = ORDERS[order]
    # Flips and transpositions instead of an index: their gradients are flips and transpositions, not a scatter.
    if columns:
        x = x.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
    return (x.flip(1) if backwards else x), ordered_grid(order, grid)


def from_order(x: Tensor, order: str, grid: tuple[int, int]) -> Tensor:
    """Undo ``to_order``: ``x`` ``(B, H·W, C)`` in that order → raster order; ``grid`` is the image's ``(H, W)``."""
    columns, backwards = ORDERS[order]
    if backwards:
        x = x.flip(1)
    if columns:
        x = x.unflatten(1, (grid[1], grid[0])).transpose(1, 2).flatten(1, 2)
    return x


def permutation(order: str, grid: tuple[int, int], device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """The order as indices.

    Returns:
        ``(permutation, inverse)``, each ``(H·W,)`` int64: ``x[:, permutation]`` is ``to_order(x)`` and
        ``y[:, inverse]`` is ``from_order(y)``. ``permutation[t]`` is the raster index of the t-th token visited.
    """
    check_order(order)
    H, W = grid
    index = torch.arange(H * W, device=device).view(1, H * W, 1)
    return to_order(index, order, grid)[0].flatten(), from_order(index, order, grid).flatten()

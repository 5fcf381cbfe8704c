"""Scan orders: permutations of any grid, undone exactly, and the same as their definition."""

import pytest
import torch

from scanvas.backbones.scan import ORDERS, check_order, from_order, permutation, to_order


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (3, 4), (5, 2), (4, 4)])
@pytest.mark.parametrize("order", ORDERS)
def test_orders(order, grid):
    H, W = grid
    cells = [(row, column) for row in range(H) for column in range(W)]
    if "column" in order:
        cells.sort(key=lambda cell: (cell[1], cell[0]))
    if "reversed" in order:
        cells.reverse()
    visited, inverse = permutation(order, grid)
    assert visited.tolist() == [row * W + column for row, column in cells]
    assert visited[inverse].tolist() == list(range(H * W))

    x = torch.randn(2, H * W, 3)
    ordered, ordered_grid = to_order(x, order, grid)
    assert torch.equal(ordered, x[:, visited])
    assert ordered_grid == ((W, H) if "column" in order else (H, W))
    assert torch.equal(from_order(ordered, order, grid), x)


def test_unknown_order():
    with pytest.raises(ValueError, match=r"scan order must be one of raster, .*'spiral'"):
        check_order("spiral")

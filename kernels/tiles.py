"""How kernels that work row by row cut their rows, each the channels of a token or of one of its heads."""

import math
from typing import NamedTuple

import triton
from torch import Tensor

STAGES = 2  # tiles of a backward pass that are on their way at once, that of the next step while one is worked on


class Cut(NamedTuple):
    """Elements of a tile, if a row has not more of them, and the warps of its program."""

    elements: int = 2048
    warps: int = 4


def tile(D: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of about so many elements."""
    BD = triton.next_power_of_2(D)
    return max(1, elements // BD), BD


def unit(*tensors: Tensor) -> int:
    """The power of two, at most 16, that divides all strides but the last, of one. Kernels are given strides in such a
    unit, a constant: Triton by itself sees only whether a stride is a multiple of 16, and would load rows of 36 or 72
    numbers one by one."""
    size = 16
    for x in tensors:
        size = math.gcd(size, *x.stride()[:-1])
    return size


def shares(tiles: int, most: int = 1024) -> tuple[int, int]:
    """Programs of a backward pass, at most so many, and the tiles each of them takes.

    Enough programs to fill the largest chips a few times over, few enough for their shares of the gradients that are
    summed over rows to be added up in no time.
    """
    steps = max(1, triton.cdiv(tiles, most))
    return triton.cdiv(tiles, steps), steps

"""How the gate kernels cut their rows, each one head of one token."""

import triton


def tile(D: int) -> tuple[int, int]:
    """Rows and columns of a tile of about 2,048 elements."""
    BD = triton.next_power_of_2(D)
    return max(1, 2048 // BD), BD


def shares(rows: int, BR: int) -> tuple[int, int]:
    """Programs of a backward pass, and the tiles each of them takes.

    Enough programs to fill the largest chips a few times over, few enough for their shares of the weights' gradients to
    be summed in no time.
    """
    tiles = triton.cdiv(rows, BR)
    steps = triton.cdiv(tiles, 1024)
    return triton.cdiv(tiles, steps), steps

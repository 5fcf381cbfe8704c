"""Where the gate of a head lies: gates may be a slice of a wider projection, with tokens further apart than they
are wide."""

import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.tiles import unit


@triton.jit
def gate_offset(r, d, H: tl.constexpr, D: tl.constexpr, stride, UNIT: tl.constexpr):
    """Offsets of the channels ``d`` of rows ``r`` (a head of a token each), tokens ``stride`` times UNIT apart."""
    return ((r // H) * stride * UNIT + (r % H) * D)[:, None] + d[None, :]


def by_token(gate: Tensor) -> Tensor:
    """``(B, N, H·D)`` as ``(B·N, H·D)`` with channels side by side; a copy only if tokens are not evenly spaced."""
    rows = gate.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def spacing(**gates: Tensor) -> dict[str, int]:
    """``gate_stride``, and so on by name, and their common ``UNIT``, as the kernels take them."""
    size = unit(*gates.values())
    return {f"{name}_stride": rows.stride(0) // size for name, rows in gates.items()} | {"UNIT": size}

"""Where the gate of a head lies: gates may be a slice of a wider projection, with tokens further apart than they
are wide."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gate_offset(r, d, H: tl.constexpr, D, stride):
    """Offsets of the channels ``d`` of rows ``r`` (a head of a token each), tokens ``stride`` apart."""
    return ((r // H) * stride + (r % H) * D)[:, None] + d[None, :]


def by_token(gate: Tensor) -> Tensor:
    """``(B, N, H·D)`` as ``(B·N, H·D)`` with channels side by side; a copy only if tokens are not evenly spaced."""
    rows = gate.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()

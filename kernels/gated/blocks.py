"""Pieces shared by the kernels of gated linear attention. Only ``@triton.jit`` helpers.

Names: L tokens of a chunk, BK and BV the padded head dimensions (powers of two), DT the dtype of the operands of matrix
products (bfloat16 or float32) and PREC how float32 operands are multiplied. Everything is summed in float32. States are
kept transposed, ``(BV, BK)``, so that both of their products find their operands in shared memory as they were loaded.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from scanvas.kernels.dispatch import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
_COMPILED = tl.constexpr(not INTERPRETED)
# No log decay is read as less than this: exp() of it is zero, and its products with zero are not NaN as those of -inf.
_LOWEST = tl.constexpr(-1e6)


@triton.jit
def hidden_zero(chunk):
    """Zero, but not to the compiler. Added to indices in a loop over chunks it keeps offsets and masks from being
    computed before the loop, to be held in registers throughout."""
    return chunk >> 30


@triton.jit
def load_tile(base, chunk, end, stride, first, D: tl.constexpr, L: tl.constexpr, BD: tl.constexpr):
    """Rows ``chunk · L …`` before ``end`` and BD columns from ``first`` of an ``(N, D)`` matrix; zero beyond.

    Within a tile offsets fit into 32 bits: ``launch`` copies inputs whose tokens lie too far apart for that."""
    start = chunk * L
    rows = (tl.arange(0, L) + hidden_zero(chunk))[:, None]
    cols = (tl.arange(0, BD) + first)[None, :]
    mask = rows < end - start
    if D % BD != 0:
        mask = mask & (cols < D)
    return tl.load(base + start * stride + (rows * stride.to(tl.int32) + cols), mask=mask, other=0.0)


@triton.jit
def store_tile(base, x, chunk, end, stride, first, D: tl.constexpr, L: tl.constexpr, BD: tl.constexpr):
    """The counterpart of ``load_tile``; rounds to the dtype of the destination."""
    start = chunk * L
    rows = (tl.arange(0, L) + hidden_zero(chunk))[:, None]
    cols = (tl.arange(0, BD) + first)[None, :]
    mask = rows < end - start
    if D % BD != 0:
        mask = mask & (cols < D)
    pointers = base + start * stride + (rows * stride.to(tl.int32) + cols)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def state_offsets(first_v, BV: tl.constexpr, BK: tl.constexpr):
    """Offsets of a ``(BV, BK)`` tile in a transposed state whose rows are BK long."""
    return (first_v + tl.arange(0, BV))[:, None] * BK + tl.arange(0, BK)[None, :]


@triton.jit
def load_state(base, first_v, DV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    rows = first_v + tl.arange(0, BV)
    offsets = state_offsets(first_v, BV, BK)
    if DV % BV == 0:
        state = tl.load(base + offsets)
    else:
        state = tl.load(base + offsets, mask=rows[:, None] < DV, other=0.0)
    return state


@triton.jit
def store_state(base, state, first_v, DV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    rows = first_v + tl.arange(0, BV)
    offsets = state_offsets(first_v, BV, BK)
    state = state.to(base.dtype.element_ty)
    if DV % BV == 0:
        tl.store(base + offsets, state)
    else:
        tl.store(base + offsets, state, mask=rows[:, None] < DV)


@triton.jit
def store_row(base, x, BV: tl.constexpr, BK: tl.constexpr):
    """The first row of x ``(BV, BK)``."""
    row = tl.arange(0, BV)[:, None]
    col = tl.arange(0, BK)[None, :]
    tl.store(base + 0 * row + col, x, mask=row + 0 * col == 0)


@triton.jit
def in_order(pointer, stride, first, last, REVERSE: tl.constexpr):
    """Pointer and stride to walk the tokens ``first … last - 1`` from the left, or from the right."""
    stride = tl.cast(stride, tl.int64)
    if REVERSE:
        pointer += (last - 1) * stride
        stride = -stride
    else:
        pointer += first * stride
    return pointer, stride


@triton.jit
def log_decay(gate, chunk, end, NORMALIZER: tl.constexpr, L: tl.constexpr):
    """Log decays of a tile of gates. With a normalizer the gates are logits: ``logsigmoid(x) / normalizer``."""
    if NORMALIZER == 0:
        g = gate if gate.dtype == tl.bfloat16 else tl.maximum(gate.to(tl.float32), _LOWEST)
    else:
        x = gate.to(tl.float32)
        small = 1.0 + tl.exp2(-tl.abs(x) * LOG2E)
        if _COMPILED:  # one instruction where tl.log2 is some twenty, but the interpreter has no device library
            logarithm = libdevice.fast_log2f(small)
        else:
            logarithm = tl.log2(small)
        g = (tl.minimum(x, 0.0) - logarithm * (1.0 / LOG2E)) * (1.0 / NORMALIZER)
        rows = chunk * L + tl.arange(0, L)
        g = tl.where(rows[:, None] < end, g, 0.0)  # a logit of zero is a decay, and padding must not decay
    return g


@triton.jit
def clamped(g):
    """What ``log_decay`` has not done to bfloat16 gates, which matrix products can read as they are."""
    if g.dtype == tl.bfloat16:
        g = tl.maximum(g.to(tl.float32), _LOWEST).to(tl.bfloat16)
    return g


@triton.jit
def opaque(x):
    """x as a value of its own to the compiler, at the cost of no instruction: what it computes from a copy it neither
    shares with what it computed from x nor moves across. Used where that would hold many registers for long."""
    if _COMPILED:
        if x.dtype == tl.float32:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
        elif x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def masked(mask, x, DT: tl.constexpr):
    """``where(mask, x, 0)`` as an operand. If LLVM rounds before it selects, every bfloat16 number gets a register."""
    return opaque(tl.where(mask, x, 0.0)).to(DT)


@triton.jit
def mm_add(a, b, c, PREC: tl.constexpr):
    if _COMPILED:
        c = tl.dot(a, b, c, input_precision=PREC, out_dtype=tl.float32)
    else:  # the interpreter would multiply the bits of bfloat16 numbers
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, out_dtype=tl.float32)
    return c


@triton.jit
def mm(a, b, PREC: tl.constexpr):
    return mm_add(a, b, tl.zeros((a.shape[0], b.shape[1]), tl.float32), PREC)


@triton.jit
def sums_add(weights, x, total, DT: tl.constexpr):
    """``weights @ x + total`` for weights of 0, 1 and ±1/2, precise to 2⁻¹⁶ of the summands if DT is bfloat16, else to
    float32. On tensor cores this costs less than a scan or a reduction, which move data between threads."""
    if DT == tl.bfloat16:
        weights = weights.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        total = mm_add(weights, high, total, "tf32")
        if x.dtype != tl.bfloat16:
            low = (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
            total = mm_add(weights, low, total, "tf32")
    else:
        total = mm_add(weights.to(tl.float32), x.to(tl.float32), total, "tf32x3")
    return total


@triton.jit
def sums(weights, x, DT: tl.constexpr):
    return sums_add(weights, x, tl.zeros((weights.shape[0], x.shape[1]), tl.float32), DT)


@triton.jit
def column_sums(x, ROWS: tl.constexpr, DT: tl.constexpr):
    """The sum of every column of x in each of ROWS rows."""
    return sums(tl.full((ROWS, x.shape[0]), 1.0, tl.float32), x, DT)

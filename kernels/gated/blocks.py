"""Pieces shared by the kernels of gated linear attention. Only ``@triton.jit`` helpers.

Names: L tokens of a chunk; BK the width of a piece of the keys' dimension, of which KP cover it (WK = KP · BK in all);
BV and BV2 the widths of one or two tiles of values; DT the dtype of the operands of matrix products (bfloat16 or
float32) and PREC how float32 operands are multiplied. Everything is summed in float32. States are kept transposed,
``(BV, BK)``, so that both of their products find their operands in shared memory as they were loaded.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from scanvas.kernels.dispatch import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
# Decays are kept as binary logarithms. A chunk in which a channel decays by more than 2^-RANGE, e^-80, is computed the
# far way (chunks.py). The factors of the other way lie within e^±40: they and their sums of products stay within
# bfloat16 and float32.
RANGE = tl.constexpr(80.0 * 1.4426950408889634)
COMPILED = tl.constexpr(not INTERPRETED)
# No logarithm is read as less than this: its power is zero, and its products with zero are not NaN as those of -inf.
_LOWEST = tl.constexpr(-1e6)


def strides(tensors: str) -> list[str]:
    """Names of the strides of these tensors. They come in units that are constants, which is all Triton need know of
    them: they are not specialised, or a stride of one unit would be a constant, too, and of another type."""
    return [f"{tensor}_{axis}" for tensor in tensors.split() for axis in ("batch", "token", "head")]


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
    pointers = base + tl.cast(start, tl.int64) * stride + (rows * tl.cast(stride, tl.int32) + cols)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(base, x, chunk, end, stride, first, D: tl.constexpr, L: tl.constexpr, BD: tl.constexpr):
    """The counterpart of ``load_tile``; rounds to the dtype of the destination."""
    start = chunk * L
    rows = (tl.arange(0, L) + hidden_zero(chunk))[:, None]
    cols = (tl.arange(0, BD) + first)[None, :]
    mask = rows < end - start
    if D % BD != 0:
        mask = mask & (cols < D)
    pointers = base + tl.cast(start, tl.int64) * stride + (rows * tl.cast(stride, tl.int32) + cols)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def state_tile(first_v, first_k, DV: tl.constexpr, WK: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """Offsets of a ``(BV, BK)`` tile of a ``(DV, WK)`` state, and which of them it has."""
    rows = (first_v + tl.arange(0, BV))[:, None]
    cols = (first_k + tl.arange(0, BK))[None, :]
    return rows * WK + cols, (rows < DV) & (cols < WK)


@triton.jit
def load_state(base, first_v, first_k, DV: tl.constexpr, WK: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """A tile of a state; zero beyond it."""
    offsets, inside = state_tile(first_v, first_k, DV, WK, BV, BK)
    if (DV % BV == 0) & (WK % BK == 0):
        state = tl.load(base + offsets)
    else:
        state = tl.load(base + offsets, mask=inside, other=0.0)
    return state


@triton.jit
def store_state(base, x, first_v, first_k, DV: tl.constexpr, WK: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    offsets, inside = state_tile(first_v, first_k, DV, WK, BV, BK)
    x = x.to(base.dtype.element_ty)
    if (DV % BV == 0) & (WK % BK == 0):
        tl.store(base + offsets, x)
    else:
        tl.store(base + offsets, x, mask=inside)


@triton.jit
def rounded(x, DT: tl.constexpr):
    """x, float32, in DT. LLVM would convert each number apart, by one of the slowest instructions there are, wherever
    the result is used in float32 again or a condition chooses between two; this converts two at a time."""
    if COMPILED and DT == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        x = x.to(DT)
    return x


@triton.jit
def log_decay(gate, chunk, end, NORMALIZER: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Binary logarithms of the decays of a tile of gates, rounded to DT, so that products with them are exact. With a
    normalizer the gates are logits: ``logsigmoid(x) / normalizer``."""
    x = gate.to(tl.float32)
    if NORMALIZER == 0:
        g = tl.maximum(x * LOG2E, _LOWEST)
    else:
        small = 1.0 + tl.exp2(-tl.abs(x) * LOG2E)
        if COMPILED:  # one instruction where tl.log2 is some twenty, but the interpreter has no device library
            logarithm = libdevice.fast_log2f(small)
        else:
            logarithm = tl.log2(small)
        g = tl.minimum(x, 0.0) * (LOG2E / NORMALIZER) - logarithm * (1.0 / NORMALIZER)
        rows = chunk * L + tl.arange(0, L)
        g = tl.where(rows[:, None] < end, g, 0.0)  # a logit of zero is a decay, and padding must not decay
    return rounded(g, DT)


@triton.jit
def gate_slope(gate, NORMALIZER: tl.constexpr):
    """Derivative of ``logsigmoid(x) / normalizer``."""
    grown = 1.0 + tl.exp2(gate.to(tl.float32) * LOG2E)
    if COMPILED:
        slope = libdevice.fast_dividef(1.0 / NORMALIZER, grown)
    else:
        slope = (1.0 / NORMALIZER) / grown
    return slope


@triton.jit
def mm_add(a, b, c, PREC: tl.constexpr):
    if COMPILED:
        c = tl.dot(a, b, c, input_precision=PREC, out_dtype=tl.float32)
    else:  # the interpreter would multiply the bits of bfloat16 numbers
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, out_dtype=tl.float32)
    return c


@triton.jit
def mm(a, b, PREC: tl.constexpr):
    return mm_add(a, b, tl.zeros((a.shape[0], b.shape[1]), tl.float32), PREC)


@triton.jit
def sums(weights, g, PREC: tl.constexpr):
    """``weights @ g`` for weights of 0, 1 and ±1/2, exact in g's dtype. On tensor cores this costs less than a scan,
    which moves data between threads."""
    return mm(weights.to(g.dtype), g, PREC)


@triton.jit
def precise_sums(weights, x, DT: tl.constexpr, PREC: tl.constexpr):
    """``weights @ x`` for x in float32, precise to 2⁻¹⁶ of the summands if DT is bfloat16."""
    if DT == tl.bfloat16:
        high = rounded(x, DT)
        low = rounded(x - high.to(tl.float32), DT)
        total = mm_add(weights.to(tl.bfloat16), low, mm(weights.to(tl.bfloat16), high, PREC), PREC)
    else:
        total = mm(weights, x, PREC)
    return total


@triton.jit
def column_sums(g, ROWS: tl.constexpr, PREC: tl.constexpr):
    """The sum of every column of g in each of ROWS rows, as a product too: a reduction would have threads wait."""
    return sums(tl.full((ROWS, g.shape[0]), 1.0, tl.float32), g, PREC)


@triton.jit
def in_order(pointer, stride, N, REVERSE: tl.constexpr):
    """Pointer and stride to walk all tokens from the left, or from the right."""
    stride = tl.cast(stride, tl.int64)
    if REVERSE:
        pointer += (N - 1) * stride
        stride = -stride
    return pointer, stride


@triton.jit
def halves(L: tl.constexpr):
    """``(L, L)``: 1/2 on and below the diagonal, -1/2 above."""
    i = tl.arange(0, L)[:, None]
    t = tl.arange(0, L)[None, :]
    return tl.where(t <= i, 0.5, -0.5)


@triton.jit
def centred(g, REVERSE: tl.constexpr, L: tl.constexpr, PREC: tl.constexpr):
    """The decay up to and including each token, from the left or, in REVERSE, from the right, less half of the
    chunk's: between two tokens the decay is exp2 of the difference of two rows."""
    half = sums(halves(L), g, PREC)
    if REVERSE:
        half = g.to(tl.float32) - half
    return half


@triton.jit
def behind(i, t, REVERSE: tl.constexpr):
    """Whether t comes after i in the order of the scan."""
    return t < i if REVERSE else t > i


@triton.jit
def level_factors(g, size, REVERSE: tl.constexpr, L: tl.constexpr, PREC: tl.constexpr):
    """Decays within blocks of ``size`` tokens, in the order of the scan: from the start up to and including i, for
    queries, whose keys lie in the block before; from after i to the end, for keys, whose queries lie behind."""
    i = tl.arange(0, L)[:, None]
    t = tl.arange(0, L)[None, :]
    same = (i ^ t) < size
    later = behind(i, t, REVERSE)
    of_query = tl.exp2(sums(tl.where(same & ~later, 1.0, 0.0), g, PREC))
    of_key = tl.exp2(sums(tl.where(same & later, 1.0, 0.0), g, PREC))
    return of_query, of_key


@triton.jit
def level_mask(i, j, size, REVERSE: tl.constexpr):
    """Pairs (query i, key j) whose decay is split at the border of two blocks of ``size``."""
    return ((i ^ j) >= size) & ((i ^ j) < 2 * size) & behind(j, i, REVERSE)

"""The states between chunks and between segments.

Both passes need the same recurrence. Walking the chunks of L tokens in one direction, with x and y ``(L, Dk)`` and
``(L, Dv)``,

    state behind the chunk = exp(sum of its gates) · state before it + Σ_i y_i ⊗ x_i exp(sum of the gates behind i)

is the state of the scan for x, y = k, v and, walking against the scan and with i's own gate, its gradient for
x, y = q, dout.
"""

import triton
import triton.language as tl

from .blocks import (
    LOG2E,
    clamped,
    column_sums,
    hidden_zero,
    in_order,
    load_state,
    load_tile,
    log_decay,
    mm_add,
    store_row,
    store_state,
    sums,
)


@triton.jit
def step(
    x, y, g, total, state,
    AGAINST: tl.constexpr, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The state behind a chunk, walking with the order of its rows (a scan's state) or AGAINST it (its gradient).
    No exponent is positive and none is a difference."""
    i = tl.arange(0, L)[:, None]
    t = tl.arange(0, L)[None, :]
    behind = t <= i if AGAINST else t > i
    weight = tl.exp2(sums(tl.where(behind, 1.0, 0.0), g, DT) * LOG2E)
    weighted = (x.to(tl.float32) * weight).to(DT)
    return mm_add(tl.trans(y.to(DT)), weighted, state * tl.exp2(total * LOG2E), PREC)


@triton.jit
def gradient_sweep(
    q_ptr, q_stride, dout_ptr, dout_stride, g_ptr, g_stride, stash_ptr, gradient, length, first_v,
    NORMALIZER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk the chunks from the last to the first; ``stash[c]`` ``(DV, BK)`` is the state's gradient behind chunk c."""
    chunks = tl.cdiv(length, L)
    for number in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - number
        q = load_tile(q_ptr, chunk, length, q_stride, 0, DK, L, BK)
        dout = load_tile(dout_ptr, chunk, length, dout_stride, first_v, DV, L, BV)
        g = clamped(log_decay(load_tile(g_ptr, chunk, length, g_stride, 0, DK, L, BK), chunk, length, NORMALIZER, L))
        here = first_v + hidden_zero(chunk)
        store_state(stash_ptr + chunk.to(tl.int64) * (DV * BK), gradient, here, DV, BV, BK)
        gradient = step(q, dout, g, column_sums(g, BV, DT), gradient, True, L, DT, PREC)
    return gradient


@triton.jit(do_not_specialize=["N", "H", "segment_length"])
def totals_kernel(
    x_ptr, x_batch, x_token, x_head,  # (B, N, H, DK)
    y_ptr, y_batch, y_token, y_head,  # (B, N, H, DV)
    g_ptr, g_batch, g_token, g_head,  # (B, N, H, DK): gates
    total_ptr,  # (B·H, segments, DV, BK)
    decay_ptr,  # (B·H, segments, BK): sums of the gates
    N, H, segment_length,
    REVERSE: tl.constexpr, AGAINST: tl.constexpr, NORMALIZER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B·H, tiles of v, segments). The states behind each segment, as if those before it were zero."""
    head = tl.program_id(0).to(tl.int64)
    first_v = tl.program_id(1) * BV
    b, h = head // H, head % H
    first = tl.program_id(2) * segment_length
    last = tl.minimum(first + segment_length, N)
    length = last - first
    x_ptr, x_stride = in_order(x_ptr + b * x_batch + h * x_head, x_token, first, last, REVERSE)
    y_ptr, y_stride = in_order(y_ptr + b * y_batch + h * y_head, y_token, first, last, REVERSE)
    g_ptr, g_stride = in_order(g_ptr + b * g_batch + h * g_head, g_token, first, last, REVERSE)
    state = tl.zeros((BV, BK), tl.float32)
    decay = tl.zeros((BV, BK), tl.float32)  # every row the same
    chunks = tl.cdiv(length, L)
    for number in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - number if AGAINST else number + 0 * chunks
        x = load_tile(x_ptr, chunk, length, x_stride, 0, DK, L, BK)
        y = load_tile(y_ptr, chunk, length, y_stride, first_v, DV, L, BV)
        g = clamped(log_decay(load_tile(g_ptr, chunk, length, g_stride, 0, DK, L, BK), chunk, length, NORMALIZER, L))
        total = column_sums(g, BV, DT)
        state = step(x, y, g, total, state, AGAINST, L, DT, PREC)
        decay += total
    row = head * tl.num_programs(2) + tl.program_id(2)
    store_state(total_ptr + row * (DV * BK), state, first_v, DV, BV, BK)
    store_row(decay_ptr + row * BK, decay, BV, BK)


@triton.jit(do_not_specialize=["segments"])
def scan_kernel(
    total_ptr,  # (B·H, segments, DV, BK)
    decay_ptr,  # (B·H, segments, BK)
    initial_ptr,  # (B·H, DV, BK), if INITIAL
    incoming_ptr,  # (B·H, segments, DV, BK): the state before each segment in the direction of the scan
    final_ptr,  # (B·H, DV, BK), if FINAL
    segments,
    LEFTWARD: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    DV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B·H, tiles of ROWS rows of the state). From the segments' totals to the states between them."""
    head = tl.program_id(0).to(tl.int64)
    first_v = tl.program_id(1) * ROWS
    k = tl.arange(0, BK)
    state = tl.zeros((ROWS, BK), tl.float32)
    if INITIAL:
        state += load_state(initial_ptr + head * (DV * BK), first_v, DV, ROWS, BK)
    for number in tl.range(0, segments, num_stages=STAGES):
        segment = segments - 1 - number if LEFTWARD else number
        row = head * segments + segment
        total = load_state(total_ptr + row * (DV * BK), first_v, DV, ROWS, BK)
        decay = tl.load(decay_ptr + row * BK + k)
        store_state(incoming_ptr + row * (DV * BK), state, first_v, DV, ROWS, BK)
        state = state * tl.exp2(decay * LOG2E)[None, :] + total
    if FINAL:
        store_state(final_ptr + head * (DV * BK), state, first_v, DV, ROWS, BK)

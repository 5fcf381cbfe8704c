"""The states before and behind every chunk.

One recurrence serves the states of a scan and their gradients. Walking over the chunks, with x and y ``(L, Dk)`` and
``(L, Dv)``,

    state behind the chunk = exp(sum of its gates) · state before it + Σ_i y_i ⊗ x_i exp(sum of the gates behind i)

is the state of the scan for x, y = k, v and, walking against the scan and with i's own gate, its gradient for
x, y = q, dout. No exponent is positive and none is a difference.
"""

import triton
import triton.language as tl

from .blocks import RANGE, column_sums, load_state, load_tile, log_decay, mm_add, rounded, store_state, strides, sums


@triton.jit(do_not_specialize=["N", "H", "chunks", "segment_chunks", "directions", *strides("x y f r")])
def walk_kernel(
    x_ptr, x_batch, x_token, x_head,  # (B, N, H, DK)
    y_ptr, y_batch, y_token, y_head,  # (B, N, H, DV)
    f_ptr, f_batch, f_token, f_head,  # (B, N, H, DK): forward gates
    r_ptr, r_batch, r_token, r_head,  # (B, N, H, DK): reverse gates
    initial_ptr,  # (directions, B·H, DV, WK), if INITIAL
    stash_ptr,  # (directions, B·H, chunks, DV, WK): the state before each chunk, ready for use (below), if STASH
    lowest_ptr,  # (B·H, chunks, directions, pieces): the lowest sum of gates over a chunk, if STASH
    last_ptr,  # (directions, B·H, segments, DV, WK): the state behind each segment, if LAST
    reach_ptr,  # (directions, B·H, chunks, WK): what of the state before the segment reaches a chunk, if CUT and STASH
    decay_ptr,  # (directions, B·H, segments, WK): binary logarithm of what of it reaches the end, if CUT
    N, H, chunks, segment_chunks, directions,
    AGAINST: tl.constexpr, INITIAL: tl.constexpr, STASH: tl.constexpr, LAST: tl.constexpr, CUT: tl.constexpr,
    NORMALIZER: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, WK: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BV2: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B·H, pieces of WK · tiles of v, segments · directions). One program walks a segment in the order of its
    scan, or AGAINST it. Strides come in units, see ``tiles.unit``.

    Where a chunk is to be computed the close way its factors are relative to the middle of its decay; the state is
    stored with the half that leads there. If the sequence is CUT, walks start from zero and ``complete_kernel`` adds
    what the state before the segment contributes. Without STASH only the states behind segments are wanted."""
    PIECES: tl.constexpr = (WK + BK - 1) // BK
    head = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1) % PIECES
    first_v = tl.program_id(1) // PIECES * (BV + BV2)
    direction = tl.program_id(2) % directions
    segment = tl.program_id(2) // directions
    b, h = head // H, head % H
    x_ptr += (b * x_batch + h * x_head) * UNIT_K
    y_ptr += (b * y_batch + h * y_head) * UNIT_V
    x_token *= UNIT_K
    y_token *= UNIT_V
    if direction == 0:
        g_ptr = f_ptr + (b * f_batch + h * f_head) * UNIT_K
        g_token = f_token * UNIT_K
    else:
        g_ptr = r_ptr + (b * r_batch + h * r_head) * UNIT_K
        g_token = r_token * UNIT_K
    row = direction * tl.num_programs(0) + head
    leftward = (direction == 1) != AGAINST
    i = tl.arange(0, L)[:, None]
    t = tl.arange(0, L)[None, :]
    weights = tl.where(leftward, t < i, t > i)
    if AGAINST:
        weights = weights | (t == i)
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)

    state = tl.zeros((BV, BK), tl.float32)
    if INITIAL:
        state += load_state(initial_ptr + row * (DV * WK), first_v, piece * BK, DV, WK, BV, BK)
    if BV2:
        state2 = tl.zeros((BV2, BK), tl.float32)
        if INITIAL:
            state2 += load_state(initial_ptr + row * (DV * WK), first_v + BV, piece * BK, DV, WK, BV2, BK)
    elapsed = tl.zeros((BK,), tl.float32)
    k = piece * BK + tl.arange(0, BK)
    for number in tl.range(0, count, num_stages=STAGES):
        chunk = first + tl.where(leftward, count - 1 - number, number)
        x = load_tile(x_ptr, chunk, N, x_token, piece * BK, DK, L, BK)
        y = load_tile(y_ptr, chunk, N, y_token, first_v, DV, L, BV).to(DT)
        g = log_decay(load_tile(g_ptr, chunk, N, g_token, piece * BK, DK, L, BK), chunk, N, NORMALIZER, L, DT)
        total = tl.max(column_sums(g, 16, PREC), axis=0)  # of equal rows: no threads of another warp to wait for
        if STASH:
            lowest = tl.min(total, axis=0)
            start = tl.where(lowest > -RANGE, 0.5, 0.0) * total
            here = row * chunks + chunk
            ready = tl.exp2(start)[None, :]
            store_state(stash_ptr + here * (DV * WK), state * ready, first_v, piece * BK, DV, WK, BV, BK)
            if BV2:
                store_state(stash_ptr + here * (DV * WK), state2 * ready, first_v + BV, piece * BK, DV, WK, BV2, BK)
            tl.store(lowest_ptr + ((head * chunks + chunk) * directions + direction) * PIECES + piece, lowest)
            if CUT:
                tl.store(reach_ptr + here * WK + k, tl.exp2(elapsed + start), mask=k < WK)
        if CUT:
            elapsed += total
        weighted = rounded(x.to(tl.float32) * tl.exp2(sums(tl.where(weights, 1.0, 0.0), g, PREC)), DT)
        decay = tl.exp2(total)[None, :]
        state = mm_add(tl.trans(y), weighted, state * decay, PREC)
        if BV2:
            y2 = load_tile(y_ptr, chunk, N, y_token, first_v + BV, DV, L, BV2).to(DT)
            state2 = mm_add(tl.trans(y2), weighted, state2 * decay, PREC)
    segment_row = row * (tl.num_programs(2) // directions) + segment
    if LAST:
        store_state(last_ptr + segment_row * (DV * WK), state, first_v, piece * BK, DV, WK, BV, BK)
        if BV2:
            store_state(last_ptr + segment_row * (DV * WK), state2, first_v + BV, piece * BK, DV, WK, BV2, BK)
    if CUT:
        tl.store(decay_ptr + segment_row * WK + k, elapsed, mask=k < WK)


@triton.jit(do_not_specialize=["segments", "heads"])
def scan_kernel(
    total_ptr,  # (directions, B·H, segments, DV, WK): states behind the segments, had they started from zero
    decay_ptr,  # (directions, B·H, segments, WK): sums of the gates
    initial_ptr,  # (directions, B·H, DV, WK), if INITIAL
    incoming_ptr,  # (directions, B·H, segments, DV, WK): the state before each segment
    final_ptr,  # (directions, B·H, DV, WK), if FINAL
    segments, heads,
    AGAINST: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    DV: tl.constexpr, WK: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (directions · B·H · WK / BK, tiles of ROWS rows). From the segments' totals to the states between them."""
    row = tl.program_id(0).to(tl.int64) // (WK // BK)
    leftward = (row >= heads) != AGAINST
    first_k = tl.program_id(0) % (WK // BK) * BK
    first_v = tl.program_id(1) * ROWS
    k = first_k + tl.arange(0, BK)
    state = tl.zeros((ROWS, BK), tl.float32)
    if INITIAL:
        state += load_state(initial_ptr + row * (DV * WK), first_v, first_k, DV, WK, ROWS, BK)
    for number in tl.range(0, segments, num_stages=STAGES):
        segment = row * segments + tl.where(leftward, segments - 1 - number, number)
        total = load_state(total_ptr + segment * (DV * WK), first_v, first_k, DV, WK, ROWS, BK)
        decay = tl.load(decay_ptr + segment * WK + k)
        store_state(incoming_ptr + segment * (DV * WK), state, first_v, first_k, DV, WK, ROWS, BK)
        state = state * tl.exp2(decay)[None, :] + total
    if FINAL:
        store_state(final_ptr + row * (DV * WK), state, first_v, first_k, DV, WK, ROWS, BK)


@triton.jit(do_not_specialize=["chunks", "segments", "segment_chunks"])
def complete_kernel(
    stash_ptr,  # (directions, B·H, chunks, DV, WK)
    reach_ptr,  # (directions, B·H, chunks, WK)
    incoming_ptr,  # (directions, B·H, segments, DV, WK)
    chunks, segments, segment_chunks,
    DV: tl.constexpr, WK: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (directions · B·H · WK / BK, tiles of ROWS rows, segments). Adds to stashed states what of the state before
    the segment reaches them."""
    row = tl.program_id(0).to(tl.int64) // (WK // BK)
    first_k = tl.program_id(0) % (WK // BK) * BK
    first_v = tl.program_id(1) * ROWS
    segment = tl.program_id(2)
    k = first_k + tl.arange(0, BK)
    incoming = load_state(incoming_ptr + (row * segments + segment) * (DV * WK), first_v, first_k, DV, WK, ROWS, BK)
    first = segment * segment_chunks
    for chunk in tl.range(first, tl.minimum(first + segment_chunks, chunks), num_stages=STAGES):
        here = row * chunks + chunk
        reach = tl.load(reach_ptr + here * WK + k)
        state = load_state(stash_ptr + here * (DV * WK), first_v, first_k, DV, WK, ROWS, BK).to(tl.float32)
        store_state(stash_ptr + here * (DV * WK), state + incoming * reach[None, :], first_v, first_k, DV, WK, ROWS, BK)

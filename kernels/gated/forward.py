"""The outputs of gated linear attention. Only ``@triton.jit`` code; README.md draws the algorithm.

A chunk's outputs are its scores times v plus its queries, decayed, times the state before it. Two ways to the scores:

- close: when no channel decays by more than exp(-RANGE) over a chunk, the decay between two tokens is split at the
  middle of the chunk's range, exp(G_i - G_j) = exp(G_i - m) · exp(m - G_j), and the scores are one matrix product.
  Every factor lies within exp(±RANGE/2).
- far: otherwise a pair of tokens is met at that level of a binary tree where it falls into two halves of a block, and
  its decay is split at the border of the halves. No exponent is positive or a difference; log2(L) matrix products.

The kernel is launched twice. CLOSE programs compute everything the close way and note the lowest sum of gates they met;
the others read the note, leave at once if that was good enough and compute everything anew the far way if not. One
program holding both ways would hold the registers of both.

The reverse scan is the forward scan over the tokens in reverse order: its program walks with negative strides.
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
    masked,
    mm,
    mm_add,
    store_state,
    store_tile,
    sums,
)

# exp(±30) times any sensible q, k stays within bfloat16 and float32, and the sums of such products do.
RANGE = tl.constexpr(60.0)


@triton.jit
def centred_factors(g, total, L: tl.constexpr, DT: tl.constexpr):
    """exp(G - total/2), exp(total/2 - G) and exp(total/2), G being the sum of the gates up to and including i."""
    i = tl.arange(0, L)[:, None]
    t = tl.arange(0, L)[None, :]
    centred = sums(tl.where(t <= i, 0.5, -0.5), g, DT) * LOG2E
    return tl.exp2(centred), tl.exp2(-centred), tl.exp2(total * (0.5 * LOG2E))


@triton.jit
def level_factors(g, size, zero, L: tl.constexpr, DT: tl.constexpr):
    """Decays within blocks of ``size`` tokens: from the start up to and including i, for queries, whose keys lie in
    the block before; and from after i to the end, for keys, whose queries lie in the block behind."""
    i = tl.arange(0, L)[:, None] + zero
    t = tl.arange(0, L)[None, :]
    same = (i ^ t) < size
    of_query = tl.exp2(sums(tl.where(same & (t <= i), 1.0, 0.0), g, DT) * LOG2E)
    of_key = tl.exp2(sums(tl.where(same & (t > i), 1.0, 0.0), g, DT) * LOG2E)
    return of_query, of_key


@triton.jit
def level_mask(i, j, size):
    """Pairs (query i, key j) whose decay is split at the border of two blocks of ``size``."""
    return ((i ^ j) >= size) & ((i ^ j) < 2 * size) & (i > j)


@triton.jit
def close_chunk(q, k, v, g, total, state, zero, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    i = tl.arange(0, L)[:, None] + zero
    j = tl.arange(0, L)[None, :]
    of_query, of_key, half = centred_factors(g, total, L, DT)
    q_g = (q.to(tl.float32) * of_query).to(DT)
    k_g = (k.to(tl.float32) * of_key).to(DT)
    state *= half
    scores = masked(j <= i, mm(q_g, tl.trans(k_g), PREC), DT)
    out = mm_add(scores, v, mm(q_g, tl.trans(state.to(DT)), PREC), PREC)
    return out, mm_add(tl.trans(v), k_g, state, PREC) * half


@triton.jit
def far_chunk(q, k, v, g, total, state, zero, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    i = tl.arange(0, L)[:, None] + zero
    j = tl.arange(0, L)[None, :]
    q, k, g = q.to(tl.float32), k.to(tl.float32), clamped(g)
    scores = tl.where(i == j, mm(q.to(DT), tl.trans(k.to(DT)), PREC), 0.0)
    size = 1
    while size < L:
        of_query, of_key = level_factors(g, size, zero, L, DT)
        part = mm((q * of_query).to(DT), tl.trans((k * of_key).to(DT)), PREC)
        scores += tl.where(level_mask(i, j, size), part, 0.0)
        size *= 2
    of_query, of_key = level_factors(g, L, zero, L, DT)
    out = mm_add(scores.to(DT), v, mm((q * of_query).to(DT), tl.trans(state.to(DT)), PREC), PREC)
    return out, mm_add(tl.trans(v), (k * of_key).to(DT), state * tl.exp2(total * LOG2E), PREC)


@triton.jit
def scan_direction(
    q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, g_ptr, g_token, out_ptr, state, lowest, scale, first, last, H,
    first_v,
    REVERSE: tl.constexpr, CLOSE: tl.constexpr, NORMALIZER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of one direction; those of the reverse are added to what the other has stored. Returns the last state
    and ``lowest``, each column the lowest sum of gates over a chunk."""
    q_ptr, q_stride = in_order(q_ptr, q_token, first, last, REVERSE)
    k_ptr, k_stride = in_order(k_ptr, k_token, first, last, REVERSE)
    v_ptr, v_stride = in_order(v_ptr, v_token, first, last, REVERSE)
    g_ptr, g_stride = in_order(g_ptr, g_token, first, last, REVERSE)
    out_ptr, out_stride = in_order(out_ptr, H * DV, first, last, REVERSE)
    length = last - first
    for number in tl.range(0, tl.cdiv(length, L), num_stages=STAGES):
        chunk = number + 0 * length
        zero = hidden_zero(chunk)
        q = load_tile(q_ptr, chunk, length, q_stride, 0, DK, L, BK)
        k = load_tile(k_ptr, chunk, length, k_stride, 0, DK, L, BK)
        v = load_tile(v_ptr, chunk, length, v_stride, first_v, DV, L, BV).to(DT)
        g = log_decay(load_tile(g_ptr, chunk, length, g_stride, 0, DK, L, BK), chunk, length, NORMALIZER, L)
        total = column_sums(g, BV, DT)
        if CLOSE:
            out, state = close_chunk(q, k, v, g, total, state, zero, L, DT, PREC)
            lowest = tl.minimum(lowest, column_sums(g, 16, DT))
        else:
            out, state = far_chunk(q, k, v, g, total, state, zero, L, DT, PREC)
        out *= scale
        if REVERSE:
            out += load_tile(out_ptr, chunk, length, out_stride, first_v, DV, L, BV).to(tl.float32)
        store_tile(out_ptr, out, chunk, length, out_stride, first_v, DV, L, BV)
    return state, lowest


@triton.jit(do_not_specialize=["scale", "N", "H", "segment_length"])
def forward_kernel(
    q_ptr, q_batch, q_token, q_head,  # (B, N, H, DK)
    k_ptr, k_batch, k_token, k_head,  # (B, N, H, DK)
    v_ptr, v_batch, v_token, v_head,  # (B, N, H, DV)
    f_ptr, f_batch, f_token, f_head,  # (B, N, H, DK): forward gates
    r_ptr, r_batch, r_token, r_head,  # (B, N, H, DK): reverse gates, if BIDIRECTIONAL
    out_ptr,  # (B, N, H, DV), contiguous
    f_state_ptr, r_state_ptr,  # (B·H, segments, DV, BK): states before each segment, if INCOMING
    f_final_ptr, r_final_ptr,  # (B·H, segments, DV, BK): states behind each segment, if FINAL
    lowest_ptr,  # (segments, tiles of v, B·H): lowest sum of gates over a chunk
    scale, N, H, segment_length,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, INCOMING: tl.constexpr, FINAL: tl.constexpr,
    NORMALIZER: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B·H, tiles of v, segments)."""
    head = tl.program_id(0).to(tl.int64)
    lowest_ptr += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + head
    if not CLOSE:  # noqa: SIM102 - the compiler needs the static condition apart
        if tl.load(lowest_ptr) > -RANGE:
            return
    first_v = tl.program_id(1) * BV
    b, h = head // H, head % H
    first = tl.program_id(2) * segment_length
    last = tl.minimum(first + segment_length, N)
    q_ptr += b * q_batch + h * q_head
    k_ptr += b * k_batch + h * k_head
    v_ptr += b * v_batch + h * v_head
    f_ptr += b * f_batch + h * f_head
    out_ptr += (b * N * H + h) * DV
    row = (head * tl.num_programs(2) + tl.program_id(2)) * (DV * BK)

    lowest = tl.zeros((16, BK), tl.float32)
    state = tl.zeros((BV, BK), tl.float32)
    if INCOMING:
        state += load_state(f_state_ptr + row, first_v, DV, BV, BK)
    state, lowest = scan_direction(
        q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, f_ptr, f_token, out_ptr, state, lowest, scale, first, last,
        H, first_v, False, CLOSE, NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
    )  # fmt: skip
    if FINAL:
        store_state(f_final_ptr + row, state, first_v, DV, BV, BK)
    if BIDIRECTIONAL:
        tl.debug_barrier()  # outputs are read by other threads than those which wrote them
        r_ptr += b * r_batch + h * r_head
        state = tl.zeros((BV, BK), tl.float32)
        if INCOMING:
            state += load_state(r_state_ptr + row, first_v, DV, BV, BK)
        state, lowest = scan_direction(
            q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, r_ptr, r_token, out_ptr, state, lowest, scale, first,
            last, H, first_v, True, CLOSE, NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
        )  # fmt: skip
        if FINAL:
            store_state(r_final_ptr + row, state, first_v, DV, BV, BK)
    if CLOSE:
        tl.store(lowest_ptr, tl.min(tl.min(lowest, axis=1), axis=0))

"""Outputs of whole sequences, or of long segments of them. Only ``@triton.jit`` code; README.md draws the algorithm.

One program owns a segment of a (batch, head) and walks its chunks twice, from the left with the forward gates and from
the right with the reverse gates, the state ``(BV, BK)`` in registers. The reverse scan is the forward scan over the
tokens in reverse order: it walks with negative strides and adds to the outputs of the first walk, which lie in L2, as
do its inputs.

The close and the far way are those of chunks.py, where they are explained; here it is whole segments that are computed
anew.
"""

import triton
import triton.language as tl

from .blocks import (
    RANGE,
    column_sums,
    hidden_zero,
    in_order,
    load_state,
    load_tile,
    log_decay,
    mm,
    mm_add,
    rounded,
    store_state,
    store_tile,
    strides,
)
from .chunks import close_factors, far_factors, far_scores


@triton.jit
def close_chunk(q, k, v, g, total, state, zero, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    i = tl.arange(0, L)[:, None] + zero
    j = tl.arange(0, L)[None, :]
    q_g, k_g, _, _ = close_factors(q, k, g, False, L, DT, PREC)
    half = tl.exp2(total * 0.5)
    state *= half
    scores = rounded(tl.where(j <= i, mm(q_g, tl.trans(k_g), PREC), 0.0), DT)
    out = mm_add(scores, v, mm(q_g, tl.trans(rounded(state, DT)), PREC), PREC)
    return out, mm_add(tl.trans(v), k_g, state, PREC) * half


@triton.jit
def far_chunk(q, k, v, g, total, state, zero, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    i = tl.arange(0, L)[:, None] + zero
    j = tl.arange(0, L)[None, :]
    scores = tl.where(i == j, mm(q.to(DT), tl.trans(k.to(DT)), PREC), 0.0)
    scores = far_scores(scores, q, k, g, False, L, DT, PREC)
    q_g, k_g, _, _ = far_factors(q, k, g, tl.zeros((q.shape[1],), tl.float32), False, L, DT, PREC)
    out = mm_add(scores.to(DT), v, mm(q_g, tl.trans(state.to(DT)), PREC), PREC)
    return out, mm_add(tl.trans(v), k_g, state * tl.exp2(total), PREC)


@triton.jit
def scan_direction(
    q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, g_ptr, g_token, out_ptr, state, lowest, scale, N, H,
    REVERSE: tl.constexpr, CLOSE: tl.constexpr, NORMALIZER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of one direction; those of the reverse are added to what the other has stored. Returns the last state
    and ``lowest``, each column the lowest sum of gates over a chunk."""
    q_ptr, q_stride = in_order(q_ptr, q_token, N, REVERSE)
    k_ptr, k_stride = in_order(k_ptr, k_token, N, REVERSE)
    v_ptr, v_stride = in_order(v_ptr, v_token, N, REVERSE)
    g_ptr, g_stride = in_order(g_ptr, g_token, N, REVERSE)
    out_ptr, out_stride = in_order(out_ptr, H * DV, N, REVERSE)
    for number in tl.range(0, tl.cdiv(N, L), num_stages=STAGES):
        chunk = number + 0 * N
        zero = hidden_zero(chunk)
        q = load_tile(q_ptr, chunk, N, q_stride, 0, DK, L, BK)
        k = load_tile(k_ptr, chunk, N, k_stride, 0, DK, L, BK)
        v = load_tile(v_ptr, chunk, N, v_stride, 0, DV, L, BV).to(DT)
        g = log_decay(load_tile(g_ptr, chunk, N, g_stride, 0, DK, L, BK), chunk, N, NORMALIZER, L, DT)
        total = column_sums(g, BV, PREC)
        if CLOSE:
            out, state = close_chunk(q, k, v, g, total, state, zero, L, DT, PREC)
            lowest = tl.minimum(lowest, column_sums(g, 16, PREC))
        else:
            out, state = far_chunk(q, k, v, g, total, state, zero, L, DT, PREC)
        out *= scale
        if REVERSE:
            out += load_tile(out_ptr, chunk, N, out_stride, 0, DV, L, BV).to(tl.float32)
        store_tile(out_ptr, out, chunk, N, out_stride, 0, DV, L, BV)
    return state, lowest


@triton.jit(do_not_specialize=["scale", "N", "H", "segments", "segment_tokens", *strides("q k v f r")])
def fused_kernel(
    q_ptr, q_batch, q_token, q_head,  # (B, N, H, DK)
    k_ptr, k_batch, k_token, k_head,  # (B, N, H, DK)
    v_ptr, v_batch, v_token, v_head,  # (B, N, H, DV)
    f_ptr, f_batch, f_token, f_head,  # (B, N, H, DK): forward gates
    r_ptr, r_batch, r_token, r_head,  # (B, N, H, DK): reverse gates, if BIDIRECTIONAL
    out_ptr,  # (B, N, H, DV), contiguous
    initial_ptr,  # (directions, B·H, segments, DV, BK), if INITIAL
    final_ptr,  # (directions, B·H, segments, DV, BK), if FINAL
    lowest_ptr,  # (B·H, segments): lowest sum of gates over a chunk
    scale, N, H, segments, segment_tokens,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    NORMALIZER: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B·H · segments). Strides come in units, see ``tiles.unit``."""
    place = tl.program_id(0).to(tl.int64)
    lowest_ptr += place
    if not CLOSE:  # noqa: SIM102 - the compiler needs the static condition apart
        if tl.load(lowest_ptr) > -RANGE:
            return
    head, first = place // segments, place % segments * segment_tokens
    b, h = head // H, head % H
    q_ptr += (b * q_batch + h * q_head + first * q_token) * UNIT_K
    k_ptr += (b * k_batch + h * k_head + first * k_token) * UNIT_K
    v_ptr += (b * v_batch + h * v_head + first * v_token) * UNIT_V
    f_ptr += (b * f_batch + h * f_head + first * f_token) * UNIT_K
    out_ptr += ((b * N + first) * H + h) * DV
    q_token *= UNIT_K
    k_token *= UNIT_K
    v_token *= UNIT_V
    tokens = tl.minimum(segment_tokens, N - first).to(tl.int32)

    lowest = tl.zeros((16, BK), tl.float32)
    state = tl.zeros((BV, BK), tl.float32)
    if INITIAL:
        state += load_state(initial_ptr + place * (DV * BK), 0, 0, DV, BK, BV, BK)
    state, lowest = scan_direction(
        q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, f_ptr, f_token * UNIT_K, out_ptr, state, lowest, scale, tokens,
        H, False, CLOSE, NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
    )  # fmt: skip
    if FINAL:
        store_state(final_ptr + place * (DV * BK), state, 0, 0, DV, BK, BV, BK)
    if BIDIRECTIONAL:
        tl.debug_barrier()  # outputs are read by other threads than those which wrote them
        r_ptr += (b * r_batch + h * r_head + first * r_token) * UNIT_K
        place += tl.num_programs(0)
        state = tl.zeros((BV, BK), tl.float32)
        if INITIAL:
            state += load_state(initial_ptr + place * (DV * BK), 0, 0, DV, BK, BV, BK)
        state, lowest = scan_direction(
            q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, r_ptr, r_token * UNIT_K, out_ptr, state, lowest, scale,
            tokens, H, True, CLOSE, NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
        )  # fmt: skip
        if FINAL:
            store_state(final_ptr + place * (DV * BK), state, 0, 0, DV, BK, BV, BK)
    if CLOSE:
        tl.store(lowest_ptr, tl.min(tl.min(lowest, axis=1), axis=0))

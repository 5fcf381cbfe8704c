"""The gradients of gated linear attention. Only ``@triton.jit`` code; README.md derives them.

With P = dout vᵀ, D the decays between tokens, S the state before a chunk and dS the gradient of the one behind it,

    dq_i = Σ_j P_ij D_ij k_j + decay · S dout_i        dk_j = Σ_i P_ij D_ij q_i + decay · dS v_j
    dv   = scoresᵀ dout + decayed keys · dS

A gate t takes part in the pairs key < t ≤ query; its gradient is the sum over the tokens ≥ t of q ⊙ dq - k ⊙ dk, in
which pairs with both tokens ≥ t cancel. It is summed inside the chunk only: the pairs with the query behind the chunk
add up to Σ_v S ⊙ dS there, so that rounding does not accumulate over the sequence.
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
    opaque,
    store_state,
    store_tile,
    sums,
    sums_add,
)
from .forward import RANGE, centred_factors, level_factors, level_mask
from .states import gradient_sweep


@triton.jit
def close_gradients(
    q, k, v, dout, g, total, state, d_state, zero, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr
):
    """dq, dk, dv, the gates' part before its sum over tokens, the pairs that reach beyond the chunk, and the state
    behind it. ``state`` is the one before the chunk, ``d_state`` the gradient of the one behind it."""
    i = tl.arange(0, L)[:, None] + zero
    j = tl.arange(0, L)[None, :]
    of_query, of_key, half = centred_factors(g, total, L, DT)
    q_g = (q.to(tl.float32) * of_query).to(DT)
    k_g = (k.to(tl.float32) * of_key).to(DT)
    state *= half
    d_state *= half
    d_state_low = d_state.to(DT)
    scores_t = masked(i <= j, mm(k_g, tl.trans(q_g), PREC), DT)
    dv = mm_add(scores_t, dout, mm(k_g, tl.trans(d_state_low), PREC), PREC)
    p = masked(j <= i, mm(dout, tl.trans(v), PREC), DT)
    dq = opaque(mm_add(dout, state.to(DT), mm(p, k_g, PREC), PREC) * of_query)
    p_t = masked(i <= j, mm(v, tl.trans(dout), PREC), DT)
    dk = opaque(mm_add(v, d_state_low, mm(p_t, q_g, PREC), PREC) * of_key)
    dg = opaque(q).to(tl.float32) * dq - opaque(k).to(tl.float32) * dk
    state = mm_add(tl.trans(v), k_g, state, PREC)
    return dq, dk, dv, dg, state * d_state, state * half


@triton.jit
def far_gradients(q, k, v, dout, g, total, state, d_state, zero, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """As ``close_gradients`` for any gates. Here the gates' part is made of the operands of the matrix products,
    rounded as those, so that what should cancel cancels: the gradient of a gate that lets nothing through is zero."""
    i = tl.arange(0, L)[:, None] + zero
    j = tl.arange(0, L)[None, :]
    g = clamped(g)
    q, k = q.to(tl.float32), k.to(tl.float32)
    of_query, of_key = level_factors(g, L, zero, L, DT)
    q_g = (q * of_query).to(DT)
    k_g = (k * of_key).to(DT)
    d_state_low = d_state.to(DT)
    dq = mm(dout, state.to(DT), PREC)
    dk = mm(v, d_state_low, PREC)
    dv = mm(k_g, tl.trans(d_state_low), PREC)
    dg = q_g.to(tl.float32) * dq - k_g.to(tl.float32) * dk
    dq *= of_query
    dk *= of_key
    state = mm_add(tl.trans(v), k_g, state * tl.exp2(total * LOG2E), PREC)
    beyond = state * d_state_low.to(tl.float32)
    p = mm(dout, tl.trans(v), PREC)
    p_t = mm(v, tl.trans(dout), PREC)
    scores_t = tl.where(i == j, mm(k.to(DT), tl.trans(q.to(DT)), PREC), 0.0)
    dq += mm(masked(i == j, p, DT), k.to(DT), PREC)
    dk += mm(masked(i == j, p_t, DT), q.to(DT), PREC)
    size = 1
    while size < L:
        of_query, of_key = level_factors(g, size, zero, L, DT)
        q_g = (q * of_query).to(DT)
        k_g = (k * of_key).to(DT)
        met = level_mask(i, j, size)
        met_t = level_mask(j, i, size)
        scores_t += tl.where(met_t, mm(k_g, tl.trans(q_g), PREC), 0.0)
        dq_g = mm(masked(met, p, DT), k_g, PREC)
        dk_g = mm(masked(met_t, p_t, DT), q_g, PREC)
        dg += q_g.to(tl.float32) * dq_g - k_g.to(tl.float32) * dk_g
        dq += dq_g * of_query
        dk += dk_g * of_key
        size *= 2
    return dq, dk, mm_add(scores_t.to(DT), dout, dv, PREC), dg, beyond, state


@triton.jit
def store_sum(pointer, x, chunk, length, stride, first, ADD: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
              BD: tl.constexpr):  # fmt: skip
    if ADD:
        x += load_tile(pointer, chunk, length, stride, first, D, L, BD).to(tl.float32)
    store_tile(pointer, x, chunk, length, stride, first, D, L, BD)


@triton.jit
def gradients_of_direction(
    q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, g_ptr, g_token, dout_ptr, dout_token,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, stash_ptr, state, gradient, lowest, scale, first, last, H,
    first_v, REVERSE: tl.constexpr, CLOSE: tl.constexpr, NORMALIZER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One direction's gradients; the reverse's are added to those of q, k and v that the other has stored. Returns the
    gradient of the state before the first token and ``lowest``, as in ``forward``."""
    q_ptr, q_stride = in_order(q_ptr, q_token, first, last, REVERSE)
    k_ptr, k_stride = in_order(k_ptr, k_token, first, last, REVERSE)
    v_ptr, v_stride = in_order(v_ptr, v_token, first, last, REVERSE)
    g_ptr, g_stride = in_order(g_ptr, g_token, first, last, REVERSE)
    dout_ptr, dout_stride = in_order(dout_ptr, dout_token, first, last, REVERSE)
    dq_ptr, narrow = in_order(dq_ptr, H * DK, first, last, REVERSE)
    dk_ptr, narrow = in_order(dk_ptr, H * DK, first, last, REVERSE)
    dg_ptr, narrow = in_order(dg_ptr, H * DK, first, last, REVERSE)
    dv_ptr, wide = in_order(dv_ptr, H * DV, first, last, REVERSE)
    length = last - first
    gradient = gradient_sweep(
        q_ptr, q_stride, dout_ptr, dout_stride, g_ptr, g_stride, stash_ptr, gradient, length, first_v,
        NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
    )  # fmt: skip
    tl.debug_barrier()  # the stash, and the other direction's gradients, are read by other threads than wrote them
    i = tl.arange(0, L)[:, None]
    t = tl.arange(0, L)[None, :]
    for number in tl.range(0, tl.cdiv(length, L), num_stages=STAGES):
        chunk = number + 0 * length
        zero = hidden_zero(chunk)
        q = load_tile(q_ptr, chunk, length, q_stride, 0, DK, L, BK)
        k = load_tile(k_ptr, chunk, length, k_stride, 0, DK, L, BK)
        v = load_tile(v_ptr, chunk, length, v_stride, first_v, DV, L, BV).to(DT)
        dout = load_tile(dout_ptr, chunk, length, dout_stride, first_v, DV, L, BV).to(DT)
        gate = load_tile(g_ptr, chunk, length, g_stride, 0, DK, L, BK)
        g = log_decay(gate, chunk, length, NORMALIZER, L)
        here = stash_ptr + chunk.to(tl.int64) * (DV * BK)
        d_state = load_state(here, first_v + zero, DV, BV, BK).to(tl.float32)
        total = column_sums(g, BV, DT)
        if CLOSE:
            dq, dk, dv, dg, beyond, state = close_gradients(q, k, v, dout, g, total, state, d_state, zero, L, DT, PREC)
            lowest = tl.minimum(lowest, column_sums(g, 16, DT))
        else:
            dq, dk, dv, dg, beyond, state = far_gradients(q, k, v, dout, g, total, state, d_state, zero, L, DT, PREC)
        store_sum(dq_ptr, dq * scale, chunk, length, narrow, 0, REVERSE, DK, L, BK)
        store_sum(dk_ptr, dk * scale, chunk, length, narrow, 0, REVERSE, DK, L, BK)
        store_sum(dv_ptr, dv * scale, chunk, length, wide, first_v, REVERSE, DV, L, BV)
        # Sum over the tokens from i on, with the half-weights at hand in the pattern 1/2 ∓ 1/2.
        summed = sums_add(tl.full((L, L), 1.0, tl.float32), 0.5 * dg, sums(tl.where(t >= i, 0.5, -0.5), dg, DT), DT)
        summed = sums_add(tl.full((L, BV), 1.0, tl.float32), beyond, summed, DT) * scale
        if NORMALIZER != 0:
            summed *= tl.sigmoid(-gate.to(tl.float32)) * (1.0 / NORMALIZER)
        store_tile(dg_ptr, summed, chunk, length, narrow, 0, DK, L, BK)
    return gradient, lowest


@triton.jit(do_not_specialize=["scale", "N", "H", "segment_length", "segment_chunks", "tile_stride"])
def backward_kernel(
    q_ptr, q_batch, q_token, q_head,  # (B, N, H, DK)
    k_ptr, k_batch, k_token, k_head,  # (B, N, H, DK)
    v_ptr, v_batch, v_token, v_head,  # (B, N, H, DV)
    f_ptr, f_batch, f_token, f_head,  # (B, N, H, DK): forward gates
    r_ptr, r_batch, r_token, r_head,  # (B, N, H, DK): reverse gates, if BIDIRECTIONAL
    dout_ptr, dout_batch, dout_token, dout_head,  # (B, N, H, DV)
    dq_ptr, dk_ptr, df_ptr, dr_ptr,  # (tiles of v, B, N, H, DK), contiguous: to be summed over the tiles
    dv_ptr,  # (B, N, H, DV), contiguous
    f_state_ptr, r_state_ptr,  # (B·H, segments, DV, BK): states before each segment, if STATES
    f_grad_ptr, r_grad_ptr,  # (B·H, segments, DV, BK): gradients of those behind it, over scale, if GRADIENTS
    df_initial_ptr, dr_initial_ptr,  # (B·H, segments, DV, BK): of those before it, over scale, if INITIAL_GRADIENTS
    stash_ptr,  # (B·H, segments, chunks of a segment, DV, BK)
    lowest_ptr,  # (segments, tiles of v, B·H): lowest sum of gates over a chunk
    scale, N, H, segment_length, segment_chunks, tile_stride,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, STATES: tl.constexpr, GRADIENTS: tl.constexpr,
    INITIAL_GRADIENTS: tl.constexpr,
    NORMALIZER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B·H, tiles of v, segments). Everything is computed for a scale of 1 and scaled when stored."""
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
    dout_ptr += b * dout_batch + h * dout_head
    narrow = tl.program_id(1).to(tl.int64) * tile_stride + (b * N * H + h) * DK
    dv_ptr += (b * N * H + h) * DV
    row = (head * tl.num_programs(2) + tl.program_id(2)) * (DV * BK)
    stash_ptr += row * segment_chunks

    lowest = tl.zeros((16, BK), tl.float32)
    state = tl.zeros((BV, BK), tl.float32)
    gradient = tl.zeros((BV, BK), tl.float32)
    if STATES:
        state += load_state(f_state_ptr + row, first_v, DV, BV, BK)
    if GRADIENTS:
        gradient += load_state(f_grad_ptr + row, first_v, DV, BV, BK)
    gradient, lowest = gradients_of_direction(
        q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, f_ptr, f_token, dout_ptr, dout_token,
        dq_ptr + narrow, dk_ptr + narrow, dv_ptr, df_ptr + narrow, stash_ptr, state, gradient, lowest, scale, first,
        last, H, first_v, False, CLOSE, NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
    )  # fmt: skip
    if INITIAL_GRADIENTS:
        store_state(df_initial_ptr + row, gradient, first_v, DV, BV, BK)
    if BIDIRECTIONAL:
        tl.debug_barrier()  # before the stash is written anew
        r_ptr += b * r_batch + h * r_head
        state = tl.zeros((BV, BK), tl.float32)
        gradient = tl.zeros((BV, BK), tl.float32)
        if STATES:
            state += load_state(r_state_ptr + row, first_v, DV, BV, BK)
        if GRADIENTS:
            gradient += load_state(r_grad_ptr + row, first_v, DV, BV, BK)
        gradient, lowest = gradients_of_direction(
            q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, r_ptr, r_token, dout_ptr, dout_token,
            dq_ptr + narrow, dk_ptr + narrow, dv_ptr, dr_ptr + narrow, stash_ptr, state, gradient, lowest, scale, first,
            last, H, first_v, True, CLOSE, NORMALIZER, DK, DV, L, BK, BV, DT, PREC, STAGES,
        )  # fmt: skip
        if INITIAL_GRADIENTS:
            store_state(dr_initial_ptr + row, gradient, first_v, DV, BV, BK)
    if CLOSE:
        tl.store(lowest_ptr, tl.min(tl.min(lowest, axis=1), axis=0))

"""The gradients of gated linear attention. Only ``@triton.jit`` code; README.md derives them.

With P = dout vᵀ, D the decays between tokens, S the state before a chunk and dS the gradient of the one behind it,

    dq_i = Σ_j P_ij D_ij k_j + decay · S dout_i        dk_j = Σ_i P_ij D_ij q_i + decay · dS v_j
    dv   = scoresᵀ dout + decayed keys · dS

A gate t takes part in the pairs key < t ≤ query. Within the chunk these are the sum over the tokens from t on of
q ⊙ dq - k ⊙ dk, in which pairs with both tokens there cancel; keys before t meet queries behind the chunk in k ⊙ dS v;
and pairs around the chunk add up to Σ_v S ⊙ dS. All products are formed of operands as rounded for the matrix products,
so that what should cancel does.
"""

import triton
import triton.language as tl

from .blocks import (
    COMPILED,
    column_sums,
    gate_slope,
    halves,
    level_factors,
    level_mask,
    load_state,
    load_tile,
    log_decay,
    mm,
    mm_add,
    precise_sums,
    rounded,
    store_tile,
    strides,
)
from .chunks import close_factors, far_factors, from_middle, is_far, place


@triton.jit
def summed(u, once, REVERSE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Gradients of the log decays: u summed over the tokens from each on, in the order of the scan, plus ``once``,
    which has half of the sum of u already."""
    half = precise_sums(halves(L), u, DT, PREC)
    if REVERSE:
        result = half + once
    else:
        result = (u - half) + once
    return result


@triton.jit
def overlap(state, d_state, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Σ_v S ⊙ dS as a row to be broadcast. Of bfloat16 it comes as a matrix product, in L equal rows: the reduction of
    two states in float32 would fill the registers and have threads wait."""
    if DT == tl.float32:
        result = tl.sum(state * d_state, axis=0)[None, :]
    elif COMPILED:
        result = column_sums(state * d_state, L, PREC)
    else:  # the interpreter would multiply the bits of bfloat16 numbers
        result = column_sums((state.to(tl.float32) * d_state.to(tl.float32)).to(DT), L, PREC)
    return result


@triton.jit
def far_gradients(q, k, g, p, p_t, REVERSE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Of pairs of two different tokens of the chunk: the gates' part before its sum over tokens, dq, dk and the
    transposed scores."""
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]
    q, k = q.to(tl.float32), k.to(tl.float32)
    u = tl.zeros(q.shape, tl.float32)
    dq = tl.zeros(q.shape, tl.float32)
    dk = tl.zeros(q.shape, tl.float32)
    scores_t = tl.zeros((L, L), tl.float32)
    size = 1
    while size < L:
        of_query, of_key = level_factors(g, size, REVERSE, L, PREC)
        q_g = rounded(q * of_query, DT)
        k_g = rounded(k * of_key, DT)
        met = level_mask(i, j, size, REVERSE)
        met_t = level_mask(j, i, size, REVERSE)
        scores_t += tl.where(met_t, mm(k_g, tl.trans(q_g), PREC), 0.0)
        dq_g = mm(tl.where(met, p, 0.0).to(DT), k_g, PREC)
        dk_g = mm(tl.where(met_t, p_t, 0.0).to(DT), q_g, PREC)
        u += q_g.to(tl.float32) * dq_g - k_g.to(tl.float32) * dk_g
        dq += dq_g * of_query
        dk += dk_g * of_key
        size *= 2
    return u, dq, dk, scores_t


@triton.jit
def gradients_of_chunk(
    program, q_ptr, q_batch, q_token, q_head, k_ptr, k_batch, k_token, k_head, v_ptr, v_batch, v_token, v_head,
    f_ptr, f_batch, f_token, f_head, r_ptr, r_batch, r_token, r_head, dout_ptr, dout_batch, dout_token, dout_head,
    dq_ptr, dk_ptr, df_ptr, dr_ptr, narrow_token, dv_ptr, wide_token, stash_ptr, gradient_ptr, lowest_ptr,
    scale, N, H, heads, chunks,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, NOTED: tl.constexpr, NORMALIZER: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BV2: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    WK: tl.constexpr = KP * BK
    DIRECTIONS: tl.constexpr = 2 if BIDIRECTIONAL else 1
    head, chunk, tile = place(program, heads, chunks)
    first_v = tile * (BV + BV2)
    b, h = head // H, head % H
    q_ptr += (b * q_batch + h * q_head) * UNIT_K
    k_ptr += (b * k_batch + h * k_head) * UNIT_K
    v_ptr += (b * v_batch + h * v_head) * UNIT_V
    f_ptr += (b * f_batch + h * f_head) * UNIT_K
    r_ptr += (b * r_batch + h * r_head) * UNIT_K
    dout_ptr += (b * dout_batch + h * dout_head) * UNIT_V
    narrow_token *= UNIT_K
    wide_token *= UNIT_V
    narrow = (tile * (heads // H) + b) * N * narrow_token + h * DK
    dv_ptr += b * N * wide_token + h * DV
    NOTES: tl.constexpr = (KP + NOTED - 1) // NOTED
    lowest_ptr += (head * chunks + chunk) * (DIRECTIONS * NOTES)
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]

    v = load_tile(v_ptr, chunk, N, v_token * UNIT_V, first_v, DV, L, BV).to(DT)
    dout = load_tile(dout_ptr, chunk, N, dout_token * UNIT_V, first_v, DV, L, BV).to(DT)
    p = mm(dout, tl.trans(v), PREC)
    p_t = mm(v, tl.trans(dout), PREC)
    dv = tl.zeros((L, BV), tl.float32)
    if BV2:
        v2 = load_tile(v_ptr, chunk, N, v_token * UNIT_V, first_v + BV, DV, L, BV2).to(DT)
        dout2 = load_tile(dout_ptr, chunk, N, dout_token * UNIT_V, first_v + BV, DV, L, BV2).to(DT)
        p = mm_add(dout2, tl.trans(v2), p, PREC)
        p_t = mm_add(v2, tl.trans(dout2), p_t, PREC)
        dv2 = tl.zeros((L, BV2), tl.float32)
    if CLOSE:
        below, below_t = rounded(tl.where(j <= i, p, 0.0), DT), rounded(tl.where(i <= j, p_t, 0.0), DT)
        above, above_t = rounded(tl.where(j >= i, p, 0.0), DT), rounded(tl.where(i >= j, p_t, 0.0), DT)
    scores_t = tl.zeros((L, L), tl.float32)
    for piece in tl.static_range(KP):
        q = load_tile(q_ptr, chunk, N, q_token * UNIT_K, piece * BK, DK, L, BK)
        k = load_tile(k_ptr, chunk, N, k_token * UNIT_K, piece * BK, DK, L, BK)
        dq = tl.zeros((L, BK), tl.float32)
        dk = tl.zeros((L, BK), tl.float32)
        if not CLOSE:
            scores_t += DIRECTIONS * tl.where(i == j, mm(k.to(DT), tl.trans(q.to(DT)), PREC), 0.0)
            dq = DIRECTIONS * mm(tl.where(i == j, p, 0.0).to(DT), k.to(DT), PREC)
            dk = DIRECTIONS * mm(tl.where(i == j, p_t, 0.0).to(DT), q.to(DT), PREC)
        for direction in tl.static_range(DIRECTIONS):
            if direction == 1:
                gate = load_tile(r_ptr, chunk, N, r_token * UNIT_K, piece * BK, DK, L, BK)
            else:
                gate = load_tile(f_ptr, chunk, N, f_token * UNIT_K, piece * BK, DK, L, BK)
            g = log_decay(gate, chunk, N, NORMALIZER, L, DT)
            here = ((direction * heads + head) * chunks + chunk) * (DV * WK)
            state = load_state(stash_ptr + here, first_v, piece * BK, DV, WK, BV, BK)
            d_state = load_state(gradient_ptr + here, first_v, piece * BK, DV, WK, BV, BK)
            around = overlap(state, d_state, L, DT, PREC)
            from_state = mm(dout, state, PREC)
            from_gradient = mm(v, d_state, PREC)
            if BV2:
                state2 = load_state(stash_ptr + here, first_v + BV, piece * BK, DV, WK, BV2, BK)
                d_state2 = load_state(gradient_ptr + here, first_v + BV, piece * BK, DV, WK, BV2, BK)
                around += overlap(state2, d_state2, L, DT, PREC)
                from_state = mm_add(dout2, state2, from_state, PREC)
                from_gradient = mm_add(v2, d_state2, from_gradient, PREC)
            if CLOSE:
                q_g, k_g, of_query, of_key = close_factors(q, k, g, direction == 1, L, DT, PREC)
                pairs_t = mm(k_g, tl.trans(q_g), PREC)
                if direction == 0:
                    scores_t += tl.where(i <= j, pairs_t, 0.0)
                    dq_g = mm_add(below, k_g, from_state, PREC)
                    dk_g = mm_add(below_t, q_g, from_gradient, PREC)
                else:
                    scores_t += tl.where(i >= j, pairs_t, 0.0)
                    dq_g = mm_add(above, k_g, from_state, PREC)
                    dk_g = mm_add(above_t, q_g, from_gradient, PREC)
            else:
                u, dq_far, dk_far, scores_far = far_gradients(q, k, g, p, p_t, direction == 1, L, DT, PREC)
                scores_t += scores_far
                dq += dq_far
                dk += dk_far
                total = tl.sum(g.to(tl.float32), axis=0)
                start = from_middle(total, tl.load(lowest_ptr + direction * NOTES + piece // NOTED))
                around *= tl.exp2(total - 2.0 * start)[None, :]
                q_g, k_g, of_query, of_key = far_factors(q, k, g, start, direction == 1, L, DT, PREC)
                dq_g, dk_g = from_state, from_gradient
            dq += dq_g * of_query
            dk += dk_g * of_key
            dv = mm_add(k_g, tl.trans(d_state), dv, PREC)
            if BV2:
                dv2 = mm_add(k_g, tl.trans(d_state2), dv2, PREC)
            own = q_g.to(tl.float32) * dq_g - k_g.to(tl.float32) * dk_g
            if not CLOSE:
                own += u
            once = around + tl.sum(k_g.to(tl.float32) * from_gradient + 0.5 * own, axis=0)[None, :]
            dg = summed(own, once, direction == 1, L, DT, PREC) * scale
            if NORMALIZER != 0:
                dg *= gate_slope(gate, NORMALIZER)
            if direction == 1:
                store_tile(dr_ptr + narrow, dg, chunk, N, narrow_token, piece * BK, DK, L, BK)
            else:
                store_tile(df_ptr + narrow, dg, chunk, N, narrow_token, piece * BK, DK, L, BK)
        store_tile(dq_ptr + narrow, dq * scale, chunk, N, narrow_token, piece * BK, DK, L, BK)
        store_tile(dk_ptr + narrow, dk * scale, chunk, N, narrow_token, piece * BK, DK, L, BK)
    scores_t = rounded(scores_t, DT)
    store_tile(dv_ptr, mm_add(scores_t, dout, dv, PREC) * scale, chunk, N, wide_token, first_v, DV, L, BV)
    if BV2:
        dv2 = mm_add(scores_t, dout2, dv2, PREC)
        store_tile(dv_ptr, dv2 * scale, chunk, N, wide_token, first_v + BV, DV, L, BV2)


_SCALARS = ["scale", "N", "H", "heads", "chunks", "programs", "narrow_token", "wide_token"]


@triton.jit(do_not_specialize=[*_SCALARS, *strides("q k v f r dout")])
def gradient_kernel(
    q_ptr, q_batch, q_token, q_head,  # (B, N, H, DK)
    k_ptr, k_batch, k_token, k_head,  # (B, N, H, DK)
    v_ptr, v_batch, v_token, v_head,  # (B, N, H, DV)
    f_ptr, f_batch, f_token, f_head,  # (B, N, H, DK): forward gates
    r_ptr, r_batch, r_token, r_head,  # (B, N, H, DK): reverse gates, if BIDIRECTIONAL
    dout_ptr, dout_batch, dout_token, dout_head,  # (B, N, H, DV)
    dq_ptr, dk_ptr, df_ptr, dr_ptr,  # (tiles of v, B, N, H, DK): to be summed over the tiles
    narrow_token,  # of these four; heads lie side by side, batch and tiles follow without gaps
    dv_ptr, wide_token,  # (B, N, H, DV), likewise
    stash_ptr, gradient_ptr,  # states, and their gradients over scale, as walk_kernel has left them
    lowest_ptr,
    scale, N, H, heads, chunks, programs,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, NOTED: tl.constexpr, NORMALIZER: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BV2: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, FAR_BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs as those of ``output_kernel``. Everything is computed for a scale of 1 and scaled when stored."""
    NOTES: tl.constexpr = (KP + NOTED - 1) // NOTED * (2 if BIDIRECTIONAL else 1)
    if CLOSE:
        gradients_of_chunk(
            tl.program_id(0), q_ptr, q_batch, q_token, q_head, k_ptr, k_batch, k_token, k_head, v_ptr, v_batch,
            v_token, v_head, f_ptr, f_batch, f_token, f_head, r_ptr, r_batch, r_token, r_head, dout_ptr, dout_batch,
            dout_token, dout_head, dq_ptr, dk_ptr, df_ptr, dr_ptr, narrow_token, dv_ptr, wide_token, stash_ptr,
            gradient_ptr, lowest_ptr, scale, N, H, heads, chunks, CLOSE, BIDIRECTIONAL, NOTED, NORMALIZER, UNIT_K,
            UNIT_V, DK, DV, KP, L, BK, BV, BV2, DT, PREC,
        )  # fmt: skip
    else:
        first = tl.program_id(0) * FAR_BLOCK
        for program in range(first, tl.minimum(first + FAR_BLOCK, programs)):
            if is_far(lowest_ptr, program, heads, chunks, NOTES):
                gradients_of_chunk(
                    program, q_ptr, q_batch, q_token, q_head, k_ptr, k_batch, k_token, k_head, v_ptr, v_batch,
                    v_token, v_head, f_ptr, f_batch, f_token, f_head, r_ptr, r_batch, r_token, r_head, dout_ptr,
                    dout_batch, dout_token, dout_head, dq_ptr, dk_ptr, df_ptr, dr_ptr, narrow_token, dv_ptr,
                    wide_token, stash_ptr, gradient_ptr, lowest_ptr, scale, N, H, heads, chunks, CLOSE, BIDIRECTIONAL,
                    NOTED, NORMALIZER, UNIT_K, UNIT_V, DK, DV, KP, L, BK, BV, BV2, DT, PREC,
                )  # fmt: skip

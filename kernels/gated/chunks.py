"""Outputs of one chunk a program, from stashed states. Only ``@triton.jit`` code; README.md draws the algorithm.

A chunk's outputs are one matrix of scores, those of the forward scan below and of the reverse scan above its diagonal,
times v, plus the queries, decayed, times the states before the chunk. Two ways to the scores:

- close: when no channel decays by more than 2^-RANGE over the chunk, the decay between two tokens is split at the
  middle of the chunk's range, 2^(G_i - G_j) = 2^(G_i - m) · 2^(m - G_j), and the scores are one matrix product.
- far: otherwise a pair of tokens is met at that level of a binary tree where it falls into two halves of a block, and
  its decay is split at the border of the halves. No exponent is positive or a difference; log2(L) matrix products.

A program computes a chunk the close way. A second launch looks at what ``walk_kernel`` noted of every chunk and
computes anew, the far way, those that need it; one program holding both ways would hold the registers of both.
"""

import triton
import triton.language as tl

from .blocks import (
    RANGE,
    centred,
    level_factors,
    level_mask,
    load_state,
    load_tile,
    log_decay,
    mm,
    mm_add,
    rounded,
    store_tile,
    strides,
)


@triton.jit
def place(program, heads, chunks):
    """The (batch, head), chunk and tile of values of a program; heads, neighbours in memory, run side by side."""
    return (program % heads).to(tl.int64), program // heads % chunks, program // heads // chunks


@triton.jit
def is_far(lowest_ptr, program, heads, chunks, NOTES: tl.constexpr):
    """Whether one of the NOTES on a program's chunk is beyond RANGE."""
    head, chunk, _ = place(program, heads, chunks)
    i = tl.arange(0, triton.next_power_of_2(NOTES))
    notes = tl.load(lowest_ptr + (head * chunks + chunk) * NOTES + i, mask=i < NOTES, other=0.0)
    return tl.min(notes, axis=0) <= -RANGE


@triton.jit
def from_middle(total, lowest):
    """Of the decay over a chunk, what a stashed state has been given already: half of it if its piece is close."""
    return tl.where(lowest > -RANGE, 0.5, 0.0) * total


@triton.jit
def close_factors(q, k, g, REVERSE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Queries and keys times their decays to and from the middle, and these decays."""
    middle = centred(g, REVERSE, L, PREC)
    of_query, of_key = tl.exp2(middle), tl.exp2(-middle)
    return rounded(q.to(tl.float32) * of_query, DT), rounded(k.to(tl.float32) * of_key, DT), of_query, of_key


@triton.jit
def far_scores(scores, q, k, g, REVERSE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Add the scores of one direction for pairs of two tokens, all levels of the tree, in float32."""
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]
    q, k = q.to(tl.float32), k.to(tl.float32)
    size = 1
    while size < L:
        of_query, of_key = level_factors(g, size, REVERSE, L, PREC)
        part = mm((q * of_query).to(DT), tl.trans((k * of_key).to(DT)), PREC)
        scores += tl.where(level_mask(i, j, size, REVERSE), part, 0.0)
        size *= 2
    return scores


@triton.jit
def far_factors(q, k, g, start, REVERSE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Queries times their decay since the stashed state, keys times theirs until the end of the chunk, less ``start``
    as that state is, and these decays. Where start is not 0 it is at least -RANGE / 2."""
    of_query, of_key = level_factors(g, L, REVERSE, L, PREC)
    rest = tl.exp2(-start)[None, :]
    of_query *= rest
    of_key *= rest
    return rounded(q.to(tl.float32) * of_query, DT), rounded(k.to(tl.float32) * of_key, DT), of_query, of_key


@triton.jit
def output_of_chunk(
    program, q_ptr, q_batch, q_token, q_head, k_ptr, k_batch, k_token, k_head, v_ptr, v_batch, v_token, v_head,
    f_ptr, f_batch, f_token, f_head, r_ptr, r_batch, r_token, r_head, out_ptr,
    stash_ptr, lowest_ptr, scale, N, H, heads, chunks,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, NOTED: tl.constexpr, NORMALIZER: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BV2: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    head, chunk, tile = place(program, heads, chunks)
    first_v = tile * (BV + BV2)
    b, h = head // H, head % H
    q_ptr += (b * q_batch + h * q_head) * UNIT_K
    k_ptr += (b * k_batch + h * k_head) * UNIT_K
    v_ptr += (b * v_batch + h * v_head) * UNIT_V
    f_ptr += (b * f_batch + h * f_head) * UNIT_K
    r_ptr += (b * r_batch + h * r_head) * UNIT_K
    out_ptr += (b * N * H + h) * DV
    WK: tl.constexpr = KP * BK
    DIRECTIONS: tl.constexpr = 2 if BIDIRECTIONAL else 1
    NOTES: tl.constexpr = (KP + NOTED - 1) // NOTED
    lowest_ptr += (head * chunks + chunk) * (DIRECTIONS * NOTES)
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]
    scores = tl.zeros((L, L), tl.float32)
    reverse_scores = tl.zeros((L, L), tl.float32)
    out = tl.zeros((L, BV), tl.float32)
    if BV2:
        out2 = tl.zeros((L, BV2), tl.float32)
    for piece in tl.static_range(KP):
        q = load_tile(q_ptr, chunk, N, q_token * UNIT_K, piece * BK, DK, L, BK)
        k = load_tile(k_ptr, chunk, N, k_token * UNIT_K, piece * BK, DK, L, BK)
        if not CLOSE:
            scores += DIRECTIONS * tl.where(i == j, mm(q.to(DT), tl.trans(k.to(DT)), PREC), 0.0)
        for direction in tl.static_range(DIRECTIONS):
            if direction == 0:
                g = load_tile(f_ptr, chunk, N, f_token * UNIT_K, piece * BK, DK, L, BK)
            else:
                g = load_tile(r_ptr, chunk, N, r_token * UNIT_K, piece * BK, DK, L, BK)
            g = log_decay(g, chunk, N, NORMALIZER, L, DT)
            if CLOSE:
                q_g, k_g, _, _ = close_factors(q, k, g, direction == 1, L, DT, PREC)
                if direction == 0:
                    scores = mm_add(q_g, tl.trans(k_g), scores, PREC)
                else:
                    reverse_scores = mm_add(q_g, tl.trans(k_g), reverse_scores, PREC)
            else:
                scores = far_scores(scores, q, k, g, direction == 1, L, DT, PREC)
                lowest = tl.load(lowest_ptr + direction * NOTES + piece // NOTED)
                start = from_middle(tl.sum(g.to(tl.float32), axis=0), lowest)
                q_g, _, _, _ = far_factors(q, k, g, start, direction == 1, L, DT, PREC)
            here = ((direction * heads + head) * chunks + chunk) * (DV * WK)
            state = load_state(stash_ptr + here, first_v, piece * BK, DV, WK, BV, BK)
            out = mm_add(q_g, tl.trans(state), out, PREC)
            if BV2:
                state2 = load_state(stash_ptr + here, first_v + BV, piece * BK, DV, WK, BV2, BK)
                out2 = mm_add(q_g, tl.trans(state2), out2, PREC)
    if CLOSE:
        scores = tl.where(j <= i, scores, 0.0)
        if BIDIRECTIONAL:
            scores += tl.where(j >= i, reverse_scores, 0.0)
    scores = rounded(scores, DT)
    v = load_tile(v_ptr, chunk, N, v_token * UNIT_V, first_v, DV, L, BV).to(DT)
    store_tile(out_ptr, mm_add(scores, v, out, PREC) * scale, chunk, N, H * DV, first_v, DV, L, BV)
    if BV2:
        v2 = load_tile(v_ptr, chunk, N, v_token * UNIT_V, first_v + BV, DV, L, BV2).to(DT)
        store_tile(out_ptr, mm_add(scores, v2, out2, PREC) * scale, chunk, N, H * DV, first_v + BV, DV, L, BV2)


@triton.jit(do_not_specialize=["scale", "N", "H", "heads", "chunks", "programs", *strides("q k v f r")])
def output_kernel(
    q_ptr, q_batch, q_token, q_head,  # (B, N, H, DK)
    k_ptr, k_batch, k_token, k_head,  # (B, N, H, DK)
    v_ptr, v_batch, v_token, v_head,  # (B, N, H, DV)
    f_ptr, f_batch, f_token, f_head,  # (B, N, H, DK): forward gates
    r_ptr, r_batch, r_token, r_head,  # (B, N, H, DK): reverse gates, if BIDIRECTIONAL
    out_ptr,  # (B, N, H, DV), contiguous
    stash_ptr, lowest_ptr,  # as walk_kernel has left them; NOTED pieces of the keys' dimension share a note
    scale, N, H, heads, chunks, programs,
    CLOSE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, NOTED: tl.constexpr, NORMALIZER: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BV2: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, FAR_BLOCK: tl.constexpr,
):  # fmt: skip
    """Close: a program for every chunk of every (batch, head) and tile of values. Far: a program looks at FAR_BLOCK of
    them and computes those which need it."""
    NOTES: tl.constexpr = (KP + NOTED - 1) // NOTED * (2 if BIDIRECTIONAL else 1)
    if CLOSE:
        output_of_chunk(
            tl.program_id(0), q_ptr, q_batch, q_token, q_head, k_ptr, k_batch, k_token, k_head, v_ptr, v_batch,
            v_token, v_head, f_ptr, f_batch, f_token, f_head, r_ptr, r_batch, r_token, r_head, out_ptr, stash_ptr,
            lowest_ptr, scale, N, H, heads, chunks, CLOSE, BIDIRECTIONAL, NOTED, NORMALIZER, UNIT_K, UNIT_V,
            DK, DV, KP, L, BK, BV, BV2, DT, PREC,
        )  # fmt: skip
    else:
        first = tl.program_id(0) * FAR_BLOCK
        for program in range(first, tl.minimum(first + FAR_BLOCK, programs)):
            if is_far(lowest_ptr, program, heads, chunks, NOTES):
                output_of_chunk(
                    program, q_ptr, q_batch, q_token, q_head, k_ptr, k_batch, k_token, k_head, v_ptr, v_batch,
                    v_token, v_head, f_ptr, f_batch, f_token, f_head, r_ptr, r_batch, r_token, r_head, out_ptr,
                    stash_ptr, lowest_ptr, scale, N, H, heads, chunks, CLOSE, BIDIRECTIONAL, NOTED, NORMALIZER, UNIT_K,
                    UNIT_V, DK, DV, KP, L, BK, BV, BV2, DT, PREC,
                )  # fmt: skip

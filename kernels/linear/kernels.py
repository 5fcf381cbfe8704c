"""The Triton kernels of ``triton``. Tokens meet only in sums over all of them, so there are two kinds of work: a sum of
outer products over tokens, and a product of each token with a matrix that all tokens of a head share."""

import triton
import triton.language as tl

from scanvas.kernels.gated.blocks import mm_add, strides


@triton.jit
def _rows(pointer, b, batch_stride, h, head_stride, n, N, token_stride, UNIT: tl.constexpr, c, C: tl.constexpr):
    """``(tokens, channels)`` of a head from a tensor whose channels lie side by side, its strides in UNITs."""
    inside = (n < N)[:, None] & (c < C)[None, :]
    pointer += (b * batch_stride + h * head_stride) * UNIT
    return tl.load(pointer + n[:, None].to(tl.int64) * token_stride * UNIT + c[None, :], mask=inside, other=0.0)


@triton.jit
def _add_product(acc, a, b, SPLIT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """``acc + a @ b`` for a in the inputs' dtype. Of a float32 b bfloat16 would keep 8 bits: with SPLIT its rest is a
    second product."""
    if DT == tl.bfloat16:
        high = b.to(tl.bfloat16)
        acc = mm_add(a, high, acc, PREC)
        if SPLIT:
            acc = mm_add(a, (b - high.to(tl.float32)).to(tl.bfloat16), acc, PREC)
    else:
        acc = mm_add(a.to(tl.float32), b.to(tl.float32), acc, PREC)
    return acc


@triton.jit
def _matrix(pointer, cx, cy, X: tl.constexpr, Y: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A piece of an ``(X, Y)`` float32 matrix, or of its transpose."""
    where = cy[None, :] * X + cx[:, None] if TRANSPOSED else cx[:, None] * Y + cy[None, :]
    return tl.load(pointer + where, mask=(cx < X)[:, None] & (cy < Y)[None, :], other=0.0)


@triton.jit(do_not_specialize=strides("x y u"))
def reduce_kernel(
    x_ptr,  # (B, N, H, X)
    y_ptr,  # (B, N, H, Y)
    divisor_ptr,  # (B, N, H) float32, or None
    u_ptr,  # (B, N, H, U)
    w_ptr,  # (B, N, H) float32, or None for ones
    out_ptr,  # (B, H, segments, X, Y) float32: sums of xᵀ y / divisor
    total_ptr,  # (B, H, segments, U) float32: sums of w·u
    x_batch,
    x_token,
    x_head,
    y_batch,
    y_token,
    y_head,
    u_batch,
    u_token,
    u_head,
    N,
    H,
    steps,
    UNIT_X: tl.constexpr,
    UNIT_Y: tl.constexpr,
    UNIT_U: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    U: tl.constexpr,
    DIVIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    DT: tl.constexpr,
    PREC: tl.constexpr,
    BN: tl.constexpr,
    BX: tl.constexpr,
    BY: tl.constexpr,
    BU: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    segments, segment = tl.num_programs(1), tl.program_id(1)
    pieces = tl.cdiv(Y, BY)
    x_piece, y_piece = tl.program_id(2) // pieces, tl.program_id(2) % pieces
    cx, cy, cu = x_piece * BX + tl.arange(0, BX), y_piece * BY + tl.arange(0, BY), tl.arange(0, BU)
    total_here = tl.program_id(2) == 0
    acc = tl.zeros((BX, BY), tl.float32)
    total = tl.zeros((BU,), tl.float32)
    for step in range(steps):
        n = (segment * steps + step) * BN + tl.arange(0, BN)
        x = _rows(x_ptr, b, x_batch, h, x_head, n, N, x_token, UNIT_X, cx, X)
        y = _rows(y_ptr, b, y_batch, h, y_head, n, N, y_token, UNIT_Y, cy, Y)
        place = (b * N + n) * H + h
        if DIVIDE:
            divisor = tl.load(divisor_ptr + place, mask=n < N, other=1.0)
            acc = _add_product(acc, tl.trans(x), y.to(tl.float32) / divisor[:, None], True, DT, PREC)
        else:
            acc = _add_product(acc, tl.trans(x), y, False, DT, PREC)
        if total_here:
            u = _rows(u_ptr, b, u_batch, h, u_head, n, N, u_token, UNIT_U, cu, U).to(tl.float32)
            if WEIGHT:
                u *= tl.load(w_ptr + place, mask=n < N, other=0.0)[:, None]
            total += tl.sum(u, axis=0)
    where = (head * segments + segment) * X * Y + cx[:, None] * Y + cy[None, :]
    tl.store(out_ptr + where, acc, mask=(cx < X)[:, None] & (cy < Y)[None, :])
    if total_here:
        tl.store(total_ptr + (head * segments + segment) * U + cu, total, mask=cu < U)


@triton.jit(do_not_specialize=strides("x u"))
def apply_kernel(
    x_ptr,  # (B, N, H, X)
    matrix_ptr,  # (B, H, X, Y) float32, or its transpose with TRANSPOSED
    u_ptr,  # (B, N, H, U): the divisor is u · total + eps
    total_ptr,  # (B, H, U) float32
    divisor_ptr,  # (B, N, H) float32, written with NORMALISE, else read with DIVIDE
    w_ptr,  # (B, N, H) float32, or None for ones: w · added is added
    added_ptr,  # (B, H, Y) float32, or None
    out_ptr,  # (B, N, H, Y)
    x_batch,
    x_token,
    x_head,
    u_batch,
    u_token,
    u_head,
    N,
    H,
    eps,
    steps,
    UNIT_X: tl.constexpr,
    UNIT_U: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    U: tl.constexpr,
    ONE_PIECE: tl.constexpr,
    NORMALISE: tl.constexpr,
    DIVIDE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DT: tl.constexpr,
    PREC: tl.constexpr,
    BN: tl.constexpr,
    BX: tl.constexpr,
    BY: tl.constexpr,
    BU: tl.constexpr,
):
    programs = tl.cdiv(N, BN * steps)
    head = (tl.program_id(0) // programs).to(tl.int64)
    b, h = head // H, head % H
    cy, cu = tl.program_id(1) * BY + tl.arange(0, BY), tl.arange(0, BU)
    if ONE_PIECE:  # the matrix stays with the program
        matrix = _matrix(matrix_ptr + head * X * Y, tl.arange(0, BX), cy, X, Y, TRANSPOSED)
    for step in range(steps):
        n = (tl.program_id(0) % programs * steps + step) * BN + tl.arange(0, BN)
        place = (b * N + n) * H + h
        acc = tl.zeros((BN, BY), tl.float32)
        if ONE_PIECE:
            x = _rows(x_ptr, b, x_batch, h, x_head, n, N, x_token, UNIT_X, tl.arange(0, BX), X)
            acc = _add_product(acc, x, matrix, True, DT, PREC)
        else:
            for first in range(0, X, BX):
                cx = first + tl.arange(0, BX)
                x = _rows(x_ptr, b, x_batch, h, x_head, n, N, x_token, UNIT_X, cx, X)
                piece = _matrix(matrix_ptr + head * X * Y, cx, cy, X, Y, TRANSPOSED)
                acc = _add_product(acc, x, piece, True, DT, PREC)
        if NORMALISE:
            u = _rows(u_ptr, b, u_batch, h, u_head, n, N, u_token, UNIT_U, cu, U).to(tl.float32)
            total = tl.load(total_ptr + head * U + cu, mask=cu < U, other=0.0)
            divisor = tl.sum(u * total[None, :], axis=1) + eps
            if tl.program_id(1) == 0:
                tl.store(divisor_ptr + place, divisor, mask=n < N)
            acc /= tl.where(n < N, divisor, 1.0)[:, None]
        if DIVIDE:
            acc /= tl.load(divisor_ptr + place, mask=n < N, other=1.0)[:, None]
        if ADD:
            added = tl.load(added_ptr + head * Y + cy, mask=cy < Y, other=0.0)[None, :]
            if WEIGHT:
                added = added * tl.load(w_ptr + place, mask=n < N, other=0.0)[:, None]
            acc += added
        inside = (n < N)[:, None] & (cy < Y)[None, :]
        tl.store(out_ptr + place[:, None] * Y + cy[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=strides("q d"))
def divisor_gradient_kernel(
    q_ptr,  # (B, N, H, D)
    d_ptr,  # (B, N, H, V), the gradient of the output
    matrix_ptr,  # (B, H, D, V) float32, the state
    divisor_ptr,  # (B, N, H) float32
    gradient_ptr,  # (B, N, H) float32: −(q state) · d_out / divisor²
    q_batch,
    q_token,
    q_head,
    d_batch,
    d_token,
    d_head,
    N,
    H,
    UNIT_Q: tl.constexpr,
    UNIT_D: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    DT: tl.constexpr,
    PREC: tl.constexpr,
    BN: tl.constexpr,
    BX: tl.constexpr,
    BY: tl.constexpr,
):
    """The numerator is formed again: the output, which is it over the divisor, has been rounded, and its gradient must
    cancel that of the divisor where both are large."""
    tiles = tl.cdiv(N, BN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    place = (b * N + n) * H + h
    total = tl.zeros((BN,), tl.float32)
    for first in range(0, D, BX):
        cx = first + tl.arange(0, BX)
        acc = tl.zeros((BN, BX), tl.float32)
        for start in range(0, V, BY):
            cy = start + tl.arange(0, BY)
            d_out = _rows(d_ptr, b, d_batch, h, d_head, n, N, d_token, UNIT_D, cy, V)
            acc = _add_product(acc, d_out, _matrix(matrix_ptr + head * D * V, cy, cx, V, D, True), True, DT, PREC)
        q = _rows(q_ptr, b, q_batch, h, q_head, n, N, q_token, UNIT_Q, cx, D)
        total += tl.sum(acc * q.to(tl.float32), axis=1)
    divisor = tl.load(divisor_ptr + place, mask=n < N, other=1.0)
    tl.store(gradient_ptr + place, -total / (divisor * divisor), mask=n < N)

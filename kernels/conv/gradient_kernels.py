"""Triton kernels of the gradients of the depthwise convolution's weights, and of its input beside them.

``d_pre`` is the gradient of what SiLU, if there is one, took. The gradients of input and weights both go over its
window: ``d_x[m] = Σ_t w[t]·d_pre[m − t]`` and ``d_w[t] = Σ_m x[m]·d_pre[m − t]``, so that a value of it that was read
serves both, and of x only the middle is read.

Each thread sums the gradients of its weights over all tiles that its program goes through, which takes threads
together only once, at the end. Nothing is summed by atomics: the same inputs give the same bits.
"""

import triton
import triton.language as tl

from .kernels import there, weight, wide


@triton.jit
def _place(tile, H, W, BX: tl.constexpr):
    """The image, the place across it and the strip of four rows of a tile."""
    strips, across = tl.cdiv(H, 4), tl.cdiv(W, BX)
    rest = tile // strips
    return rest // across, rest % across, tile % strips


@triton.jit
def _next(b, place, strip, H, W, BX: tl.constexpr):
    """The same of the next tile: down, then to the right, then in the next image. No division."""
    strip += 1
    bottom = strip == tl.cdiv(H, 4)
    strip = tl.where(bottom, 0, strip)
    place += bottom.to(tl.int32)
    end = place == tl.cdiv(W, BX)
    return b + end.to(tl.int32), tl.where(end, 0, place), strip


@triton.jit
def _weights(w_ptr, dy: tl.constexpr, c, C: tl.constexpr):
    return weight(w_ptr, dy, 0, c, C, 3, True), weight(w_ptr, dy, 1, c, C, 3, True), weight(w_ptr, dy, 2, c, C, 3, True)


@triton.jit
def _middle(pixels, row, j: tl.constexpr, H, down, inside):
    """Row ``row + j`` of x."""
    return wide(tl.load(pixels + j * down, mask=there(inside, row, j, H), other=0.0))


@triton.jit
def _three(pixels, row, j: tl.constexpr, H, down, left, inside, right, C: tl.constexpr):
    """Row ``row + j`` of d_pre at the pixels and at their neighbours."""
    at = pixels + j * down
    a = wide(tl.load(at - C, mask=there(left, row, j, H), other=0.0))
    b = wide(tl.load(at, mask=there(inside, row, j, H), other=0.0))
    c = wide(tl.load(at + C, mask=there(right, row, j, H), other=0.0))
    return a, b, c


@triton.jit
def _meet(a, b, c, x, acc, wa, wb, wc, ga, gb, gc):
    """A row of d_pre with one of x: their shares of the gradients of that row and of a row of weights."""
    return acc + a * wa + b * wb + c * wc, ga + a * x, gb + b * x, gc + c * x


@triton.jit
def _put(acc, pixels, row, j: tl.constexpr, H, down, inside):
    tl.store(pixels + j * down, acc.to(pixels.dtype.element_ty), mask=there(inside, row, j, H))


@triton.jit(do_not_specialize=["H", "W", "x_batch", "x_token", "tiles", "steps"])
def gradients_kernel(
    x_ptr,  # (B, H·W, C), strides (x_batch·UNIT, x_token·UNIT, 1)
    w_ptr,  # (9, C) float32
    d_pre_ptr,  # (B, H·W, C)
    d_x_ptr,  # (B, H·W, C)
    partial_ptr,  # (programs, 9 + BIAS, C) float32
    H,
    W,
    x_batch,
    x_token,
    tiles,
    steps,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    BX: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradients of the input and of the weights of a 3×3 convolution, ``steps`` tiles a program."""
    blocks = tl.cdiv(C, BC)
    block, program = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    c = block * BC + tl.arange(0, BC)
    first = program * steps
    b, place, strip = _place(first, H, W, BX)
    down, x_token = W.to(tl.int64) * C, x_token.to(tl.int64) * UNIT
    x_down = W * x_token
    # In the order of d_pre's window, which is that of the weights backwards.
    w00, w01, w02 = _weights(w_ptr, 0, c, C)
    w10, w11, w12 = _weights(w_ptr, 1, c, C)
    w20, w21, w22 = _weights(w_ptr, 2, c, C)
    zero = tl.zeros((BX, BC), tl.float32)
    g00, g01, g02, g10, g11, g12, g20, g21, g22, total = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(tl.minimum(steps, tiles - first)):
        row, x = strip * 4, place * BX + tl.arange(0, BX)
        known = (c < C)[None, :]
        inside = (x < W)[:, None] & known
        left, right = ((x >= 1) & (x < W))[:, None] & known, (x + 1 < W)[:, None] & known
        offset = (b.to(tl.int64) * H + row) * down + (x[:, None] * C + c[None, :])
        pixels = x_ptr + (b.to(tl.int64) * x_batch * UNIT + row * x_down) + (x[:, None] * x_token + c[None, :])
        window = d_pre_ptr + offset
        x0 = _middle(pixels, row, 0, H, x_down, inside)
        x1 = _middle(pixels, row, 1, H, x_down, inside)
        x2 = _middle(pixels, row, 2, H, x_down, inside)
        x3 = _middle(pixels, row, 3, H, x_down, inside)
        acc0, acc1, acc2, acc3 = zero, zero, zero, zero
        l, m, r = _three(window, row, -1, H, down, left, inside, right, C)
        acc0, g00, g01, g02 = _meet(l, m, r, x0, acc0, w00, w01, w02, g00, g01, g02)
        l, m, r = _three(window, row, 0, H, down, left, inside, right, C)
        total += m
        acc0, g10, g11, g12 = _meet(l, m, r, x0, acc0, w10, w11, w12, g10, g11, g12)
        acc1, g00, g01, g02 = _meet(l, m, r, x1, acc1, w00, w01, w02, g00, g01, g02)
        l, m, r = _three(window, row, 1, H, down, left, inside, right, C)
        total += m
        acc0, g20, g21, g22 = _meet(l, m, r, x0, acc0, w20, w21, w22, g20, g21, g22)
        acc1, g10, g11, g12 = _meet(l, m, r, x1, acc1, w10, w11, w12, g10, g11, g12)
        acc2, g00, g01, g02 = _meet(l, m, r, x2, acc2, w00, w01, w02, g00, g01, g02)
        l, m, r = _three(window, row, 2, H, down, left, inside, right, C)
        total += m
        acc1, g20, g21, g22 = _meet(l, m, r, x1, acc1, w20, w21, w22, g20, g21, g22)
        acc2, g10, g11, g12 = _meet(l, m, r, x2, acc2, w10, w11, w12, g10, g11, g12)
        acc3, g00, g01, g02 = _meet(l, m, r, x3, acc3, w00, w01, w02, g00, g01, g02)
        l, m, r = _three(window, row, 3, H, down, left, inside, right, C)
        total += m
        acc2, g20, g21, g22 = _meet(l, m, r, x2, acc2, w20, w21, w22, g20, g21, g22)
        acc3, g10, g11, g12 = _meet(l, m, r, x3, acc3, w10, w11, w12, g10, g11, g12)
        l, m, r = _three(window, row, 4, H, down, left, inside, right, C)
        acc3, g20, g21, g22 = _meet(l, m, r, x3, acc3, w20, w21, w22, g20, g21, g22)
        out = d_x_ptr + offset
        _put(acc0, out, row, 0, H, down, inside)
        _put(acc1, out, row, 1, H, down, inside)
        _put(acc2, out, row, 2, H, down, inside)
        _put(acc3, out, row, 3, H, down, inside)
        b, place, strip = _next(b, place, strip, H, W, BX)
    at = partial_ptr + program.to(tl.int64) * (9 + BIAS) * C + c
    tl.store(at, tl.sum(g22, axis=0), mask=c < C)
    tl.store(at + C, tl.sum(g21, axis=0), mask=c < C)
    tl.store(at + 2 * C, tl.sum(g20, axis=0), mask=c < C)
    tl.store(at + 3 * C, tl.sum(g12, axis=0), mask=c < C)
    tl.store(at + 4 * C, tl.sum(g11, axis=0), mask=c < C)
    tl.store(at + 5 * C, tl.sum(g10, axis=0), mask=c < C)
    tl.store(at + 6 * C, tl.sum(g02, axis=0), mask=c < C)
    tl.store(at + 7 * C, tl.sum(g01, axis=0), mask=c < C)
    tl.store(at + 8 * C, tl.sum(g00, axis=0), mask=c < C)
    if BIAS:
        tl.store(at + 9 * C, tl.sum(total, axis=0), mask=c < C)


@triton.jit
def _add(e: tl.constexpr, K: tl.constexpr, value, g0, g1, g2, g3, g4, g5, g6):
    """``value`` added to the e-th, if e is one of a column's K weights."""
    if e < K:
        if e == 0:
            g0 += value
        if e == 1:
            g1 += value
        if e == 2:
            g2 += value
        if e == 3:
            g3 += value
        if e == 4:
            g4 += value
        if e == 5:
            g5 += value
        if e == 6:
            g6 += value
    return g0, g1, g2, g3, g4, g5, g6


@triton.jit
def _keep(at, g, e: tl.constexpr, c, C: tl.constexpr, K: tl.constexpr):
    if e < K:
        tl.store(at + (K - 1 - e) * K * C, tl.sum(g, axis=0), mask=c < C)


@triton.jit(do_not_specialize=["H", "W", "x_batch", "x_token", "tiles", "steps"])
def weights_kernel(
    x_ptr,  # (B, H·W, C), strides (x_batch·UNIT, x_token·UNIT, 1)
    d_pre_ptr,  # (B, H·W, C)
    partial_ptr,  # (programs, K·K + BIAS, C) float32
    H,
    W,
    x_batch,
    x_token,
    tiles,
    steps,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BX: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradients of the weights of one column of a K×K convolution, K ≤ 7, ``steps`` tiles a program."""
    blocks = tl.cdiv(C, BC)
    column, rest = tl.program_id(0) % K, tl.program_id(0) // K
    block, program = rest % blocks, rest // blocks
    c = block * BC + tl.arange(0, BC)
    first = program * steps
    b, place, strip = _place(first, H, W, BX)
    down, x_token = W.to(tl.int64) * C, x_token.to(tl.int64) * UNIT
    x_down = W * x_token
    zero = tl.zeros((BX, BC), tl.float32)
    g0, g1, g2, g3, g4, g5, g6, total = zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(tl.minimum(steps, tiles - first)):
        row, x = strip * 4, place * BX + tl.arange(0, BX)
        reach = x + K // 2 - column
        inside = (x < W)[:, None] & (c < C)[None, :]
        reached = inside & ((reach >= 0) & (reach < W))[:, None]
        pixels = x_ptr + (b.to(tl.int64) * x_batch * UNIT + row * x_down) + (x[:, None] * x_token + c[None, :])
        window = d_pre_ptr + (b.to(tl.int64) * H + row) * down + (reach[:, None] * C + c[None, :])
        x0 = _middle(pixels, row, 0, H, x_down, inside)
        x1 = _middle(pixels, row, 1, H, x_down, inside)
        x2 = _middle(pixels, row, 2, H, x_down, inside)
        x3 = _middle(pixels, row, 3, H, x_down, inside)
        for dy in tl.static_range(K + 3):
            at = window + (dy - K // 2) * down
            value = wide(tl.load(at, mask=there(reached, row, dy - K // 2, H), other=0.0))
            if BIAS and (dy >= K // 2 and dy < K // 2 + 4):
                total += value
            g0, g1, g2, g3, g4, g5, g6 = _add(dy, K, value * x0, g0, g1, g2, g3, g4, g5, g6)
            g0, g1, g2, g3, g4, g5, g6 = _add(dy - 1, K, value * x1, g0, g1, g2, g3, g4, g5, g6)
            g0, g1, g2, g3, g4, g5, g6 = _add(dy - 2, K, value * x2, g0, g1, g2, g3, g4, g5, g6)
            g0, g1, g2, g3, g4, g5, g6 = _add(dy - 3, K, value * x3, g0, g1, g2, g3, g4, g5, g6)
        b, place, strip = _next(b, place, strip, H, W, BX)
    at = partial_ptr + (program.to(tl.int64) * (K * K + BIAS) + column) * C + c
    _keep(at, g0, 0, c, C, K)
    _keep(at, g1, 1, c, C, K)
    _keep(at, g2, 2, c, C, K)
    _keep(at, g3, 3, c, C, K)
    _keep(at, g4, 4, c, C, K)
    _keep(at, g5, 5, c, C, K)
    _keep(at, g6, 6, c, C, K)
    if BIAS and column == K // 2:
        tl.store(at - column * C + K * K * C, tl.sum(total, axis=0), mask=c < C)


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    partial_ptr,  # (programs, TAPS + BIAS, C) float32
    d_weight_ptr,  # (C, TAPS)
    d_bias_ptr,  # (C,)
    programs,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """The sums over the programs, in an order which depends on nothing but their number."""
    tap, c = tl.program_id(0) % (TAPS + BIAS), tl.program_id(0) // (TAPS + BIAS) * BC + tl.arange(0, BC)
    acc = tl.zeros((BP, BC), tl.float32)
    for first in range(0, programs, BP):
        p = first + tl.arange(0, BP)
        at = partial_ptr + (p.to(tl.int64)[:, None] * (TAPS + BIAS) + tap) * C + c[None, :]
        acc += tl.load(at, mask=(p < programs)[:, None] & (c < C)[None, :], other=0.0)
    total = tl.sum(acc, axis=0)
    if tap < TAPS:
        tl.store(d_weight_ptr + c * TAPS + tap, total.to(d_weight_ptr.dtype.element_ty), mask=c < C)
    if BIAS and tap == TAPS:
        tl.store(d_bias_ptr + c, total.to(d_bias_ptr.dtype.element_ty), mask=c < C)

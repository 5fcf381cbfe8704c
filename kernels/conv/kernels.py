"""Triton kernels of the depthwise convolution of tokens: tiles of four rows, so that a row that is read serves all of
them that it reaches, and a weight all four. Sums are float32."""

import triton
import triton.language as tl

from scanvas.kernels.activation import sigmoid, silu
from scanvas.kernels.dispatch import INTERPRETED

_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def wide(value):
    """``value``, of at least two numbers, in float32: an instruction for each bfloat16, where the compiler by itself
    takes three for two, and these kernels are bound by instructions."""
    if _COMPILED and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [value], tl.float32, True, 2
        )
    else:
        return value.to(tl.float32)


@triton.jit
def _pick(i: tl.constexpr, w0, w1, w2, w3, w4, w5, w6):
    first = w0 if i == 0 else w1 if i == 1 else w2
    last = w4 if i == 4 else w5 if i == 5 else w6
    return first if i < 3 else w3 if i == 3 else last


@triton.jit
def weight(w_ptr, dy: tl.constexpr, dx: tl.constexpr, c, C: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr):
    if dy < K:
        tap = (K * K - 1 - dy * K - dx) if FLIP else dy * K + dx
        return tl.load(w_ptr + tap * C + c, mask=c < C, other=0.0)[None, :]
    else:
        return tl.zeros((1, c.shape[0]), tl.float32)


@triton.jit
def there(mask, row, j: tl.constexpr, H):
    """``mask`` if row ``row + j`` is one of the image's, as ``row`` is."""
    if j < 0:
        mask = mask & (row + j >= 0)
    elif j > 0:
        mask = mask & (row + j < H)
    return mask


@triton.jit
def _finish(
    acc, out_ptr, d_out_ptr, bias_ptr, row, j: tl.constexpr, H, W, x, c,
    C: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    inside = there((x < W)[:, None] & (c < C)[None, :], row, j, H)
    offset = (row + j).to(tl.int64) * W * C + x[:, None] * C + c[None, :]
    if GRADIENT:
        s = sigmoid(acc)
        d_out = wide(tl.load(d_out_ptr + offset, mask=inside, other=0.0))
        acc = d_out * (s + acc * (s - s * s))
    elif SILU:
        acc = silu(acc)
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["H", "W", "x_batch", "x_token"])
def convolution_kernel(
    x_ptr,  # (B, H·W, C), strides (x_batch·UNIT, x_token·UNIT, 1)
    w_ptr,  # (K·K, C) float32
    bias_ptr,  # (C,)
    d_out_ptr,  # (B, H·W, C), read only with GRADIENT
    out_ptr,  # (B, H·W, C)
    H,
    W,
    x_batch,
    x_token,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GRADIENT: tl.constexpr,
    FLIP: tl.constexpr,
    BX: tl.constexpr,
    BC: tl.constexpr,
):
    """The convolution of BX pixels of four rows; with GRADIENT, ``d_out`` times SiLU's derivative there instead."""
    strips, across, blocks = tl.cdiv(H, 4), tl.cdiv(W, BX), tl.cdiv(C, BC)
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    place, rest = rest % across, rest // across
    row, b = rest % strips * 4, (rest // strips).to(tl.int64)
    x, c = place * BX + tl.arange(0, BX), block * BC + tl.arange(0, BC)
    image = x_ptr + b * x_batch * UNIT
    x_token *= UNIT
    acc0 = tl.zeros((BX, BC), tl.float32)
    acc1 = tl.zeros((BX, BC), tl.float32)
    acc2 = tl.zeros((BX, BC), tl.float32)
    acc3 = tl.zeros((BX, BC), tl.float32)
    for dx in tl.static_range(K):
        column = x + dx - K // 2
        reached = ((column >= 0) & (column < W))[:, None] & (c < C)[None, :]
        pixels = image + column.to(tl.int64)[:, None] * x_token + c[None, :]
        w0 = weight(w_ptr, 0, dx, c, C, K, FLIP)
        w1 = weight(w_ptr, 1, dx, c, C, K, FLIP)
        w2 = weight(w_ptr, 2, dx, c, C, K, FLIP)
        w3 = weight(w_ptr, 3, dx, c, C, K, FLIP)
        w4 = weight(w_ptr, 4, dx, c, C, K, FLIP)
        w5 = weight(w_ptr, 5, dx, c, C, K, FLIP)
        w6 = weight(w_ptr, 6, dx, c, C, K, FLIP)
        for dy in tl.static_range(K + 3):
            row_pixels = pixels + ((row + dy - K // 2) * W).to(tl.int64) * x_token
            value = wide(tl.load(row_pixels, mask=there(reached, row, dy - K // 2, H), other=0.0))
            if dy < K:
                acc0 += value * _pick(dy, w0, w1, w2, w3, w4, w5, w6)
            if dy >= 1 and dy < K + 1:
                acc1 += value * _pick(dy - 1, w0, w1, w2, w3, w4, w5, w6)
            if dy >= 2 and dy < K + 2:
                acc2 += value * _pick(dy - 2, w0, w1, w2, w3, w4, w5, w6)
            if dy >= 3:
                acc3 += value * _pick(dy - 3, w0, w1, w2, w3, w4, w5, w6)
    out, d_out = out_ptr + b * H * W * C, d_out_ptr + b * H * W * C
    _finish(acc0, out, d_out, bias_ptr, row, 0, H, W, x, c, C, BIAS, SILU, GRADIENT)
    _finish(acc1, out, d_out, bias_ptr, row, 1, H, W, x, c, C, BIAS, SILU, GRADIENT)
    _finish(acc2, out, d_out, bias_ptr, row, 2, H, W, x, c, C, BIAS, SILU, GRADIENT)
    _finish(acc3, out, d_out, bias_ptr, row, 3, H, W, x, c, C, BIAS, SILU, GRADIENT)

"""Depthwise convolution of tokens in Triton, with bias and SiLU, forward and backward.

Bound by memory: each input is read once from it and each output written once; the k² reads of a token by its
neighbours hit registers or the cache, since a program holds tokens side by side and channels lie next to each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.activation import sigmoid, silu
from scanvas.kernels.tiles import unit

PIXELS = 16  # of a tile of the forward kernel, in each of its four rows
WIDEST = 7  # kernel that the forward kernel knows
GRADIENT_TOKENS, GRADIENT_WARPS = 32, 1  # of a tile whose weight gradients are summed in one program


@triton.jit
def _taps(x_ptr, w_ptr, n, c, inside, H, W, C: tl.constexpr, stride, K: tl.constexpr, acc):
    """acc + Σ over the window of x·w for tokens ``n`` (BN,) and channels ``c`` (BC,) of one image."""
    row, col = n // W, n % W
    for dy in tl.static_range(K):
        for dx in tl.static_range(K):
            y, x = row + dy - K // 2, col + dx - K // 2
            ok = inside & ((y >= 0) & (y < H) & (x >= 0) & (x < W))[:, None]
            value = tl.load(x_ptr + (y * W + x).to(tl.int64)[:, None] * stride + c[None, :], mask=ok, other=0.0)
            weight = tl.load(w_ptr + (dy * K + dx) * C + c, mask=c < C, other=0.0).to(tl.float32)
            acc += value.to(tl.float32) * weight[None, :]
    return acc


@triton.jit
def _pick(i: tl.constexpr, w0, w1, w2, w3, w4, w5, w6):
    first = w0 if i == 0 else w1 if i == 1 else w2
    last = w4 if i == 4 else w5 if i == 5 else w6
    return first if i < 3 else w3 if i == 3 else last


@triton.jit
def _weight(w_ptr, dy: tl.constexpr, dx: tl.constexpr, c, C: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr):
    if dy < K:
        tap = (K * K - 1 - dy * K - dx) if FLIP else dy * K + dx
        return tl.load(w_ptr + tap * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.zeros((1, c.shape[0]), tl.float32)


@triton.jit
def _finish(acc, out_ptr, bias, row, H, W, x, c, C: tl.constexpr, SILU: tl.constexpr):
    acc += bias
    if SILU:
        acc = silu(acc)
    inside = ((x < W) & (row < H))[:, None] & (c < C)[None, :]
    offset = row.to(tl.int64) * W * C + x[:, None] * C + c[None, :]
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_batch", "x_token"])
def _forward_kernel(
    x_ptr,  # (B, H·W, C), strides (x_batch·UNIT, x_token·UNIT, 1)
    w_ptr,  # (K·K, C)
    bias_ptr,  # (C,)
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
    FLIP: tl.constexpr,
    BX: tl.constexpr,
    BC: tl.constexpr,
):
    """Four rows of BX pixels: a row that is read serves all of them that it reaches, and a weight all four."""
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
        w0 = _weight(w_ptr, 0, dx, c, C, K, FLIP)
        w1 = _weight(w_ptr, 1, dx, c, C, K, FLIP)
        w2 = _weight(w_ptr, 2, dx, c, C, K, FLIP)
        w3 = _weight(w_ptr, 3, dx, c, C, K, FLIP)
        w4 = _weight(w_ptr, 4, dx, c, C, K, FLIP)
        w5 = _weight(w_ptr, 5, dx, c, C, K, FLIP)
        w6 = _weight(w_ptr, 6, dx, c, C, K, FLIP)
        for dy in tl.static_range(K + 3):
            y = row + dy - K // 2
            ok = reached & (y >= 0) & (y < H)
            value = tl.load(pixels + (y * W).to(tl.int64) * x_token, mask=ok, other=0.0).to(tl.float32)
            if dy < K:
                acc0 += value * _pick(dy, w0, w1, w2, w3, w4, w5, w6)
            if dy >= 1 and dy < K + 1:
                acc1 += value * _pick(dy - 1, w0, w1, w2, w3, w4, w5, w6)
            if dy >= 2 and dy < K + 2:
                acc2 += value * _pick(dy - 2, w0, w1, w2, w3, w4, w5, w6)
            if dy >= 3:
                acc3 += value * _pick(dy - 3, w0, w1, w2, w3, w4, w5, w6)
    bias = tl.zeros((1, BC), tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + b * H * W * C
    _finish(acc0, out, bias, row, H, W, x, c, C, SILU)
    _finish(acc1, out, bias, row + 1, H, W, x, c, C, SILU)
    _finish(acc2, out, bias, row + 2, H, W, x, c, C, SILU)
    _finish(acc3, out, bias, row + 3, H, W, x, c, C, SILU)


@triton.jit(do_not_specialize=["x_batch", "x_token"])
def _gradient_kernel(
    x_ptr,  # (B, N, C), strides (x_batch·UNIT, x_token·UNIT, 1)
    w_ptr,  # (K·K, C)
    bias_ptr,  # (C,)
    d_out_ptr,  # (B, N, C)
    d_pre_ptr,  # (B, N, C), gradient before SiLU, written only with SILU
    partial_ptr,  # (B·tiles, K·K + 1, C) float32, this program's share of the gradients of weight and bias
    H,
    W,
    x_batch,
    x_token,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    tiles = tl.cdiv(H * W, BN)
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, block = rest // tl.cdiv(C, BC), rest % tl.cdiv(C, BC)
    n, c = tile * BN + tl.arange(0, BN), block * BC + tl.arange(0, BC)
    inside = (n < H * W)[:, None] & (c < C)[None, :]
    image = x_ptr + b.to(tl.int64) * x_batch * UNIT
    x_token *= UNIT
    offset = (b.to(tl.int64) * H * W + n)[:, None] * C + c[None, :]
    gradient = tl.load(d_out_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        pre = tl.zeros((BN, BC), tl.float32)
        pre = _taps(image, w_ptr, n, c, inside, H, W, C, x_token, K, pre)
        if BIAS:
            pre += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        s = sigmoid(pre)
        gradient *= s * (1.0 + pre * (1.0 - s))
        tl.store(d_pre_ptr + offset, gradient.to(d_pre_ptr.dtype.element_ty), mask=inside)
    out = partial_ptr + (b.to(tl.int64) * tiles + tile) * (K * K + 1) * C + c
    row, col = n // W, n % W
    for dy in tl.static_range(K):
        for dx in tl.static_range(K):
            y, x = row + dy - K // 2, col + dx - K // 2
            ok = inside & ((y >= 0) & (y < H) & (x >= 0) & (x < W))[:, None]
            value = tl.load(image + (y * W + x).to(tl.int64)[:, None] * x_token + c[None, :], mask=ok, other=0.0)
            share = tl.sum(value.to(tl.float32) * gradient, axis=0)
            tl.store(out + (dy * K + dx) * C, share, mask=c < C)
    tl.store(out + K * K * C, tl.sum(gradient, axis=0), mask=c < C)


def _channels(C: int) -> int:
    return min(64, triton.next_power_of_2(C))


def _taps_first(weight: Tensor) -> Tensor:
    """``(C, 1, K, K)`` → ``(K·K, C)``: a thread holds neighbouring channels, and loads the weights of all at once."""
    return weight.flatten(1).t().contiguous()


def _dense(x: Tensor) -> Tensor:
    """Channels must be neighbours and a token's stride an int32; that of the batch may be anything."""
    return x if x.stride(2) == 1 and x.stride(1) < 2**31 else x.contiguous()


def _spacing(x: Tensor) -> dict[str, int]:
    """``x_batch``, ``x_token`` and their ``UNIT``, as the kernels take them."""
    size = unit(x)
    return {"x_batch": x.stride(0) // size, "x_token": x.stride(1) // size, "UNIT": size}


def _launch(x, taps, bias, H, W, K, silu, flip, dtype):
    B, N, C = x.shape
    out = torch.empty((B, N, C), device=x.device, dtype=dtype)
    BC, BX = _channels(C), min(PIXELS, triton.next_power_of_2(W))
    programs = triton.cdiv(H, 4) * triton.cdiv(W, BX) * triton.cdiv(C, BC) * B
    with torch.cuda.device_of(x):
        _forward_kernel[(programs,)](
            x, taps, taps if bias is None else bias, out, H, W, **_spacing(x), C=C, K=K,
            BIAS=bias is not None, SILU=silu, FLIP=flip, BX=BX, BC=BC,
            num_warps=max(1, BX * BC // (256 if K < 7 else 128)),  # with fewer the weights of 7×7 do not fit registers
        )  # fmt: skip
    return out


@torch.library.custom_op("scanvas::depthwise_conv2d", mutates_args=())
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, H: int, W: int, silu: bool, dtype: torch.dtype) -> Tensor:
    return _launch(_dense(x), _taps_first(weight), bias, H, W, weight.shape[-1], silu, False, dtype)


@_forward.register_fake
def _(x, weight, bias, H, W, silu, dtype):
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("scanvas::depthwise_conv2d_backward", mutates_args=())
def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, d_out: Tensor, H: int, W: int, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, taps, d_out = _dense(x), _taps_first(weight), d_out.contiguous()
    B, N, C = x.shape
    K, BC = weight.shape[-1], min(32, _channels(C))
    tiles = triton.cdiv(N, GRADIENT_TOKENS)
    partial = torch.empty((B * tiles, K * K + 1, C), device=x.device, dtype=torch.float32)
    d_pre = torch.empty_like(d_out) if silu else d_out
    with torch.cuda.device_of(x):
        _gradient_kernel[(tiles * triton.cdiv(C, BC) * B,)](
            x, taps, taps if bias is None else bias, d_out, d_pre, partial, H, W, **_spacing(x), C=C, K=K,
            BIAS=bias is not None, SILU=silu, BN=GRADIENT_TOKENS, BC=BC, num_warps=GRADIENT_WARPS,
        )  # fmt: skip
    d_x = _launch(d_pre, taps, None, H, W, K, False, True, x.dtype)
    d_weight = partial[:, :-1].sum(0).T.reshape(weight.shape).to(weight.dtype)
    return d_x, d_weight, partial[:, -1].sum(0).to(weight.dtype if bias is None else bias.dtype)


@_backward.register_fake
def _(x, weight, bias, d_out, H, W, silu):
    like = weight if bias is None else bias
    return x.new_empty(x.shape), weight.new_empty(weight.shape), like.new_empty(x.shape[2])


def _setup_context(ctx, inputs, output):
    x, weight, bias, ctx.H, ctx.W, ctx.silu, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx, d_out):
    x, weight, bias = ctx.saved_tensors
    d_x, d_weight, d_bias = _backward(x, weight, bias, d_out, ctx.H, ctx.W, ctx.silu)
    return d_x, d_weight, None if bias is None else d_bias, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def convolve(x: Tensor, weight: Tensor, grid: tuple[int, int], bias: Tensor | None, activation: str | None) -> Tensor:
    """Arguments and result as ``reference.convolve``; sums are float32 whatever the dtypes. Like a convolution of
    PyTorch's, it gives autocast's dtype under autocast."""
    if x.dtype == torch.float64:
        raise TypeError("depthwise_conv2d: impl='triton' sums in float32, but x is float64; use impl='torch'")
    if weight.shape[-1] > WIDEST:
        raise ValueError(
            f"depthwise_conv2d: impl='triton' knows kernels of up to {WIDEST}, got {weight.shape[-1]}; use impl='torch'"
        )
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _forward(x, weight, bias, *grid, activation == "silu", dtype)

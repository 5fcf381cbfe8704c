"""Depthwise convolution of tokens in Triton, with bias and SiLU, forward and backward.

Bound by memory and by instructions: each input is read once from memory and each output written once; the k² reads of
a token by its neighbours hit registers or the cache, since a program holds tokens side by side and channels lie next
to each other. Backward, one kernel makes ``d_pre``, the gradient of what SiLU took, which it computes anew; the next
goes over it for the gradients of input and weights at once.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from scanvas.kernels.tiles import shares, unit

from .gradient_kernels import gradients_kernel, sum_kernel, weights_kernel
from .kernels import convolution_kernel

WIDEST = 7  # kernel that the kernels know


class Tile(NamedTuple):
    """Pixels of each of a tile's four rows for 64 channels, elements of a row for each thread, and the registers that
    the compiler may give a thread."""

    pixels: int
    elements: int
    registers: int | None = None


FORWARD = Tile(16, 8)
DERIVATIVE = Tile(16, 8, 128)
GRADIENTS = Tile(8, 4)
WEIGHTS = Tile(16, 8)
PROGRAMS = 396  # at most, that share the tiles of the weights' gradients: an H200 holds three on a multiprocessor


def _cut(W: int, C: int, tile: Tile) -> dict[str, int | None]:
    """A tile's pixels, channels, warps and registers; blocks of 32 channels where those of 64 leave more idle."""
    BC = min(64, max(2, triton.next_power_of_2(C)))
    if triton.cdiv(C, 32) * 32 < triton.cdiv(C, BC) * BC:
        BC = 32
    BX = min(tile.pixels * 64 // BC, triton.next_power_of_2(W))
    return {"BX": BX, "BC": BC, "num_warps": max(1, BX * BC // (32 * tile.elements)), "maxnreg": tile.registers}


def _taps_first(weight: Tensor) -> Tensor:
    """``(C, 1, K, K)`` → ``(K·K, C)`` in float32: a thread holds neighbouring channels, whose weights it loads at once
    and need not convert."""
    taps = weight.flatten(1).t()
    return torch.empty(taps.shape, device=weight.device, dtype=torch.float32).copy_(taps)


def _dense(x: Tensor) -> Tensor:
    """Channels must be neighbours and a token's stride an int32; that of the batch may be anything."""
    return x if x.stride(2) == 1 and x.stride(1) < 2**31 else x.contiguous()


def _spacing(x: Tensor) -> dict[str, int]:
    """``x_batch``, ``x_token`` and their ``UNIT``, as the kernels take them."""
    size = unit(x)
    return {"x_batch": x.stride(0) // size, "x_token": x.stride(1) // size, "UNIT": size}


def _convolve(x, taps, bias, H, W, K, silu, dtype, *, d_out=None, flip=False):
    """The convolution; with ``d_out``, its gradient before SiLU instead; with ``flip``, with the kernel backwards."""
    B, N, C = x.shape
    out = torch.empty((B, N, C), device=x.device, dtype=dtype)
    tile = FORWARD if d_out is None else DERIVATIVE
    if K > 3 or not silu:  # these want more registers; with as many elements in a thread 7×7 weights would not fit any
        tile = Tile(tile.pixels, tile.elements if K < 7 else tile.elements // 2)
    cut = _cut(W, C, tile)
    programs = triton.cdiv(H, 4) * triton.cdiv(W, cut["BX"]) * triton.cdiv(C, cut["BC"]) * B
    with torch.cuda.device_of(x):
        convolution_kernel[(programs,)](
            x, taps, taps if bias is None else bias, out if d_out is None else d_out, out, H, W, **_spacing(x), C=C,
            K=K, BIAS=bias is not None, SILU=silu, GRADIENT=d_out is not None, FLIP=flip, **cut,
        )  # fmt: skip
    return out


@torch.library.custom_op("scanvas::depthwise_conv2d", mutates_args=())
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, H: int, W: int, silu: bool, dtype: torch.dtype) -> Tensor:
    return _convolve(_dense(x), _taps_first(weight), bias, H, W, weight.shape[-1], silu, dtype)


@_forward.register_fake
def _(x, weight, bias, H, W, silu, dtype):
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("scanvas::depthwise_conv2d_backward", mutates_args=())
def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, d_out: Tensor, H: int, W: int, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; the last is empty without a bias."""
    B, N, C = x.shape
    K = weight.shape[-1]
    like = weight.new_empty(0) if bias is None else bias
    if not x.numel():
        return x.new_zeros(x.shape), torch.zeros_like(weight), torch.zeros_like(like)
    x, taps, d_pre = _dense(x), _taps_first(weight), d_out.contiguous()
    if silu:
        d_pre = _convolve(x, taps, bias, H, W, K, True, d_pre.dtype, d_out=d_pre)
    cut = _cut(W, C, GRADIENTS if K == 3 else WEIGHTS)
    columns = 1 if K == 3 else K
    parts = triton.cdiv(C, cut["BC"]) * columns
    tiles = B * triton.cdiv(H, 4) * triton.cdiv(W, cut["BX"])
    programs, steps = shares(tiles, most=max(1, PROGRAMS // parts))
    partial = torch.empty((programs, K * K + (bias is not None), C), device=x.device, dtype=torch.float32)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    d_bias = torch.empty_like(like, memory_format=torch.contiguous_format)
    settings = {**_spacing(x), "tiles": tiles, "steps": steps, "C": C, "BIAS": bias is not None, **cut}
    with torch.cuda.device_of(x):
        if K == 3:
            d_x = torch.empty((B, N, C), device=x.device, dtype=x.dtype)
            gradients_kernel[(programs * parts,)](x, taps, d_pre, d_x, partial, H, W, **settings)
        else:
            d_x = _convolve(d_pre, taps, None, H, W, K, False, x.dtype, flip=True)
            weights_kernel[(programs * parts,)](x, d_pre, partial, H, W, K=K, **settings)
        BC = min(32, triton.next_power_of_2(C))
        sum_kernel[(partial.shape[1] * triton.cdiv(C, BC),)](
            partial, d_weight, d_bias, programs, C=C, TAPS=K * K, BIAS=bias is not None, BP=64, BC=BC, num_warps=4
        )
    return d_x, d_weight, d_bias


@_backward.register_fake
def _(x, weight, bias, d_out, H, W, silu):
    like = weight.new_empty(0) if bias is None else bias
    return x.new_empty(x.shape), weight.new_empty(weight.shape), like.new_empty(like.shape)


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

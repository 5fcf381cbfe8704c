"""SwiGLU's first linear layer and product in Triton: ``x Wᵀ`` stays in registers but for what autograd will ask for."""

import inspect
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from scanvas.kernels.activation import silu
from scanvas.kernels.gated.blocks import mm_add

from .triton import product_backward

DTYPES = (torch.bfloat16, torch.float16)
SUPPORTED = "flatten" in inspect.signature(tl.range.__init__).parameters  # from Triton 3.3 on


@triton.jit(do_not_specialize=["R"])
def swiglu_kernel(
    x_ptr,  # (R, C), its rows x_stride apart
    weight_ptr,  # (2·D, C)
    out_ptr,  # (R, D)
    both_ptr,  # (R, 2·D), written with KEEP: x Wᵀ
    R,
    C,
    x_stride,
    D: tl.constexpr,
    KEEP: tl.constexpr,
    EVEN: tl.constexpr,  # C is a multiple of BC
    BR: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
):
    """Tiles of BR rows and BD columns of the output; those of the same rows follow one another, so that x comes from
    the L2 cache after the first. What the next tile of a program needs is loaded while this one is stored."""
    across = tl.cdiv(D, BD)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, BR) * across, tl.num_programs(0), flatten=True):
        rows = (tile // across).to(tl.int64) * BR + tl.arange(0, BR)
        first = tile % across * BD
        # a_d and b_d side by side: one matrix product makes both, and one thread holds both.
        pair = tl.arange(0, 2 * BD)
        pair = tl.minimum(first + pair // 2, D - 1) + pair % 2 * D
        c = tl.arange(0, BC)
        # Beyond the last, rows of x and of W repeat it; what comes of them is not stored.
        x_at = x_ptr + tl.minimum(rows, R - 1)[:, None] * x_stride + c[None, :]
        weight_at = weight_ptr + pair.to(tl.int64)[None, :] * C + c[:, None]
        acc = tl.zeros((BR, 2 * BD), tl.float32)
        for start in range(0, C, BC):
            if EVEN:
                x, weight = tl.load(x_at + start), tl.load(weight_at + start)
            else:
                inside = c < C - start
                x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
                weight = tl.load(weight_at + start, mask=inside[:, None], other=0.0)
            acc = mm_add(x, weight, acc, "tf32")
        a, b = tl.split(tl.reshape(acc, (BR, BD, 2)))
        columns = first + tl.arange(0, BD)
        inside = (rows < R)[:, None] & (columns < D)[None, :]
        if KEEP:
            at = both_ptr + rows[:, None] * (2 * D) + columns[None, :]
            tl.store(at, a.to(both_ptr.dtype.element_ty), mask=inside)
            tl.store(at + D, b.to(both_ptr.dtype.element_ty), mask=inside)
        out = (silu(a) * b).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * D + columns[None, :], out, mask=inside)


class Tiling(NamedTuple):
    """How a product is cut: rows, columns of either half and channels of a step; and into how many programs."""

    BR: int
    BD: int
    BC: int
    num_warps: int
    num_stages: int
    programs: int


def tiling(x: Tensor) -> Tiling:
    """Measured on an H200, of a dozen ways to cut it the quickest for 192 and 384 channels, and for 768 and 1,152. They
    fill a Hopper chip's shared memory and registers; other chips get what fits anywhere."""
    if x.is_cuda and x.shape[1] % 64 == 0:
        device = torch.cuda.get_device_properties(x.device)
        if device.major == 9 and x.shape[1] <= 512:
            return Tiling(128, 64, 64, 4, 3, 2 * device.multi_processor_count)
        if device.major == 9:
            return Tiling(128, 128, 64, 8, 3, device.multi_processor_count)
    return Tiling(64, 64, 32, 4, 2, 1024)


def _launch(x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The product ``(R, D)`` for x ``(R, C)`` and, on demand, ``x Wᵀ`` ``(R, 2·D)``."""
    (R, C), D = x.shape, weight.shape[0] // 2
    x = x if x.stride(1) == 1 and x.stride(0) % 16 == 0 else x.contiguous()  # rows are loaded 16 bytes at a time
    weight = weight.contiguous()
    out = x.new_empty((R, D))
    both = x.new_empty((R, 2 * D)) if keep else None
    if out.numel() == 0:
        return out, both
    BR, BD, BC, warps, stages, programs = tiling(x)
    options = {"BR": BR, "BD": BD, "BC": BC, "num_warps": warps, "num_stages": stages}
    grid = min(programs, triton.cdiv(R, BR) * triton.cdiv(D, BD))
    with torch.cuda.device_of(x):
        swiglu_kernel[(grid,)](x, weight, out, both, R, C, x.stride(0), D, KEEP=keep, EVEN=C % BC == 0, **options)
    return out, both


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@torch.library.custom_op("scanvas::swiglu_linear", mutates_args=())
def _forward(x: Tensor, weight: Tensor) -> Tensor:
    out, _ = _launch(_rows(x), weight, False)
    return out.view(*x.shape[:-1], out.shape[-1])


@_forward.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


@torch.library.custom_op("scanvas::swiglu_linear_kept", mutates_args=())
def _forward_kept(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and ``x Wᵀ``, of which the gradient is made."""
    out, both = _launch(_rows(x), weight, True)
    return out.view(*x.shape[:-1], out.shape[-1]), both.view(*x.shape[:-1], both.shape[-1])


@_forward_kept.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2)), x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, d_out, _):
    x, weight, both = ctx.saved_tensors
    d_both = product_backward(both, d_out)
    d_x = d_both @ weight if ctx.needs_input_grad[0] else None
    d_weight = _rows(d_both).T @ _rows(x) if ctx.needs_input_grad[1] else None
    return d_x, d_weight


_forward_kept.register_autograd(_differentiate, setup_context=_setup_context)


@register_flop_formula([torch.ops.scanvas.swiglu_linear, torch.ops.scanvas.swiglu_linear_kept])
def _flops(x_shape, weight_shape, *args, **kwargs) -> int:
    """Those of the matrix product, as PyTorch counts its own."""
    return 2 * math.prod(x_shape[:-1]) * math.prod(weight_shape)


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Arguments and result as ``reference.swiglu``; summed in float32."""
    if x.dtype not in DTYPES:
        raise TypeError(f"swiglu_linear: impl='triton' takes float16 and bfloat16, not {x.dtype}; use impl='torch'")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _forward_kept(x, weight)[0]
    return _forward(x, weight)

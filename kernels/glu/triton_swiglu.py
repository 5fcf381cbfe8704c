"""SwiGLU's first linear layer and product in Triton: ``x Wᵀ`` stays in registers but for what autograd will ask for."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from scanvas.kernels.gated.blocks import mm_add

from .triton import product_backward

DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _pairs(first, D, BD: tl.constexpr):
    """Rows of W for a tile of 2·BD columns of ``x Wᵀ``: a_d and b_d side by side, so that one matrix product makes both
    and one thread holds both. Beyond the last they repeat it, and are not stored."""
    pair = tl.arange(0, 2 * BD)
    return (tl.minimum(first + pair // 2, D - 1) + pair % 2 * D).to(tl.int64)


@triton.jit
def _store(out_ptr, both_ptr, acc, rows, first, R, D, KEEP: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    a, b = tl.split(tl.reshape(acc, (BR, BD, 2)))
    columns = first + tl.arange(0, BD)
    inside = (rows < R)[:, None] & (columns < D)[None, :]
    if KEEP:
        at = both_ptr + rows[:, None] * (2 * D) + columns[None, :]
        tl.store(at, a.to(both_ptr.dtype.element_ty), mask=inside)
        tl.store(at + D, b.to(both_ptr.dtype.element_ty), mask=inside)
    out = (a * tl.sigmoid(a) * b).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], out, mask=inside)


@triton.jit
def _tile(
    tile, x_ptr, weight_ptr, out_ptr, both_ptr, R, C, D, x_stride,
    KEEP: tl.constexpr, EVEN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(D, BD)
    rows = (tile // across).to(tl.int64) * BR + tl.arange(0, BR)
    first = tile % across * BD
    c = tl.arange(0, BC)
    x_at = x_ptr + tl.minimum(rows, R - 1)[:, None] * x_stride + c[None, :]
    weight_at = weight_ptr + _pairs(first, D, BD)[None, :] * C + c[:, None]
    acc = tl.zeros((BR, 2 * BD), tl.float32)
    for start in range(0, C, BC):
        if EVEN:
            x, weight = tl.load(x_at + start), tl.load(weight_at + start)
        else:
            inside = c < C - start
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=inside[:, None], other=0.0)
        acc = mm_add(x, weight, acc, "tf32")
    _store(out_ptr, both_ptr, acc, rows, first, R, D, KEEP, BR, BD)


@triton.jit(do_not_specialize=["R"])
def swiglu_kernel(
    x_ptr,  # (R, C), its rows x_stride apart
    weight_ptr,  # (2·D, C)
    out_ptr,  # (R, D)
    both_ptr,  # (R, 2·D), written with KEEP: x Wᵀ
    R,
    C,
    D,
    x_stride,
    PERSISTENT: tl.constexpr,
    KEEP: tl.constexpr,
    EVEN: tl.constexpr,  # C is a multiple of BC
    BR: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
):
    # Tiles of the same rows follow one another, so that x comes from the L2 cache after the first.
    if PERSISTENT:
        tiles = tl.cdiv(R, BR) * tl.cdiv(D, BD)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tile(tile, x_ptr, weight_ptr, out_ptr, both_ptr, R, C, D, x_stride, KEEP, EVEN, BR, BD, BC)
    else:
        _tile(tl.program_id(0), x_ptr, weight_ptr, out_ptr, both_ptr, R, C, D, x_stride, KEEP, EVEN, BR, BD, BC)


@triton.jit(do_not_specialize=["R"])
def swiglu_rows_kernel(
    x_ptr,  # (R, C), its rows x_stride apart
    weight_ptr,  # (2·D, C)
    out_ptr,  # (R, D)
    both_ptr,  # (R, 2·D), written with KEEP: x Wᵀ
    R,
    C,
    D,
    x_stride,
    PIECES: tl.constexpr,  # of BC columns, which are C
    KEEP: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program makes whole rows of the output, with its rows of x in shared memory throughout."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    x_at = x_ptr + tl.minimum(rows, R - 1)[:, None] * x_stride + c[None, :]
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces += (tl.load(x_at + i * BC),)
    for first in tl.range(0, D, BD, num_stages=STAGES):
        weight_at = weight_ptr + _pairs(first, D, BD)[None, :] * C + c[:, None]
        acc = tl.zeros((BR, 2 * BD), tl.float32)
        for i in tl.static_range(PIECES):
            acc = mm_add(pieces[i], tl.load(weight_at + i * BC), acc, "tf32")
        _store(out_ptr, both_ptr, acc, rows, first, R, D, KEEP, BR, BD)


class Tiling(NamedTuple):
    """How a product is cut, rows by columns of either half by channels a step, and how it is run."""

    BR: int = 128
    BD: int = 64
    BC: int = 64
    num_warps: int = 4
    num_stages: int = 3
    form: str = "tiles"  # or "persistent", or "rows"


def tiling(R: int, C: int, D: int) -> Tiling:
    if C <= 256 and C % 64 == 0:
        return Tiling(128, 32, 64, 8, 2, "rows")
    return Tiling()


def launch(x: Tensor, weight: Tensor, keep: bool, tiles: Tiling | None = None) -> tuple[Tensor, Tensor | None]:
    """The product ``(R, D)`` for x ``(R, C)`` and, on demand, ``x Wᵀ`` ``(R, 2·D)``."""
    (R, C), D = x.shape, weight.shape[0] // 2
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    out = x.new_empty((R, D))
    both = x.new_empty((R, 2 * D)) if keep else None
    if out.numel() == 0:
        return out, both
    BR, BD, BC, warps, stages, form = tiles or tiling(R, C, D)
    options = {"KEEP": keep, "BR": BR, "BD": BD, "BC": BC, "num_warps": warps, "num_stages": stages}
    arguments = (x, weight, out, both, R, C, D, x.stride(0))
    with torch.cuda.device_of(x):
        if form == "rows":
            swiglu_rows_kernel[(triton.cdiv(R, BR),)](*arguments, PIECES=C // BC, STAGES=stages, **options)
        else:
            grid = triton.cdiv(R, BR) * triton.cdiv(D, BD)
            if form == "persistent":
                grid = min(grid, 132 if BD == 128 else 264)
            swiglu_kernel[(grid,)](*arguments, PERSISTENT=form == "persistent", EVEN=C % BC == 0, **options)
    return out, both


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@torch.library.custom_op("scanvas::swiglu_linear", mutates_args=())
def _forward(x: Tensor, weight: Tensor) -> Tensor:
    out, _ = launch(_rows(x), weight, False)
    return out.view(*x.shape[:-1], out.shape[-1])


@_forward.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


@torch.library.custom_op("scanvas::swiglu_linear_kept", mutates_args=())
def _forward_kept(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and ``x Wᵀ``, of which the gradient is made."""
    out, both = launch(_rows(x), weight, True)
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

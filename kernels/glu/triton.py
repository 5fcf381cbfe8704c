"""The product of SwiGLU in Triton: one pass over both halves, forward and backward. Bound by memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _forward_kernel(
    x_ptr,  # (rows, 2·D)
    out_ptr,  # (rows, D)
    count,  # rows·D
    D,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    place = i + i // D * D
    a = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + place + D, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, (a * tl.sigmoid(a) * b).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,  # (rows, 2·D)
    d_out_ptr,  # (rows, D)
    d_x_ptr,  # (rows, 2·D)
    count,  # rows·D
    D,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    place = i + i // D * D
    a = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + place + D, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(d_out_ptr + i, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    d_a = g * b * s * (1.0 + a * (1.0 - s))
    tl.store(d_x_ptr + place, d_a.to(d_x_ptr.dtype.element_ty), mask=mask)
    tl.store(d_x_ptr + place + D, (g * a * s).to(d_x_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("scanvas::silu_product", mutates_args=())
def _forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    D = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], D), device=x.device, dtype=x.dtype)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(out.numel(), BLOCK),)](x, out, out.numel(), D, BLOCK=BLOCK, num_warps=4)
    return out


@_forward.register_fake
def _(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("scanvas::silu_product_backward", mutates_args=())
def _backward(x: Tensor, d_out: Tensor) -> Tensor:
    x, d_out = x.contiguous(), d_out.contiguous()
    D = d_out.shape[-1]
    d_x = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _backward_kernel[(triton.cdiv(d_out.numel(), BLOCK),)](
            x, d_out, d_x, d_out.numel(), D, BLOCK=BLOCK, num_warps=4
        )
    return d_x


@_backward.register_fake
def _(x, d_out):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, d_out):
    (x,) = ctx.saved_tensors
    return _backward(x, d_out)


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def product(x: Tensor) -> Tensor:
    """Argument and result as ``reference.product``; computed in float32 whatever the dtype."""
    if x.dtype == torch.float64:
        raise TypeError("silu_product: impl='triton' computes in float32, but x is float64; use impl='torch'")
    return _forward(x)

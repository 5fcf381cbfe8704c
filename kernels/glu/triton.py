"""The product of SwiGLU in Triton: one pass over both halves, forward and backward. Bound by memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.activation import sigmoid

BLOCK = 1024


@triton.jit
def _forward_kernel(
    x_ptr,  # (rows, 2·D)
    out_ptr,  # (rows, D), its rows out_stride apart; may be x_ptr
    count,  # rows·D
    D: tl.constexpr,
    out_stride: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    place = i + i // D * D
    a = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + place + D, mask=mask, other=0.0).to(tl.float32)
    out = (a * sigmoid(a) * b).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i + i // D * (out_stride - D), out, mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,  # (rows, 2·D)
    d_out_ptr,  # (rows, D)
    d_x_ptr,  # (rows, 2·D)
    count,  # rows·D
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    place = i + i // D * D
    a = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + place + D, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(d_out_ptr + i, mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(a)
    d_a = g * b * s * (1.0 + a * (1.0 - s))
    tl.store(d_x_ptr + place, d_a.to(d_x_ptr.dtype.element_ty), mask=mask)
    tl.store(d_x_ptr + place + D, (g * a * s).to(d_x_ptr.dtype.element_ty), mask=mask)


def _launch(x: Tensor, out: Tensor, D: int, out_stride: int) -> None:
    count = x.numel() // 2
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(count, BLOCK),)](x, out, count, D, out_stride, BLOCK=BLOCK, num_warps=4)


@torch.library.custom_op("scanvas::silu_product", mutates_args=())
def _forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    D = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], D), device=x.device, dtype=x.dtype)
    _launch(x, out, D, D)
    return out


@_forward.register_fake
def _(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("scanvas::silu_product_backward", mutates_args=())
def product_backward(x: Tensor, d_out: Tensor) -> Tensor:
    """The gradient of x, ``(…, 2·D)``, from that of the product ``(…, D)``."""
    x, d_out = x.contiguous(), d_out.contiguous()
    D = d_out.shape[-1]
    d_x = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _backward_kernel[(triton.cdiv(d_out.numel(), BLOCK),)](
            x, d_out, d_x, d_out.numel(), D, BLOCK=BLOCK, num_warps=4
        )
    return d_x


@product_backward.register_fake
def _(x, d_out):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, d_out):
    (x,) = ctx.saved_tensors
    return product_backward(x, d_out)


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@torch.library.custom_op("scanvas::silu_product_", mutates_args=("x",))
def _overwrite(x: Tensor) -> None:
    D = x.shape[-1] // 2
    _launch(x, x, D, 2 * D)


@_overwrite.register_fake
def _(x):
    return None


def _check(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise TypeError("silu_product: impl='triton' computes in float32, but x is float64; use impl='torch'")


def product(x: Tensor) -> Tensor:
    """Argument and result as ``reference.product``; computed in float32 whatever the dtype."""
    _check(x)
    return _forward(x)


def product_(x: Tensor) -> Tensor:
    """Argument and result as ``reference.product_``."""
    _check(x)
    if not x.is_contiguous():
        out = _forward(x)
        return x[..., : out.shape[-1]].copy_(out)
    _overwrite(x)
    return x[..., : x.shape[-1] // 2]

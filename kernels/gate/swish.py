"""Norm and gate of a head's output in Triton, one pass, forward and backward. A row is one head of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.activation import sigmoid
from scanvas.kernels.tiles import STAGES, Cut, shares, tile

from .places import by_token, gate_offset, spacing

FORWARD = Cut(elements=1024, warps=2)
BACKWARD = Cut(elements=1024, warps=2)


@triton.jit(do_not_specialize=["gate_stride"])
def _forward_kernel(
    o_ptr,  # (rows, D)
    gate_ptr,  # tokens gate_stride·UNIT apart
    weight_ptr,  # (D,)
    out_ptr,  # (rows, D)
    rows,
    gate_stride,
    eps,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    r, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    offset = r[:, None] * D + d[None, :]
    o = tl.load(o_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_offset(r, d, H, D, gate_stride, UNIT), mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    inverse = tl.rsqrt(tl.sum(o * o, axis=1) / D + eps)[:, None]
    y = o * inverse * weight * gate * sigmoid(gate)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["gate_stride"])
def _backward_kernel(
    o_ptr,  # (rows, D), this and all others but the weight and the last
    gate_ptr,  # tokens gate_stride·UNIT apart
    weight_ptr,  # (D,)
    d_out_ptr,
    d_o_ptr,
    d_gate_ptr,
    partial_ptr,  # (programs, D) float32, this program's share of the gradient of the weight
    rows,
    gate_stride,
    eps,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    d = tl.arange(0, BD)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros((BR, BD), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        r = (tl.program_id(0).to(tl.int64) * STEPS + step) * BR + tl.arange(0, BR)
        inside = (r < rows)[:, None] & (d < D)[None, :]
        offset = r[:, None] * D + d[None, :]
        o = tl.load(o_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + gate_offset(r, d, H, D, gate_stride, UNIT), mask=inside, other=0.0).to(tl.float32)
        g = tl.load(d_out_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        s = sigmoid(gate)
        inverse = tl.rsqrt(tl.sum(o * o, axis=1) / D + eps)[:, None]
        normed = o * inverse
        d_gate = g * normed * weight * s * (1.0 + gate * (1.0 - s))
        g *= gate * s
        d_weight += g * normed
        g *= weight
        d_o = inverse * (g - normed * (tl.sum(g * normed, axis=1)[:, None] / D))
        tl.store(d_o_ptr + offset, d_o.to(d_o_ptr.dtype.element_ty), mask=inside)
        tl.store(d_gate_ptr + offset, d_gate.to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * D + d, tl.sum(d_weight, axis=0), mask=d < D)


@torch.library.custom_op("scanvas::swish_norm", mutates_args=())
def _forward(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    o, gates = o.contiguous(), by_token(gate)
    H, D = o.shape[-2:]
    rows = o.numel() // D
    BR, BD = tile(D, FORWARD.elements)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(o):
        _forward_kernel[(triton.cdiv(rows, BR),)](
            o, gates, weight.contiguous(), out, rows, eps=eps, H=H, D=D, BR=BR, BD=BD, num_warps=FORWARD.warps,
            **spacing(gate=gates),
        )  # fmt: skip
    return out


@_forward.register_fake
def _(o, gate, weight, eps):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("scanvas::swish_norm_backward", mutates_args=())
def _backward(o: Tensor, gate: Tensor, weight: Tensor, d_out: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    o, gates, d_out = o.contiguous(), by_token(gate), d_out.contiguous()
    H, D = o.shape[-2:]
    rows = o.numel() // D
    BR, BD = tile(D, BACKWARD.elements)
    programs, steps = shares(triton.cdiv(rows, BR))
    d_o, d_gate = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (o, gate))
    partial = torch.empty((programs, D), device=o.device, dtype=torch.float32)
    with torch.cuda.device_of(o):
        _backward_kernel[(programs,)](
            o, gates, weight.contiguous(), d_out, d_o, d_gate, partial, rows, eps=eps, STEPS=steps, STAGES=STAGES,
            H=H, D=D, BR=BR, BD=BD, num_warps=BACKWARD.warps, **spacing(gate=gates),
        )  # fmt: skip
    return d_o, d_gate, partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(o, gate, weight, d_out, eps):
    return tuple(x.new_empty(x.shape) for x in (o, gate, weight))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, d_out):
    return *_backward(*ctx.saved_tensors, d_out, ctx.eps), None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def swish_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Arguments and result as ``reference.swish_norm``; computed in float32 whatever the dtypes."""
    if gate.dtype == torch.float64:
        raise TypeError("swish_norm: impl='triton' computes in float32, but gate is float64; use impl='torch'")
    return _forward(o, gate, weight, eps)

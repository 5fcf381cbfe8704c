"""The gated mix in Triton: two norms, gate, mix and SiLU in one pass, forward and backward.

A row is one head of one token. Bound by memory: three reads and a write forward, four reads and three writes backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.activation import sigmoid
from scanvas.kernels.tiles import STAGES, Cut, shares, tile

from .places import by_token, gate_offset, spacing

FORWARD = Cut(elements=512, warps=1)
BACKWARD = Cut(elements=512, warps=2)
PROGRAMS = 2048  # of the backward pass, at most


@triton.jit
def _load(o_ptr, local_ptr, gate_ptr, offset, place, mask):
    o = tl.load(o_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    local = tl.load(local_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return o, local, sigmoid(gate)


@triton.jit
def _inverse_rms(x, D, eps):
    return tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]


@triton.jit(do_not_specialize=["gate_stride"])
def _forward_kernel(
    o_ptr,  # (rows, D)
    local_ptr,  # (rows, D)
    gate_ptr,  # (rows, D), tokens gate_stride·UNIT apart
    ow_ptr,  # (D,)
    lw_ptr,  # (D,)
    out_ptr,  # (rows, D)
    rows,
    gate_stride,
    eps,
    SILU: tl.constexpr,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    r, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    mask = (r < rows)[:, None] & (d < D)[None, :]
    offset = r[:, None] * D + d[None, :]
    place = gate_offset(r, d, H, D, gate_stride, UNIT)
    o, local, s = _load(o_ptr, local_ptr, gate_ptr, offset, place, mask)
    ow = tl.load(ow_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    lw = tl.load(lw_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    normed = local * _inverse_rms(local, D, eps) * lw
    y = normed + s * (o * _inverse_rms(o, D, eps) * ow - normed)
    if SILU:
        y *= sigmoid(y)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(d_normed, x, inverse, weight, D):
    """Gradient of ``x · inverse_rms(x) · weight`` with respect to x."""
    g = d_normed * weight
    return inverse * (g - x * inverse * inverse * (tl.sum(g * x, axis=1)[:, None] / D))


@triton.jit(do_not_specialize=["gate_stride", "d_gate_stride"])
def _backward_kernel(
    o_ptr,  # (rows, D), this and all others but the weights
    local_ptr,
    gate_ptr,  # tokens gate_stride·UNIT apart
    ow_ptr,  # (D,)
    lw_ptr,  # (D,)
    d_out_ptr,
    d_o_ptr,
    d_local_ptr,
    d_gate_ptr,  # tokens d_gate_stride·UNIT apart
    partial_ptr,  # (programs, 2, D) float32, this program's share of the gradients of the weights
    rows,
    gate_stride,
    d_gate_stride,
    eps,
    SILU: tl.constexpr,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    d = tl.arange(0, BD)
    ow = tl.load(ow_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    lw = tl.load(lw_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    d_ow = tl.zeros((BR, BD), tl.float32)
    d_lw = tl.zeros((BR, BD), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BR * STEPS
    for step in tl.range(STEPS, num_stages=STAGES):
        r = first + step * BR + tl.arange(0, BR)
        mask = (r < rows)[:, None] & (d < D)[None, :]
        offset = r[:, None] * D + d[None, :]
        place = gate_offset(r, d, H, D, gate_stride, UNIT)
        o, local, s = _load(o_ptr, local_ptr, gate_ptr, offset, place, mask)
        gradient = tl.load(d_out_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        ro, rl = _inverse_rms(o, D, eps), _inverse_rms(local, D, eps)
        difference = o * ro * ow - local * rl * lw
        if SILU:
            y = local * rl * lw + s * difference
            sy = sigmoid(y)
            gradient *= sy * (1.0 + y * (1.0 - sy))
        d_o, d_l = gradient * s, gradient * (1.0 - s)
        d_gate = d_l * s * difference
        d_ow += d_o * o * ro
        d_lw += d_l * local * rl
        tl.store(d_o_ptr + offset, _norm_backward(d_o, o, ro, ow, D).to(d_o_ptr.dtype.element_ty), mask=mask)
        d_local = _norm_backward(d_l, local, rl, lw, D)
        tl.store(d_local_ptr + offset, d_local.to(d_local_ptr.dtype.element_ty), mask=mask)
        place = gate_offset(r, d, H, D, d_gate_stride, UNIT)
        tl.store(d_gate_ptr + place, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    out = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * D + d
    tl.store(out, tl.sum(d_ow, axis=0), mask=d < D)
    tl.store(out + D, tl.sum(d_lw, axis=0), mask=d < D)


def forward(
    o: Tensor, local: Tensor, gate: Tensor, o_weight: Tensor, local_weight: Tensor, eps: float, silu: bool
) -> Tensor:
    """The mix ``(B, N, H·D)``, without autograd."""
    o, local, gates = o.contiguous(), local.contiguous(), by_token(gate)
    H, D = o.shape[-2:]
    rows = o.numel() // D
    BR, BD = tile(D, FORWARD.elements)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(o):
        _forward_kernel[(triton.cdiv(rows, BR),)](
            o, local, gates, o_weight.contiguous(), local_weight.contiguous(), out, rows, eps=eps,
            SILU=silu, H=H, D=D, BR=BR, BD=BD, num_warps=FORWARD.warps, **spacing(gate=gates),
        )  # fmt: skip
    return out


def backward(
    o: Tensor,
    local: Tensor,
    gate: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    d_out: Tensor,
    eps: float,
    silu: bool,
    d_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all tensors; that of the gate is written into ``d_gate`` if given, part of a wider tensor."""
    o, local, d_out = (x.contiguous() for x in (o, local, d_out))
    gates = by_token(gate)
    H, D = o.shape[-2:]
    rows = o.numel() // D
    BR, BD = tile(D, BACKWARD.elements)
    programs, steps = shares(triton.cdiv(rows, BR), most=PROGRAMS)
    d_o, d_local = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (o, local))
    if d_gate is None:
        d_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    partial = torch.empty((programs, 2, D), device=o.device, dtype=torch.float32)
    with torch.cuda.device_of(o):
        _backward_kernel[(programs,)](
            o, local, gates, o_weight.contiguous(), local_weight.contiguous(), d_out, d_o, d_local, d_gate, partial,
            rows, eps=eps, SILU=silu, H=H, D=D, BR=BR, BD=BD, STEPS=steps, STAGES=STAGES, num_warps=BACKWARD.warps,
            **spacing(gate=gates, d_gate=d_gate.flatten(0, 1)),
        )  # fmt: skip
    weights = [d.to(w.dtype, copy=True) for d, w in zip(partial.sum(0), (o_weight, local_weight))]
    return d_o, d_local, d_gate, *weights


@torch.library.custom_op("scanvas::gated_mix", mutates_args=())
def _forward(
    o: Tensor, local: Tensor, gate: Tensor, o_weight: Tensor, local_weight: Tensor, eps: float, silu: bool
) -> Tensor:
    return forward(o, local, gate, o_weight, local_weight, eps, silu)


@_forward.register_fake
def _(o, local, gate, o_weight, local_weight, eps, silu):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("scanvas::gated_mix_backward", mutates_args=())
def _backward(
    o: Tensor,
    local: Tensor,
    gate: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    d_out: Tensor,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return backward(o, local, gate, o_weight, local_weight, d_out, eps, silu)


@_backward.register_fake
def _(o, local, gate, o_weight, local_weight, d_out, eps, silu):
    return tuple(x.new_empty(x.shape) for x in (o, local, gate, o_weight, local_weight))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, d_out):
    return *_backward(*ctx.saved_tensors, d_out, ctx.eps, ctx.silu), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def mix(
    o: Tensor, local: Tensor, gate: Tensor, o_weight: Tensor, local_weight: Tensor, eps: float, activation: str | None
) -> Tensor:
    """Arguments and result as ``reference.mix``; computed in float32 whatever the dtypes."""
    if gate.dtype == torch.float64:
        raise TypeError("gated_mix: impl='triton' computes in float32, but gate is float64; use impl='torch'")
    return _forward(o, local, gate, o_weight, local_weight, eps, activation == "silu")

"""The layer as one operator of the kernels of ``gated`` and ``gate``, whose gradients share a tensor.

What it saves in the backward, in bytes of a token of C channels in half precision: putting the gradients of the six
projections side by side (16·C), the sum of what reaches the features from the projections and from the mix (6·C), and
half of what PyTorch's sum for the biases reads, at a third of the bandwidth.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.gate import triton as gate
from scanvas.kernels.gated import launch
from scanvas.kernels.tiles import shares

from .reference import split

ROWS, COLUMNS, WARPS = 16, 128, 2  # of a tile of the sums for the biases


@triton.jit(do_not_specialize=["rows"])
def _column_sums_kernel(
    x_ptr,  # (rows, C), ROW apart
    partial_ptr,  # (programs, C) float32
    rows,
    ROW: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """A program sums BC columns of STEPS tiles of rows."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0).to(tl.int64) * (STEPS * BR)
    total = tl.zeros((BR, BC), tl.float32)
    for step in range(STEPS):
        r = first + step * BR + tl.arange(0, BR)
        inside = (r < rows)[:, None] & (c < C)[None, :]
        total += tl.load(x_ptr + r[:, None] * ROW + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(total, axis=0), mask=c < C)


def column_sums(x: Tensor) -> Tensor:
    """``(rows, C)``, channels side by side → ``(C,)`` in x's dtype, summed in float32."""
    rows, C = x.shape
    programs, steps = shares(triton.cdiv(rows, ROWS), most=512)
    partial = torch.empty((programs, C), device=x.device, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _column_sums_kernel[(programs, triton.cdiv(C, COLUMNS))](
            x, partial, rows, ROW=x.stride(0), C=C, STEPS=steps, BR=ROWS, BC=COLUMNS, num_warps=WARPS
        )
    return partial.sum(0).to(x.dtype)


@torch.library.custom_op("scanvas::gated_layer", mutates_args=())
def _forward(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    heads: int,
    normalizer: float,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and, for the backward, the projections and the output of the scans."""
    projected = F.linear(features, weight, F.pad(bias, (len(weight) - len(bias), 0)))
    q, k, v, f, r, out_gate = split(projected, features.shape[2], heads)
    o, _, _ = launch.forward(q, k, v, f, r, None, None, q.shape[-1] ** -0.5, normalizer, False)
    out = gate.forward(o, features, out_gate, o_weight, local_weight, eps, silu)
    return out, projected, o


@_forward.register_fake
def _(features, weight, bias, o_weight, local_weight, heads, normalizer, eps, silu):
    B, N, C = features.shape
    shapes = (B, N, C), (B, N, len(weight)), (B, N, heads, C // heads)
    return tuple(features.new_empty(shape) for shape in shapes)


@torch.library.custom_op("scanvas::gated_layer_backward", mutates_args=())
def _backward(
    features: Tensor,
    weight: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    projected: Tensor,
    o: Tensor,
    d_out: Tensor,
    heads: int,
    normalizer: float,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    C = features.shape[2]
    *inputs, out_gate = split(projected, C, heads)
    d_projected = torch.empty_like(projected)
    *d_inputs, d_out_gate = split(d_projected, C, heads)
    d_o, d_features, _, d_o_weight, d_local_weight = gate.backward(
        o, features, out_gate, o_weight, local_weight, d_out, eps, silu, d_gate=d_out_gate
    )
    scale = inputs[0].shape[-1] ** -0.5
    launch.backward(*inputs, d_o, None, None, None, None, scale, normalizer, into=tuple(d_inputs))
    rows = d_projected.flatten(0, 1)
    d_features.flatten(0, 1).addmm_(rows, weight)
    d_weight = rows.t() @ features.reshape(-1, C)
    d_bias = column_sums(rows[:, len(weight) // 2 :])  # gates are as wide as queries, keys and values together
    return d_features, d_weight, d_bias, d_o_weight, d_local_weight


@_backward.register_fake
def _(features, weight, o_weight, local_weight, projected, o, d_out, heads, normalizer, eps, silu):
    like = (features, weight, o_weight, local_weight)
    d_features, d_weight, *rest = (x.new_empty(x.shape) for x in like)
    return d_features, d_weight, weight.new_empty(len(weight) // 2), *rest


def _setup_context(ctx, inputs, output):
    features, weight, _, o_weight, local_weight, *ctx.settings = inputs
    _, projected, o = output
    ctx.save_for_backward(features, weight, o_weight, local_weight, projected, o)
    ctx.set_materialize_grads(False)  # no zeros for the second and third, which have no gradient


def _differentiate(ctx, d_out, _projected, _o):
    nothing = (None,) * 9
    if d_out is None:
        return nothing
    return *_backward(*ctx.saved_tensors, d_out, *ctx.settings), *nothing[5:]


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def layer(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    heads: int,
    normalizer: float,
    eps: float,
    activation: str | None,
) -> Tensor:
    """Arguments and result as ``reference.layer``; sums are float32 whatever the dtypes."""
    if features.dtype == torch.float64:
        raise TypeError("gated_layer: impl='triton' sums in float32, but features are float64; use impl='torch'")
    out, _, _ = _forward(features, weight, bias, o_weight, local_weight, heads, normalizer, eps, activation == "silu")
    return out

"""Norms of tokens in Triton, with the residual sum before them and the modulation after them, forward and backward.

Bound by memory: what is read and written once is the floor. PyTorch takes a pass for each of the steps, and its norms
reach a tenth of the bandwidth for rows of 64 to 400 channels. On an H200 norms, modulation, residual sums and changes
of the scan order took 2.5 ms of the 5.0 ms of DiG-S/2 at 1792 pixels; with these kernels and that of the output gate it
takes 3.1 ms (2.9 predicted), and ViG-T at 1024² 7.3 ms instead of 8.5.
"""

import torch
import triton
from torch import Tensor

from scanvas.kernels.scan_order import ORDERS
from scanvas.kernels.tiles import STAGES, Cut, shares, tile

from .kernels import norm_backward_kernel, norm_kernel
from .reference import Norm

FORWARD = Cut()
BACKWARD = Cut(elements=512, warps=1)
PROGRAMS = 2048  # of the backward pass, at most


def _tile(C: int, cut: Cut) -> dict[str, int]:
    BR, BC = tile(C, cut.elements)
    return {"BR": BR, "BC": BC, "num_warps": max(cut.warps, BC // 1024)}


def _rows(x: Tensor, *per_image: Tensor | None, order: str) -> tuple[int, int, int]:
    """Images, tokens of an image and channels; all tokens are one image's where nothing depends on the image."""
    B, N, C = x.shape
    return (1, B * N, C) if order == "raster" and all(v is None for v in per_image) else (B, N, C)


def _stride(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.stride(0)


def _dense(vector: Tensor | None) -> Tensor | None:
    """A vector for each image whose channels lie side by side, as they do in a slice of a condition."""
    return vector if vector is None or vector.stride(-1) == 1 else vector.contiguous()


def _shared(branch: Tensor | None) -> int:
    """1 if a branch is the same tokens for all images, 2 if the same for all tokens: it is not copied to be so."""
    if branch is None or branch.stride(0) != 0 or branch.stride(2) != 1:
        return 0
    return 2 if branch.stride(1) == 0 else 1 if branch.stride(1) == branch.shape[2] else 0


def _forward(x, branch, gate, weight, bias, shift, scale, norm: Norm | None, order: str, grid) -> tuple[Tensor, ...]:
    """The sum, if there is a branch, and its norm, unless ``norm`` is ``None``."""
    gate, shift, scale = _dense(gate), _dense(shift), _dense(scale)
    x, shared = x.contiguous(), _shared(branch)
    B, N, C = x.shape if shared else _rows(x, gate, shift, order=order)
    columns, backwards = ORDERS[order]
    dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    total = None if branch is None else torch.empty_like(x, dtype=dtype)
    out = None if norm is None else torch.empty_like(x, dtype=dtype)
    cut = _tile(C, FORWARD)
    if x.numel():
        with torch.cuda.device_of(x):
            norm_kernel[(B * triton.cdiv(N, cut["BR"]),)](
                x, branch if branch is None or shared else branch.contiguous(), gate,
                None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous(),
                shift, scale, total, out, N, *grid, _stride(gate), _stride(shift), _stride(scale),
                0.0 if norm is None else norm.eps, C=C, BRANCH=branch is not None, SHARED=shared,
                GATE=gate is not None, NORM=norm is not None, LAYER=norm is not None and norm.layer,
                WEIGHT=weight is not None, BIAS=bias is not None, MODULATE=shift is not None, COLUMNS=columns,
                BACKWARDS=backwards, **cut,
            )  # fmt: skip
    return tuple(y for y in (total, out) if y is not None)


@torch.library.custom_op("scanvas::norm_backward", mutates_args=())
def _backward(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    d_sum: Tensor | None,
    d_out: Tensor | None,
    layer: bool,
    eps: float,
    order: str,
    H: int,
    W: int,
) -> list[Tensor]:
    """Gradients of x (unless it is that of the sum), branch (unless it is x's), gate, weight, bias, shift, scale: those
    which are there. ``branch`` is given if it has a gate, ``d_sum`` if there was a branch."""
    gate, scale = _dense(gate), _dense(scale)
    B, N, C = _rows(x, gate, scale, order=order)
    columns, backwards = ORDERS[order]
    cut = _tile(C, BACKWARD)
    programs, steps = shares(triton.cdiv(N, cut["BR"]), most=triton.cdiv(PROGRAMS, B))
    moved = d_sum is not None and (gate is not None or columns or backwards)
    d_x = None if d_out is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    d_branch = (
        torch.empty_like(x if branch is None else branch, memory_format=torch.contiguous_format) if moved else None
    )
    partial = torch.empty((B, programs, 5, C), device=x.device, dtype=torch.float32)
    inputs = [None if y is None else y.contiguous() for y in (x, branch, weight, bias, d_sum, d_out)]
    if x.numel():
        with torch.cuda.device_of(x):
            norm_backward_kernel[(B * programs,)](
                inputs[0], inputs[1], gate, inputs[2], inputs[3], scale, inputs[4], inputs[5], d_x, d_branch, partial,
                N, H, W, _stride(gate), _stride(scale), eps, programs, C=C, BRANCH=d_sum is not None,
                GATE=gate is not None, NORM=d_out is not None, LAYER=layer, WEIGHT=weight is not None,
                BIAS=bias is not None, MODULATE=scale is not None, COLUMNS=columns, BACKWARDS=backwards,
                STEPS=steps, STAGES=STAGES, **cut,
            )  # fmt: skip
    else:
        partial.zero_()
    grads = [d_x, d_branch]
    for i, (like, image) in enumerate(((gate, True), (weight, False), (bias, False), (scale, True), (scale, True))):
        if like is not None:
            total = partial[:, :, i].sum(1, keepdim=True) if image else partial[:, :, i].sum((0, 1))
            grads.append(total.to(like.dtype))
    return [g for g in grads if g is not None]


@_backward.register_fake
def _(x, branch, gate, weight, bias, scale, d_sum, d_out, layer, eps, order, H, W):
    moved = d_sum is not None and (gate is not None or order != "raster")
    d_branch = x if branch is None else branch
    like = [None if d_out is None else x, d_branch if moved else None, gate, weight, bias, scale, scale]
    return [y.new_empty(y.shape) for y in like if y is not None]


def _differentiate(ctx, x, branch, gate, weight, bias, scale, d_sum, d_out) -> list[Tensor | None]:
    """Gradients of x, branch, gate, weight, bias, shift and scale, ``None`` for those which are not there."""
    grads = _backward(x, branch, gate, weight, bias, scale, d_sum, d_out, *ctx.settings)
    order = ctx.settings[2]
    moved = d_sum is not None and (gate is not None or order != "raster")
    present = [d_out is not None, moved, *(y is not None for y in (gate, weight, bias, scale, scale))]
    result: list[Tensor | None] = [grads.pop(0) if there else None for there in present]
    if result[0] is None:
        result[0] = d_sum
    if d_sum is not None:
        result[0] = result[0].to(ctx.dtypes[0])
        result[1] = (result[1] if moved else result[0]).to(ctx.dtypes[1])
    return result


@torch.library.custom_op("scanvas::token_norm", mutates_args=())
def _token_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    layer: bool,
    eps: float,
    order: str,
    H: int,
    W: int,
) -> Tensor:
    return _forward(x, None, None, weight, bias, shift, scale, Norm(layer, eps, order, (H, W)), order, (H, W))[0]


@_token_norm.register_fake
def _(x, *_):
    return x.new_empty(x.shape)


def _token_norm_context(ctx, inputs, output):
    x, weight, bias, _, scale, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, bias, scale)


def _token_norm_backward(ctx, d_out):
    x, weight, bias, scale = ctx.saved_tensors
    d_x, _, _, *rest = _differentiate(ctx, x, None, None, weight, bias, scale, None, d_out)
    return d_x, *rest, None, None, None, None, None


_token_norm.register_autograd(_token_norm_backward, setup_context=_token_norm_context)


@torch.library.custom_op("scanvas::add_norm", mutates_args=())
def _add_norm(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    layer: bool,
    eps: float,
    order: str,
    H: int,
    W: int,
) -> tuple[Tensor, Tensor]:
    norm = Norm(layer, eps, order, (H, W))
    return _forward(x, branch, gate, weight, bias, shift, scale, norm, order, (H, W))


@_add_norm.register_fake
def _(x, branch, *_):
    dtype = torch.promote_types(x.dtype, branch.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def _add_norm_context(ctx, inputs, output):
    x, branch, gate, weight, bias, _, scale, *ctx.settings = inputs
    ctx.dtypes = x.dtype, branch.dtype
    # The branch is wanted for the gradient of the gate alone.
    ctx.save_for_backward(output[0], None if gate is None else branch, gate, weight, bias, scale)


def _add_norm_backward(ctx, d_sum, d_out):
    grads = _differentiate(ctx, *ctx.saved_tensors, d_sum, d_out)
    return *grads, None, None, None, None, None


_add_norm.register_autograd(_add_norm_backward, setup_context=_add_norm_context)


@torch.library.custom_op("scanvas::gated_add", mutates_args=())
def _gated_add(x: Tensor, branch: Tensor, gate: Tensor | None, order: str, H: int, W: int) -> Tensor:
    return _forward(x, branch, gate, None, None, None, None, None, order, (H, W))[0]


@_gated_add.register_fake
def _(x, branch, *_):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))


def _gated_add_context(ctx, inputs, output):
    x, branch, gate, *order = inputs
    ctx.settings = [False, 0.0, *order]
    ctx.dtypes = x.dtype, branch.dtype
    ctx.save_for_backward(None if gate is None else branch, gate)


def _gated_add_backward(ctx, d_sum):
    branch, gate = ctx.saved_tensors
    grads = _differentiate(ctx, d_sum, branch, gate, None, None, None, d_sum, None)
    return *grads[:3], None, None, None


_gated_add.register_autograd(_gated_add_backward, setup_context=_gated_add_context)


def _check(op: str, x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise TypeError(f"{op}: impl='triton' computes in float32, but x is float64; use impl='torch'")


def token_norm(x, weight, bias, shift, scale, norm: Norm) -> Tensor:
    """Arguments and result as ``reference.token_norm``; computed in float32 whatever the dtypes."""
    _check("token_norm", x)
    return _token_norm(x, weight, bias, shift, scale, norm.layer, norm.eps, norm.order, *norm.grid)


def add_norm(x, branch, gate, weight, bias, shift, scale, norm: Norm) -> tuple[Tensor, Tensor]:
    """Arguments and results as ``reference.add_norm``; computed in float32 whatever the dtypes."""
    _check("add_norm", x)
    return _add_norm(x, branch, gate, weight, bias, shift, scale, norm.layer, norm.eps, norm.order, *norm.grid)


def gated_add(x, branch, gate, order: str, grid: tuple[int, int]) -> Tensor:
    """Arguments and result as ``reference.gated_add``; computed in float32 whatever the dtypes."""
    _check("gated_add", x)
    return _gated_add(x, branch, gate, order, *grid)

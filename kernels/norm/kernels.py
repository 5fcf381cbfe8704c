"""The Triton kernels of ``triton``: a program takes some rows, each the channels of a token."""

import triton
import triton.language as tl


@triton.jit
def _raster(t, N, H, W, COLUMNS: tl.constexpr, BACKWARDS: tl.constexpr):
    """Raster index of the t-th token visited; see ``scan_order``."""
    if BACKWARDS:
        t = N - 1 - t
    if COLUMNS:
        t = t % H * W + t // H
    return t


@triton.jit
def _normalise(x, inside, C: tl.constexpr, eps, LAYER: tl.constexpr):
    """Normalised rows and the factor which they were multiplied with."""
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=1)[:, None] / C, 0.0)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)[:, None]
    return x * factor, factor


@triton.jit
def _vector(pointer, offset, c, C: tl.constexpr, PRESENT: tl.constexpr, default: tl.constexpr):
    """``(1, channels)`` float32, or a constant where the operation has no such argument."""
    if PRESENT:
        return tl.load(pointer + offset + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.full((1, c.shape[0]), default, tl.float32)


@triton.jit
def norm_kernel(
    x_ptr,  # (B, N, C), raster order
    branch_ptr,  # (B, N, C), scan order; (N, C) if it is SHARED by the images, (C,) if by all tokens, too: 1, 2
    gate_ptr,  # (B, C), images gate_stride apart
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    shift_ptr,  # (B, C), images shift_stride apart
    scale_ptr,  # (B, C), images scale_stride apart
    sum_ptr,  # (B, N, C), raster order
    out_ptr,  # (B, N, C), raster order after a branch, else scan order
    N,
    H,
    W,
    gate_stride,
    shift_stride,
    scale_stride,
    eps,
    C: tl.constexpr,
    BRANCH: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MODULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    blocks = tl.cdiv(N, BR)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    t, c = tl.program_id(0) % blocks * BR + tl.arange(0, BR), tl.arange(0, BC)
    inside = (t < N)[:, None] & (c < C)[None, :]
    scan = (image * N + t)[:, None] * C + c[None, :]
    raster = (image * N + _raster(t, N, H, W, COLUMNS, BACKWARDS))[:, None] * C + c[None, :]

    x = tl.load(x_ptr + raster, mask=inside, other=0.0).to(tl.float32)
    if BRANCH:
        gate = _vector(gate_ptr, image * gate_stride, c, C, GATE, 1.0)
        of_branch = scan
        if SHARED > 0:
            of_branch = (t.to(tl.int64) * (1 if SHARED == 1 else 0))[:, None] * C + c[None, :]
        total = x + gate * tl.load(branch_ptr + of_branch, mask=inside, other=0.0).to(tl.float32)
        total = total.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + raster, total, mask=inside)
        x = total.to(tl.float32)  # the norm is of what is stored, as the backward pass will see it
    if NORM:
        z, _ = _normalise(x, inside, C, eps, LAYER)
        z = z * _vector(weight_ptr, 0, c, C, WEIGHT, 1.0) + _vector(bias_ptr, 0, c, C, BIAS, 0.0)
        if MODULATE:
            scale = _vector(scale_ptr, image * scale_stride, c, C, True, 0.0)
            z = z + (z * scale + _vector(shift_ptr, image * shift_stride, c, C, True, 0.0))
        tl.store(out_ptr + (raster if BRANCH else scan), z.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    x_ptr,  # (B, N, C), what was normalised, raster order
    branch_ptr,  # (B, N, C), scan order
    gate_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    d_sum_ptr,  # (B, N, C), raster order
    d_out_ptr,  # (B, N, C), raster order after a branch, else scan order
    d_x_ptr,  # (B, N, C), raster order
    d_branch_ptr,  # (B, N, C), scan order
    partial_ptr,  # (programs, 5, C) float32: shares of gate, weight, bias, shift, scale
    N,
    H,
    W,
    gate_stride,
    scale_stride,
    eps,
    programs,  # for an image
    C: tl.constexpr,
    BRANCH: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MODULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    image = (tl.program_id(0) // programs).to(tl.int64)
    c = tl.arange(0, BC)
    gate = _vector(gate_ptr, image * gate_stride, c, C, GATE, 1.0)
    weight = _vector(weight_ptr, 0, c, C, WEIGHT, 1.0)
    bias = _vector(bias_ptr, 0, c, C, BIAS, 0.0)
    scale = _vector(scale_ptr, image * scale_stride, c, C, MODULATE, 0.0)
    d_gate = tl.zeros((BR, BC), tl.float32)
    d_weight = tl.zeros((BR, BC), tl.float32)
    d_bias = tl.zeros((BR, BC), tl.float32)
    d_shift = tl.zeros((BR, BC), tl.float32)
    d_scale = tl.zeros((BR, BC), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        t = (tl.program_id(0) % programs * STEPS + step) * BR + tl.arange(0, BR)
        inside = (t < N)[:, None] & (c < C)[None, :]
        scan = (image * N + t)[:, None] * C + c[None, :]
        raster = (image * N + _raster(t, N, H, W, COLUMNS, BACKWARDS))[:, None] * C + c[None, :]
        d_x = tl.zeros((BR, BC), tl.float32)
        if BRANCH:
            d_x += tl.load(d_sum_ptr + raster, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            x = tl.load(x_ptr + raster, mask=inside, other=0.0).to(tl.float32)
            z, factor = _normalise(x, inside, C, eps, LAYER)
            g = tl.load(d_out_ptr + (raster if BRANCH else scan), mask=inside, other=0.0).to(tl.float32)
            if MODULATE:
                d_shift += g
                d_scale += g * (z * weight + bias)
                g += g * scale
            if BIAS:
                d_bias += g
            if WEIGHT:
                d_weight += g * z
                g *= weight
            along = z * (tl.sum(g * z, axis=1)[:, None] / C)
            if LAYER:
                along += tl.sum(g, axis=1)[:, None] / C
            d_x += factor * (g - along)
            tl.store(d_x_ptr + raster, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        if GATE:
            d_gate += d_x * tl.load(branch_ptr + scan, mask=inside, other=0.0).to(tl.float32)
        if BRANCH and (GATE or (COLUMNS or BACKWARDS)):  # Triton 3.2 knows no chains
            tl.store(d_branch_ptr + scan, (d_x * gate).to(d_branch_ptr.dtype.element_ty), mask=inside)
    out = partial_ptr + tl.program_id(0).to(tl.int64) * 5 * C + c
    if GATE:
        tl.store(out, tl.sum(d_gate, axis=0), mask=c < C)
    if WEIGHT:
        tl.store(out + C, tl.sum(d_weight, axis=0), mask=c < C)
    if BIAS:
        tl.store(out + 2 * C, tl.sum(d_bias, axis=0), mask=c < C)
    if MODULATE:
        tl.store(out + 3 * C, tl.sum(d_shift, axis=0), mask=c < C)
        tl.store(out + 4 * C, tl.sum(d_scale, axis=0), mask=c < C)

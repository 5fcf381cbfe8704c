"""``swiglu_linear``: checks and dispatch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels import dispatch

from .api import silu_product, silu_product_
from .reference import swiglu

LINEAR_IMPLEMENTATIONS: dict[str, Callable] = {"torch": swiglu}
if dispatch.TRITON_USABLE:
    from . import triton_swiglu

    if triton_swiglu.SUPPORTED:
        LINEAR_IMPLEMENTATIONS["triton"] = triton_swiglu.swiglu


def _dtypes(x: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Those in which a linear layer takes its arguments: autocast leaves float64 alone."""
    device = x.device.type
    if not dispatch.autocasts(device):
        return x.dtype, weight.dtype
    low = torch.get_autocast_dtype(device)
    first, second = (t.dtype if t.dtype == torch.float64 else low for t in (x, weight))
    return first, second


def swiglu_is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether ``swiglu_linear`` takes one kernel of its own accord.

    On an H200 in bfloat16, against cuBLAS and ``silu_product_`` (rows, C, D: microseconds of both, ratio; the latter
    with ``x Wᵀ`` written for autograd)::

        65,536 192   512:  61, 106, 1.73; 1.20        16,384   768 2,048:   172,   196, 1.14; 0.97
        12,544 192   512:  15,  23, 1.59; 1.20        50,176   768 2,048:   566,   633, 1.12; 0.98
        50,176 384 1,024: 149, 203, 1.37; 1.10        65,536 1,152 3,072: 1,602, 1,808, 1.13; 0.95
        12,544 384 1,024:  39,  58, 1.47; 1.18         3,136   384 1,024:    15,    16, 1.04; 0.88

    What is saved is time to write and read ``x Wᵀ``, a share of the whole that falls with C, while cuBLAS is the better
    at the matrix product. In training PyTorch's product stays: of what the second ratio promises nothing was seen in
    whole steps (ViG-S, 384 channels: 7,322 images/s with the kernel, 7,536 without, in two runs). Other chips were not
    measured.
    """
    if "triton" not in LINEAR_IMPLEMENTATIONS or x.device.type != "cuda" or weight.device != x.device:
        return False
    dtype, other = _dtypes(x, weight)
    if dtype != other or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    (width, C), rows = weight.shape, x.numel() // max(1, x.shape[-1])
    return C <= 1152 and C % 64 == 0 and rows * width >= 2**23 and dispatch.is_hopper(x.device.index)


def swiglu_linear(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """``SiLU(a) ⊙ b`` with ``(a, b) = x Wᵀ``: SwiGLU up to its second linear layer (arXiv:2002.05202, eq. 6).

    In one kernel the widest tensor of a backbone, ``x Wᵀ``, is never written in inference, and written but not read
    again in the forward pass of training. Under autocast, x and W are cast as those of a linear layer are.

    Args:
        x: ``(…, C)``.
        weight: ``(2·D, C)`` in x's dtype.
        impl: ``"torch"``; ``"triton"``, one kernel, for float16 and bfloat16; or ``"auto"``, which takes the kernel
            where it is the quicker (``swiglu_is_fused``), elsewhere PyTorch's matrix product and ``silu_product``.

    Returns:
        ``(…, D)`` in x's dtype, or autocast's.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or ``impl`` is unknown.
    """
    dispatch.check_tensors("swiglu_linear", x=x, weight=weight)
    if weight.ndim != 2 or weight.shape[0] % 2:
        raise ValueError(f"swiglu_linear: weight must be (2·D, C), got shape {tuple(weight.shape)}")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"swiglu_linear: x must be (…, C) with C = {weight.shape[1]}, got shape {tuple(x.shape)}")
    dtype, other = _dtypes(x, weight)
    if dtype != other:
        raise TypeError(f"swiglu_linear: weight must have x's dtype, {dtype}, got {other}")
    if impl == "auto" and not swiglu_is_fused(x, weight):
        both = F.linear(x, weight)
        return silu_product(both) if both.requires_grad else silu_product_(both)
    name = dispatch.resolve("swiglu_linear", impl, x.device, LINEAR_IMPLEMENTATIONS, dtype)
    return LINEAR_IMPLEMENTATIONS[name](x.to(dtype), weight.to(dtype))

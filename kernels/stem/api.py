"""``stem``: checks and dispatch."""

from collections.abc import Callable

import torch
from torch import Tensor

from scanvas.kernels import dispatch

from . import reference

IMPLEMENTATIONS: dict[str, Callable] = {"torch": reference.stem}
if dispatch.TRITON_USABLE:
    from . import triton

    IMPLEMENTATIONS["triton"] = triton.stem
WIDEST = 256  # channels of an output that a program of the kernel can hold


def is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether ``stem`` takes one kernel of its own accord: for half precision on a GPU, with a stride of 8, where no
    gradient is recorded. Other chips than Hopper's were not measured."""
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if "triton" not in IMPLEMENTATIONS or trained or x.device.type != "cuda" or dispatch.autocasts("cuda"):
        return False
    if weight.shape[-1] != 9 or len(weight) > WIDEST or weight.device != x.device:
        return False
    half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    return half and dispatch.is_hopper(x.device.index)


def stem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    stride: int,
    eps: float = 1e-5,
    impl: str = "auto",
) -> Tensor:
    """``SiLU(LayerNorm(Conv2d(x)))``, a stem's first convolution, with padding 1, and what follows it.

    The convolution makes many outputs of few channels: its floor is to read the image and to write the result once,
    which cuDNN, bias, norm and SiLU of their own do four times over.

    Args:
        x: ``(B, C, H, W)``, any strides.
        weight, bias: ``(D, C, k, k)`` with k = stride + 1, and ``(D,)``.
        norm_weight, norm_bias: ``(D,)``.
        stride: of the convolution; must divide H and W.
        eps: of the norm.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the latter is for inference, in float16 or bfloat16, with a
            stride of 8.

    Returns:
        ``(B, H/stride · W/stride, D)``, in raster order, in x's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or ``impl`` is unknown.
        RuntimeError: ``impl="triton"`` while a gradient is being recorded.
    """
    vectors = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    dispatch.check_tensors("stem", x=x, weight=weight, **vectors)
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[1:] != (x.shape[1], stride + 1, stride + 1):
        raise ValueError(
            f"stem: weight must be (D, C, k, k) with k = stride + 1 = {stride + 1} for x (B, C, H, W), got weight "
            f"{tuple(weight.shape)} and x {tuple(x.shape)}"
        )
    if x.shape[2] % stride or x.shape[3] % stride:
        raise ValueError(f"stem: stride {stride} must divide the sides of x, got {tuple(x.shape[2:])}")
    for name, vector in vectors.items():
        if vector.shape != weight.shape[:1]:
            raise ValueError(f"stem: {name} must be ({len(weight)},), got {tuple(vector.shape)}")
    if impl == "auto":
        impl = "triton" if is_fused(x, weight) else "torch"
    name = dispatch.resolve("stem", impl, x.device, IMPLEMENTATIONS, x.dtype)
    return IMPLEMENTATIONS[name](x, weight, bias, norm_weight, norm_bias, stride, eps)

"""``silu_product``: checks and dispatch."""

from collections.abc import Callable

import torch
from torch import Tensor

from scanvas.kernels import dispatch

from .reference import product, product_

IMPLEMENTATIONS: dict[str, Callable] = {"torch": product}
IN_PLACE: dict[str, Callable] = {"torch": product_}
if dispatch.TRITON_USABLE:
    from . import triton

    IMPLEMENTATIONS["triton"] = triton.product
    IN_PLACE["triton"] = triton.product_


def silu_product(x: Tensor, *, impl: str = "auto") -> Tensor:
    """``SiLU(a) ⊙ b`` for ``x = [a, b]``, the product of SwiGLU (arXiv:2002.05202, eq. 6).

    PyTorch takes two passes over halves that are strided; on an H200 they were a fifth of ViG-S' time.

    Args:
        x: ``(…, 2·D)``.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        ``(…, D)`` in x's dtype.

    Raises:
        ValueError: the last dimension is odd, or ``impl`` is unknown.
    """
    return _run(IMPLEMENTATIONS, x, impl)


def silu_product_(x: Tensor, *, impl: str = "auto") -> Tensor:
    """The same, written over the first half of ``x``, of which the result is a view: for inference, where ``[a, b]`` is
    the widest tensor of a backbone and not wanted again.

    Raises:
        RuntimeError: a gradient is being recorded, which needs ``x`` as it was.
        ValueError: as ``silu_product``.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("silu_product_: x requires grad, and its gradient needs what would be overwritten")
    return _run(IN_PLACE, x, impl)


def _run(implementations: dict[str, Callable], x: Tensor, impl: str) -> Tensor:
    if x.shape[-1] % 2:
        raise ValueError(f"silu_product: the last dimension of x must be even, got shape {tuple(x.shape)}")
    return implementations[dispatch.resolve("silu_product", impl, x.device, implementations, x.dtype)](x)

"""``silu_product``: checks and dispatch."""

from collections.abc import Callable

from torch import Tensor

from scanvas.kernels import dispatch

from .reference import product

IMPLEMENTATIONS: dict[str, Callable] = {"torch": product}
if dispatch.TRITON_USABLE:
    from . import triton

    IMPLEMENTATIONS["triton"] = triton.product


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
    if x.shape[-1] % 2:
        raise ValueError(f"silu_product: the last dimension of x must be even, got shape {tuple(x.shape)}")
    return IMPLEMENTATIONS[dispatch.resolve("silu_product", impl, x.device, IMPLEMENTATIONS, x.dtype)](x)

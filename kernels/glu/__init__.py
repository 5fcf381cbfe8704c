"""The product in SwiGLU, alone or with the linear layer before it: see ``silu_product`` and ``swiglu_linear``."""

from .api import IMPLEMENTATIONS, silu_product, silu_product_
from .swiglu import LINEAR_IMPLEMENTATIONS, swiglu_is_fused, swiglu_linear

__all__ = [
    "IMPLEMENTATIONS",
    "LINEAR_IMPLEMENTATIONS",
    "silu_product",
    "silu_product_",
    "swiglu_is_fused",
    "swiglu_linear",
]

"""The product in SwiGLU: see ``silu_product``."""

from .api import IMPLEMENTATIONS, silu_product, silu_product_

__all__ = ["IMPLEMENTATIONS", "silu_product", "silu_product_"]

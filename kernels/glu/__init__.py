"""The product in SwiGLU: see ``silu_product``."""

from .api import IMPLEMENTATIONS, silu_product

__all__ = ["IMPLEMENTATIONS", "silu_product"]

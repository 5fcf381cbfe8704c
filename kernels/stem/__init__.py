"""The first layers of a backbone as one operation: see ``stem``."""

from .api import IMPLEMENTATIONS, is_fused, stem

__all__ = ["IMPLEMENTATIONS", "is_fused", "stem"]

"""Gated mix of global and local features: see ``gated_mix``."""

from .api import IMPLEMENTATIONS, gated_mix

__all__ = ["IMPLEMENTATIONS", "gated_mix"]

"""What is done to the output of a head: see ``gated_mix`` and ``swish_norm``."""

from .api import IMPLEMENTATIONS, SWISH_IMPLEMENTATIONS, gated_mix, swish_norm

__all__ = ["IMPLEMENTATIONS", "SWISH_IMPLEMENTATIONS", "gated_mix", "swish_norm"]

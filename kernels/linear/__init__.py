"""Division-normalised linear attention: see ``linear_attention``."""

from .api import IMPLEMENTATIONS, attention_matrix, linear_attention

__all__ = ["IMPLEMENTATIONS", "attention_matrix", "linear_attention"]

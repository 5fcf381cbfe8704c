"""Gated linear attention, causal or bidirectional: see ``gated_linear_attention``."""

from .api import IMPLEMENTATIONS, gated_linear_attention, gated_linear_attention_from_logits
from .reference import attention_matrix
from .rows import attention_rows

__all__ = [
    "IMPLEMENTATIONS",
    "attention_matrix",
    "attention_rows",
    "gated_linear_attention",
    "gated_linear_attention_from_logits",
]

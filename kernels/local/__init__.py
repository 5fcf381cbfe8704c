"""Softmax attention to a disc of neighbours, alone or with linear attention to the rest: see ``local_attention``."""

from .api import HYBRID_IMPLEMENTATIONS, IMPLEMENTATIONS, hybrid_attention, local_attention
from .disc import count_pairs
from .reference import attention_matrix, hybrid_matrix

__all__ = [
    "HYBRID_IMPLEMENTATIONS",
    "IMPLEMENTATIONS",
    "attention_matrix",
    "count_pairs",
    "hybrid_attention",
    "hybrid_matrix",
    "local_attention",
]

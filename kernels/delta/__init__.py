"""The gated delta rule: see ``gated_delta_rule``."""

from .api import IMPLEMENTATIONS, gated_delta_rule
from .fla import refusal
from .rows import attention_rows

__all__ = ["IMPLEMENTATIONS", "attention_rows", "gated_delta_rule", "refusal"]

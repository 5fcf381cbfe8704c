"""Norms of tokens with what stands beside them in a block: see ``token_norm``, ``add_norm`` and ``gated_add``."""

from .api import IMPLEMENTATIONS, KINDS, add_norm, gated_add, token_norm

__all__ = ["IMPLEMENTATIONS", "KINDS", "add_norm", "gated_add", "token_norm"]

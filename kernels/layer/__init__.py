"""ViG's mixer between its convolution and its output projection as one operator: see ``gated_layer``."""

from .api import IMPLEMENTATIONS, compose_projections, gated_layer, gated_layer_pays

__all__ = ["IMPLEMENTATIONS", "compose_projections", "gated_layer", "gated_layer_pays"]

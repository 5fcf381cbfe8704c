"""Looking inside: attention maps of anything scanvas, timm and diffusers build, exact and without ``N²`` memory."""

from .api import AttentionMaps, attention_maps
from .attribution import deletion_insertion, relevance
from .explanation import Explanation, explain
from .layers import LayerMap
from .receptive import ReceptiveField, effective_receptive_field
from .steps import StepMaps, attention_over_steps

__all__ = [
    "AttentionMaps",
    "Explanation",
    "LayerMap",
    "ReceptiveField",
    "StepMaps",
    "attention_maps",
    "attention_over_steps",
    "deletion_insertion",
    "effective_receptive_field",
    "explain",
    "relevance",
]

"""Token mixers by name. A mixer is one file here and one line in ``MIXERS``; see CONTRIBUTING.md."""

from typing import Any

from .agent import AgentAttention
from .base import TokenConv, TokenMixer
from .cosformer import CosformerAttention
from .flow import FlowAttention
from .focused import FocusedAttention
from .gated_softmax import GatedSoftmaxAttention
from .gdn import GatedDeltaNet
from .gdn2 import GatedDeltaNet2
from .gla import GatedLinearAttention
from .hedgehog import HedgehogAttention
from .hgrn2 import HGRN2Attention
from .hybrid import HybridAttention
from .inline import InLineAttention
from .kda import KimiDeltaAttention
from .l2 import L2Attention
from .lina import LinaAttention
from .linear import LinearAttention
from .linfusion import LinFusionAttention
from .local import LocalAttention
from .mala import MALAAttention
from .mlla import MLLAAttention
from .nala import NaLaAttention
from .rala import RALAAttention
from .retention import RetentionAttention
from .sana import SanaAttention
from .sla import SparseLinearAttention
from .slab import SlabAttention
from .softmax import SoftmaxAttention
from .t5 import TTTAttention

__all__ = ["MIXERS", "TokenConv", "TokenMixer", "create_mixer", "layer_options", "list_mixers"]

MIXERS: dict[str, type[TokenMixer]] = {
    "agent": AgentAttention,
    "cosformer": CosformerAttention,
    "flow": FlowAttention,
    "focused": FocusedAttention,
    "gated_softmax": GatedSoftmaxAttention,
    "gdn": GatedDeltaNet,
    "gdn2": GatedDeltaNet2,
    "gla": GatedLinearAttention,
    "hedgehog": HedgehogAttention,
    "hgrn2": HGRN2Attention,
    "hybrid": HybridAttention,
    "inline": InLineAttention,
    "kda": KimiDeltaAttention,
    "l2": L2Attention,
    "lina": LinaAttention,
    "linear": LinearAttention,
    "linfusion": LinFusionAttention,
    "local": LocalAttention,
    "mala": MALAAttention,
    "mlla": MLLAAttention,
    "nala": NaLaAttention,
    "rala": RALAAttention,
    "retention": RetentionAttention,
    "sana": SanaAttention,
    "sla": SparseLinearAttention,
    "slab": SlabAttention,
    "softmax": SoftmaxAttention,
    "t5": TTTAttention,
}


def list_mixers() -> list[str]:
    """Names of all mixers, sorted."""
    return sorted(MIXERS)


def create_mixer(name: str, dim: int, num_heads: int, **cfg) -> TokenMixer:
    """Build a mixer by name.

    Args:
        name: one of ``list_mixers()``.
        dim: channels of the tokens.
        num_heads: heads; must divide ``dim``.
        cfg: keywords of the mixer's class.

    Raises:
        ValueError: no mixer has that name.
        TypeError: the mixer has no such keyword.
    """
    if name not in MIXERS:
        raise ValueError(f"mixer must be one of {', '.join(list_mixers())}; got {name!r}")
    return MIXERS[name](dim, num_heads, **cfg)


def layer_options(name: str, index: int, given: dict[str, Any] | None) -> dict[str, Any]:
    """Keywords of a mixer in the layer ``index`` of a model (or of its stage): those of its turn, then those given."""
    turns = MIXERS[name].in_turn if name in MIXERS else ({},)
    return {**turns[index % len(turns)], **(given or {})}

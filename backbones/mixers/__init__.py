"""Token mixers by name. A mixer is one file here and one line in ``MIXERS``; see CONTRIBUTING.md."""

from .base import TokenConv, TokenMixer
from .gla import GatedLinearAttention
from .hedgehog import HedgehogAttention
from .hybrid import HybridAttention
from .linear import LinearAttention
from .linfusion import LinFusionAttention
from .local import LocalAttention
from .retention import RetentionAttention
from .sana import SanaAttention
from .softmax import SoftmaxAttention
from .t5 import TTTAttention

__all__ = ["MIXERS", "TokenConv", "TokenMixer", "create_mixer", "list_mixers"]

MIXERS: dict[str, type[TokenMixer]] = {
    "gla": GatedLinearAttention,
    "hedgehog": HedgehogAttention,
    "hybrid": HybridAttention,
    "linear": LinearAttention,
    "linfusion": LinFusionAttention,
    "local": LocalAttention,
    "retention": RetentionAttention,
    "sana": SanaAttention,
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

"""Adapters of timm's vision transformers; see adapters.py."""

from typing import Any

from torch import nn

from .adapters import Adapter, patch_grid, register_adapter
from .linear_attention_modules import TimmAttention


def _check(path: str, attention: nn.Module) -> None:
    if attention.proj.out_features != attention.proj.in_features and attention.proj.in_features % attention.num_heads:
        raise ValueError(f"{path}: the projections of its attention do not fit together")


def _options(model: nn.Module, path: str) -> dict[str, Any]:
    return {"prefix": model.num_prefix_tokens}


for _name in ("VisionTransformer", "VisionTransformerDistilled", "Eva"):
    register_adapter(
        Adapter(
            _name,
            r"blocks\.\d+\.attn",
            grid=patch_grid,
            host=lambda path: "patch_embed",
            module=TimmAttention,
            module_options=_options,
            classes=("Attention", "AttentionRope", "EvaAttention"),
            check=_check,
        )
    )

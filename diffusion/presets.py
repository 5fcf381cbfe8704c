"""The published sizes of DiG, LiT, DiT and U-DiT, and small text-to-image models, by name."""

from typing import Any

from .denoiser import LinearDiTTransformer2DModel
from .denoiser_base import Denoiser
from .u_denoiser import LinearUDiTTransformer2DModel

# DiT's sizes (arXiv:2212.09748, table 1): blocks, heads of attention, width.
_SIZES = {"s": (12, 6, 384), "b": (12, 12, 768), "l": (24, 16, 1024), "xl": (28, 16, 1152)}
_LIT_HEADS = {"s": 2, "b": 3, "l": 4, "xl": 4}
_DIG_MIXER = {"bidirectional": False, "local": False, "output": "swish", "norm_eps": 1e-6}


def _size(name: str, heads: int, patch_size: int, **config: Any) -> dict[str, Any]:
    depth, _, width = _SIZES[name]
    return {
        "sample_size": 32,
        "patch_size": patch_size,
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        **config,
    }


def _presets() -> dict[str, dict[str, Any]]:
    classes = {"in_channels": 4, "out_channels": 8, "num_classes": 1000}
    dig = {"mixer": "gla", "mixer_kwargs": _DIG_MIXER, "mlp": "swiglu", "depthwise_conv": True}
    lit = {"mixer": "linear", "mixer_kwargs": {"kernel_size": 5}, "mlp": "gelu", "depthwise_conv": False}
    dit = {"mixer": "softmax", "mlp": "gelu", "depthwise_conv": False}
    presets = {}
    for name, (_, heads, width) in _SIZES.items():
        for patch in (2, 4, 8):
            # Heads of DiG have 64 value channels at every size.
            presets[f"dig_{name}_{patch}"] = _size(name, width // 64, patch, **classes, **dig)
            presets[f"dig_{name}_{patch}_skip"] = {**presets[f"dig_{name}_{patch}"], "long_skip": True}
            presets[f"dit_{name}_{patch}"] = _size(name, heads, patch, **classes, **dit)
        presets[f"lit_{name}_2"] = _size(name, _LIT_HEADS[name], 2, **classes, **lit)
    # Text-to-image: flow matching, adaLN-single, captions of T5-base's or CLIP-L's width.
    text = {
        "in_channels": 4,
        "norm_type": "ada_norm_single",
        "caption_channels": 768,
        "prediction_type": "flow_prediction",
    }
    for name in ("s", "b"):
        heads = _SIZES[name][2] // 64
        presets[f"dig_t2i_{name}_2"] = _size(name, heads, 2, **text, **dig, num_cross_attention_heads=heads)
        mix = {**lit, "mixer_kwargs": {"kernel_size": 0}, "mlp": "mix"}
        presets[f"lit_t2i_{name}_2"] = _size(name, 2 * heads, 2, **text, **mix, num_cross_attention_heads=heads)
    # U-DiT's sizes (arXiv:2405.02730): heads, of 24 channels at the first level.
    for name, heads in (("s", 4), ("b", 8), ("l", 16)):
        presets[f"udit_{name}"] = {
            **classes,
            "sample_size": 32,
            "num_attention_heads": heads,
            "attention_head_dim": 24,
            "mixer_kwargs": {"cosine": True, "rope": True},
            "mlp": "rep",
        }
    # For the smallest images, such as handwritten digits, in pixel space.
    presets["dig_t2i_nano"] = {
        **presets["dig_t2i_s_2"],
        "sample_size": 8,
        "patch_size": 1,
        "in_channels": 1,
        "num_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 48,
        "caption_channels": 64,
        "num_cross_attention_heads": 2,
    }
    return presets


PRESETS: dict[str, dict[str, Any]] = _presets()
"""Name → keywords of ``denoiser_class``."""


def denoiser_class(name: str) -> type[Denoiser]:
    """The class that a preset is of: ``LinearUDiTTransformer2DModel`` for ``udit_…``, else
    ``LinearDiTTransformer2DModel``."""
    return LinearUDiTTransformer2DModel if name.startswith("udit_") else LinearDiTTransformer2DModel


def create_denoiser(name: str, **overrides: Any) -> Denoiser:
    """Build a denoiser of a published size with fresh weights, zeroed where DiT zeroes them (``zero_init``).

    Args:
        name: ``dig_{s,b,l,xl}_{2,4,8}``, the same with ``_skip``, ``lit_{s,b,l,xl}_2``, ``dit_{s,b,l,xl}_{2,4,8}``,
            ``udit_{s,b,l}``, ``dig_t2i_{s,b}_2``, ``lit_t2i_{s,b}_2`` or ``dig_t2i_nano``; see ``PRESETS``.
        overrides: keywords of the model's class to change, see ``denoiser_class``.

    Raises:
        ValueError: no preset has that name.
        TypeError: the model has no such keyword.
    """
    if name not in PRESETS:
        raise ValueError(f"denoiser must be one of {', '.join(sorted(PRESETS))}; got {name!r}")
    return denoiser_class(name)(**{**PRESETS[name], **overrides}).zero_init()

"""RAVLT, MAViT and NaLaFormer by their published sizes.

Depths, widths, heads and the starts of LayerScale are those of the released codes. Stochastic depth is a matter of
training and off by default; the codes train tiny, small, base and large with 0.1, 0.15, 0.4 and 0.55.
"""

import re
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .convert import fit_checkpoint, rename, unwrap
from .pyramid import Pyramid
from .staged import build_staged, staged_cfg

_SIZES: dict[str, dict[str, Any]] = {
    "test": {
        "depths": (1, 1, 2, 1),
        "embed_dims": (16, 24, 32, 48),
        "num_heads": (1, 2, 2, 4),
        "head_width": 64,
        "layer_scale": (1.0, 1.0, 1.0, 1.0),
    },
    "xtiny": {
        "depths": (2, 2, 2, 2),
        "embed_dims": (32, 64, 128, 384),
        "num_heads": (1, 2, 4, 12),
        "layer_scale": (1.0, 1.0, 1.0, 1.0),
    },
    "tiny": {
        "depths": (2, 2, 6, 2),
        "embed_dims": (64, 128, 256, 512),
        "num_heads": (1, 2, 4, 8),
        "layer_scale": (1.0, 1.0, 1.0, 1.0),
    },
    "small": {
        "depths": (3, 5, 9, 3),
        "embed_dims": (64, 128, 320, 512),
        "num_heads": (1, 2, 5, 8),
        "layer_scale": (1.0, 1.0, 1.0, 1.0),
    },
    "base": {
        "depths": (4, 6, 12, 6),
        "embed_dims": (96, 192, 384, 512),
        "num_heads": (1, 2, 6, 8),
        "layer_scale": (1.0, 1.0, 1e-6, 1e-6),
    },
    "large": {
        "depths": (4, 7, 19, 8),
        "embed_dims": (96, 192, 448, 640),
        "num_heads": (1, 2, 7, 10),
        "layer_scale": (1e-6, 1e-6, 1e-6, 1e-6),
    },
}
_RAVLT = {"mixer": "rala"}
_MAVIT = {"mixer": "mala"}
_NALAFORMER = {"mixer": "nala", "softmax_kwargs": {"out_norm": True}, "second_cpe": True}


_BLOCK = r"^layers\.(\d+\.blocks\.\d+)\."
_RULES = [
    (r"^patch_embed\.proj\.", "stem."),
    (_BLOCK + r"(norm[12])\.norm\.", r"stages.\1.\2."),
    (_BLOCK + r"attn\.lepe\.", r"stages.\1.mixer.conv."),
    (_BLOCK + r"attn\.(?:out_)?proj\.", r"stages.\1.mixer.to_out.0."),
    (_BLOCK + r"attn\.ln\.", r"stages.\1.mixer.out_norm."),
    (_BLOCK + r"ffn\.dwconv\.", r"stages.\1.mlp.conv."),
    (_BLOCK + r"ffn\.(fc[12])\.", r"stages.\1.mlp.\2."),
    (_BLOCK + r"(?:pos|cpe1)\.", r"stages.\1.cpe1."),
    (_BLOCK + r"cpe2\.", r"stages.\1.cpe2."),
    (_BLOCK + r"gamma_([12])$", r"stages.\1.ls\2.gamma"),
    (r"^proj\.", "norm.0."),
    (r"^norm\.(?=[a-z])", "norm.1."),
    (r"^head\.(?=weight|bias)", "head.fc."),
]


def convert_pyramid_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of an original checkpoint of RAVLT, MAViT or NaLaFormer, or of one of ours, under our names; ``model`` is
    the one to be filled. The originals keep the merging at the end of a stage, we at the start of the next; most of
    their linear layers are 1×1 convolutions, and one projection makes queries, keys, values and gate.

    Raises:
        ValueError: tensors do not fit; the message names them.
    """
    converted = {}
    for key, value in unwrap(state_dict).items():
        merge = re.match(r"^layers\.(\d+)\.downsample\.(reduction|norm)\.(.*)", key)
        joint = re.match(_BLOCK + r"attn\.qkv[og]\.(weight|bias)$", key)
        if key.endswith(".RoPE.angle"):  # frequencies, which are no parameters
            continue
        if merge:
            part = "conv" if merge[2] == "reduction" else "norm"
            converted[f"stages.{int(merge[1]) + 1}.downsample.{part}.{merge[3]}"] = value
        elif joint:
            for part, rows in zip(("to_q", "to_k", "to_v", "gate_proj"), value.chunk(4)):
                converted[f"stages.{joint[1]}.mixer.{part}.{joint[2]}"] = rows
        else:
            converted[rename(key, _RULES)] = value
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    for key, value in converted.items():
        if re.search(r"\.to_[qkv]\.weight$", key):
            converted[key] = value.flatten(1)
        elif key in shapes and value.squeeze().shape == torch.Size(side for side in shapes[key] if side > 1):
            converted[key] = value.reshape(shapes[key])
    return fit_checkpoint(converted, model)


def _create(name: str, pretrained: bool, family: dict[str, Any], size: str, **kwargs) -> Pyramid:
    return build_staged(Pyramid, name, pretrained, convert_pyramid_checkpoint, **{**family, **_SIZES[size], **kwargs})


def _cfg(**kwargs) -> dict[str, Any]:
    return staged_cfg(crop_pct=0.875, **kwargs)  # the codes evaluate as DeiT does: 256 pixels, of which the middle 224


_TEST = {"input_size": (3, 160, 160), "pool_size": (5, 5)}
default_cfgs = generate_default_cfgs(
    {
        "ravlt_tiny.untrained": _cfg(),
        "ravlt_small.untrained": _cfg(),
        "ravlt_base.untrained": _cfg(),
        "ravlt_large.untrained": _cfg(),
        "test_ravlt.untrained": _cfg(**_TEST),
        "mavit_tiny.untrained": _cfg(),
        "mavit_small.untrained": _cfg(),
        "mavit_base.untrained": _cfg(),
        "mavit_large.untrained": _cfg(),
        "test_mavit.untrained": _cfg(**_TEST),
        "nalaformer_xtiny.untrained": _cfg(),
        "nalaformer_tiny.untrained": _cfg(),
        "nalaformer_small.untrained": _cfg(),
        "nalaformer_base.untrained": _cfg(),
        "nalaformer_large.untrained": _cfg(),
        "test_nalaformer.untrained": _cfg(**_TEST),
    }
)


@register_model
def ravlt_tiny(pretrained: bool = False, **kwargs) -> Pyramid:
    """RAVLT-T: 15 M parameters."""
    return _create("ravlt_tiny", pretrained, _RAVLT, "tiny", **kwargs)


@register_model
def ravlt_small(pretrained: bool = False, **kwargs) -> Pyramid:
    """RAVLT-S: 26 M parameters."""
    return _create("ravlt_small", pretrained, _RAVLT, "small", **kwargs)


@register_model
def ravlt_base(pretrained: bool = False, **kwargs) -> Pyramid:
    """RAVLT-B: 48 M parameters."""
    return _create("ravlt_base", pretrained, _RAVLT, "base", **kwargs)


@register_model
def ravlt_large(pretrained: bool = False, **kwargs) -> Pyramid:
    """RAVLT-L: 95 M parameters."""
    return _create("ravlt_large", pretrained, _RAVLT, "large", **kwargs)


@register_model
def test_ravlt(pretrained: bool = False, **kwargs) -> Pyramid:
    """A tiny RAVLT for tests."""
    return _create("test_ravlt", pretrained, _RAVLT, "test", **kwargs)


@register_model
def mavit_tiny(pretrained: bool = False, **kwargs) -> Pyramid:
    """MAViT-T: 16.4 M parameters."""
    return _create("mavit_tiny", pretrained, {**_MAVIT, "head_width": 2048}, "tiny", **kwargs)


@register_model
def mavit_small(pretrained: bool = False, **kwargs) -> Pyramid:
    """MAViT-S: 27.1 M parameters."""
    return _create("mavit_small", pretrained, {**_MAVIT, "head_width": 2048}, "small", **kwargs)


@register_model
def mavit_base(pretrained: bool = False, **kwargs) -> Pyramid:
    """MAViT-B: 49.8 M parameters."""
    return _create("mavit_base", pretrained, {**_MAVIT, "head_width": 2048}, "base", **kwargs)


@register_model
def mavit_large(pretrained: bool = False, **kwargs) -> Pyramid:
    """MAViT-L: 97.8 M parameters."""
    return _create("mavit_large", pretrained, {**_MAVIT, "head_width": 2560}, "large", **kwargs)


@register_model
def test_mavit(pretrained: bool = False, **kwargs) -> Pyramid:
    """A tiny MAViT for tests."""
    return _create("test_mavit", pretrained, _MAVIT, "test", **kwargs)


@register_model
def nalaformer_xtiny(pretrained: bool = False, **kwargs) -> Pyramid:
    """NaLaFormer-XT: 6.1 M parameters. The paper says 8 M, which the configuration released with it does not give."""
    return _create("nalaformer_xtiny", pretrained, _NALAFORMER, "xtiny", **kwargs)


@register_model
def nalaformer_tiny(pretrained: bool = False, **kwargs) -> Pyramid:
    """NaLaFormer-T: 15.9 M parameters; the paper says 15 M."""
    return _create("nalaformer_tiny", pretrained, {**_NALAFORMER, "mlp_ratio": 4.0}, "tiny", **kwargs)


@register_model
def nalaformer_small(pretrained: bool = False, **kwargs) -> Pyramid:
    """NaLaFormer-S: 26 M parameters."""
    return _create("nalaformer_small", pretrained, _NALAFORMER, "small", **kwargs)


@register_model
def nalaformer_base(pretrained: bool = False, **kwargs) -> Pyramid:
    """NaLaFormer-B: 52 M parameters."""
    return _create("nalaformer_base", pretrained, {**_NALAFORMER, "mlp_ratio": 4.0}, "base", **kwargs)


@register_model
def nalaformer_large(pretrained: bool = False, **kwargs) -> Pyramid:
    """NaLaFormer-L: 95 M parameters."""
    return _create("nalaformer_large", pretrained, _NALAFORMER, "large", **kwargs)


@register_model
def test_nalaformer(pretrained: bool = False, **kwargs) -> Pyramid:
    """A tiny NaLaFormer for tests."""
    return _create("test_nalaformer", pretrained, _NALAFORMER, "test", **kwargs)

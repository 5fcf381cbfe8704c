"""Checkpoints of the original DiG code (https://github.com/hustvl/DiG) as ``LinearDiTTransformer2DModel``."""

import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import single_file_model
from torch import Tensor

from scanvas.backbones.convert import MIXER_RULES, check_fit, rename, unwrap

from .conditioning import sincos_positions
from .denoiser import LinearDiTTransformer2DModel

_DIG = [
    (r"^x_embedder\.proj\.", "patch_embed."),
    (r"^t_embedder\.mlp\.0\.", "time_embed.linear_1."),
    (r"^t_embedder\.mlp\.2\.", "time_embed.linear_2."),
    (r"^y_embedder\.embedding_table\.", "class_embed."),
    (r"^final_layer\.adaLN_modulation\.1\.", "modulation_out.linear."),
    (r"^final_layer\.linear\.", "proj_out."),
    (r"^blocks\.(\d+)\.adaLN_modulation\.1\.", r"transformer_blocks.\1.modulation.linear."),
    (r"^blocks\.(\d+)\.dw_conv\.", r"transformer_blocks.\1.conv."),
    (r"^blocks\.(\d+)\.mlp\.gate_proj\.", r"transformer_blocks.\1.mlp.fc1."),
    (r"^blocks\.(\d+)\.mlp\.down_proj\.", r"transformer_blocks.\1.mlp.fc2."),
    (r"^blocks\.(\d+)\.skip_linear\.", r"transformer_blocks.\1.skip_linear."),
    *[(rf"^blocks\.(\d+)\.attn\.{old}", rf"transformer_blocks.\1.mixer.{new}") for old, new in MIXER_RULES],
]
_CONV = re.compile(r"^blocks\.(\d+)\.dw_conv\.weight$")
_HEAD_DIM = 64
"""Value channels of a head in every released model."""
_NORM_EPS = 1e-6
"""Of the output norm."""


def _tensors(state_dict: dict) -> dict[str, Tensor]:
    """The model's tensors; training checkpoints of the original keep the averaged weights, which it samples from, under
    ``"ema"``."""
    if isinstance(state_dict.get("ema"), dict):
        return _tensors(state_dict["ema"])
    return unwrap(state_dict)


def _shape(tensors: dict[str, Tensor], key: str, ndim: int) -> tuple[int, ...]:
    if key not in tensors:
        hint = (
            "; it has the names of scanvas: use from_pretrained, or from_single_file with config=DIRECTORY"
            if "proj_out.weight" in tensors
            else f"; it has {', '.join(sorted(tensors)[:5])}, …"
        )
        raise ValueError(f"not an original checkpoint of DiG: there is no tensor {key}{hint}")
    if tensors[key].ndim != ndim:
        raise ValueError(f"{key} must have {ndim} dimensions, got shape {tuple(tensors[key].shape)}")
    return tuple(tensors[key].shape)


def dig_config(state_dict: dict) -> dict[str, Any]:
    """Keywords of ``LinearDiTTransformer2DModel`` for an original DiG checkpoint, read off its tensors.

    Heads have as many value channels as the output norm ``g_norm_swish_gate`` has weights, or 64. The grid is square,
    as in the original.

    Raises:
        ValueError: a tensor is missing or has a shape that no DiG has; the message names it.
    """
    tensors = _tensors(state_dict)
    dim, in_channels, patch, _ = _shape(tensors, "x_embedder.proj.weight", 4)
    _, tokens, _ = _shape(tensors, "pos_embed", 3)
    edge = math.isqrt(tokens)
    if edge * edge != tokens:
        raise ValueError(f"pos_embed has {tokens} positions, which is not a square grid as the original needs")
    blocks = {int(match[1]) for key in tensors if (match := re.match(r"^blocks\.(\d+)\.", key))}
    depth = max(blocks, default=-1) + 1
    if not depth or blocks != set(range(depth)):
        raise ValueError(f"blocks.0 … blocks.{max(depth - 1, 0)} must all be there, got {sorted(blocks)}")
    norms = [f"blocks.0.attn.{name}.weight" for name in ("g_norm_swish_gate", "g_norm")]
    head_dim = next((tensors[key].numel() for key in norms if key in tensors), _HEAD_DIM)
    value_dim = _shape(tensors, "blocks.0.attn.v_proj.weight", 2)[0]
    key_dim = _shape(tensors, "blocks.0.attn.k_proj.weight", 2)[0]
    if value_dim % head_dim:
        raise ValueError(f"blocks.0.attn.v_proj has {value_dim} outputs, which heads of {head_dim} do not divide")
    heads = value_dim // head_dim
    if dim % heads:
        raise ValueError(f"{heads} heads do not divide the width {dim}")
    long_skip = any("skip_linear" in key for key in tensors)
    labels = tensors.get("y_embedder.embedding_table.weight")
    return {
        "sample_size": edge * patch,
        "patch_size": patch,
        "in_channels": in_channels,
        "out_channels": _shape(tensors, "final_layer.linear.bias", 1)[0] // patch**2,
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": dim // heads,
        "mixer": "gla",
        "mixer_kwargs": {
            "bidirectional": False,
            "local": False,
            "output": "swish",
            "expand_k": key_dim / dim,
            "expand_v": value_dim / dim,
            "gate_rank": _shape(tensors, "blocks.0.attn.gk_proj.0.weight", 2)[0],
            "norm_eps": _NORM_EPS,
        },
        "mlp": "swiglu",
        "mlp_hidden": _shape(tensors, "blocks.0.mlp.down_proj.weight", 2)[1],
        "depthwise_conv": "blocks.0.dw_conv.weight" in tensors,
        "long_skip": long_skip,
        # The original stores skips in scan order, and with a depth that is no multiple of 4 paints in it too.
        "original_scan_order": long_skip or depth % 4 != 0,
        "num_classes": None if labels is None else len(labels) - 1,
    }


def convert_dig_state_dict(state_dict: dict) -> dict[str, Tensor]:
    """Tensors of an original DiG checkpoint under our names.

    The original convolves the tokens in the order of the scan, we in raster order: kernels are turned accordingly.
    Positions are computed, not loaded.

    Raises:
        ValueError: ``pos_embed`` does not hold DiG's fixed positions.
    """
    tensors = _tensors(state_dict)
    positions = tensors["pos_embed"].float()
    edge = math.isqrt(positions.shape[1])
    expected = sincos_positions((edge, edge), positions.shape[2], (edge, edge), positions.device)
    error = (positions[0] - expected).abs().max().item()
    if not error < 1e-3:
        raise ValueError(f"pos_embed does not hold the fixed sin-cos positions of DiG: it differs by up to {error:.3g}")
    converted = {}
    for key, value in tensors.items():
        if key == "pos_embed":
            continue
        if match := _CONV.match(key):
            state = int(match[1]) % 4
            value = value.transpose(2, 3) if state in (2, 3) else value
            value = value.flip(2, 3) if state in (1, 3) else value
        converted[rename(key, _DIG)] = value.contiguous()
    return converted


def convert_dig_checkpoint(state_dict: dict) -> LinearDiTTransformer2DModel:
    """A model with the weights of an original DiG checkpoint, plain or with long skips, any width, depth and grid.

    All hyper-parameters are read off the tensors. Checkpoints with long skips get ``original_scan_order=True``: they
    were trained with skips stored in scan order, which reach every other receiving block transposed, and give their
    results only so.

    Args:
        state_dict: the tensors, perhaps under ``"ema"``, ``"model"`` or ``"state_dict"``.

    Raises:
        ValueError: the tensors are not those of a DiG; the message names the ones that do not fit.
    """
    model = LinearDiTTransformer2DModel(**dig_config(state_dict))
    converted = convert_dig_state_dict(state_dict)
    check_fit(converted, model)
    model.load_state_dict(converted)
    return model.eval()


def load_tensors(path: str | Path) -> dict:
    """The content of a ``.safetensors`` or PyTorch file; no other pickled object is read.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    # The original's training script saves its command-line arguments too.
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True)


def convert_file(source: str | Path, out: str | Path) -> LinearDiTTransformer2DModel:
    """Read an original DiG checkpoint and write the model with ``save_pretrained``; what ``scanvas convert`` does."""
    model = convert_dig_checkpoint(load_tensors(source))
    model.save_pretrained(out)
    return model


def _single_file_config(original_config: dict, checkpoint: dict) -> dict[str, Any]:
    return {**dig_config(checkpoint), **original_config}


def _single_file_tensors(config: dict, checkpoint: dict) -> dict[str, Tensor]:
    converted = convert_dig_state_dict(checkpoint)
    with torch.device("meta"):
        # diffusers itself would leave what is missing without values.
        check_fit(converted, LinearDiTTransformer2DModel.from_config(config))
    return converted


# What ``LinearDiTTransformer2DModel.from_single_file`` looks up.
single_file_model.SINGLE_FILE_LOADABLE_CLASSES["LinearDiTTransformer2DModel"] = {
    "config_mapping_fn": _single_file_config,
    "checkpoint_mapping_fn": _single_file_tensors,
}

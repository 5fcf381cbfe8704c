"""Key maps from the original projects' checkpoints to ours."""

import math
import re

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, to_2tuple
from torch import Tensor, nn

from .mixers.places import PlaceParameter

# The mixer of ViG and ViG-H; DiG's has the same parts under the same names.
MIXER_RULES = [
    (r"in_proj\.0\.", "conv."),
    (r"qkv_proj\.", "to_qkv."),
    (r"q_proj\.", "to_q."),
    (r"k_proj\.", "to_k."),
    (r"v_proj\.", "to_v."),
    (r"gk_proj\.", "decay_proj."),
    (r"g_proj\.", "gate_proj."),
    (r"o_proj\.", "to_out.0."),
    (r"g_norm(_swish_gate)?\.", "out_norm."),
    (r"l_norm\.", "local_norm."),
]
_VIG = [
    (r"^(blocks\.\d+)\.attn_norm\.", r"\1.norm1."),
    (r"^(blocks\.\d+)\.mlp_norm\.", r"\1.norm2."),
    (r"^(blocks\.\d+)\.mlp\.gate_proj\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.mlp\.down_proj\.", r"\1.mlp.fc2."),
    *[(rf"^(blocks\.\d+)\.attn\.{old}", rf"\1.mixer.{new}") for old, new in MIXER_RULES],
]
_VIG_H = [
    (r"^patch_embed\.0\.", "stem.0."),
    (r"^patch_embed\.2\.", "stem.1."),
    (r"^patch_embed\.5\.", "stem.3."),
    (r"^patch_embed\.7\.", "stem.4."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.norm\.", r"stages.\1.blocks.\2.norm1."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.(norm2|mlp)\.", r"stages.\1.blocks.\2.\3."),
    *[(rf"^layers\.(\d+)\.blocks\.(\d+)\.op\.{old}", rf"stages.\1.blocks.\2.mixer.{new}") for old, new in MIXER_RULES],
    (r"^classifier\.norm\.", "norm."),
    (r"^classifier\.head\.", "head.fc."),
]


def unwrap(state_dict: dict) -> dict[str, Tensor]:
    """The tensors of a checkpoint which may keep them under ``"model"``, ``"state_dict"`` or ``"model_ema"``."""
    for key in ("model", "state_dict", "model_ema"):
        if isinstance(state_dict.get(key), dict):
            return unwrap(state_dict[key])
    return {key.removeprefix("module."): value for key, value in state_dict.items() if isinstance(value, Tensor)}


def rename(key: str, rules: list[tuple[str, str]]) -> str:
    """Apply the first rule that matches."""
    for pattern, replacement in rules:
        new, count = re.subn(pattern, replacement, key)
        if count:
            return new
    return key


def check_fit(state_dict: dict[str, Tensor], model: nn.Module, optional: tuple[str, ...] = ()) -> None:
    """Compare converted tensors with those of a model, leaving out those whose names start as in ``optional``.

    Raises:
        ValueError: a tensor has the wrong shape, is missing or has no place; the message names each of them.
    """
    wanted = {key: value for key, value in model.state_dict().items() if not key.startswith(optional)}
    given = {key: value for key, value in state_dict.items() if not key.startswith(optional)}
    faults = [
        f"{key} has shape {tuple(given[key].shape)}, the model's is {tuple(wanted[key].shape)}"
        for key in wanted
        if key in given and given[key].shape != wanted[key].shape
    ]
    faults += [f"{key} is missing" for key in wanted if key not in given]
    faults += [f"{key} has no place in the model" for key in given if key not in wanted]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: {shown}")


def _left_to_timm(state_dict: dict[str, Tensor], model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the tensors that timm fits when this conversion is done: a first convolution for images of other
    channels, a classifier of other classes.

    timm decides on the classifier by the number of classes in ``pretrained_cfg``, which knows nothing of a file given
    by hand. It is corrected here if the file's classifier is what was asked for, so that it is not thrown away.

    Raises:
        ValueError: the classifier has another number of classes, and no other number was asked for.
    """
    cfg = getattr(model, "pretrained_cfg", None)
    if not cfg:
        return ()
    prefixes = []
    if model.in_chans != cfg["input_size"][0]:
        prefixes.append(cfg["first_conv"] + ".weight")
    key = cfg["classifier"] + ".weight"
    classes = len(state_dict[key]) if key in state_dict else cfg["num_classes"]
    if classes == model.num_classes:
        cfg["num_classes"] = classes
    elif model.num_classes != cfg["num_classes"]:
        prefixes.append(cfg["classifier"] + ".")
    else:
        raise ValueError(
            f"the checkpoint does not fit {type(model).__name__}: {key} has {classes} classes, the model "
            f"{model.num_classes}; pass num_classes={classes} to keep the classifier, another number for a new one"
        )
    return tuple(prefixes)


def _fit_projections(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Join or split the projections of queries, keys and values as the model's mixers have them."""
    for name, module in model.named_modules():
        if not hasattr(module, "fused_projections"):
            continue
        sizes = (module.key_dim, module.key_dim, module.value_dim)
        for kind in ("weight", "bias"):
            joint = f"{name}.to_qkv.{kind}"
            separate = [f"{name}.{part}.{kind}" for part in ("to_q", "to_k", "to_v")]
            # What does not fit is left as it is, for check_fit to name.
            if module.fused_projections:
                if [len(state_dict.get(key, ())) for key in separate] == list(sizes):
                    state_dict[joint] = torch.cat([state_dict.pop(key) for key in separate])
            elif len(state_dict.get(joint, ())) == sum(sizes):
                state_dict.update(zip(separate, state_dict.pop(joint).split(sizes)))


def _fit_positions(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Resample position embeddings of another grid. That grid is the one recorded with the checkpoint if its size is
    right, else the model's, else a square.

    Raises:
        ValueError: none of these has as many places as the checkpoint.
    """
    if "pos_embed" not in state_dict or state_dict["pos_embed"].ndim != 3:
        return
    count = state_dict["pos_embed"].shape[1] - model.pos_prefix
    patch = model.patch_embed.patch_size
    sizes = [
        getattr(model, "pretrained_model_args", {}).get("img_size"),
        getattr(model, "pretrained_cfg", {}).get("input_size", ())[1:] or None,
    ]
    grids = [[side // patch for side in to_2tuple(size)] for size in sizes if size is not None]
    grids += [model.grid_size, [math.isqrt(count)] * 2]
    grid = next((grid for grid in grids if grid[0] * grid[1] == count), None)
    if grid is None:
        raise ValueError(
            f"the checkpoint does not fit {type(model).__name__}: pos_embed has {count} places, which is neither the "
            f"model's {model.grid_size[0]}×{model.grid_size[1]} nor a square; build the model with the img_size of the "
            "checkpoint, then call set_input_size"
        )
    if grid != model.grid_size:
        state_dict["pos_embed"] = resample_abs_pos_embed(
            state_dict["pos_embed"],
            new_size=model.grid_size,
            old_size=grid,
            num_prefix_tokens=model.pos_prefix,
            antialias=False,
        )


def _fit_places(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Interpolate what mixers learned for the places of another grid, as they do themselves for other images."""
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if not isinstance(module, PlaceParameter) or key not in state_dict:
            continue
        given, wanted = state_dict[key], module.weight.shape
        if given.ndim == 3 and len(given) == wanted[0] and given.shape != wanted:
            resized = F.interpolate(given[None].float(), size=tuple(wanted[1:]), mode="bilinear", align_corners=False)
            state_dict[key] = resized[0].to(given.dtype)


def fit_checkpoint(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Tensors under our names, made to fit: positions and places of another grid are resampled, joint projections split
    or separate ones joined. A classifier of other classes and a first convolution for other channels are left for timm.

    Raises:
        ValueError: tensors do not fit; the message names them.
    """
    _fit_positions(state_dict, model)
    _fit_places(state_dict, model)
    _fit_projections(state_dict, model)
    check_fit(state_dict, model, optional=_left_to_timm(state_dict, model))
    return state_dict


def convert_vig_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of an original ViG checkpoint, or of one of ours, under our names; ``model`` is the one to be filled.

    Position embeddings of another grid are resampled. A classifier of other classes and a first convolution for other
    channels are left for timm to fit, if the model was asked for with other classes or channels.

    Raises:
        ValueError: tensors do not fit; the message names them.
    """
    return fit_checkpoint({rename(key, _VIG): value for key, value in unwrap(state_dict).items()}, model)


def convert_vig_h_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """The same for ViG-H. The original keeps the down-sampling at the end of a stage, we at the start of the next."""

    def new_key(key: str) -> str:
        match = re.match(r"^layers\.(\d+)\.downsample\.([13])\.(.*)", key)
        if match:
            part = {"1": "conv", "3": "norm"}[match[2]]
            return f"stages.{int(match[1]) + 1}.downsample.{part}.{match[3]}"
        return rename(key, _VIG_H)

    return fit_checkpoint({new_key(key): value for key, value in unwrap(state_dict).items()}, model)

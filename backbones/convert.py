"""Key maps from the original projects' checkpoints to ours."""

import re

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

# The mixer of ViG and ViG-H; DiG's has the same parts under the same names.
_MIXER = [
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
    *[(rf"^(blocks\.\d+)\.attn\.{old}", rf"\1.mixer.{new}") for old, new in _MIXER],
]
_VIG_H = [
    (r"^patch_embed\.0\.", "stem.0."),
    (r"^patch_embed\.2\.", "stem.1."),
    (r"^patch_embed\.5\.", "stem.3."),
    (r"^patch_embed\.7\.", "stem.4."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.norm\.", r"stages.\1.blocks.\2.norm1."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.(norm2|mlp)\.", r"stages.\1.blocks.\2.\3."),
    *[(rf"^layers\.(\d+)\.blocks\.(\d+)\.op\.{old}", rf"stages.\1.blocks.\2.mixer.{new}") for old, new in _MIXER],
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
    """Compare converted tensors with those of a model.

    Raises:
        ValueError: a tensor has the wrong shape, is missing or has no place; the message names each of them.
    """
    wanted = model.state_dict()
    faults = [
        f"{key} has shape {tuple(state_dict[key].shape)}, the model's is {tuple(wanted[key].shape)}"
        for key in wanted
        if key in state_dict and state_dict[key].shape != wanted[key].shape and not key.startswith(optional)
    ]
    faults += [f"{key} is missing" for key in wanted if key not in state_dict and not key.startswith(optional)]
    faults += [f"{key} has no place in the model" for key in state_dict if key not in wanted]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: {shown}")


def _fit_projections(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Join or split the projections of queries, keys and values as the model's mixers have them."""
    for name, module in model.named_modules():
        if not hasattr(module, "fused_projections"):
            continue
        fused = [key for key in (f"{name}.to_qkv.weight", f"{name}.to_qkv.bias") if key in state_dict]
        if not module.fused_projections:
            for key in fused:
                sizes = (module.key_dim, module.key_dim, module.value_dim)
                tensor = state_dict[key]
                if len(tensor) != sum(sizes):
                    continue  # left for check_fit to name
                del state_dict[key]
                for part, piece in zip(("to_q", "to_k", "to_v"), tensor.split(sizes)):
                    state_dict[key.replace("to_qkv", part)] = piece


def convert_vig_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of an original ViG checkpoint, or of one of ours, under our names; ``model`` is the one to be filled.

    Position embeddings of another grid are resampled. A classifier of another size is left for timm to handle.

    Raises:
        ValueError: tensors do not fit; the message names them.
    """
    state_dict = {rename(key, _VIG): value for key, value in unwrap(state_dict).items()}
    if "pos_embed" in state_dict and state_dict["pos_embed"].shape != model.pos_embed.shape:
        state_dict["pos_embed"] = resample_abs_pos_embed(
            state_dict["pos_embed"], new_size=model.grid_size, num_prefix_tokens=0, antialias=False
        )
    _fit_projections(state_dict, model)
    check_fit(state_dict, model, optional=("head.",))
    return state_dict


def convert_vig_h_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """The same for ViG-H. The original keeps the down-sampling at the end of a stage, we at the start of the next."""

    def new_key(key: str) -> str:
        match = re.match(r"^layers\.(\d+)\.downsample\.([13])\.(.*)", key)
        if match:
            part = {"1": "conv", "3": "norm"}[match[2]]
            return f"stages.{int(match[1]) + 1}.downsample.{part}.{match[3]}"
        return rename(key, _VIG_H)

    state_dict = {new_key(key): value for key, value in unwrap(state_dict).items()}
    _fit_projections(state_dict, model)
    check_fit(state_dict, model, optional=("head.",))
    return state_dict

"""Saving and loading of linearised timm models, whose classes have no config of their own."""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from .linear_classes import linearized_class
from .linear_swap import build_all, install


def save_linearized(model: nn.Module, directory: str | Path, **create: Any) -> None:
    """Write a linearised timm model: ``model.safetensors`` and ``config.json``, for ``load_linearized``.

    Args:
        model: linearised timm model.
        directory: is made if it is not there.
        create: keywords that the softmax model was created with by ``timm.create_model``, other than its name:
            ``num_classes``, ``img_size``, … timm does not keep them.

    Raises:
        ValueError: the model is no linearised timm model, or what ``create`` builds has other tensors.
    """
    if not hasattr(model, "linearization") or not hasattr(model, "pretrained_cfg"):
        raise ValueError(
            f"save_linearized is for linearised timm models, got {type(model).__name__}; "
            "diffusers' have save_pretrained"
        )
    config = {
        "architecture": model.pretrained_cfg["architecture"],
        "create": create,
        "linearization": model.linearization,
    }
    config = json.loads(json.dumps(config))
    with torch.device("meta"):
        twin = _build_timm(config).state_dict()
    own = model.state_dict()
    wrong = [k for k in {*twin, *own} if k not in twin or k not in own or twin[k].shape != own[k].shape]
    if wrong:
        raise ValueError(
            f"save_linearized: timm.create_model({config['architecture']!r}, {create}) has other tensors, such as "
            f"{sorted(wrong)[0]}; give the keywords that the model was created with"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_model(model, str(directory / "model.safetensors"))


def load_linearized(directory: str | Path) -> nn.Module:
    """Build and load what ``save_linearized`` wrote, in eval mode. Loading is strict."""
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} holds no config.json: it was not written by save_linearized")
    model = _build_timm(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    load_model(model, str(directory / "model.safetensors"), strict=True)
    return model.eval()


def _build_timm(config: dict[str, Any]) -> nn.Module:
    model = timm.create_model(config["architecture"], **config["create"])
    install(model, build_all(model, config["linearization"]))
    model.__class__ = linearized_class(type(model))
    model.linearization = config["linearization"]
    return model

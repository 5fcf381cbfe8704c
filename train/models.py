"""Building classifiers through timm, and what ``scanvas models`` prints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

import scanvas  # registers the models with timm

from .config import ModelConfig
from .errors import CheckpointError, ConfigError, UserError, nearest
from .flops import count_flops


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """``timm.create_model`` with errors that name the option. Weights from ``pretrained`` or ``checkpoint``; a head for
    another number of classes starts anew."""
    name = config.name
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise ConfigError(f"model.name={name!r} is no model of timm or scanvas{nearest(name, timm.list_models())}")
    kwargs: dict[str, Any] = dict(config.kwargs)
    for key in ("img_size", "drop_rate", "drop_path_rate"):
        if getattr(config, key):
            kwargs[key] = getattr(config, key)
    if config.checkpoint:
        kwargs |= {"pretrained": True, "pretrained_cfg_overlay": _weights_at(Path(config.checkpoint))}
    elif config.pretrained or ":" in name:
        kwargs["pretrained"] = True
    try:
        return timm.create_model(name, num_classes=num_classes, **kwargs)
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError, OSError) as error:
        raise ConfigError(f"model {name!r} cannot be built with {kwargs}: {_one_line(error)}") from error


def _weights_at(path: Path) -> dict[str, Any]:
    if path.is_dir():
        weights = path / "model.safetensors"
        if not weights.is_file():
            raise CheckpointError(f"model.checkpoint={str(path)!r} holds no model.safetensors")
        overlay = {"file": str(weights)}
        if (path / "config.json").is_file():
            overlay["num_classes"] = json.loads((path / "config.json").read_text(encoding="utf-8"))["num_classes"]
        return overlay
    if not path.is_file():
        raise CheckpointError(f"model.checkpoint={str(path)!r} is neither a file nor a directory")
    return {"file": str(path)}


def load_classifier(path: str) -> nn.Module:
    """The classifier in a checkpoint directory (config.json + model.safetensors), in eval mode.

    Raises CheckpointError where the directory is missing, incomplete or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"--checkpoint {path!r} is not a directory; give one that training wrote, such as RUN/best"
        )
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            hint = " (its sub-directory best or final does?)" if any(folder.glob("*/config.json")) else ""
            raise CheckpointError(f"--checkpoint {path!r} holds no {name}{hint}")
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "linearization" in told:  # timm does not know such models
            model = scanvas.load_linearized(folder)
            model.pretrained_cfg = {**model.pretrained_cfg, **told.get("pretrained_cfg", {})}
            return model
        return timm.create_model(f"local-dir:{os.fspath(folder)}", pretrained=True).eval()
    except Exception as error:
        raise CheckpointError(f"cannot read checkpoint {path!r}: {_one_line(error)}") from error


def input_config(model: nn.Module, **overrides: Any) -> dict[str, Any]:
    """timm's data configuration of ``model`` (input_size, mean, std, interpolation, crop_pct), None left out."""
    config = resolve_model_data_config(model)
    return {**config, **{k: tuple(v) if isinstance(v, list) else v for k, v in overrides.items() if v is not None}}


def label_names(model: nn.Module) -> list[str]:
    """Class names stored with the weights, or ``class 0``, ``class 1``, …"""
    names = model.pretrained_cfg.get("label_names")
    return list(names) if names else [f"class {i}" for i in range(model.num_classes)]


def table(pattern: str = "*") -> list[dict[str, Any]]:
    """One row for each scanvas model that matches: name, parameters, FLOPs per image, input size. Built without memory,
    on the meta device."""
    names = [
        name for name in timm.list_models(pattern) if timm.model_entrypoint(name).__module__.startswith("scanvas.")
    ]
    if not names:
        ours = [n for n in timm.list_models() if timm.model_entrypoint(n).__module__.startswith("scanvas.")]
        raise UserError(f"no scanvas model matches {pattern!r}{nearest(pattern, ours)}")
    rows = []
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name).eval()
        size = tuple(input_config(model)["input_size"])
        rows.append(
            {
                "name": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "flops": count_flops(model, size),
                "input_size": size,
            }
        )
    return rows


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 600 else text[:600] + " …"

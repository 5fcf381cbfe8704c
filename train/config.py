"""Recipes: dataclasses filled from YAML and ``key=value`` overrides, strictly.

A key that does not exist is refused with the nearest one; a value of the wrong type is refused with the type wanted.
Each task owns one dataclass that is built of the sections below; ``load(cls, recipe, overrides)`` fills it.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from .errors import ConfigError, nearest

T = TypeVar("T")


@dataclass
class ModelConfig:
    """What ``timm.create_model`` is called with."""

    name: str = "vig_tiny_patch16_224"
    num_classes: int | None = None  # None: the number of classes in the data
    img_size: int | None = None  # pixels; None: the model's own
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    pretrained: bool = False
    checkpoint: str | None = None  # directory or file with weights to start from; the head may differ
    kwargs: dict[str, Any] = field(default_factory=dict)  # further keywords of create_model


@dataclass
class DataConfig:
    """Where images come from. ``root`` is a folder, a Hugging Face id or local dataset folder, or a shard folder."""

    format: Literal["folder", "hfds", "wds"] = "folder"
    root: str = ""
    train_split: str = "train"
    val_split: str = "val"
    image_key: str | None = None  # hfds: "image"; wds: "jpg;png;webp"
    label_key: str | None = None  # hfds: "label"; wds: the .cls file
    train_samples: int | None = None  # wds without _info.json: how many samples the shards hold
    val_samples: int | None = None
    cache_dir: str | None = None  # hfds
    mean: list[float] | None = None  # None: the model's own
    std: list[float] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    workers: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))  # processes; 0: the training process
    on_error: Literal["skip", "stop"] = "skip"  # an image that cannot be read


@dataclass
class AugmentConfig:
    """timm's augmentations; the defaults are off."""

    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [0.75, 1.3333])
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float = 0.0
    auto_augment: str | None = None  # e.g. rand-m9-mstd0.5-inc1
    random_erasing: float = 0.0
    random_erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    label_smoothing: float = 0.0
    repeats: int = 1  # repeated augmentation: views of an image per batch of all processes


@dataclass
class OptimConfig:
    """timm's optimisers and schedules."""

    name: str = "adamw"
    lr: float = 1e-3
    lr_reference_batch: int | None = None  # lr is for this global batch and scaled linearly; None: lr as it is
    weight_decay: float = 0.05
    layer_decay: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. betas, eps
    schedule: Literal["cosine", "poly", "step", "multistep", "tanh", "wsd", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    clip_grad: float | None = None  # largest gradient norm
    ema_decay: float | None = None
    ema_warmup: bool = False


@dataclass
class TrainConfig:
    """How long and how."""

    epochs: int = 300
    batch_size: int = 128  # images per process and micro-step
    grad_accum_steps: int = 1
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    seed: int = 0
    cpu: bool = False  # train on the CPU even where there is an accelerator
    threads: int | None = None  # of the CPU; None: as torch has it


@dataclass
class RunConfig:
    """What is written, and where."""

    out: str = "runs/train"
    resume: Literal["auto", "never"] = "auto"  # auto: go on from the newest checkpoint in `out`
    save_every: int = 0  # optimiser steps between checkpoints, besides one each epoch
    keep: int = 2  # checkpoints kept, besides the best
    log_every: int = 10  # optimiser steps between rows of train.csv
    eval_every: int = 1  # epochs
    tensorboard: bool = True
    plot: bool = True


def load(cls: type[T], recipe: str | None, overrides: list[str] = (), *, task: str = "") -> T:
    """The dataclass ``cls`` filled from ``recipe`` (path or shipped name of ``task``), then ``a.b=value`` strings.

    Raises ConfigError on an unknown recipe or key, a wrong type, YAML that does not parse.
    """
    config = _fill(cls, read_tree(recipe, task), "")
    for item in overrides:
        _override(config, item)
    return config


def read_tree(recipe: str | None, task: str = "") -> dict[str, Any]:
    """What a recipe (path or shipped name) says, unchecked. Raises ConfigError: unknown, or no YAML."""
    if recipe is None:
        return {}
    text, where = _read_recipe(recipe, task)
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} must hold key: value pairs, and holds a {type(tree).__name__}.")
    return tree


def from_dict(cls: type[T], tree: dict[str, Any]) -> T:
    """The dataclass ``cls`` from what ``dataclasses.asdict`` gave."""
    return _fill(cls, tree, "")


def recipes(task: str = "") -> dict[str, Any]:
    """Shipped recipes: name (``classify/digits``) → readable resource."""
    found = {}
    root = resources.files("scanvas.configs")
    for folder in root.iterdir():
        if folder.is_dir() and (not task or folder.name == task):
            for entry in folder.iterdir():
                if entry.name.endswith(".yaml"):
                    found[f"{folder.name}/{entry.name[:-5]}"] = entry
    return found


def _read_recipe(recipe: str, task: str) -> tuple[str, str]:
    path = Path(recipe)
    if path.is_file():
        return path.read_text(encoding="utf-8"), f"config {path}"
    shipped = recipes(task)
    name = recipe.removesuffix(".yaml")
    for key, entry in shipped.items():
        if name in (key, key.split("/")[1]):
            return entry.read_text(encoding="utf-8"), f"recipe {key}"
    names = [key.split("/")[1] for key in shipped]
    raise ConfigError(f"--config {recipe!r} is neither a file nor a shipped recipe{nearest(name, names)}")


def _fill(cls: type[T], tree: dict[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"unknown key {prefix + str(key)!r}{nearest(str(key), hints)}")
        values[key] = _convert(value, hints[key], prefix + key)
    return cls(**values)


def _override(config: Any, item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"override {item!r} must look like key=value, for example optim.lr=1e-3")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        value = text  # a plain string that YAML reads as broken syntax, such as a path with a brace
    *parents, last = key.split(".")
    target = config
    for depth, name in enumerate([*parents, last]):
        if isinstance(target, dict):  # the free-form `kwargs`: whatever follows is a key of it
            target[".".join([*parents, last][depth:])] = value
            return
        if isinstance(target, list):  # of sections: stages.0.lr
            if not name.isdigit() or int(name) >= len(target):
                raise ConfigError(f"{key!r}: {name!r} is no entry of the {len(target)} there, numbered from 0")
            if depth == len(parents):
                raise ConfigError(f"{key!r} is a section; set one of its keys")
            target = target[int(name)]
            continue
        hints = typing.get_type_hints(type(target))
        if name not in hints:
            full = [f.name for f in dataclasses.fields(target)]
            path = ".".join([*parents, last][: depth + 1])
            raise ConfigError(f"unknown key {path!r}{_suggest_path(config, key) or nearest(name, full)}")
        if depth == len(parents):
            if dataclasses.is_dataclass(hints[name]):
                inner = ", ".join(f.name for f in dataclasses.fields(hints[name]))
                raise ConfigError(f"{key!r} is a section; set one of its keys: {inner}")
            setattr(target, name, _convert(value, hints[name], key))
            return
        target = getattr(target, name)
        sections = isinstance(target, list) and target and dataclasses.is_dataclass(target[0])
        if not (dataclasses.is_dataclass(target) or isinstance(target, dict) or sections):
            raise ConfigError(f"unknown key {key!r}: {name!r} is a single value and has no keys below it")


def _suggest_path(config: Any, key: str) -> str:
    paths = list(_paths(config))
    tails = [path for path in paths if path.split(".")[-1] == key.split(".")[-1]]
    if tails:
        return f"; did you mean {tails[0]!r}?"
    hint = nearest(key, paths)
    return hint if "did you mean" in hint else ""


def _paths(config: Any, prefix: str = "") -> typing.Iterator[str]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def _convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the annotated type, or ConfigError. Integers count as floats, and so do strings such as 1e-3,
    which YAML 1.1 reads as text."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{where!r} is a section with keys of its own, and was given {value!r}")
        return _fill(hint, value or {}, f"{where}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), where)
    if origin is Literal:
        value = {False: "no", True: "yes"}.get(value, value) if isinstance(value, bool) else value  # YAML reads no
        if value not in args:
            raise ConfigError(f"{where} must be one of {', '.join(map(str, args))}, and is {value!r}")
        return value
    if hint is Any:
        return value
    if origin is list and isinstance(value, (list, tuple)):
        return [_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and (value is None or isinstance(value, dict)):
        return dict(value or {})
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and not isinstance(value, bool):
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass  # reported below
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    wanted = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise ConfigError(f"{where} must be of type {wanted}, and is {value!r} ({type(value).__name__})")

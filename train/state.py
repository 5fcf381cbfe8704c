"""What a run must remember to go on as if it had never stopped: from the loop to a checkpoint and back."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .checkpoint import load_tensors, load_weights
from .errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from .loop import Loop

# Keys that may differ between a run and its continuation: they change where and how fast, not what is computed.
_FREE_KEYS = (
    "run.",
    "grid.",
    "data.root",
    "data.workers",
    "data.cache_dir",
    "data.decoded",
    "data.on_error",
    "train.cpu",
)


def capture(loop: Loop, rng: list[dict[str, Any]]) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """``(tensors by file, plain values)`` of a loop; ``rng``: the random states of all processes."""
    tensors, numbers = pack_optimizer(loop.optimizer.optimizer.state_dict())
    groups = {"model": loop.plain_model.state_dict(), "optimizer": tensors}
    if loop.ema is not None:
        groups["ema"] = loop.ema.module.state_dict()
    scaler = loop.accelerator.scaler
    return groups, {
        "step": loop.step,
        "epoch": loop.epoch,
        "place": loop.place,
        "optimizer": numbers,
        "scheduler": {k: v for k, v in loop.scheduler.state_dict().items() if _is_plain(v)},
        "scaler": scaler.state_dict() if scaler is not None else None,
        "rng": rng,
        "config": dataclasses.asdict(loop.config),
    }


def restore(loop: Loop, place: Path) -> None:
    """Fill ``loop`` from the checkpoint at ``place``.

    Raises CheckpointError where it is damaged or does not fit, ConfigError where it comes from other settings.
    """
    state = loop.store.load_state(place)
    _same_config(state["config"], dataclasses.asdict(loop.config), place)
    load_weights(loop.plain_model, load_tensors(place / "model.safetensors"), place)
    if loop.ema is not None:
        load_weights(loop.ema.module, load_tensors(place / "ema.safetensors"), place)
    saved = unpack_optimizer(load_tensors(place / "optimizer.safetensors"), state["optimizer"])
    try:
        loop.optimizer.optimizer.load_state_dict(saved)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{place}: the optimiser's state does not fit this model: {error}") from error
    loop.scheduler.load_state_dict(state["scheduler"])
    if loop.accelerator.scaler is not None and state["scaler"]:
        loop.accelerator.scaler.load_state_dict(state["scaler"])
    rank = loop.accelerator.process_index
    if rank < len(state["rng"]):  # more processes than before: the new ones keep the states they began with
        set_rng_state(state["rng"][rank], loop.device)
    loop.step, loop.epoch, loop.place = state["step"], state["epoch"], state["place"]


def _same_config(saved: dict[str, Any], config: dict[str, Any], place: Path) -> None:
    before, now = _flat(saved), _flat(config)
    changed = [
        f"{key} ({before.get(key)!r} there, {now.get(key)!r} now)"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(_FREE_KEYS)
    ]
    if changed:
        raise ConfigError(
            f"{place} comes from a run with other settings: {'; '.join(changed)}. Give the same ones to resume, or "
            "another run.out to start anew."
        )


def pack_optimizer(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimiser's ``state_dict`` as tensors for safetensors and the rest for JSON."""
    tensors, plain = {}, {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    return tensors, {"state": plain, "param_groups": state["param_groups"]}


def unpack_optimizer(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``pack_optimizer``; JSON's lists become tuples again (betas)."""
    state: dict[int, dict[str, Any]] = {int(i): dict(entries) for i, entries in plain["state"].items()}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    groups = [
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
        for group in plain["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random states of python, numpy, torch and the accelerator, as plain lists (JSON)."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).tolist()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what ``rng_state`` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))

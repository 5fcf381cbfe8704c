"""Checkpoints: safetensors and JSON, never pickle; whole or not there at all.

``<run>/checkpoints/step-00001200/`` holds what a run needs to go on: ``model``, ``ema`` and ``optimizer``
(``.safetensors``) and ``state.json`` (step, place in the data, random states, scheduler, scaler, optimiser groups).
``<run>/best`` and ``<run>/final`` hold what others load (a timm directory, a diffusers pipeline); the task writes them.
Every directory is written beside its place, flushed to disk, and renamed into it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from .errors import CheckpointError

_WRITE_ERRORS = (OSError, SafetensorError)
FORMAT = 1


def write_directory(place: Path, fill: Callable[[Path], None]) -> None:
    """Have ``fill`` write files into a new directory, then put it at ``place`` (which may exist) in one step.

    Raises CheckpointError where a file cannot be written (a full disk, say); ``place`` is then as it was.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = place.with_name(f".new-{place.name}"), place.with_name(f".old-{place.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()
        fill(fresh)
        for path in [p for p in fresh.rglob("*") if p.is_file()]:
            _flush(path)
        _flush(fresh)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        fresh.rename(place)
        _flush(place.parent)
    except _WRITE_ERRORS as error:
        shutil.rmtree(fresh, ignore_errors=True)
        settle_directory(place)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        kept = f"what was at {place} before is intact" if place.exists() else "older checkpoints are intact"
        raise CheckpointError(
            f"could not write {place}: {'the disk is full' if full else error}; nothing half-written was left, {kept}"
        ) from error
    shutil.rmtree(old, ignore_errors=True)


def settle_directory(place: Path) -> None:
    """Undo what a process killed in the middle of ``write_directory`` may have left."""
    old = place.with_name(f".old-{place.name}")
    if old.exists() and not place.exists():
        old.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(place.with_name(f".new-{place.name}"), ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a directory
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def fresh_file(place: Path) -> Iterator[Path]:
    """A path beside ``place`` to write a file to, which then takes its place: whole, or as it was. Processes may do so
    at the same time. Directories are made as needed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f".{os.getpid()}-{place.name}")
    try:
        yield fresh
        fresh.replace(place)
    finally:
        fresh.unlink(missing_ok=True)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file of ``tensors``, moved to the CPU. Tensors that share memory are stored one by one."""
    save_file({k: v.detach().to("cpu").contiguous().clone() for k, v in tensors.items()}, path, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises CheckpointError where it is missing, cut short or not safetensors."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint file {path} does not exist") from error
    except (*_WRITE_ERRORS, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint file {path}: {error}; it is damaged or cut short") from error


def load_json(path: Path) -> Any:
    """A JSON file. Raises CheckpointError where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint file {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint file {path}: {error}") from error


def load_weights(module: nn.Module, tensors: dict[str, torch.Tensor], where: Path) -> None:
    """Fill ``module`` strictly. Raises CheckpointError naming a tensor that is missing, left over or
    of another shape."""
    own = module.state_dict()
    for name in [*own, *tensors]:
        if name not in tensors:
            raise CheckpointError(f"{where} lacks the tensor {name!r} of the model")
        if name not in own:
            raise CheckpointError(f"{where} has a tensor {name!r} that the model lacks")
        if own[name].shape != tensors[name].shape:
            there, here = tuple(tensors[name].shape), tuple(own[name].shape)
            raise CheckpointError(f"tensor {name!r} of {where} has shape {there}, and the model's has {here}")
    module.load_state_dict(tensors)


class CheckpointStore:
    """The checkpoints of one run: the newest ``keep`` under ``<out>/checkpoints``."""

    def __init__(self, out: Path, keep: int):
        self.folder, self.keep = Path(out) / "checkpoints", max(1, keep)

    def tidy(self) -> None:
        """Remove what a killed process left half-written."""
        if self.folder.is_dir():
            for path in self.folder.glob(".*-step-*"):
                shutil.rmtree(path, ignore_errors=True)
        for name in ("best", "final"):
            settle_directory(self.folder.parent / name)

    def place(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is or would be."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*")) if self.folder.is_dir() else []

    def save(self, step: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]) -> Path:
        """Write ``<name>.safetensors`` for each entry of ``tensors`` and ``state.json``; then drop the oldest."""

        def fill(folder: Path) -> None:
            for name, group in tensors.items():
                save_tensors(group, folder / f"{name}.safetensors")
            (folder / "state.json").write_text(json.dumps({"format": FORMAT, **state}), encoding="utf-8")

        place = self.place(step)
        write_directory(place, fill)
        for path in self.steps()[: -self.keep]:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
        return place

    def newest(self) -> Path | None:
        """The newest checkpoint, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def load_state(self, place: Path) -> dict[str, Any]:
        """``state.json`` of a checkpoint. Raises CheckpointError on another format."""
        state = load_json(place / "state.json")
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{place} has checkpoint format {state.get('format')!r}; this version reads {FORMAT}")
        return state

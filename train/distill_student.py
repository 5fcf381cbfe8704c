"""The student: the teacher linearised as a recipe says, or a linearised model that goes with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import scanvas
from scanvas.diffusion.adapters import find_adapter
from scanvas.diffusion.linear_report import LinearizeReport, is_linear, tensor_rows
from scanvas.diffusion.linear_swap import parts_of

from .checkpoint import load_json
from .distill_config import StudentConfig
from .errors import ConfigError


@dataclass
class Linear:
    """A linearised model, and what is new in it."""

    model: nn.Module
    layers: list[str]
    new: set[str] = field(default_factory=set)  # names of tensors that the teacher lacks
    report: LinearizeReport | None = None


def linearized(teacher: nn.Module, config: StudentConfig, batches: list | None, known: Path | None = None) -> Linear:
    """``scanvas.linearize`` with the settings of a recipe; the teacher stays as it is.

    Args:
        batches: for calibration. ``None`` only checks: layers chosen by what batches tell are taken to be all.
        known: the report of an earlier start of the run, whose layers are taken again.

    Raises:
        ConfigError: an argument does not fit.
    """
    layers: Any = config.layers
    if known is not None and known.is_file():
        layers = [row["path"] for row in load_json(known)["layers"]]
    elif isinstance(layers, (int, float)) and not isinstance(layers, bool) and batches is None:
        layers = "all"
    try:
        model, report = scanvas.linearize(
            teacher,
            config.mixer,
            layers,
            heads=config.heads,
            inherit=config.inherit,
            calibration=batches or None,
            keep_original=False,
            seed=config.seed,
            **config.options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"student: {error}") from error
    new = {row["name"] for row in report.tensors if row["status"] == "new"}
    return Linear(model, [row["path"] for row in report.layers], new, report)


def matched(teacher: nn.Module, student: nn.Module, path: str) -> Linear:
    """A linearised model from disk, compared with its teacher. Raises ConfigError where they do not go together."""
    adapter = find_adapter(teacher)
    try:
        softmax = adapter.attentions(teacher)
        other = adapter.attentions(student)
    except ValueError as error:
        raise ConfigError(f"student.checkpoint={path!r}: {error}") from error
    layers = [
        name
        for name, layer in other.items()
        if name in softmax and (is_linear(layer) or type(layer) is not type(softmax[name]))
    ]
    if type(student).__name__.removeprefix("Linearized") != type(teacher).__name__ or not layers:
        raise ConfigError(
            f"student.checkpoint={path!r} holds a {type(student).__name__} with {len(layers)} linear layers, and the "
            f"teacher is a {type(teacher).__name__}: the student must be what scanvas.linearize made of it"
        )
    inside = tuple(f"{name}." for name in layers)
    before, after = (
        {name: tuple(t.shape) for name, t in model.state_dict().items() if not name.startswith(inside)}
        for model in (teacher, student)
    )
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"student.checkpoint={path!r} does not fit the teacher: {name} has shape {after.get(name)} in the "
                f"student and {before.get(name)} in the teacher"
            )
    new = set()
    for name in layers:
        layer = student.get_submodule(name)
        rows = tensor_rows(name, softmax[name], layer, parts_of(adapter, layer), [], [])
        new |= {row["name"] for row in rows if row["status"] == "new"}
    return Linear(student, layers, new)

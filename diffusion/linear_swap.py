"""Exchange of attention modules, as ``linearize`` and the constructors of linearised classes do it."""

from typing import Any

import torch
from torch import nn

from .adapters import Adapter, find_adapter
from .linear_attention_modules import GridRecord, LinearizedLayer

Replacements = dict[str, nn.Module]


class RecordGrid:
    """A forward pre-hook that writes the grid of a call into a record."""

    def __init__(self, grid, record: GridRecord):
        self.grid = grid
        self.record = record

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.record.value = self.grid(module, args, kwargs)


def build_all(model: nn.Module, linearization: dict[str, Any], originals: Replacements | None = None) -> Replacements:
    """The replacements for all layers of a ``linearization``. They take over the submodules of ``originals``, by
    default of the model's own layers, which must not be used any more then. The model is not changed."""
    adapter = find_adapter(model)
    records: dict[str, GridRecord] = {}
    built = {}
    for path, spec in linearization["layers"].items():
        original = (originals or {}).get(path)
        if original is None:
            original = model.get_submodule(path)
        record = records.setdefault(adapter.host(path), GridRecord())
        built[path] = adapter.replace(model, path, original, spec, record).train(original.training)
    return built


def add_hooks(model: nn.Module, replacements: Replacements) -> list:
    """Let the model tell the grid to the replacements that need it; returns the handles of the hooks."""
    adapter = find_adapter(model)
    hosts = {}
    for path, layer in replacements.items():
        if isinstance(layer, LinearizedLayer) and layer.core.needs_grid and layer.reads_record:
            hosts[adapter.host(path)] = layer.record
    return [
        model.get_submodule(host).register_forward_pre_hook(RecordGrid(adapter.grid, record), with_kwargs=True)
        for host, record in hosts.items()
    ]


def install(model: nn.Module, replacements: Replacements) -> None:
    """Put the replacements in and the hooks on."""
    for path, layer in replacements.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    add_hooks(model, replacements)


def remove_hooks(model: nn.Module) -> None:
    """Take the hooks of ``add_hooks`` off."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, RecordGrid):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def records_of(model: nn.Module) -> list[GridRecord]:
    """The records of all replaced layers, each once."""
    records = {id(m.record): m.record for m in model.modules() if isinstance(m, LinearizedLayer)}
    return list(records.values())


@torch.no_grad()
def reset_parts(layer: nn.Module, parts: dict[str, tuple[str, ...]], inherit: str) -> list[str]:
    """Give fresh weights to the parts that are not inherited: Xavier-uniform projections with zero biases, norms of
    one. Returns the names of the tensors that were reset."""
    fresh = []
    for part, names in parts.items():
        if part in inherit:
            continue
        for name in names:
            module = getattr(layer, name, None)
            if module is None:
                continue
            for key, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
                else:
                    parameter.fill_(0.0 if key.endswith("bias") else 1.0)
                fresh.append(f"{name}.{key}" if key else name)
    return fresh


def parts_of(adapter: Adapter, layer: nn.Module) -> dict[str, tuple[str, ...]]:
    """Which submodules of a replacement are queries', keys', values' and output's."""
    return layer.parts if isinstance(layer, LinearizedLayer) else adapter.parts

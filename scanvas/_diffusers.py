"""Makes diffusers know scanvas' classes, without importing diffusers.

After ``import scanvas``, and in whichever order the two are imported,

- ``DiffusionPipeline.from_pretrained(directory)`` finds our pipelines, which it looks for as attributes of the module
  ``diffusers``;
- a component of ours is written to ``model_index.json`` as ``["scanvas", class name]`` and found again there, wherever
  in scanvas its class lives.
"""

import importlib.abc
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

_LOADING = "diffusers.pipelines.pipeline_loading_utils"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions with modules that have just been imported. Finding and loading is left to the other finders."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]):
        self.actions = actions

    def find_spec(self, name, path=None, target=None):
        # Others look for a module without importing it, so nothing is crossed off the list here.
        if name not in self.actions:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.actions[name](sys.modules[name])  # diffusers puts another object in its own place

        spec.loader.exec_module = exec_module
        return spec


def _add_attributes(names: Iterable[str]) -> Callable[[ModuleType], None]:
    names = frozenset(names)

    def action(module: ModuleType) -> None:
        def lookup(name: str):
            if name in names:
                return getattr(sys.modules["scanvas"], name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        # Asked before the lazy lookup of diffusers' own module type, which it falls back to (PEP 562).
        module.__getattr__ = lookup

    return action


def _add_library(module: ModuleType) -> None:
    methods = {"ModelMixin": ["save_pretrained", "from_pretrained"]}
    module.LOADABLE_CLASSES["scanvas"] = methods
    module.ALL_IMPORTABLE_CLASSES.update(methods)


def register(names: Iterable[str]) -> None:
    """Announce ``names``, attributes of ``scanvas``, to diffusers: now if it is imported, else once it is."""
    attributes = _add_attributes(names)
    # diffusers' own tests look for pipelines and models in these sub-packages, too.
    actions = dict.fromkeys(("diffusers", "diffusers.pipelines", "diffusers.models"), attributes)
    actions[_LOADING] = _add_library
    for name in list(actions):
        if name in sys.modules:
            actions.pop(name)(sys.modules[name])
    if actions:
        sys.meta_path.insert(0, _AfterImport(actions))

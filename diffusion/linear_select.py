"""Which layers ``linearize`` replaces, and with what: arguments checked before anything is built."""

import fnmatch
from typing import Any

from torch import nn

from scanvas.backbones.mixers import MIXERS

from .adapters import Adapter, nearest
from .linear_cores import NO_TARGETS, TARGETS


def check_target(name: Any) -> None:
    """Raise ValueError where ``name`` is no target: why, if it is a mixer, else the nearest names."""
    if name in TARGETS:
        return
    if name in MIXERS:
        why = NO_TARGETS.get(name, "no core takes the softmax's queries, keys and values for it")
        raise ValueError(f"mixer: {name!r} is no target of linearize: {why}")
    raise ValueError(f"mixer must be one of {', '.join(TARGETS)}; got {name!r}{nearest(str(name), TARGETS)}")


def check_options(mixer: str, options: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    defaults = {**TARGETS[mixer].defaults, **adapter.options.get(mixer, {})}
    for name in options:
        if name not in defaults:
            raise TypeError(
                f"linearize: {name!r} is no option of {mixer!r}, which has {', '.join(defaults)}"
                f"{nearest(name, defaults)}"
            )
        _check_type(name, options[name], defaults[name])
    return {**defaults, **options}


def _check_type(name: str, value: Any, default: Any) -> None:
    """Refuse an option of another type than its default; what is ``None`` by default is a whole number otherwise."""
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "True or False"
    elif isinstance(default, float):
        fits, wanted = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0, "a number ≥ 0"
    else:
        fits, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        if default is None:
            fits, wanted = fits or value is None, "a whole number or None"
    if not fits:
        kind = ValueError if isinstance(value, (int, float)) and not isinstance(value, bool) else TypeError
        raise kind(f"linearize: {name} must be {wanted}, got {value!r}")


def layer_spec(
    adapter: Adapter, path: str, attention: nn.Module, mixer: str, heads: int | None, inherit: str, options: dict
) -> dict[str, Any]:
    adapter.verify(path, attention)
    before = adapter.heads(attention)
    after = TARGETS[mixer].default_heads(before) if heads is None else heads
    if not TARGETS[mixer].fuses_heads and after != before:
        raise ValueError(
            f"heads: {mixer!r} keeps the scores of the softmax, so also its {before} heads in {path}; got {heads}"
        )
    if not isinstance(after, int) or isinstance(after, bool) or after < 1 or before % after:
        divisors = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0)
        raise ValueError(
            f"heads must divide the {before} heads of {path}, whose neighbours are fused: {divisors}; got {heads!r}"
        )
    return {"mixer": mixer, "heads": after, "inherit": inherit, "options": dict(options)}


def select_layers(softmax: dict[str, nn.Module], layers: Any) -> list[str]:
    """Paths that ``layers`` names, in the model's order; see ``linearize``.

    Raises:
        ValueError, TypeError: nothing matches, or it is none of the allowed kinds.
    """
    paths = list(softmax)
    if isinstance(layers, str):
        layers = ["*"] if layers == "all" else [layers]
    if not isinstance(layers, (list, tuple, range)) or not all(
        isinstance(x, (str, int)) and not isinstance(x, bool) for x in layers
    ):
        raise TypeError(
            "layers must be 'all', a pattern or a list of patterns, a list of indices, a Budget, or a number or "
            f"fraction of the {len(paths)} layers; got {layers!r}"
        )
    if not layers:
        raise ValueError("layers is empty: name at least one layer")
    chosen = set()
    for item in layers:
        if isinstance(item, str):
            matched = fnmatch.filter(paths, item)
            if not matched:
                hint = nearest(item, paths) or f"; there are {paths[0]} … {paths[-1]}"
                raise ValueError(f"layers: {item!r} matches no attention layer{hint}")
            chosen.update(matched)
        elif -len(paths) <= item < len(paths):
            chosen.add(paths[item])
        else:
            raise ValueError(f"layers: index {item} is out of range: there are {len(paths)} attention layers")
    return [path for path in paths if path in chosen]


def count_layers(layers: int | float, total: int, batches: list | None) -> int:
    if batches is None:
        raise ValueError(f"layers={layers} chooses by measured sensitivity, which needs calibration")
    if isinstance(layers, float):
        if not 0 < layers <= 1:
            raise ValueError(f"layers as a fraction must be in (0, 1], got {layers}")
        return max(1, round(layers * total))
    if not 1 <= layers <= total:
        raise ValueError(f"layers as a number must be in 1…{total}, got {layers}")
    return layers

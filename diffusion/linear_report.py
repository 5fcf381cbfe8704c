"""What ``linearize`` did: every tensor of attention, and what attention costs before and after."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from scanvas.backbones.mixers.sla import blocks_kept
from scanvas.kernels.local import count_pairs

from .adapters import Adapter
from .linear_attention_modules import LinearizedLayer

# Tokens of text beside the image in a joint sequence, as the models' pipelines give them by default.
_TEXT = {
    "SD3Transformer2DModel": 333,
    "FluxTransformer2DModel": 512,
    "AuraFlowTransformer2DModel": 264,
    "QwenImageTransformer2DModel": 256,
    "Lumina2Transformer2DModel": 256,
}
_PACKED = ("FluxTransformer2DModel", "QwenImageTransformer2DModel")  # 2×2 patches are made by the pipeline
_UNSIZED = 128  # latents of a megapixel, for models whose config has no size


@dataclass
class LinearizeReport:
    """Printed, it is a summary; ``to_dict`` and ``save`` give all of it.

    Attributes:
        model: the class, before and after.
        mixer, inherit, options: what was asked for.
        layers: per linearised layer: path, heads before and after.
        tensors: per tensor of attention: ``name``, ``shape``, ``status`` (``"inherited"``, ``"new"``, ``"softmax"``: in
            a layer left as it was, or ``"dropped"``), and ``source`` or ``init``.
        costs: per size: tokens, FLOPs and memory of attention before and after, see ``attention_costs``.
        calibration: per layer: error before and after the fit, and what was fitted.
        sensitivity: layers and the error of linearising each alone, least first, if it was measured; under a budget
            also what each saves.
        budget: of a choice by ``Budget``: size, FLOPs before, allowed and after, and the sum of the chosen errors.
    """

    model: tuple[str, str]
    mixer: str
    inherit: str
    options: dict[str, Any]
    layers: list[dict[str, Any]]
    tensors: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    calibration: dict[str, dict[str, Any]] = field(default_factory=dict)
    sensitivity: list[dict[str, Any]] = field(default_factory=list)
    budget: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {**vars(self), "model": list(self.model)}

    def save(self, path: str | Path) -> None:
        """Write JSON; with measured sensitivities and matplotlib, a plot of them beside it (``.png``)."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        if self.sensitivity:
            _plot(self.sensitivity, path.with_suffix(".png"))

    def __str__(self) -> str:
        counts = {
            status: sum(math.prod(t["shape"]) for t in self.tensors if t["status"] == status)
            for status in ("inherited", "new", "dropped", "softmax")
        }
        left = {t["layer"] for t in self.tensors if t["status"] == "softmax"}
        heads = sorted({(row["heads_before"], row["heads"]) for row in self.layers})
        lines = [
            f"{self.model[0]} → {self.model[1]}: {len(self.layers)} attention layers to {self.mixer!r}, "
            f"{len(left)} left softmax",
            f"heads {', '.join(f'{a} → {b}' for a, b in heads)}; inherited: {self.inherit}; "
            + ", ".join(f"{key}={value}" for key, value in self.options.items()),
            f"parameters of attention: {counts['inherited']:,} inherited, {counts['new']:,} new, "
            f"{counts['softmax']:,} in layers left softmax, {counts['dropped']:,} dropped",
        ]
        names = {t["name"].removeprefix(t["layer"] + "."): t for t in self.tensors if t["status"] in ("new", "dropped")}
        lines += [f"  {t['status']} in every layer that has it: {name} ({t['init']})" for name, t in names.items()]
        for cost in self.costs:
            lines.append(
                f"attention at {'×'.join(map(str, cost['size']))} ({cost['tokens']:,} tokens): "
                f"{cost['flops_before'] / 1e9:,.1f} → {cost['flops_after'] / 1e9:,.1f} GFLOPs, largest map or state "
                f"{cost['bytes_before'] / 2**20:,.1f} → {cost['bytes_after'] / 2**20:,.1f} MiB"
            )
        if self.budget:
            b = self.budget
            lines.append(
                f"budget at {'×'.join(map(str, b['size']))}: {b['flops_after'] / 1e9:,.1f} of "
                f"{b['flops_allowed'] / 1e9:,.1f} GFLOPs (softmax: {b['flops_before'] / 1e9:,.1f}), sum of the layers' "
                f"errors {b['sum_of_errors']:.3g}"
            )
        for path, fit in self.calibration.items():
            what = ", ".join(fit["fitted"]) or "nothing to fit in closed form"
            lines.append(f"  {path}: relative error {fit['error_before']:.3g} → {fit['error_after']:.3g} ({what})")
        lines.append("A model whose softmax was taken away needs training before it is of use: see docs/linearize.md.")
        return "\n".join(lines)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 1 + 0.2 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([row["path"] for row in rows], [row["error"] for row in rows])
    axes.set_xlabel("relative squared error of the model's output, one layer linearised")
    figure.savefig(path)


def tensor_rows(
    path: str, original: nn.Module, layer: nn.Module, parts: dict[str, tuple[str, ...]], fresh: list[str], fitted: list
) -> list[dict[str, Any]]:
    """Rows of a linearised layer: inherited from where, new and how it was initialised, dropped."""
    old = dict(original.named_parameters())
    owned = {name for names in parts.values() for name in names}
    rows, used = [], set()
    for name, parameter in layer.named_parameters():
        row = {"layer": path, "name": f"{path}.{name}", "shape": list(parameter.shape)}
        if name.split(".")[0] in owned and name not in fresh:
            sources = _sources(name, old)
            used.update(sources)
            row |= {"status": "inherited", "source": ", ".join(f"{path}.{s}" for s in sources)}
            if name in fitted:
                row["init"] = "least squares"
        else:
            used.update(_sources(name, old))
            row |= {"status": "new", "init": "fitted to the softmax layer" if name in fitted else _init(name, layer)}
        rows.append(row)
    for name, parameter in old.items():
        if name not in used:
            rows.append(
                {
                    "layer": path,
                    "name": f"{path}.{name}",
                    "shape": list(parameter.shape),
                    "status": "dropped",
                    "init": "the linear layer has no such tensor",
                }
            )
    return rows


def _sources(name: str, old: dict[str, Any]) -> list[str]:
    """The tensor of the softmax layer that a tensor came from."""
    if name in old:
        return [name]
    part, _, key = name.partition(".")
    if part in ("q_proj", "k_proj", "v_proj"):  # timm's fused projection, with EVA's biases beside it
        found = ["qkv.weight"] if key == "weight" else ["qkv.bias", f"{part[0]}_bias"]
        return [n for n in found if n in old]
    if part in ("to_q", "to_k", "to_v"):
        return [n for n in (f"to_qkv.{key}",) if n in old]
    return []


def _init(name: str, layer: nn.Module) -> str:
    if "conv" in name:  # that of our gated mixer comes before the projections
        return "identity" if hasattr(layer, "decay_proj") else "zero"
    if "features" in name:
        return "identity"
    if "linear_proj" in name or "feature_map" in name or "position" in name or name.endswith("norm.bias"):
        return "zero"
    if "gate_proj" in name:  # of a mixer, not of a core
        if hasattr(layer, "local_norm"):
            return "zero" if name.endswith("weight") else "zero: the gate is a half"
        return "zero" if name.endswith("weight") else "the gate is one"
    if hasattr(layer, "local_norm") and name in ("out_norm.weight", "local_norm.weight"):
        return "two, for the gate is a half" if name == "out_norm.weight" else "zero"
    if "pool" in name:
        return "mean of a square"
    if "inner" in name:
        return "truncated normal, 0.02"
    if "factor" in name:
        return "logit of softmax_factor"
    if "modulator" in name:
        return "x + f(x) with f = 0"
    if "decay_proj.1.bias" in name:
        return "decays of initial_decay"
    if "scale" in name or "norm" in name or name.endswith(("k_gate.weight", "v_gate.weight")):
        return "one"
    return "zero" if name.endswith("bias") else "Xavier"


def softmax_rows(path: str, layer: nn.Module) -> list[dict[str, Any]]:
    """Rows of a layer that was left as it was."""
    return [
        {"layer": path, "name": f"{path}.{name}", "shape": list(p.shape), "status": "softmax"}
        for name, p in layer.named_parameters()
    ]


def default_sizes(model: nn.Module) -> list[tuple[int, ...]]:
    """The size a model was made for, twice and four times that: in latents for denoisers, pixels for classifiers."""
    if hasattr(model, "patch_embed") and hasattr(model.patch_embed, "img_size"):
        size = tuple(model.patch_embed.img_size)
    elif hasattr(model, "pretrained_cfg"):
        size = tuple(model.pretrained_cfg["input_size"][1:])
        if hasattr(model, "grid_size"):  # of its position embeddings
            size = tuple(n * model.feature_info[0]["reduction"] for n in model.grid_size)
    elif not hasattr(model, "config") or not hasattr(model.config, "patch_size"):
        if type(model).__name__ != "UNet2DConditionModel":
            return []
        size = (model.config.sample_size or 64,) * 2
    else:
        side = model.config.get("sample_size") or _UNSIZED
        size = (side, side) if isinstance(side, int) else tuple(side)
    return [tuple(factor * n for n in size) for factor in (1, 2, 4)]


def check_sizes(model: nn.Module, sizes: Any) -> list[tuple[int, ...]]:
    """``sizes`` as a list of tuples.

    Raises:
        TypeError, ValueError: they are none, or have another number of axes than the model's images.
    """
    patch = getattr(getattr(model, "config", None), "patch_size", None)
    axes = 3 if isinstance(patch, (tuple, list)) and len(patch) == 3 else 2
    names = "(T, H, W)" if axes == 3 else "(H, W)"
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, (list, tuple)) for size in sizes):
        raise TypeError(f"sizes must be a list of {names}, got {sizes!r}")
    least = patch if isinstance(patch, (tuple, list)) else (patch or 1,) * axes
    for size in sizes:
        if len(size) != axes or not all(isinstance(n, int) and n >= p for n, p in zip(size, least)):
            raise ValueError(f"sizes must be a list of {names}, whole numbers that hold a patch; got {tuple(size)}")
    return [tuple(size) for size in sizes]


def image_grid(adapter: Adapter, model: nn.Module, path: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """Grid of the image's tokens in a layer for an input of that size."""
    if hasattr(adapter, "image_grid"):
        return adapter.image_grid(model, path, size)
    if adapter.host(path) == "patch_embed":
        return tuple(model.patch_embed.dynamic_feat_size(size))
    if adapter.model == "UNet2DConditionModel":
        levels = len(model.config.down_block_types)
        kind, _, rest = path.partition(".")
        index = int(rest.split(".")[0]) if kind != "mid_block" else levels - 1
        level = levels - 1 - index if kind == "up_blocks" else index
        return tuple(math.ceil(n / 2**level) for n in size)
    patch = 2 if adapter.model in _PACKED else model.config.patch_size
    patches = (patch,) * len(size) if isinstance(patch, int) else patch[-len(size) :]
    return tuple(n // p for n, p in zip(size, patches))


def attention_costs(
    adapter: Adapter, model: nn.Module, specs: dict[str, dict], originals: dict[str, nn.Module], size: tuple[int, ...]
) -> dict[str, Any]:
    """Costs of one image's attention without its projections, which stay: FLOPs (a multiply and an add are two) of all
    layers, and the largest map ``(heads, N, N)`` in bf16, which a plain softmax holds in memory, against the largest
    state ``(heads, D, D')`` in float32. Of local softmax the map of what is seen counts. Layers that stay softmax count
    on both sides."""
    costs = [layer_costs(adapter, model, path, m, specs.get(path), size) for path, m in originals.items()]
    result = {"size": list(size), "tokens": max(cost["tokens"] for cost in costs)}
    for when in ("before", "after"):
        result[f"flops_{when}"] = sum(cost[when][0] for cost in costs)
        result[f"bytes_{when}"] = max(cost[when][1] for cost in costs)
    return result


def layer_costs(
    adapter: Adapter, model: nn.Module, path: str, original: nn.Module, spec: dict | None, size: tuple[int, ...]
) -> dict[str, Any]:
    """``tokens`` of one layer and its ``(FLOPs, bytes)`` ``before`` and ``after``, see ``attention_costs``. Without a
    ``spec`` it stays softmax."""
    grid = image_grid(adapter, model, path, size)
    others = _TEXT.get(adapter.model, getattr(model, "num_prefix_tokens", 0))
    second = adapter.model == "SD3Transformer2DModel" and path.endswith("attn2")
    N = math.prod(grid) + (0 if second else others)
    heads, C = adapter.heads(original), width_of(original)
    before = (4 * N * N * C, 2 * heads * N * N)
    if adapter.model == "SanaTransformer2DModel":  # whose own attention is linear
        before = _linear_costs({"mixer": "lit", "heads": heads, "options": {}}, N, grid, C)
    return {"tokens": N, "before": before, "after": before if spec is None else _linear_costs(spec, N, grid, C)}


def width_of(attention: nn.Module) -> int:
    """Channels of all heads of an attention."""
    for name in ("to_q", "q_proj"):
        if getattr(attention, name, None) is not None:
            return getattr(attention, name).out_features
    if isinstance(getattr(attention, "qkv", None), nn.Module):
        return attention.qkv.out_features // 3
    return attention.dim


def _linear_costs(spec: dict[str, Any], N: int, grid: tuple[int, ...], C: int) -> tuple[int, int]:
    """FLOPs and bytes of the state, or of the part of the map that is seen, of a target."""
    target, heads, options = spec["mixer"], spec["heads"], spec["options"]
    width, image = C // heads, math.prod(grid)
    flops = 2 * image * C * options.get("kernel_size", 0) ** 2
    if target in ("local", "hybrid"):
        seen, pooled = _exact_pairs(options, N, grid)
        flops += 4 * C * seen + 2 * pooled * C * 2 * (options.get("pool") or 0) ** 2
        if target == "local":
            return flops, 2 * heads * seen
        # Features of queries and keys, states of all tokens, and what the exact keys have brought to them.
        flops += image * (8 * C * width + 8 * C * width) + 4 * C * _exact_pairs(options, image, grid)[0]
        return flops, 2 * heads * seen + 8 * C * width
    if target == "t5":  # the network on keys and on queries, its gradients, its convolutions
        flops += 18 * N * C * width + 4 * image * C * options["qk_kernel_size"] ** 2
        return flops, 12 * C * width
    if target == "gla":
        return flops + 2 * N * 5 * C * width, 2 * 4 * C * width
    if target == "agent":
        agents = math.prod(grid[:-2]) * options["agents"] ** 2
        return flops + 8 * N * agents * C, 2 * heads * N * agents
    if target == "retention":  # every axis in turn, with the tokens of no image in each
        others = N - image
        scores = sum(image * (size + others) for size in grid) + others * N
        return flops + 4 * C * scores, 2 * heads * image * (max(grid) + others)
    if target == "sla":  # the softmax of some blocks, linear attention, and the projection of what it gives
        seen = min(N, blocks_kept(N, options["block"], options["keep"]) * options["block"])
        flops += 4 * N * seen * C + N * (4 * C * width + 3 * C + C) + 2 * N * C * width
        return flops, 2 * heads * N * seen + 4 * C * width
    features = 2 if target in ("cosformer", "hedgehog", "nala") else 1
    flops += N * (4 * C * width * features + 3 * C * features + C)
    if target == "hedgehog":
        flops += 4 * N * C * width
    return flops, 4 * C * width * features


def _exact_pairs(options: dict[str, Any], N: int, grid: tuple[int, ...]) -> tuple[int, int]:
    """Pairs of a query and a key with a score of their own, and pooled keys, in a sequence of N tokens."""
    image, pool = math.prod(grid), options.get("pool") or 0
    pooled = math.prod(grid[:-2]) * math.prod(math.ceil(n / pool) for n in grid[-2:]) if pool else 0
    every = options.get("every")
    near = image * math.ceil(image / every) if every else count_pairs(grid, options["radius"])
    return near + image * pooled + N * N - image * image, pooled


def is_linear(layer: nn.Module) -> bool:
    """Whether it was put there by ``linearize``."""
    return isinstance(layer, LinearizedLayer)

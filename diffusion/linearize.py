"""``linearize``: give a pretrained softmax model linear attention and keep its weights; ``delinearize``: undo it."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from . import calibrate as fit
from .adapters import Adapter, find_adapter
from .calibration_data import as_batches
from .linear_budget import Budget, plan_budget
from .linear_denoiser import write_entries
from .linear_report import (
    LinearizeReport,
    attention_costs,
    check_sizes,
    default_sizes,
    is_linear,
    softmax_rows,
    tensor_rows,
)
from .linear_select import check_options, check_target, count_layers, layer_spec, select_layers
from .linear_swap import build_all, install, parts_of, remove_hooks, reset_parts

INHERIT = {"none": "", "vo": "vo", "qkvo": "qkvo"}
_COMPONENTS = ("transformer", "unet")


class Linearized(NamedTuple):
    """What ``linearize`` returns."""

    model: Any
    report: LinearizeReport


def linearize(
    model: Any,
    mixer: str = "lit",
    layers: Any = "all",
    *,
    heads: int | None = None,
    inherit: str = "qkvo",
    calibration: Any = None,
    sizes: list[tuple[int, ...]] | None = None,
    inplace: bool = False,
    keep_original: bool = True,
    seed: int = 0,
    **options: Any,
) -> Linearized:
    """Replace softmax self-attention by linear attention.

    A softmax model does not become linear without some training: what comes out paints or classifies badly until it has
    been trained again for a while. Calibration shortens that, it does not replace it.

    Args:
        model: a diffusers model, a diffusers pipeline (its transformer or UNet is linearised) or a timm model. Without
            ``inplace`` it is left as it is, to the bit.
        mixer: a target: ``"lit"``, ``"linfusion"``, ``"hedgehog"``, ``"gla"``, … ; see docs/linearize.md for all.
        layers: ``"all"``; a pattern of paths such as ``"single_transformer_blocks.*"``, or a list of them; a list of
            indices into the model's attention layers; a number (int) or fraction (float) of layers, the least
            sensitive ones, measured on ``calibration``; or a ``Budget`` of FLOPs, which the best set of layers meets.
        heads: heads of the linear attention; must divide the softmax's, whose neighbours are fused. By default the
            same number, for ``"lit"`` about a quarter.
        inherit: ``"qkvo"``, ``"vo"`` or ``"none"``: which projections keep their weights. Norms of queries and keys go
            with these.
        calibration: batches of the model's inputs: a list of dicts of keywords, tuples of arguments, or tensors. What
            is new is fitted to the softmax layers on them, in closed form; nothing is trained.
        sizes: input sizes for the report's costs, ``(H, W)`` in latents or, for timm, pixels.
        inplace: change ``model`` itself instead of a copy.
        keep_original: keep the softmax layers beside the model, for ``delinearize``. They cost their memory.
        seed: of fresh weights.
        options: the target's own, such as ``kernel_size``; see ``TARGETS[mixer].defaults``.

    Returns:
        ``(model, report)``. The model's class is the ``Linearized…`` one, which saves and loads what was done; for our
        own denoiser its own class, whose config holds it.

    Raises:
        ValueError, TypeError: an argument does not fit; the model is unchanged.
    """
    component = _component(model)
    if component:
        return _linearize_pipeline(
            model,
            component,
            mixer,
            layers,
            heads=heads,
            inherit=inherit,
            calibration=calibration,
            sizes=sizes,
            inplace=inplace,
            keep_original=keep_original,
            seed=seed,
            **options,
        )
    check_target(mixer)
    if inherit not in INHERIT:
        raise ValueError(f"inherit must be one of {', '.join(INHERIT)}; got {inherit!r}")
    adapter = find_adapter(model)
    softmax = _softmax_layers(adapter, model)
    options = check_options(mixer, options, adapter)
    sizes = None if sizes is None else check_sizes(model, sizes)
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    batches = None if calibration is None else as_batches(calibration)
    by_budget = isinstance(layers, Budget)
    by_sensitivity = by_budget or (isinstance(layers, (int, float)) and not isinstance(layers, bool))
    chosen = list(softmax) if by_sensitivity else select_layers(softmax, layers)
    count = count_layers(layers, len(softmax), batches) if by_sensitivity and not by_budget else len(chosen)

    specs = {path: layer_spec(adapter, path, softmax[path], mixer, heads, inherit, options) for path in chosen}
    plan = plan_budget(layers, adapter, model, specs, softmax, sizes, batches) if by_budget else None
    linearization = {"layers": specs}
    student = model if inplace else copy.deepcopy(model)
    originals = {path: student.get_submodule(path) for path in chosen}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        replacements = build_all(student, linearization, {path: copy.deepcopy(m) for path, m in originals.items()})
        fresh = {
            path: reset_parts(layer, parts_of(adapter, layer), INHERIT[inherit]) for path, layer in replacements.items()
        }
    fitted = fit.calibrate(student, replacements, batches, INHERIT[inherit]) if batches else {}
    ranking = fit.sensitivity(student, replacements, batches) if by_sensitivity else []
    if by_sensitivity:
        kept = set(plan.choose(ranking)) if plan else {row["path"] for row in ranking[:count]}
        if plan:
            ranking = [{**row, "flops_saved": plan.saved[row["path"]]} for row in ranking]
        chosen = [path for path in chosen if path in kept]
        specs = {path: specs[path] for path in chosen}
        linearization = {"layers": specs}

    everything = {path: student.get_submodule(path) for path in softmax}
    report = LinearizeReport(
        model=(type(model).__name__, ""),
        mixer=mixer,
        inherit=inherit,
        options=options,
        layers=[{"path": p, "heads_before": adapter.heads(originals[p]), "heads": specs[p]["heads"]} for p in chosen],
        tensors=[
            row
            for path in softmax
            for row in (
                tensor_rows(
                    path,
                    originals[path],
                    replacements[path],
                    parts_of(adapter, replacements[path]),
                    fresh[path],
                    fitted.get(path, {}).get("fitted", []),
                )
                if path in specs
                else softmax_rows(path, everything[path])
            )
        ],
        costs=[
            attention_costs(adapter, student, specs, everything, size)
            for size in (default_sizes(student) if sizes is None else sizes)
        ],
        calibration={path: fitted[path] for path in chosen if path in fitted},
        sensitivity=ranking,
        budget=plan.to_dict(chosen, ranking) if plan else None,
    )
    _finish(adapter, student, linearization, {p: replacements[p] for p in chosen}, originals)
    if keep_original:
        student._softmax_originals = {path: originals[path] for path in chosen}
    report.model = (report.model[0], type(student).__name__)
    return Linearized(student, report)


def _finish(adapter: Adapter, student: nn.Module, linearization: dict, replacements: dict, originals: dict) -> None:
    """Put the layers in, and let class and config say so."""
    from .linear_classes import linearized_class

    checkpointing = [
        m._gradient_checkpointing_func for m in student.modules() if getattr(m, "gradient_checkpointing", 0)
    ]
    install(student, replacements)
    if hasattr(adapter, "finish"):
        adapter.finish(student, linearization, originals)
        return
    student.__class__ = linearized_class(type(student))
    if hasattr(student, "register_to_config"):
        student.register_to_config(linearization=linearization)
        if checkpointing:
            student._set_gradient_checkpointing(True, checkpointing[0])
    else:
        student.linearization = linearization


def _component(model: Any) -> str | None:
    """The attribute of a pipeline that holds its denoiser."""
    if isinstance(model, nn.Module) or not hasattr(model, "components"):
        return None
    for name in _COMPONENTS:
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise ValueError(f"{type(model).__name__} has none of the components {', '.join(_COMPONENTS)} to linearise")


def _linearize_pipeline(pipeline: Any, component: str, *args: Any, inplace: bool, **kwargs: Any) -> Linearized:
    denoiser, report = linearize(getattr(pipeline, component), *args, inplace=inplace, **kwargs)
    if not inplace:
        pipeline = copy.copy(pipeline)
    pipeline.register_modules(**{component: denoiser})
    return Linearized(pipeline, report)


def _softmax_layers(adapter: Adapter, model: nn.Module) -> dict[str, nn.Module]:
    """All self-attention of a model that is softmax.

    Raises:
        ValueError: the model was linearised before, has LoRA layers or offloading enabled, or has no self-attention to
            be found.
    """
    if type(model).__name__.startswith("Linearized") or any(is_linear(m) for m in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is linearised already; delinearize it first, or start from the softmax model"
        )
    if getattr(model, "_hf_peft_config_loaded", False) or any(hasattr(m, "lora_A") for m in model.modules()):
        raise ValueError(
            "the model has LoRA layers: fuse_lora() and unload them before linearize, load them again after"
        )
    # Such hooks hold on to the modules they were made for, and would go on calling those that are replaced.
    # (A pipeline that has painted leaves an empty list of them behind.)
    if any(hasattr(m, "_hf_hook") or getattr(getattr(m, "_diffusers_hook", None), "hooks", 0) for m in model.modules()):
        raise ValueError(
            "the model has hooks of offloading, layerwise casting or a cache: linearize first, enable them afterwards"
        )
    found = adapter.attentions(model)
    if hasattr(adapter, "finish"):  # our denoiser: other mixers are no mistake, there is only nothing to do
        found = {path: m for path, m in found.items() if type(m).__name__ == "SoftmaxAttention"}
        if not found and model.config.layer_mixers:
            raise ValueError(f"{type(model).__name__} is linearised already: none of its mixers is softmax any more")
    if not found:
        raise ValueError(f"{type(model).__name__} has no softmax self-attention at {adapter.layers!r}")
    return found


def _of_teacher(teacher: Any, adapter: Adapter, path: str) -> nn.Module:
    """The softmax layer of a teacher that stands in the place of a linear one."""
    found = adapter.attentions(teacher).get(path) if isinstance(teacher, nn.Module) else None
    if found is None or is_linear(found):
        raise ValueError(
            f"teacher must be the softmax model that was linearised; {type(teacher).__name__} has no softmax at {path}"
        )
    adapter.verify(path, found)
    return found


def delinearize(model: Any, teacher: nn.Module | None = None) -> Any:
    """Put the softmax layers back, in place. The rest of the model, trained or not, stays as it is.

    Args:
        model: what ``linearize`` returned: a model or a pipeline.
        teacher: the softmax model to copy the layers from. By default they are those that ``linearize`` kept. What was
            loaded from disk, or linearised with ``keep_original=False``, has none, and needs a teacher.

    Returns:
        ``model``, with its former class and config.

    Raises:
        ValueError: the model is not linearised, or there is nothing to restore from.
    """
    component = _component(model)
    if component:
        denoiser = delinearize(getattr(model, component), teacher)
        model.register_modules(**{component: denoiser})
        return model
    adapter = find_adapter(model)
    kept = getattr(model, "_softmax_originals", None)
    own = hasattr(adapter, "finish")
    if own:
        paths = list(kept or {}) or [f"transformer_blocks.{i}.mixer" for i in model.config.layer_mixers or {}]
    else:
        paths = [path for path, m in adapter.attentions(model).items() if is_linear(m)]
    if not paths:
        raise ValueError(f"{type(model).__name__} is not linearised")
    if teacher is None and not kept:
        raise ValueError(
            "the softmax layers are not there any more: a saved model holds only its linear layers. Their projections "
            "may have been trained or fused, so nothing is guessed; give teacher=, the softmax model"
        )
    sources = {}
    for path in paths:
        source = kept[path] if teacher is None else copy.deepcopy(_of_teacher(teacher, adapter, path))
        like = next(model.get_submodule(path).parameters())
        sources[path] = source.to(device=like.device, dtype=like.dtype).train(model.training)
    remove_hooks(model)
    for path, source in sources.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, source)
    if kept:
        del model._softmax_originals
    if own:
        entries = {
            i: e for i, e in (model.config.layer_mixers or {}).items() if f"transformer_blocks.{i}.mixer" not in sources
        }
        for path in sources:
            model.get_submodule(path.rpartition(".")[0]).order = "raster"
        write_entries(model, entries)
    else:
        model.__class__ = type(model).__bases__[-1]
        if hasattr(model, "register_to_config"):
            model._internal_dict = type(model._internal_dict)(
                {key: value for key, value in model._internal_dict.items() if key != "linearization"}
            )
        else:
            del model.linearization
    return model

"""Closed-form fits of what is new in a linearised layer to the outputs of the softmax layer it replaces.

Layers are teacher-forced: each sees the inputs that the softmax model gives it. The convolution, scale or temperature
of a core, and an output projection that was not inherited, are fitted one after the other; nothing is trained.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from scanvas.backbones.mixers.agent import AgentAttention
from scanvas.backbones.mixers.gla import GatedLinearAttention
from scanvas.backbones.mixers.hybrid import factor_logit
from scanvas.backbones.mixers.lina import LinaAttention
from scanvas.backbones.mixers.linear import LinearAttention
from scanvas.backbones.mixers.mala import MALAAttention
from scanvas.backbones.mixers.rala import RALAAttention
from scanvas.backbones.mixers.retention import RetentionAttention

from .calibration_data import call_all
from .calibration_watch import InPlace, Watch, add, observe, output_layers, solve
from .linear_attention_modules import LinearizedLayer
from .linear_cores import decay_logit
from .linear_swap import Replacements, add_hooks

_TEMPERATURES = (1.0, 0.25, 0.5, 2.0, 4.0, 8.0)
_DECAYS = (0.5, 0.9, 0.99, 0.9999)
_FACTORS = (0.01, 0.5, 0.9, 0.99)
_SCALES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_OUTPUT_RIDGE = 1e-3
"""Of a whole projection. What linear attention averages is nearly the same in all tokens of an image, so a batch says
little of most directions; with 1e-6 the fit had weights 50 times the teacher's and held for its own batch alone."""
# Mixers in whose output projection goes the attention plus a convolution of all channels of the image.
_ADD_A_CONVOLUTION = (
    AgentAttention,
    LinaAttention,
    LinearAttention,
    MALAAttention,
    RALAAttention,
    RetentionAttention,
)


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def relative_errors(model: nn.Module, replacements: Replacements, batches: list) -> dict[str, float]:
    """Path → squared error of the layer's output, relative to the softmax layer's."""
    sums = {path: [0.0, 0.0] for path in replacements}

    def visit(path, args, kwargs, output, _):
        found = InPlace(model, path, replacements[path])(*args, **kwargs)
        for got, wanted in zip(_as_tuple(found), _as_tuple(output)):
            sums[path][0] += (got.double() - wanted.double()).square().sum().item()
            sums[path][1] += wanted.double().square().sum().item()

    observe(model, replacements, batches, visit)
    return {path: error / total if total else error for path, (error, total) in sums.items()}


def calibrate(model: nn.Module, replacements: Replacements, batches: list, inherit: str) -> dict[str, dict[str, Any]]:
    """Fit the replacements in place. Returns path → ``error_before``, ``error_after`` and ``fitted``."""
    before = relative_errors(model, replacements, batches)
    fitted: dict[str, list[str]] = {path: [] for path in replacements}
    if "v" in inherit:  # the decay is searched with outputs of the right size, which depends on it
        _fit_norms(model, replacements, batches, fitted)
    _search(model, replacements, batches, fitted)
    if "v" in inherit:
        _fit_norms(model, replacements, batches, fitted)
        _fit_inside(model, replacements, batches, fitted)
    if "o" not in inherit:
        _fit_output(model, replacements, batches, fitted)
    after = relative_errors(model, replacements, batches)
    return {
        path: {"error_before": before[path], "error_after": after[path], "fitted": fitted[path]}
        for path in replacements
    }


def _convolution(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, LinearizedLayer):
        return layer.core.conv
    return layer.conv if isinstance(layer, _ADD_A_CONVOLUTION) else None


def _fit_inside(model: nn.Module, replacements: Replacements, batches: list, fitted: dict) -> None:
    """The convolution and the scale of a core, to what reaches the softmax layer's output projection."""
    normal: dict[str, list] = {}

    def visit(path, args, kwargs, output, watch):
        layer = replacements[path]
        conv, scale = _convolution(layer), getattr(getattr(layer, "core", None), "scale", None)
        if (conv is None and scale is None) or not getattr(layer, "plain_inside", True):
            return
        # Without an output projection (Flux' single blocks) the output itself is what the core gives.
        targets = [watch.inputs[i] for i in sorted(watch.inputs)] or list(_as_tuple(output))
        own, seen = Watch(layer), []
        if conv is not None:
            handle = conv.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], inputs[1], out)))
        got = _as_tuple(layer(*args, **kwargs))
        own.close()
        pieces = [own.inputs[i] for i in sorted(own.inputs)] or list(got)
        if conv is not None:
            handle.remove()
            (values, grid, local) = seen[0]
            tokens = values.shape[0] // targets[0].shape[0] * values.shape[1]
            # In one stream the image comes last.
            residual = (targets[0] - pieces[0])[:, -tokens:].reshape(values.shape).double() + local.double()
            add(normal, path, *_convolution_equations(values.double(), residual, grid, conv.kernel_size[0]))
        else:
            got_all, wanted = (torch.cat([t.flatten(0, -2) for t in ts]).double() for ts in (pieces, targets))
            add(normal, path, (got_all * got_all).sum(0), (got_all * wanted).sum(0))

    observe(model, replacements, batches, visit)
    with torch.no_grad():
        for path, (gram, moment) in normal.items():
            layer = replacements[path]
            conv = _convolution(layer)
            if conv is None:
                layer.core.scale.mul_((moment / gram.clamp_min(1e-12)).to(layer.core.scale.dtype))
                fitted[path].append("core.scale")
                continue
            solution = solve(gram, moment.unsqueeze(-1)).squeeze(-1)
            conv.weight.copy_(solution[:, :-1].view_as(conv.weight))
            conv.bias.copy_(solution[:, -1])
            prefix = "core.conv" if isinstance(layer, LinearizedLayer) else "conv"
            fitted[path] += [f"{prefix}.weight", f"{prefix}.bias"]


def _fit_norms(model: nn.Module, replacements: Replacements, batches: list, fitted: dict) -> None:
    """The two norms of our denoiser's gated mixer, by least squares to the softmax layer's output, which with the
    decays and the gate as they are is linear in the norms' weights. An RMSNorm makes vectors of one size, where a
    softmax gives averages of values, which are smaller."""
    mixers = {
        path: layer
        for path, layer in replacements.items()
        if isinstance(layer, GatedLinearAttention) and layer.local_norm is not None
    }
    if not mixers:
        return
    normal: dict[str, list] = {}

    def visit(path, args, kwargs, output, _):
        mixer, inside = mixers[path], []
        norms = (mixer.out_norm, mixer.local_norm)
        placed, watch = InPlace(model, path, mixer), Watch(mixer)
        for weights in ((1.0, 0.0), (0.0, 1.0)):  # the parts of the output that the two scale
            for norm, weight in zip(norms, weights):
                nn.init.constant_(norm.weight, weight)
            placed(*args, **kwargs)
            inside.append(placed.in_raster(watch.inputs[0], args).flatten(0, -2).double())
        watch.close()
        x, layer = torch.cat(inside, dim=1), output_layers(mixer)[0]
        wanted = output.flatten(0, -2).double() - (0 if layer.bias is None else layer.bias.double())
        through = layer.weight.double().repeat(1, 2)
        # All heads share a norm: (2, heads, width) columns, summed over the heads.
        shape = (2, mixer.num_heads, -1)
        gram = ((x.T @ x) * (through.T @ through)).unflatten(1, shape).sum(2).unflatten(0, shape).sum(1)
        moment = ((x.T @ wanted) * through.T).sum(1).unflatten(0, shape).sum(1)
        add(normal, path, gram.flatten(2).flatten(0, 1), moment.flatten())

    observe(model, mixers, batches, visit)
    with torch.no_grad():
        for path, (gram, moment) in normal.items():
            solution = solve(gram, moment.unsqueeze(-1)).view(2, -1)
            for name, weight in zip(("out_norm", "local_norm"), solution):
                getattr(mixers[path], name).weight.copy_(weight)
                if f"{name}.weight" not in fitted[path]:
                    fitted[path].append(f"{name}.weight")


def _convolution_equations(values: Tensor, target: Tensor, grid: tuple[int, int], size: int) -> tuple[Tensor, Tensor]:
    """Normal equations, per channel, of a depthwise convolution with bias: ``(C, k²+1, k²+1)`` and ``(C, k²+1)``."""
    B, N, C = values.shape
    image = values.transpose(1, 2).reshape(B, C, *grid)
    patches = nn.functional.unfold(image, size, padding=size // 2).view(B, C, size * size, N)
    patches = torch.cat((patches, patches.new_ones(B, C, 1, N)), dim=2)
    return torch.einsum("bcin,bcjn->cij", patches, patches), torch.einsum("bcin,bnc->ci", patches, target)


def _candidates(layer: nn.Module, turn: int) -> dict[str, list[Tensor]]:
    """Tensors for which a few settings are tried in a turn: name → their values. The first is the present one."""
    owner, prefix = (layer.core, "core.") if isinstance(layer, LinearizedLayer) else (layer, "")

    def scaled(names: Iterable[str], factors: Iterable[float]) -> dict[str, list[Tensor]]:
        return {prefix + n: [owner.get_parameter(n).detach() * t for t in factors] for n in names}

    def filled(name: str, logits: Iterable[float]) -> dict[str, list[Tensor]]:
        present = owner.get_parameter(name).detach()
        return {prefix + name: [present.clone(), *(torch.full_like(present, logit) for logit in logits)]}

    if hasattr(owner, "factor") and turn == 0:
        return filled("factor.weight", map(factor_logit, _FACTORS))
    if hasattr(owner, "q_features") and turn == 1:
        return scaled(("q_features.weight", "k_features.weight"), _TEMPERATURES)
    if hasattr(owner, "decay_proj") and turn == 1:
        return filled("decay_proj.1.bias", map(decay_logit, _DECAYS))
    if hasattr(owner, "inner"):
        return scaled(("inner.w1", "inner.w2") if turn == 0 else ("inner.w3",), _SCALES)
    return {}


def _search(model: nn.Module, replacements: Replacements, batches: list, fitted: dict) -> None:
    """What stands outside of all sums: the temperature of Hedgehog's features, the decay of gated layers, a hybrid's
    weight of the softmax, the scale of an inner network. The best of a few, layer by layer."""
    for turn in range(2):
        _search_turn(model, replacements, batches, fitted, turn)


def _search_turn(model: nn.Module, replacements: Replacements, batches: list, fitted: dict, turn: int) -> None:
    tried = {path: values for path, layer in replacements.items() if (values := _candidates(layer, turn))}
    if not tried:
        return
    count = len(next(iter(next(iter(tried.values())).values())))
    layers = {path: replacements[path] for path in tried}
    errors = []
    for i in range(count):
        _set(layers, tried, dict.fromkeys(tried, i))
        errors.append(relative_errors(model, layers, batches))
    best = {path: min(range(count), key=lambda i: errors[i][path]) for path in tried}
    _set(layers, tried, best)
    for path, values in tried.items():
        if best[path]:
            fitted[path] += list(values)


@torch.no_grad()
def _set(layers: Replacements, tried: dict[str, dict[str, list[Tensor]]], choice: dict[str, int]) -> None:
    for path, layer in layers.items():
        for name, values in tried[path].items():
            layer.get_parameter(name).copy_(values[choice[path]])


def _fit_output(model: nn.Module, replacements: Replacements, batches: list, fitted: dict) -> None:
    """Output projections that were not inherited, by ridge regression to the softmax layer's output."""
    normal: dict[tuple[str, int], list] = {}

    def visit(path, args, kwargs, _, watch):
        own, layer = Watch(replacements[path]), InPlace(model, path, replacements[path])
        layer(*args, **kwargs)
        own.close()
        for i, features in own.inputs.items():
            if i not in watch.outputs:
                continue
            x = layer.in_raster(features, args).flatten(0, -2).double()
            if output_layers(replacements[path])[i].bias is not None:
                x = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
            add(normal, (path, i), x.T @ x, x.T @ watch.outputs[i].flatten(0, -2).double())

    observe(model, replacements, batches, visit)
    with torch.no_grad():
        for (path, i), (gram, moment) in normal.items():
            layer = output_layers(replacements[path])[i]
            solution = solve(gram, moment, _OUTPUT_RIDGE).T
            layer.weight.copy_(solution[:, : layer.in_features])
            if layer.bias is not None:
                layer.bias.copy_(solution[:, -1])
            fitted[path] += [
                f"{name}.{key}"
                for name, module in replacements[path].named_modules()
                if module is layer
                for key, _ in module.named_parameters()
            ]


def sensitivity(model: nn.Module, replacements: Replacements, batches: list) -> list[dict[str, Any]]:
    """How much the model's output changes when one layer alone is replaced, least first: ``path`` and ``error``, the
    squared error relative to the softmax model's output."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    handles = add_hooks(model, replacements)
    rows = []
    try:
        with torch.no_grad():
            wanted = call_all(model, batches)
            for path, layer in replacements.items():
                called = InPlace(model, path, layer)
                hook = model.get_submodule(path).register_forward_hook(
                    lambda _, args, kwargs, output, called=called: called(*args, **kwargs), with_kwargs=True
                )
                try:
                    got = call_all(model, batches)
                finally:
                    hook.remove()
                error = sum((a.double() - b.double()).square().sum().item() for a, b in zip(got, wanted))
                total = sum(b.double().square().sum().item() for b in wanted)
                rows.append({"path": path, "error": error / total if total else error})
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    return sorted(rows, key=lambda row: row["error"])

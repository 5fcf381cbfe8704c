"""What calibration sees of attention layers while the softmax model runs, and the least squares it solves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scanvas.backbones.scan import from_order, to_order

from .adapters import find_adapter
from .calibration_data import call_all
from .linear_swap import Replacements, add_hooks


def output_layers(layer: nn.Module) -> list[nn.Linear]:
    """The output projections of an attention: the image's, then the text's."""
    layers = [getattr(layer, "proj", None), getattr(layer, "to_out", None), getattr(layer, "to_add_out", None)]
    return [m if isinstance(m, nn.Linear) else m[0] for m in layers if m is not None]


class InPlace:
    """A replacement, called with the arguments of the softmax layer as the model will call it: our own denoiser gives
    a mixer that scans its tokens in the order of its block.

    Args:
        model: the softmax model.
        path: of the layer.
        layer: the replacement.
    """

    def __init__(self, model: nn.Module, path: str, layer: nn.Module):
        self.layer, self.order = layer, find_adapter(model).scan_order(model, path, layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.order == "raster":
            return self.layer(*args, **kwargs)
        x, grid = args
        return from_order(self.layer(*to_order(x, self.order, grid), **kwargs), self.order, grid)

    def in_raster(self, x: Tensor, args: tuple) -> Tensor:
        """What was seen inside, ``(B, N, C)``, in the order of the softmax layer's tokens."""
        return x if self.order == "raster" else from_order(x, self.order, args[1])


class Watch:
    """Keeps what goes through the output projections of a layer while it runs."""

    def __init__(self, layer: nn.Module):
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.handles = [m.register_forward_hook(self._keep(i)) for i, m in enumerate(output_layers(layer))]

    def _keep(self, index: int) -> Callable:
        def hook(_, args, output):
            self.inputs[index], self.outputs[index] = args[0].detach(), output.detach()

        return hook

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def observe(model: nn.Module, replacements: Replacements, batches: list, visit: Callable) -> None:
    """Run the softmax model, and for each of its layers ``visit(path, args, kwargs, output, watch)``."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    handles = add_hooks(model, replacements)
    watches = {}

    def attach(path: str, layer: nn.Module) -> None:
        watches[path] = Watch(layer)

        def hook(_, args, kwargs, output):
            visit(path, args, kwargs, output, watches[path])

        handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    try:
        for path in replacements:
            attach(path, model.get_submodule(path))
        call_all(model, batches)
    finally:
        for handle in handles:
            handle.remove()
        for watch in watches.values():
            watch.close()
        for module, mode in training.items():
            module.training = mode


def add(normal: dict, key: Any, gram: Tensor, moment: Tensor) -> None:
    """Add normal equations to those of a key."""
    if key in normal:
        normal[key][0] += gram
        normal[key][1] += moment
    else:
        normal[key] = [gram, moment]


def solve(gram: Tensor, moment: Tensor, ridge: float = 1e-6) -> Tensor:
    """Least squares from normal equations ``(…, n, n)`` and ``(…, n, m)``, with a ridge relative to the mean square."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    added = ridge * diagonal.mean(-1, keepdim=True).clamp_min(1e-12)
    return torch.linalg.solve(gram + torch.diag_embed(added.expand_as(diagonal)), moment)

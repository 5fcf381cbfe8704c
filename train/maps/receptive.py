"""The effective receptive field: which pixels a place of the features really depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import call, first_image, open_image, prepare


@dataclass
class ReceptiveField:
    """``map`` ``(H, W)``: root mean square influence of each pixel of the input; ``centre``: the pixel
    ``(row, column)`` in the middle of the place that was looked at."""

    map: Tensor
    centre: tuple[float, float]

    def radius(self, share: float = 0.5) -> float:
        """Pixels around the centre within which ``share`` of the influence (of its square) lies."""
        H, W = self.map.shape
        rows, columns = torch.arange(H)[:, None] - self.centre[0], torch.arange(W) - self.centre[1]
        away, order = (rows**2 + columns**2).sqrt().flatten().sort()
        mass = self.map.double().square().flatten()[order].cumsum(0)
        return away[int((mass < share * mass[-1]).sum())].item()

    def area(self, share: float = 0.95) -> float:
        """The smallest part of the image, from 0 to 1, that holds ``share`` of the influence (of its square)."""
        mass = self.map.double().square().flatten().sort(descending=True).values.cumsum(0)
        return (int((mass < share * mass[-1]).sum()) + 1) / mass.numel()


def effective_receptive_field(
    model: nn.Module,
    image: Any,
    at: tuple[int, int] | None = None,
    *,
    layer: int | None = None,
    probes: int = 4,
    seed: int = 0,
    size: int | None = None,
    **inputs: Any,
) -> ReceptiveField:
    """Gradient of the features at one place with respect to the input (Luo et al., arXiv:1701.04128).

    The root mean square over random directions of the features, batch and channels: an estimate of the Frobenius norm
    of the Jacobian. (The sum of the features, which is often used, is constant after a LayerNorm.)

    Args:
        model: a timm model, or a denoiser, whose output is then what is looked at.
        image: as for ``attention_maps``; a batch is averaged over.
        at: ``(row, column)`` of a token of the layer (of a pixel of a denoiser's output), the middle by default.
        layer: block (stage for ViG-H) of a timm model, negative from the end; the last by default.
        probes: random directions; seed: theirs.
        size, inputs: as for ``attention_maps``.

    Returns:
        ``ReceptiveField``.
    """
    given = open_image(image)
    if not isinstance(given, Tensor | dict):
        given, _ = prepare(model, given, size)
    pixels = first_image(given)
    if pixels is None:
        raise ValueError("image must be an image, its path, a tensor (B, C, H, W) or a dict that holds one")
    x = pixels.detach().clone().requires_grad_()
    given = {key: x if value is pixels else value for key, value in given.items()} if isinstance(given, dict) else x
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            features = _features(model, given, layer, inputs)
            H, W = features.shape[-2:]
            row, column = (H // 2, W // 2) if at is None else at
            if not (0 <= row < H and 0 <= column < W):
                raise ValueError(f"at must be (row, column) within {H}×{W}, got {(row, column)}")
            place = features[:, :, row, column]
            generator = torch.Generator().manual_seed(seed)
            total = torch.zeros(x.shape[-2:])
            for i in range(probes):
                direction = torch.randn(place.shape, generator=generator).to(place)
                (gradient,) = torch.autograd.grad(place, x, direction, retain_graph=i + 1 < probes)
                total += gradient.detach().float().square().mean((0, 1)).cpu()
    finally:
        model.train(training)
    scale = x.shape[-2] / H, x.shape[-1] / W
    return ReceptiveField((total / probes).sqrt(), ((row + 0.5) * scale[0] - 0.5, (column + 0.5) * scale[1] - 0.5))


def _features(model: nn.Module, given: Any, layer: int | None, inputs: dict[str, Any]) -> Tensor:
    if not hasattr(model, "forward_intermediates"):
        if layer is not None:
            raise ValueError(f"layer is for timm models; {type(model).__name__} is looked at from its output")
        out = call(model, given, inputs)
        return out.sample if hasattr(out, "sample") else out[0]
    count = len(model.feature_info)
    last = count - 1 if layer is None else layer + count * (layer < 0)
    if not 0 <= last < count:
        raise ValueError(f"layer must be from {-count} to {count - 1}, got {layer}")
    return model.forward_intermediates(given, indices=[last], intermediates_only=True, output_fmt="NCHW")[0]

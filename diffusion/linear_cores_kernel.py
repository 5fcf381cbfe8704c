"""Targets of ``linearize`` made of the mixers' feature maps: each is what it makes of queries and keys, see
linear_core_features.py."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.mixers.flow import flow_features
from scanvas.backbones.mixers.focused import FocusedFeatures
from scanvas.backbones.mixers.inline import inline_factors
from scanvas.backbones.mixers.kernel import full
from scanvas.backbones.mixers.linfusion import positive
from scanvas.backbones.mixers.mala import mala_factors
from scanvas.backbones.mixers.nala import key_features, query_features
from scanvas.backbones.mixers.places import PlaceParameter
from scanvas.backbones.mixers.rala import weighted_keys
from scanvas.kernels.dispatch import outside_autocast

from .linear_core_features import AffineCore, DividedCore, FeatureCore
from .linear_cores_placed import Grid, PlacedCore


class SanaCore(DividedCore):
    """SANA (arXiv:2410.10629): ReLU features and nothing else. (With a convolution and few heads it is ``"lit"``.)"""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 0, "eps": 1e-15}

    def features(self, q, k, turn, weight, start, grid):
        q, k = q.relu(), k.relu()
        return turn(q), turn(k), q, k


class FocusedCore(DividedCore):
    """FLatten (arXiv:2308.00442): features that keep a vector's length and sharpen its direction, over all channels
    before they are split into heads, with a learned scale per channel; a convolution on the values."""

    defaults: ClassVar[dict[str, Any]] = {"power": 3.0, "kernel_size": 5, "eps": 1e-6}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, power: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        if power < 1:
            raise ValueError(f"power must be at least 1, got {power}")
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.feature_map = FocusedFeatures(value_dim, power, **factory)

    def features(self, q, k, turn, weight, start, grid):
        q, k = (self.feature_map(z.flatten(2)).unflatten(-1, (self.heads, -1)) for z in (q, k))
        return turn(q), turn(k), q, k


class RalaCore(DividedCore):
    """RALA (arXiv:2411.07635): ELU + 1 features, keys weighted by how well they match the mean query; a convolution on
    the values. Its gate, which the softmax does not have, is left out."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 5, "eps": 1e-6}

    def features(self, q, k, turn, weight, start, grid):
        q, k = positive(q), positive(k)
        k = weighted_keys(q, k, weight)
        return turn(q), turn(k), q, k


class NalaCore(DividedCore):
    """NaLaFormer (arXiv:2506.21137): features as sharp as their query is long, positive and negative parts apart; a
    convolution on the values. Its gate and its norm, which the softmax does not have, are left out."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 5, "eps": 1e-6}

    def features(self, q, k, turn, weight, start, grid):
        q, k = query_features(q), key_features(k)
        return *(torch.cat([turn(half) for half in z.chunk(2, dim=-1)], dim=-1) for z in (q, k)), q, k


class SlabCore(DividedCore, PlacedCore):
    """SLAB (arXiv:2405.11582): ReLU features, positions of the keys that are learned on a grid of ``positions`` a side
    (0 leaves them out; interpolated for others) and start at zero; a convolution on the values."""

    defaults: ClassVar[dict[str, Any]] = {"positions": 14, "kernel_size": 5, "eps": 1e-6}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, positions: int, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        check_side("positions", positions)
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.position = PlaceParameter(value_dim, (positions, positions), 0.0, **factory) if positions else None

    @property
    def needs_grid(self) -> bool:
        return self.conv is not None or self.position is not None

    def features(self, q, k, turn, weight, start, grid):
        if self.position is not None:
            k = k + self.at_places(self.position, start, grid, k.shape[1]).unflatten(-1, (self.heads, -1))
        q, k = q.relu(), k.relu()
        return turn(q), turn(k), q, k


class LinaCore(DividedCore, PlacedCore):
    """LINA (arXiv:2601.22630): ``ReLU + 10⁻⁶`` features after the rotary positions, and a gate per head and place on
    keys and on values, learned on a grid of ``gates`` a side (0 leaves them out; interpolated for others), which starts
    at one; a convolution, here on the values."""

    defaults: ClassVar[dict[str, Any]] = {"gates": 14, "kernel_size": 5, "eps": 1e-6}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, gates: int, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        check_side("gates", gates)
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.k_gate = PlaceParameter(heads, (gates, gates), 1.0, **factory) if gates else None
        self.v_gate = PlaceParameter(heads, (gates, gates), 1.0, **factory) if gates else None

    @property
    def needs_grid(self) -> bool:
        return self.conv is not None or self.k_gate is not None

    def features(self, q, k, turn, weight, start, grid):
        q, k = full(turn(q)).relu() + 1e-6, full(turn(k)).relu() + 1e-6
        if self.k_gate is None:
            return q, k, q, k
        of_key, of_value = (
            self.at_places(gate, start, grid, k.shape[1]).unsqueeze(-1) for gate in (self.k_gate, self.v_gate)
        )
        k = k * of_key
        return q, k * of_value, q, k  # that of the values, taken to the keys of the numerator


class InlineCore(AffineCore):
    """InLine (arXiv:2412.06590): no features; rows sum to one by a subtraction, so that the map may be negative and
    stays injective. Rotary positions are in all of it. Its convolution with kernels made by a network is left out."""

    signed: ClassVar[bool] = True

    def features(self, q, k, turn, weight, start, grid):
        q, k = turn(q), turn(k)
        return q, k, *inline_factors(q, k, weight)


class MalaCore(AffineCore):
    """MALA (arXiv:2507.00698): ELU + 1 features, normalised by a factor and an offset, so that the length of a query
    counts; a convolution on the values. Its gate, which the softmax does not have, is left out."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 5}
    signed: ClassVar[bool] = True

    def features(self, q, k, turn, weight, start, grid):
        q, k = positive(q), positive(k)
        return turn(q), turn(k), *mala_factors(q, k, weight)


class FlowCore(AffineCore):
    """Flowformer (arXiv:2202.06258): sigmoid features; keys compete for what flows out of them, and queries are sated
    by what flows in."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 0, "eps": 1e-6}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, eps: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        self.eps = eps

    def features(self, q, k, turn, weight, start, grid):
        q, k, share, row = flow_features(q, k, self.eps, weight)
        return turn(q), turn(k) * share, row


class CosformerCore(AffineCore, PlacedCore):
    """cosFormer (arXiv:2202.08791): ReLU features, weighted by the cosine of the distance between two tokens. Channels
    of a head are shared out among the axes of the image, π/2 from one side to the other; tokens of no image are in the
    middle of all axes."""

    def features(self, q, k, turn, weight, start, grid):
        q, k = full(q).relu(), full(k).relu()
        there = k if weight is None else k * weight[..., None, None]
        theta = _angles(start, grid, *q.shape[1::2], q.device, q.dtype)[:, None]
        sine, cosine = theta.sin(), theta.cos()
        total = sum((q * part * (there * part).sum(1, keepdim=True)).sum(-1, keepdim=True) for part in (sine, cosine))
        q, k = (torch.cat((turn(z) * sine, turn(z) * cosine), dim=-1) for z in (q, k))
        return q, k, 1 / total.clamp_min(1e-6)


class L2Core(AffineCore):
    """The linear half of L²ViT (arXiv:2501.16182): ReLU features and a divisor that does not fall below ``least``. Its
    factor per head is one per channel here, which starts at one and is fitted by calibration."""

    defaults: ClassVar[dict[str, Any]] = {"least": 100.0, "kernel_size": 0}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, least: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        if not least > 0:
            raise ValueError(f"least must be positive, got {least}")
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.least = least
        self.scale = nn.Parameter(torch.ones(value_dim, **factory))

    def features(self, q, k, turn, weight, start, grid):
        q, k = q.relu(), k.relu()
        return turn(q), turn(k), 1 / _total(q, k, weight).clamp_min(self.least)

    def mix(self, *args: Any) -> Tensor:
        out = self.attend(*args)
        return (out * self.scale.view(self.heads, -1)).to(out.dtype)


def check_side(name: str, side: int) -> None:
    """Refuse what is no number of places."""
    if side < 0:
        raise ValueError(f"{name} must be the side of a grid of parameters, or 0 for none; got {side}")


@outside_autocast
def _total(q: Tensor, k: Tensor, weight: Tensor | None) -> Tensor:
    """``q_i · Σ_j w_j k_j``, ``(B, N, heads, 1)``."""
    k = full(k) if weight is None else full(k) * weight[..., None, None]
    return (full(q) * k.sum(1, keepdim=True)).sum(-1, keepdim=True)


def _angles(start: int, grid: Grid, tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The angle of each token and channel, ``(N, D)``: of n axes, the i-th has channels ``i·D // n`` onwards."""
    count = len(grid)
    image = []
    for axis, size in enumerate(grid):
        places = torch.arange(size, device=device, dtype=dtype) * (math.pi / 2 / size)
        shape = [size if i == axis else 1 for i in range(count)]
        channels = (axis + 1) * width // count - axis * width // count
        image.append(places.view(*shape, 1).expand(*grid, channels))
    theta = torch.cat(image, dim=-1).flatten(0, -2)
    return F.pad(theta, (0, 0, start, tokens - start - theta.shape[0]), value=math.pi / 4)


KERNEL_TARGETS: dict[str, type[FeatureCore]] = {
    "cosformer": CosformerCore,
    "flow": FlowCore,
    "focused": FocusedCore,
    "inline": InlineCore,
    "l2": L2Core,
    "lina": LinaCore,
    "mala": MalaCore,
    "nala": NalaCore,
    "rala": RalaCore,
    "sana": SanaCore,
    "slab": SlabCore,
}

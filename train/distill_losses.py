"""Losses of distillation by name. Each takes what teacher and student made of one batch and gives one number.

To add one: a function ``(seen) -> ()`` and a line in ``LOSSES``; recipes name it in a stage's ``terms``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .denoise_config import LossConfig
from .losses import LOSSES as DENOISE_LOSSES
from .losses import Step

TASKS = {"denoise": "denoisers", "classify": "classifiers"}
_ALL = tuple(TASKS)
Pairs = list[tuple[Tensor, Tensor]]


@dataclass
class Seen:
    """One batch: what the student's and the teacher's parts made of it, always (student, teacher)."""

    attention: Pairs = field(default_factory=list)  # outputs of attention, a pair for each layer and stream
    block: Pairs = field(default_factory=list)  # outputs of blocks
    attention_map: Pairs = field(default_factory=list)  # (B, heads, N, N) for each layer
    step: Step | None = None  # denoisers: the noised batch with the student's prediction
    teacher_step: Step | None = None
    loss_config: LossConfig | None = None
    logits: Tensor | None = None  # classifiers: (B, classes)
    teacher_logits: Tensor | None = None
    target: Tensor | None = None
    cross_entropy: Callable[[Tensor, Tensor], Tensor] | None = None  # of the recipe: smoothing, mixed targets
    temperature: float = 1.0


def squared_error(got: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error in at least float32."""
    dtype = torch.promote_types(torch.promote_types(got.dtype, wanted.dtype), torch.float32)
    return (got.to(dtype) - wanted.to(dtype)).square().mean()


def features(seen: Seen, kind: str) -> Tensor:
    """Mean over layers of the mean squared error of their outputs (LinFusion, arXiv:2409.02097; CLEAR,
    arXiv:2412.16112)."""
    pairs = getattr(seen, kind)
    return torch.stack([squared_error(got, wanted) for got, wanted in pairs]).mean()


def relative_features(seen: Seen, kind: str) -> Tensor:
    """The same with each layer's error divided by the mean square of the teacher's output, so that layers of any scale
    count alike."""
    pairs = getattr(seen, kind)
    parts = [squared_error(got, wanted) / squared_error(wanted, torch.zeros_like(wanted)) for got, wanted in pairs]
    return torch.stack(parts).mean()


def attention_map(seen: Seen) -> Tensor:
    """Mean over layers of the cross-entropy of the rows of the maps, −Σ_j A_ij log Â_ij (Hedgehog,
    arXiv:2402.04347)."""
    parts = [-(wanted * got.clamp_min(1e-12).log()).sum(-1).mean() for got, wanted in seen.attention_map]
    return torch.stack(parts).mean()


def prediction(seen: Seen) -> Tensor:
    """Mean squared error to the teacher's prediction, of noise or velocity (LiT, arXiv:2501.12976; CLEAR)."""
    return squared_error(seen.step.prediction, seen.teacher_step.prediction)


def variance(seen: Seen) -> Tensor:
    """Mean squared error to what the teacher says of the variance, as the network puts it out (LiT)."""
    return squared_error(seen.step.variance, seen.teacher_step.variance)


def denoising(seen: Seen, name: str) -> Tensor:
    """A loss of ``scanvas train denoise``, see losses.py."""
    return DENOISE_LOSSES[name](seen.step, seen.loss_config).mean()


def cross_entropy(seen: Seen) -> Tensor:
    """The loss of ``scanvas train classify``, with its label smoothing and mixed targets."""
    return seen.cross_entropy(seen.logits, seen.target)


def logits(seen: Seen) -> Tensor:
    """T² KL(softmax(teacher / T) ‖ softmax(student / T)) (arXiv:1503.02531, section 2)."""
    T = seen.temperature
    student, teacher = (F.log_softmax(z / T, dim=-1) for z in (seen.logits, seen.teacher_logits))
    return T * T * (teacher.exp() * (teacher - student)).sum(-1).mean()


def hard(seen: Seen) -> Tensor:
    """Cross-entropy to the class that the teacher finds most probable (DeiT, arXiv:2012.12877, section 4)."""
    return F.cross_entropy(seen.logits, seen.teacher_logits.argmax(-1))


@dataclass(frozen=True)
class Loss:
    """A loss, and where it has its place."""

    function: Callable[[Seen], Tensor]
    stages: tuple[str, ...] = ("end_to_end",)
    tasks: tuple[str, ...] = _ALL
    needs: str = ""  # which parts of the models it looks at: a field of Seen
    teacher: bool = True  # whether the teacher's output is asked for


LOSSES: dict[str, Loss] = {
    "attention": Loss(partial(features, kind="attention"), ("attention", "end_to_end"), needs="attention"),
    "attention_relative": Loss(
        partial(relative_features, kind="attention"), ("attention", "end_to_end"), needs="attention"
    ),
    "attention_map": Loss(attention_map, ("attention",), needs="attention_map"),
    "block": Loss(partial(features, kind="block"), ("block", "end_to_end"), needs="block"),
    "block_relative": Loss(partial(relative_features, kind="block"), ("block", "end_to_end"), needs="block"),
    "prediction": Loss(prediction, tasks=("denoise",)),
    "variance": Loss(variance, tasks=("denoise",)),
    **{name: Loss(partial(denoising, name=name), tasks=("denoise",), teacher=False) for name in DENOISE_LOSSES},
    "cross_entropy": Loss(cross_entropy, tasks=("classify",), teacher=False),
    "logits": Loss(logits, tasks=("classify",)),
    "hard": Loss(hard, tasks=("classify",)),
}


def loss_terms(seen: Seen, weights: dict[str, float]) -> dict[str, Any]:
    """Each term times its weight."""
    return {name: weight * LOSSES[name].function(seen) for name, weight in weights.items()}

"""Optimiser, schedule and EMA, all timm's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn

from .config import OptimConfig
from .errors import ConfigError, UserError, nearest


def learning_rate(config: OptimConfig, global_batch: int) -> float:
    """The peak rate for ``global_batch`` images per optimiser step: linear in the batch where a reference is given."""
    if config.lr_reference_batch is None:
        return config.lr
    if config.lr_reference_batch < 1:
        raise ConfigError(f"optim.lr_reference_batch must be at least 1, and is {config.lr_reference_batch}")
    return config.lr * global_batch / config.lr_reference_batch


def create_optimizer(
    model: nn.Module, config: OptimConfig, global_batch: int, scale_of: Callable[[str], float] | None = None
) -> torch.optim.Optimizer:
    """An optimiser over the parameters of ``model`` that require gradients, with timm's groups.

    ``scale_of``: a parameter's name → what its learning rate is multiplied by. Layer decay needs the model's
    ``group_matcher``. Raises ConfigError on an unknown name or a keyword it lacks.
    """
    if config.name.lower() not in list_optimizers():
        raise ConfigError(
            f"optim.name={config.name!r} is no optimiser of timm{nearest(config.name, list_optimizers())}"
        )
    if config.layer_decay is not None and not hasattr(model, "group_matcher"):
        raise ConfigError(f"optim.layer_decay needs a model with group_matcher, and {type(model).__name__} has none")
    if scale_of is not None and config.layer_decay is not None:
        raise ConfigError("optim.layer_decay does not go with learning rates of their own for some parameters")
    rate = learning_rate(config, global_batch)
    try:
        return create_optimizer_v2(
            model if scale_of is None else scaled_groups(model, config.weight_decay, rate, scale_of),
            opt=config.name,
            lr=rate,
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **config.kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.kwargs={config.kwargs} does not fit {config.name}: {error}") from error


def scaled_groups(model: nn.Module, weight_decay: float, lr: float, scale_of: Callable[[str], float]) -> list[dict]:
    """timm's groups with and without weight decay, each divided by the factor of its parameters' rate; timm's
    schedules honour ``lr_scale``."""
    listed = getattr(model, "no_weight_decay", set)()
    scales = {id(parameter): scale_of(name) for name, parameter in model.named_parameters()}
    groups = []
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=listed):
        for scale in sorted({scales[id(parameter)] for parameter in group["params"]}):
            part = [parameter for parameter in group["params"] if scales[id(parameter)] == scale]
            groups.append({**group, "params": part, "lr_scale": scale, "lr": lr * scale})
    return groups


def create_scheduler(optimizer, config: OptimConfig, epochs: int, steps_per_epoch: int):
    """A timm scheduler stepped once per optimiser step by ``step_update(steps done)``.

    The schedule proper begins where the warm-up ends, so that the rate has no jump there.
    """
    if config.warmup_epochs >= epochs and config.warmup_epochs > 0:
        raise ConfigError(f"optim.warmup_epochs={config.warmup_epochs} must be below train.epochs={epochs}")
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.schedule,
        num_epochs=epochs - config.warmup_epochs,
        warmup_prefix=True,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    scheduler.step_update(0)
    return scheduler


def create_ema(model: nn.Module, config: OptimConfig) -> ModelEmaV3 | None:
    """timm's ModelEmaV3 over ``model``, or None where no decay is set."""
    if config.ema_decay is None:
        return None
    if not 0.0 <= config.ema_decay < 1.0:
        raise UserError(f"optim.ema_decay must lie in [0, 1), and is {config.ema_decay}")
    return ModelEmaV3(model, decay=config.ema_decay, use_warmup=config.ema_warmup)

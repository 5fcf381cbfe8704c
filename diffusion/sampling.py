"""The parts of sampling which do not depend on the kind of condition."""

import inspect
from typing import Any

import torch
from diffusers import SchedulerMixin
from torch import Tensor

from .checks import check_one_of


def scheduler_prediction(scheduler: SchedulerMixin) -> str:
    """What a scheduler expects the model to predict. Flow-matching schedulers do not say so in their configuration."""
    return scheduler.config.get("prediction_type") or "flow_prediction"


def check_scheduler(scheduler: SchedulerMixin, prediction_type: str, learned_variance: bool) -> None:
    """Raise ValueError unless the scheduler makes the right thing of the model's output.

    Args:
        scheduler: any of diffusers'.
        prediction_type: of the model.
        learned_variance: the model predicts a variance too.
    """
    name = type(scheduler).__name__
    expected = scheduler_prediction(scheduler)
    if expected != prediction_type:
        raise ValueError(
            f"scheduler and transformer do not go together: {name} expects prediction_type {expected!r}, the "
            f"transformer predicts {prediction_type!r}; use {_suggestion(prediction_type)}"
        )
    if expected == "flow_prediction" and scheduler.config.get("use_flow_sigmas") is False:
        raise ValueError(f"{name} has prediction_type 'flow_prediction', which needs use_flow_sigmas=True, too")
    variance = scheduler.config.get("variance_type")
    if variance in ("learned", "learned_range"):
        if not learned_variance:
            raise ValueError(
                f"{name} has variance_type {variance!r}, but the transformer predicts no variance (out_channels is "
                f"in_channels); use {name}.from_config(scheduler.config, variance_type=…) with a fixed one"
            )
        if not takes_variance(scheduler):
            raise ValueError(
                f"{name} has variance_type {variance!r}, which it can not use; "
                f"use {name}.from_config(scheduler.config, variance_type=None)"
            )


def _suggestion(prediction_type: str) -> str:
    if prediction_type == "flow_prediction":
        return "FlowMatchEulerDiscreteScheduler, or DPMSolverMultistepScheduler with use_flow_sigmas=True and that type"
    return f"a diffusion scheduler with prediction_type={prediction_type!r}, such as DDIMScheduler"


def takes_variance(scheduler: SchedulerMixin) -> bool:
    """The scheduler splits a model output of twice the channels into prediction and variance itself."""
    return scheduler.config.get("variance_type") in ("learned", "learned_range") and hasattr(scheduler, "_get_variance")


def set_timesteps(scheduler: SchedulerMixin, steps: int, tokens: int, device: torch.device) -> Tensor:
    """The scheduler's timesteps, from noise to image.

    Args:
        scheduler: any of diffusers'.
        steps: at least 1.
        tokens: tokens of an image, on which schedulers with ``use_dynamic_shifting`` depend.
        device: of the timesteps.

    Raises:
        ValueError: ``steps`` is not a positive number.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"num_inference_steps must be an integer of at least 1, got {steps!r}")
    shift = {}
    config = scheduler.config
    if config.get("use_dynamic_shifting") and "mu" in inspect.signature(scheduler.set_timesteps).parameters:
        # SD3's rule (arXiv:2403.03206, section 5.3.2), linear in the number of tokens as diffusers has it.
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        shift["mu"] = base + (tokens - low) * (top - base) / (high - low)
    scheduler.set_timesteps(steps, device=device, **shift)
    return scheduler.timesteps


def step_keywords(scheduler: SchedulerMixin, generator: Any, eta: float) -> dict[str, Any]:
    """The keywords among ``generator`` and ``eta`` that the scheduler's ``step`` takes."""
    accepted = inspect.signature(scheduler.step).parameters
    return {key: value for key, value in (("generator", generator), ("eta", eta)) if key in accepted}


def guide(conditional: Tensor, unconditional: Tensor, scale: float, rescale: float, channels: int) -> Tensor:
    """Classifier-free guidance, ``u + scale·(c − u)`` (arXiv:2207.12598).

    Args:
        conditional, unconditional: model outputs ``(B, C, H, W)``.
        scale: 1 for none.
        rescale: 0…1, how far to bring the result's deviation per image back to that of ``conditional``
            (arXiv:2305.08891, eq. 15 and 16).
        channels: how many of the C are guided; a learned variance after them is the conditional one.
    """
    c, rest = conditional[:, :channels], conditional[:, channels:]
    guided = unconditional[:, :channels] + scale * (c - unconditional[:, :channels])
    if rescale > 0:
        axes = tuple(range(1, c.ndim))
        ratio = c.std(axes, keepdim=True) / guided.std(axes, keepdim=True)
        guided = guided * (rescale * ratio + 1 - rescale)
    return torch.cat((guided, rest), dim=1)


def check_guidance(rescale: float, interval: tuple[float, float]) -> None:
    """Raise ValueError unless 0 ≤ rescale ≤ 1 and 0 ≤ start ≤ end ≤ 1."""
    if not 0 <= rescale <= 1:
        raise ValueError(f"guidance_rescale must be in 0…1, got {rescale}")
    if len(interval) != 2 or not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError(f"guidance_interval must be (start, end) with 0 ≤ start ≤ end ≤ 1, got {interval}")


def check_output(output_type: str, channels: int) -> None:
    """Raise ValueError unless images of so many channels can be returned as ``output_type``."""
    check_one_of("output_type", output_type, ("pil", "np", "pt", "latent"))
    if output_type == "pil" and channels not in (1, 3, 4):
        raise ValueError(
            f"images of {channels} channels can not be PIL images: output_type must be 'np', 'pt' or 'latent'"
        )


def check_generators(generator: Any, batch: int) -> None:
    """Raise ValueError unless ``generator`` is none, one, or one per image."""
    if isinstance(generator, list | tuple) and len(generator) != batch:
        raise ValueError(f"generator has {len(generator)} entries for {batch} images; it must be one, or one per image")

"""The forward process of diffusion and flow matching, with the noise levels of a diffusers scheduler.

x_t = α_t x + σ_t ε at the places k = 0 … T−1 of the scheduler's table. α_t² = ᾱ_t, σ_t² = 1 − ᾱ_t for diffusion
(arXiv:2006.11239, eq. 4); α_t = 1 − σ_t for flow matching (arXiv:2403.03206, eq. 13).
"""

from __future__ import annotations

import inspect

import diffusers
import torch
from torch import Tensor

from scanvas.diffusion.sampling import check_scheduler

from .denoise_config import NoiseConfig
from .errors import ConfigError, nearest


def create_scheduler(config: NoiseConfig, prediction_type: str, learned_variance: bool):
    """The diffusers scheduler a recipe names, told what the model predicts unless the recipe says so itself.

    Raises ConfigError: no such scheduler, a keyword it lacks, or one that does not go with the model.
    """
    names = [name for name in dir(diffusers) if name.endswith("Scheduler") and not name.startswith(("Flax", "Karras"))]
    if config.scheduler not in names:
        raise ConfigError(
            f"noise.scheduler={config.scheduler!r} is none of diffusers{nearest(config.scheduler, names)}"
        )
    cls = getattr(diffusers, config.scheduler)
    accepted = inspect.signature(cls.__init__).parameters
    unknown = [key for key in config.kwargs if key not in accepted or key == "self"]
    if unknown:
        raise ConfigError(
            f"noise.kwargs: {config.scheduler} has no keyword {unknown[0]!r}{nearest(unknown[0], accepted)}"
        )
    kwargs = dict(config.kwargs)
    if "prediction_type" in accepted:
        kwargs.setdefault("prediction_type", prediction_type)
    if learned_variance and "variance_type" in accepted and config.scheduler == "DDPMScheduler":
        kwargs.setdefault("variance_type", "learned_range")
    try:
        scheduler = cls(**kwargs)
        check_scheduler(scheduler, prediction_type, learned_variance)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"noise.scheduler={config.scheduler} cannot be used: {' '.join(str(error).split())}"
        ) from error
    return scheduler


class Process:
    """See the module's docstring.

    Args:
        scheduler: any of diffusers' with ``alphas_cumprod``, or ``FlowMatchEulerDiscreteScheduler``.
        prediction_type: what the model predicts: ``epsilon``, ``sample``, ``v_prediction`` or ``flow_prediction``.
        config: how training times are drawn.
        device: of the images.

    Raises:
        ConfigError: the scheduler has neither table, or the model could not tell its input from the noise there.
    """

    def __init__(self, scheduler, prediction_type: str, config: NoiseConfig, device: torch.device | str = "cpu"):
        self.scheduler, self.prediction_type, self.config = scheduler, prediction_type, config
        name = type(scheduler).__name__
        if prediction_type == "flow_prediction":
            if not isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
                raise ConfigError(
                    f"noise.scheduler={name}: flow matching is trained with FlowMatchEulerDiscreteScheduler"
                )
            sigma = scheduler.sigmas.double()
            alpha, times = 1 - sigma, scheduler.timesteps
        else:
            if not hasattr(scheduler, "alphas_cumprod"):
                raise ConfigError(
                    f"noise.scheduler={name} has no alphas_cumprod; train with DDPMScheduler or DDIMScheduler"
                )
            signal = scheduler.alphas_cumprod.double()
            alpha, sigma = signal.sqrt(), (1 - signal).sqrt()
            times = torch.arange(len(signal))
            if config.times != "uniform":
                raise ConfigError(f"noise.times={config.times} is for flow matching; {name} needs uniform")
            if prediction_type == "epsilon" and float(signal[-1]) < 1e-8:
                raise ConfigError(
                    f"noise.scheduler={name} ends in pure noise (rescale_betas_zero_snr), where a model that predicts "
                    "epsilon learns nothing of the image: set model.kwargs.prediction_type=v_prediction "
                    "(arXiv:2305.08891, section 3.2)"
                )
        # float64, in which the losses work out their weights; where the images are, so that no step copies it there
        self.alpha, self.sigma, self.timesteps = (t.to(device, copy=True) for t in (alpha, sigma, times))

    def __len__(self) -> int:
        return len(self.sigma)

    def place(self, u: Tensor) -> Tensor:
        """Uniform numbers in (0, 1) ``(B,)`` → places in the table ``(B,)``, distributed as training times are."""
        T = len(self)
        if self.config.times == "logit_normal":
            normal = torch.special.ndtri(u.float().clamp(1e-6, 1 - 1e-6))
            u = torch.sigmoid(self.config.logit_mean + self.config.logit_std * normal)
        k = (u * T).long().clamp(0, T - 1)
        return T - 1 - k if self.prediction_type == "flow_prediction" else k  # that scheduler begins with noise

    def rates(self, k: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """``(α, σ)`` at places ``(B,)``, float32, to be multiplied with ``like`` ``(B, …)``."""
        shape = (-1, *[1] * (like.ndim - 1))
        return tuple(at(table, k).view(shape) for table in (self.alpha, self.sigma))

    def noisy(self, clean: Tensor, noise: Tensor, k: Tensor) -> Tensor:
        """x_t of clean images and noise ``(B, C, H, W)`` at places ``(B,)``."""
        alpha, sigma = self.rates(k, clean)
        return alpha * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, k: Tensor) -> Tensor:
        """What the model is to predict; v = α ε − σ x (arXiv:2202.00512), flow ε − x (arXiv:2403.03206)."""
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return clean
        if self.prediction_type == "flow_prediction":
            return noise - clean
        alpha, sigma = self.rates(k, clean)
        return alpha * noise - sigma * clean

    def clean(self, noisy: Tensor, prediction: Tensor, k: Tensor) -> Tensor:
        """The image that a prediction at x_t amounts to: the inverse of ``target``."""
        alpha, sigma = self.rates(k, noisy)
        if self.prediction_type == "epsilon":
            return (noisy - sigma * prediction) / alpha
        if self.prediction_type == "sample":
            return prediction
        if self.prediction_type == "flow_prediction":
            return noisy - sigma * prediction
        return alpha * noisy - sigma * prediction

    def times(self, k: Tensor) -> Tensor:
        """The timesteps ``(B,)`` float32 that the scheduler gives to the model at these places."""
        return at(self.timesteps, k)


def at(table: Tensor, k: Tensor) -> Tensor:
    """Entries ``k`` ``(B,)`` of a table, float32, on the device of ``k``."""
    return table.to(k.device, torch.float32)[k]

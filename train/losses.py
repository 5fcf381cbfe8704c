"""Losses by name. Each takes one noised batch with what the model made of it and gives a value per image.

To add one: a function ``(step, config) -> (B,)`` and a line in ``LOSSES``; recipes name it in ``loss.terms``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .denoise_config import LossConfig
from .errors import ConfigError, nearest
from .process import Process, at


@dataclass
class Step:
    """One noised batch. Images are ``(B, C, H, W)`` float32."""

    process: Process
    clean: Tensor
    noise: Tensor
    noisy: Tensor
    place: Tensor  # (B,) places in the process's table
    prediction: Tensor
    variance: Tensor | None = None  # the second half of the channels of a model with a learned variance


def mse(step: Step, config: LossConfig) -> Tensor:
    """Mean squared error to what is to be predicted: L_simple of DDPM (arXiv:2006.11239, eq. 14), or conditional flow
    matching (arXiv:2210.02747)."""
    target = step.process.target(step.clean, step.noise, step.place)
    return per_image((step.prediction - target).square())


def min_snr(step: Step, config: LossConfig) -> Tensor:
    """``mse`` weighted so that an error of the image counts min(SNR, γ) (arXiv:2303.09556, section 3.4)."""
    alpha, sigma = (at(table, step.place).double() for table in (step.process.alpha, step.process.sigma))
    signal, noise = alpha.square(), sigma.square().clamp_min(1e-20)
    wanted = (signal / noise).clamp_max(config.min_snr_gamma)
    # what an error of the prediction amounts to as an error of the image, squared: σ²/α², 1 or σ²
    kind = step.process.prediction_type
    error = {"epsilon": noise / signal.clamp_min(1e-20), "sample": 1.0, "v_prediction": noise, "flow_prediction": noise}
    return mse(step, config) * (wanted * error[kind]).float()


def vlb(step: Step, config: LossConfig) -> Tensor:
    """The term of the variational bound at x_t in bits per dimension, which teaches the variance alone: the mean is
    held fixed (arXiv:2102.09672, section 3.1; as in ADM and DiT).

    log Σ = v log β + (1 − v) log β̃ with v = (output + 1)/2. At the last place it is the negative log-likelihood of
    images of 256 levels.
    """
    process, k, shape = step.process, step.place, (-1, 1, 1, 1)
    signal = process.alpha.square()
    before = torch.cat((torch.ones(1, dtype=signal.dtype, device=signal.device), signal[:-1]))
    beta = 1 - signal / before
    posterior = beta * (1 - before) / (1 - signal)
    low = torch.cat((posterior[1:2], posterior[1:])).log()  # the first would be log 0; ADM takes the second's
    weights = (before.sqrt() * beta / (1 - signal), (signal / before).sqrt() * (1 - before) / (1 - signal))
    of_clean, of_noisy = (at(w, k).view(shape) for w in weights)
    low, high = at(low, k).view(shape), at(beta.log(), k).view(shape)

    guess = process.clean(step.noisy, step.prediction.detach(), k)
    mean = of_clean * guess + of_noisy * step.noisy
    truth = of_clean * step.clean + of_noisy * step.noisy
    v = (step.variance + 1) / 2
    log_variance = v * high + (1 - v) * low
    divergence = 0.5 * (
        log_variance - low - 1 + (low - log_variance).exp() + (truth - mean).square() * (-log_variance).exp()
    )
    likelihood = _discretized_gaussian(step.clean, mean, 0.5 * log_variance)
    bits = torch.where(k.view(shape) == 0, -likelihood, divergence) / math.log(2)
    return per_image(bits)


def _discretized_gaussian(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """log P of pixels in [-1, 1], multiples of 2/255, under a Gaussian integrated over each of them; the outermost
    reach to infinity (arXiv:2006.11239, eq. 13)."""
    centred, inverse = x - mean, (-log_scale).exp()
    upper = torch.special.ndtr((centred + 1 / 255) * inverse)
    lower = torch.special.ndtr((centred - 1 / 255) * inverse)
    inside = torch.where(x < -0.999, upper, torch.where(x > 0.999, 1 - lower, upper - lower))
    return inside.clamp_min(1e-12).log()


LOSSES: dict[str, Callable[[Step, LossConfig], Tensor]] = {"mse": mse, "min_snr": min_snr, "vlb": vlb}


def check_terms(config: LossConfig, prediction_type: str, learned_variance: bool) -> None:
    """Raise ConfigError for a term that is not there, or that does not go with the model."""
    if not config.terms:
        raise ConfigError(f"loss.terms is empty; give some of {', '.join(LOSSES)} with their weights")
    for name, weight in config.terms.items():
        if name not in LOSSES:
            raise ConfigError(f"loss.terms: unknown loss {name!r}{nearest(name, LOSSES)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
            raise ConfigError(f"loss.terms.{name} must be a weight of at least 0, and is {weight!r}")
    if "vlb" in config.terms and not learned_variance:
        raise ConfigError("loss.terms.vlb needs a model with a learned variance: out_channels = 2·in_channels")
    if learned_variance and "vlb" not in config.terms:
        raise ConfigError(
            "the model predicts a variance (out_channels = 2·in_channels), which nothing would train: add vlb to "
            "loss.terms, or set model.kwargs.out_channels=null"
        )
    if not 0 <= config.drop_condition < 1:
        raise ConfigError(f"loss.drop_condition must lie in [0, 1), and is {config.drop_condition}")
    if config.min_snr_gamma <= 0:
        raise ConfigError(f"loss.min_snr_gamma must be positive, and is {config.min_snr_gamma}")


def loss_terms(step: Step, config: LossConfig) -> dict[str, Tensor]:
    """Each term of ``config`` ``(B,)``, times its weight."""
    return {name: weight * LOSSES[name](step, config) for name, weight in config.terms.items()}


def per_image(x: Tensor) -> Tensor:
    """Mean over all but the batch."""
    return x.flatten(1).mean(1)

"""Checks of arguments, which name the argument, what came and what is allowed."""

from collections.abc import Iterable

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor


def check_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_multiple(name: str, size: int, multiple: int, meaning: str) -> None:
    """Raise ValueError unless ``size`` is a positive multiple; the message names the nearest ones."""
    if size < multiple or size % multiple:
        below = size // multiple * multiple
        near = [str(s) for s in (below, below + multiple) if s > 0]
        raise ValueError(
            f"{name} must be divisible by {meaning} = {multiple}, got {size}; the nearest "
            f"{'sizes are' if len(near) > 1 else 'size is'} {' and '.join(near)}"
        )


def to_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """``(height, width)`` of an int or a pair."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


PREDICTIONS = ("epsilon", "v_prediction", "sample", "flow_prediction")


def check_outputs(in_channels: int, out_channels: int | None, prediction_type: str, num_classes: int | None) -> int:
    """The number of output channels, ``in_channels`` for ``None``.

    Raises:
        ValueError: they do not fit the input or the prediction, or there is no such prediction or number of classes.
    """
    out_channels = in_channels if out_channels is None else out_channels
    if out_channels not in (in_channels, 2 * in_channels):
        raise ValueError(
            f"out_channels must be in_channels = {in_channels} or, with a learned variance, {2 * in_channels}; "
            f"got {out_channels}"
        )
    check_one_of("prediction_type", prediction_type, PREDICTIONS)
    if prediction_type == "flow_prediction" and out_channels != in_channels:
        raise ValueError("prediction_type 'flow_prediction' has no variance to learn: out_channels must be in_channels")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be positive, or None for none; got {num_classes}")
    return out_channels


def check_denoiser_inputs(
    c: FrozenDict,
    multiple: int,
    latent: Tensor,
    timestep: Tensor | float,
    class_labels: Tensor | None,
    text: Tensor | None,
    text_mask: Tensor | None,
    added_cond_kwargs: dict | None,
) -> None:
    """Raise ValueError unless the inputs of ``Denoiser.forward`` suit a model of config ``c``, whose images' sides are
    multiples of ``multiple``."""
    if latent.ndim != 4 or latent.shape[1] != c.in_channels:
        raise ValueError(
            f"hidden_states must be (B, in_channels, H, W) with in_channels = {c.in_channels}, "
            f"got shape {tuple(latent.shape)}"
        )
    for name, size in zip(("height", "width"), latent.shape[2:]):
        meaning = "patch_size" if "patch_size" in c else "what the levels of the model halve"
        check_multiple(f"the {name} of hidden_states", size, multiple, meaning)
    B, caption_channels = latent.shape[0], c.get("caption_channels")
    if isinstance(timestep, Tensor) and timestep.numel() not in (1, B):
        raise ValueError(f"timestep must have 1 or {B} entries, one per image; got shape {tuple(timestep.shape)}")
    if class_labels is not None:
        if class_labels.shape != (B,):
            raise ValueError(f"class_labels must be ({B},), one per image; got shape {tuple(class_labels.shape)}")
        if c.num_classes is None:
            raise ValueError("class_labels were given to a model without classes (num_classes=None)")
        # Elsewhere reading the labels would wait for the device; pipelines check them before.
        if class_labels.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = class_labels[(class_labels < 0) | (class_labels > c.num_classes)]
            if len(wrong):
                raise ValueError(
                    f"class_labels must be 0…{c.num_classes - 1}, or {c.num_classes} for no class; "
                    f"got {sorted(set(wrong.tolist()))}"
                )
    if (text is None) != (caption_channels is None):
        raise ValueError(
            "encoder_hidden_states were given to a model without text (caption_channels=None)"
            if caption_channels is None
            else "encoder_hidden_states are missing: the model is conditioned on text"
        )
    if text is not None and (text.ndim != 3 or text.shape[0] != B or text.shape[2] != caption_channels):
        raise ValueError(
            f"encoder_hidden_states must be (B, T, caption_channels) with B = {B} and caption_channels = "
            f"{caption_channels}, got shape {tuple(text.shape)}"
        )
    if text is None and text_mask is not None:
        raise ValueError("encoder_attention_mask was given without encoder_hidden_states")
    for key, value in (added_cond_kwargs or {}).items():
        if value is not None:
            raise ValueError(f"the model has no additional conditions, but added_cond_kwargs[{key!r}] was given")

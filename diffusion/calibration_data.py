"""Batches of a model's inputs, on which linear layers are calibrated and sensitivities measured."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def call(model: nn.Module, batch: Any) -> Tensor:
    """The model's output on a calibration batch: keywords in a dict, positional arguments in a tuple, or one tensor.

    Raises:
        TypeError: the batch is none of these.
    """
    if isinstance(batch, dict):
        out = model(**batch)
    elif isinstance(batch, (tuple, list)):
        out = model(*batch)
    elif isinstance(batch, Tensor):
        out = model(batch)
    else:
        raise TypeError(
            "calibration must hold batches for the model: dicts of keywords, tuples of arguments or tensors; "
            f"got {type(batch).__name__}"
        )
    out = out.sample if hasattr(out, "sample") else out
    return out[0] if isinstance(out, (tuple, list)) else out


_MISFITS = (TypeError, ValueError, AttributeError, AssertionError, LookupError, RuntimeError)


def call_all(model: nn.Module, batches: list) -> list[Tensor]:
    """``call`` for each batch.

    Raises:
        TypeError, ValueError: a batch does not fit the model, or its output is not finite; the message says which.
    """
    outputs = []
    for i, batch in enumerate(batches):
        try:
            out = call(model, batch)
        except torch.OutOfMemoryError:
            raise
        except _MISFITS as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"calibration: batch {i} ({_describe(batch)}) can not be run by {type(model).__name__}: {error}"
            ) from error
        if not out.is_meta and not out.isfinite().all():
            raise ValueError(
                f"calibration: the output of {type(model).__name__} on batch {i} ({_describe(batch)}) is not finite"
            )
        outputs.append(out)
    return outputs


def _describe(batch: Any) -> str:
    """Shapes and dtypes of what a batch holds, for messages."""

    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return type(value).__name__

    if isinstance(batch, dict):
        return ", ".join(f"{key}: {one(value)}" for key, value in batch.items())
    return ", ".join(map(one, batch if isinstance(batch, (tuple, list)) else [batch]))


def as_batches(calibration: Any) -> list:
    """A list of batches; one alone may come without a list.

    Raises:
        ValueError: there is none.
    """
    if isinstance(calibration, (dict, Tensor)):
        return [calibration]
    if not isinstance(calibration, Iterable):
        raise TypeError(f"calibration must be batches of the model's inputs, got {type(calibration).__name__}")
    batches = list(calibration)
    if not batches:
        raise ValueError("calibration is empty: give at least one batch of the model's inputs")
    return batches

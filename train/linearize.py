"""Linearise what lies in a directory and write it to another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import scanvas
from scanvas.diffusion.linear_report import LinearizeReport

from .errors import CheckpointError, ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def linearize_directory(
    source: str | Path, out: str | Path, *, dtype: str = "fp32", options: dict[str, Any], **arguments: Any
) -> LinearizeReport:
    """Load a pipeline or a model, linearise it, and save it with its report, ``linearize.json``.

    Args:
        source: directory with ``model_index.json`` or with a model's ``config.json``.
        out: another directory.
        dtype: of the weights: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        options, arguments: of ``scanvas.linearize``.

    Raises:
        CheckpointError: ``source`` can not be read, or is ``out``.
        ConfigError: an argument does not fit the model.
    """
    source, out = Path(source), Path(out)
    if source.resolve() == out.resolve():
        raise CheckpointError(f"--out must be another directory than {source}, which would be overwritten")
    loaded = _load(source, _DTYPES[dtype])
    try:
        # The softmax model is still on disk, so nothing is kept beside the linear one.
        linear, report = scanvas.linearize(loaded, inplace=True, keep_original=False, **arguments, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    linear.save_pretrained(out)
    report.save(out / "linearize.json")
    return report


def _load(source: Path, dtype: torch.dtype) -> Any:
    import diffusers

    if (source / "model_index.json").is_file():
        cls = diffusers.DiffusionPipeline
    elif (source / "config.json").is_file():
        name = json.loads((source / "config.json").read_text(encoding="utf-8")).get("_class_name")
        cls = getattr(scanvas, str(name), None) or getattr(diffusers, str(name), None)
        if cls is None:
            raise CheckpointError(f"{source / 'config.json'} is of class {name!r}, which diffusers does not have")
    else:
        raise CheckpointError(
            f"{source} holds neither model_index.json nor config.json: it is no saved pipeline or model"
        )
    try:
        return cls.from_pretrained(source, torch_dtype=dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} can not be loaded: {error}") from error

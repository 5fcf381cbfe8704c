"""``scanvas bench linearize``: one forward pass of whole transformers before and after ``linearize``, by resolution.

The weights are random and made on the device, so that nothing is downloaded and nothing copied; the softmax runs by
PyTorch's fused attention, as in diffusers. A row is added by adding an entry to ``MODELS``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scanvas

from .bench import _finish, _panels, _shown
from .errors import ConfigError
from .evaluate import pick_device
from .measure import peak_memory, ratio, seconds_of, versions


@dataclass(frozen=True)
class Subject:
    """A transformer of diffusers: its class, the published configuration, what a small one has instead, and
    ``inputs(model, pixels a side, device, dtype)`` of a forward pass for one image."""

    cls: str
    config: dict[str, Any]
    small: dict[str, Any]
    inputs: Callable[[nn.Module, int, torch.device, torch.dtype], dict[str, Any]]


def _flux_inputs(model: nn.Module, side: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    n, c = side // 16, model.config
    places = torch.zeros(n, n, 3, device=device)
    places[..., 1], places[..., 2] = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    return {
        "hidden_states": torch.randn(1, n * n, c.in_channels, device=device, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 512, c.joint_attention_dim, device=device, dtype=dtype),
        "pooled_projections": torch.randn(1, c.pooled_projection_dim, device=device, dtype=dtype),
        "timestep": torch.full((1,), 0.5, device=device, dtype=dtype),
        "guidance": torch.full((1,), 3.5, device=device, dtype=dtype),
        "img_ids": places.view(-1, 3),
        "txt_ids": torch.zeros(512, 3, device=device),
    }


def _pixart_inputs(model: nn.Module, side: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    n, c = side // 8, model.config
    return {
        "hidden_states": torch.randn(1, c.in_channels, n, n, device=device, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 300, c.caption_channels, device=device, dtype=dtype),
        "timestep": torch.full((1,), 500, device=device),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


MODELS: dict[str, Subject] = {
    "flux": Subject(
        "FluxTransformer2DModel",
        {"guidance_embeds": True},  # FLUX.1-dev: diffusers' defaults otherwise, 11.9 billion parameters
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
        _flux_inputs,
    ),
    "pixart": Subject(
        "PixArtTransformer2DModel",
        # PixArt-Σ-XL/2: diffusers' defaults otherwise, 0.6 billion parameters
        {"sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False},
        {
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 24,
            "cross_attention_dim": 96,
            "caption_channels": 64,
        },
        _pixart_inputs,
    ),
}
SIDES, SMALL_SIDES = (1024, 2048, 4096), (256, 512)
MIXERS = ("lit",)
_FAILURES = (RuntimeError, NotImplementedError, ValueError)  # out of memory, no kernel, a compiler that gives up
_ENOUGH = 1.0  # seconds of passes, after which none is repeated: one of the largest takes several
_PANELS = [("forward, one image", "ms", "ms"), ("peak memory beyond the weights", "peak_mb", "MiB")]


def bench_linearize(
    out: str,
    *,
    device: str | None = None,
    models: Sequence[str] = tuple(MODELS),
    mixers: Sequence[str] = MIXERS,
    sides: Sequence[int] | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure, print, and save ``linearize.json`` and ``linearize.png``; ``quick`` takes small models of these kinds.

    Raises:
        ConfigError: an argument is unknown or does not fit, or full size is asked for without a GPU.
    """
    from scanvas.diffusion.linear_cores import TARGETS

    chosen = pick_device(device)
    for name, values, allowed in (("--models", models, MODELS), ("--mixers", mixers, TARGETS)):
        unknown = [value for value in values if value not in allowed]
        if unknown:
            raise ConfigError(f"{name} must be among {', '.join(allowed)}; got {', '.join(unknown)}")
    if not quick and chosen.type != "cuda":
        raise ConfigError(f"--device {chosen}: transformers of full size need a GPU; --quick measures small ones")
    sides = sides or (SMALL_SIDES if quick else SIDES)
    wrong = [side for side in sides if side < 16 or side % 16]
    if wrong:
        raise ConfigError(f"--sides are pixels, divisible by 16, those of a token; got {', '.join(map(str, wrong))}")
    rows = _shown(linearize_rows(models, mixers, sides, chosen, small=quick))
    measured = [{**row, "line": f"{row['model']}, {row['attention']}"} for row in rows if not row["failed"]]
    result = {"versions": versions(chosen), "rows": rows, "ratios": linearize_ratios(rows)}
    return _finish(Path(out), "linearize", result, _panels(measured, "line", "side", _PANELS))


def linearize_rows(
    models: Sequence[str], mixers: Sequence[str], sides: Sequence[int], device: torch.device, *, small: bool
) -> Iterator[dict[str, Any]]:
    """One row for each model, attention and resolution: tokens of the image, milliseconds of a forward pass, the peak
    of memory beyond the weights, what went wrong, if it did, and how many times faster than the softmax it is."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in models:
        softmax: dict[int, float | None] = {}
        for attention in ("softmax", *mixers):
            began = time.perf_counter()
            model = build(name, device, dtype, small=small)
            if attention != "softmax":
                scanvas.linearize(model, attention, sizes=[], inplace=True, keep_original=False)
            print(f"{name}, {attention}: made in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            for side in sides:
                measured = _measure(model, MODELS[name].inputs(model, side, device, dtype), device)
                reference = softmax.get(side)
                faster = reference / measured["ms"] if reference and measured["ms"] else None
                if attention == "softmax":
                    softmax[side] = measured["ms"]
                row = {"model": name, "attention": attention, "side": side, "tokens": (side // 16) ** 2}
                yield row | measured | {"faster": faster}
            del model
            if device.type == "cuda":
                torch.cuda.empty_cache()


def build(name: str, device: torch.device, dtype: torch.dtype, *, small: bool) -> nn.Module:
    """A model of ``MODELS`` with random weights, made on the device in its dtype."""
    import diffusers

    subject, before = MODELS[name], torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(diffusers, subject.cls)(**subject.config | (subject.small if small else {}))
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def _measure(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    def forward() -> Tensor:
        with torch.inference_mode():
            return model(**inputs, return_dict=False)[0]

    passes = []

    def timed() -> None:
        passes.append(seconds_of(forward, device))

    try:
        forward()  # compiles and loads what the others need
        peak = peak_memory(timed, device, warm_up=False)
        if device.type != "cuda":
            passes.clear()  # a profiler has slowed it
        while sum(passes) < _ENOUGH and len(passes) < 5:
            timed()
    except _FAILURES as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return {"ms": None, "peak_mb": None, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return {"ms": min(passes) * 1e3, "peak_mb": peak / 2**20, "failed": ""}


def linearize_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The softmax against each linear attention at the largest resolution. At small ones the softmax may be quicker;
    the column ``faster`` tells from where on it is not."""
    at = {(row["model"], row["attention"], row["side"]): row for row in rows}
    largest = max(row["side"] for row in rows)
    ratios = []
    for (name, attention, side), row in at.items():
        softmax = at[name, "softmax", side]
        if attention == "softmax" or side < largest or row["failed"] or softmax["failed"]:
            continue
        where = f"{name}, {side} px"
        memory = row["peak_mb"] / softmax["peak_mb"]
        ratios.append(ratio(f"softmax / {attention}, time, {where}", softmax["ms"] / row["ms"], at_least=1.0))
        ratios.append(ratio(f"{attention} / softmax, peak memory, {where}", memory, at_most=1.0))
    return ratios

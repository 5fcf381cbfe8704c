"""``scanvas sample``: images from a saved pipeline, by prompt or class."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import scanvas  # noqa: F401 - makes our pipelines known to diffusers

from .errors import CheckpointError, UserError, nearest
from .evaluate import pick_device
from .pictures import save_grid
from .quiet import no_bars

DEFAULT = "runs/demo/painter/final"  # where the demo leaves its pipeline
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_pipeline(path: str | None, *, device: torch.device, dtype: str = "fp32", scheduler: str | None = None):
    """The pipeline saved at ``path``, by default the demo's, on ``device``.

    ``scheduler``: a diffusers scheduler to put in place of the saved one, with its config. Raises CheckpointError where
    there is no pipeline or it cannot be read, UserError for an unknown scheduler.
    """
    folder = Path(path or DEFAULT)
    if not (folder / "model_index.json").is_file():
        if path is None:
            raise CheckpointError(
                f"--pipeline is needed: there is none at {DEFAULT}, where `scanvas demo` would leave it"
            )
        inner = [name for name in ("best", "final") if (folder / name / "model_index.json").is_file()]
        hint = f"; its sub-directory {' or '.join(inner)} does" if inner else ""
        raise CheckpointError(f"--pipeline {str(folder)!r} holds no model_index.json{hint}")
    try:
        with no_bars():
            pipeline = DiffusionPipeline.from_pretrained(folder)
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        raise CheckpointError(
            f"cannot read the pipeline at {str(folder)!r}: {' '.join(str(error).split())[:400]}"
        ) from error
    if scheduler is not None:
        pipeline.register_modules(scheduler=_scheduler(scheduler, pipeline.scheduler.config))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device) if dtype == "fp32" else pipeline.to(device, DTYPES[dtype])


def _scheduler(name: str, config: Any):
    cls = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if cls is None or not hasattr(cls, "from_config"):
        known = [n for n in dir(diffusers) if n.endswith("Scheduler") and not n.startswith("Flax")]
        raise UserError(f"--scheduler {name!r} is none of diffusers{nearest(name, known)}")
    learned = str(config.get("variance_type")).startswith("learned")
    takes = "variance_type" in inspect.signature(cls.__init__).parameters
    # of the fast solvers none can use a learned variance; the pipeline then leaves it out
    fixed = {"variance_type": None} if learned and takes and cls is not diffusers.DDPMScheduler else {}
    return cls.from_config(config, **fixed)


def defaults(path: str | None) -> dict[str, Any]:
    """Steps and guidance of the pictures painted in training, as keywords of the pipeline; nothing where the directory
    does not say."""
    told = Path(path or DEFAULT) / "training.json"
    if not told.is_file():
        return {}
    grid = json.loads(told.read_text(encoding="utf-8"))["config"].get("grid", {})
    names = {"num_inference_steps": "steps", "guidance_scale": "guidance"}
    return {keyword: grid[name] for keyword, name in names.items() if name in grid}


def paint(pipeline, wanted: list[Any], *, seed: int, batch_size: int, **options: Any) -> Iterator[list[Image.Image]]:
    """Batches of images, one for each prompt (str) or class (int or name) of ``wanted``. Image i is painted from seed
    ``seed + i``, whatever the batches. Raises UserError for what the pipeline refuses."""
    by_class = "class_labels" in inspect.signature(pipeline.__call__).parameters
    for first in range(0, len(wanted), batch_size):
        part = wanted[first : first + batch_size]
        generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(part))]
        try:
            yield pipeline(**{"class_labels" if by_class else "prompt": part}, generator=generators, **options).images
        except (ValueError, TypeError) as error:
            raise UserError(f"the pipeline cannot paint this: {' '.join(str(error).split())}") from error


def sample(
    out: str,
    *,
    pipeline: str | None = None,
    prompts: list[str] | None = None,
    labels: list[str] | None = None,
    negative_prompt: str | None = None,
    num: int = 1,
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    height: int | None = None,
    width: int | None = None,
    grid: bool = False,
    enlarge: int = 1,
    scheduler: str | None = None,
    batch_size: int = 16,
    device: str | None = None,
    dtype: str = "fp32",
) -> list[str]:
    """Paint ``num`` images of each prompt or label and write them; returns the files.

    One image goes to ``out``; many go to numbered files beside it, or with ``grid`` into one picture, a row (or, with
    one prompt, a square) for each. ``enlarge``: times the size, smoothly, for looking at small images.

    Raises UserError for what cannot be painted or written, CheckpointError for the pipeline.
    """
    if (prompts is None) == (labels is None):
        raise UserError("give either --prompt or --label, as many as you like")
    for name, value in (("--num", num), ("--batch-size", batch_size), ("--enlarge", enlarge)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, and is {value}")
    place = Path(out)
    if place.suffix.lower() not in Image.registered_extensions():
        raise UserError(f"--out {out!r} must end in the name of an image format, such as .png")
    loaded = load_pipeline(pipeline, device=pick_device(device), dtype=dtype, scheduler=scheduler)
    by_class = "class_labels" in inspect.signature(loaded.__call__).parameters
    if by_class != (labels is not None):
        raise UserError(
            f"{type(loaded).__name__} paints by {'class: give --label' if by_class else 'text: give --prompt'}"
        )
    if by_class and negative_prompt is not None:
        raise UserError("--negative-prompt is for pipelines that paint by text")
    given = {"num_inference_steps": steps, "guidance_scale": guidance, "height": height, "width": width}
    options = defaults(pipeline) | {k: v for k, v in given.items() if v is not None}
    if negative_prompt is not None:
        options["negative_prompt"] = negative_prompt
    wanted = prompts or [int(label) if label.isdigit() else label for label in labels]
    wanted = [one for one in wanted for _ in range(num)]
    images = [image for part in paint(loaded, wanted, seed=seed, batch_size=batch_size, **options) for image in part]
    if enlarge > 1:
        images = [image.resize((enlarge * image.width, enlarge * image.height), Image.BICUBIC) for image in images]
    place.parent.mkdir(parents=True, exist_ok=True)
    if len(images) == 1:
        images[0].save(place)
        return [str(place)]
    if grid:
        save_grid(images, place, num if 1 < num < len(images) else None)
        return [str(place)]
    files = [place.with_stem(f"{place.stem}-{i:03d}") for i in range(len(images))]
    for image, file in zip(images, files):
        image.save(file)
    return [str(file) for file in files]

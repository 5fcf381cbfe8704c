"""``scanvas attention-map --pipeline``: what the words of a prompt, or a patch, look at while an image is painted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .attention_map import parse_layers, parse_query
from .errors import UserError
from .evaluate import pick_device
from .maps import StepMaps, attention_over_steps
from .sample import defaults, load_pipeline


def watch(
    pipeline: str,
    *,
    prompt: str | None = None,
    label: str | None = None,
    words: str | None = None,
    query: str | None = None,
    layers: str | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    out: str | None = None,
    gif: str | None = None,
    device: str | None = None,
) -> tuple[StepMaps, list[str]]:
    """Paint one image, and write the grid ``out`` (``steps.png`` if neither is asked for) and the animation ``gif``.

    Raises UserError for what is not there, CheckpointError for a pipeline that cannot be read.
    """
    if (prompt is None) == (label is None):
        raise UserError("give either --prompt or --label with --pipeline")
    for name, path, ending in (("--out", out, ".png"), ("--gif", gif, ".gif")):
        if path is not None and Path(path).suffix.lower() != ending:
            raise UserError(f"{name} must end in {ending}; got {path!r}")
    loaded = load_pipeline(pipeline, device=pick_device(device))
    given: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance}
    options = defaults(pipeline) | {k: v for k, v in given.items() if v is not None}
    place = None if query in (None, "middle") else parse_query(query)
    if isinstance(place, str):
        raise UserError(f"--query must be ROW,COLUMN with --pipeline; got {query!r}")
    wanted = prompt if prompt is not None else int(label) if label.isdigit() else label
    try:
        maps = attention_over_steps(
            loaded,
            wanted,
            words=None if words is None else [word.strip() for word in words.split(",")],
            query=place,
            layers=parse_layers(layers),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
    except (ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from error
    files = []
    if gif is not None:
        files.append(str(maps.gif(gif)))
    if out is not None or gif is None:
        maps.grid(out or "steps.png")
        files.append(out or "steps.png")
    return maps, files

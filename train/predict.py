"""``scanvas predict``: the most probable classes of images, by a saved classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .data import eval_transform
from .errors import DataError, UserError
from .evaluate import pick_device
from .models import input_config, label_names, load_classifier
from .samples import UNREADABLE, read_image


def predict(
    images: list[str], checkpoint: str, *, top_k: int = 5, device: str | None = None, on_error: str = "stop"
) -> tuple[list[dict[str, Any]], list[str]]:
    """``([{"image": path, "top": [{"class", "index", "probability"}, …]}, …], [unreadable, …])``.

    Raises DataError for an image that cannot be read, unless ``on_error`` is "skip".
    """
    if top_k < 1:
        raise UserError(f"--top-k must be at least 1, and is {top_k}")
    chosen = pick_device(device)
    model = load_classifier(checkpoint).to(chosen)
    transform, names = eval_transform(input_config(model)), label_names(model)
    results, skipped = [], []
    for path in images:
        try:
            tensor = transform(read_image(Path(path)))
        except UNREADABLE as error:
            message = f"cannot read image {path}: {type(error).__name__}: {error}"
            if on_error == "stop":
                raise DataError(message) from error
            skipped.append(message)
            continue
        with torch.inference_mode():
            probability = model(tensor[None].to(chosen)).float().softmax(-1)[0]
        top = probability.topk(min(top_k, len(names)))
        results.append(
            {
                "image": path,
                "top": [
                    {"class": names[i], "index": i, "probability": p}
                    for p, i in zip(top.values.tolist(), top.indices.tolist())
                ],
            }
        )
    return results, skipped

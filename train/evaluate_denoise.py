"""``scanvas evaluate denoise``: how alike the images of a pipeline and those of a data set are."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import from_dict
from .denoise_config import PaintDataConfig
from .errors import DataError, UserError
from .evaluate import pick_device
from .extract import Extractor
from .generative_metrics import frechet_distance, kernel_distance, moments, precision_recall
from .paint_data import Key, PixelItems, WorkerReader, caption_of
from .pictures import save_grid
from .sample import defaults, load_pipeline, paint
from .samples import BadImages
from .sources import Source, check_label_range, open_source

_SHOWN = 100  # images in the picture


@dataclass
class PaintEvaluation:
    """What ``evaluate`` measured. ``kid`` and ``kid_std`` as they are, not times 1000."""

    frechet_distance: float
    precision: float
    recall: float
    kid: float
    kid_std: float
    images: int
    real_images: int
    features: str  # the extractor: numbers of different ones do not compare
    feature_dim: int
    split: str
    scheduler: str
    steps: int
    guidance: float
    seed: int
    images_per_second: float  # painted


def evaluate_denoiser(
    pipeline: str,
    features: str,
    data: dict[str, Any],
    *,
    split: str | None = None,
    num: int = 5000,
    real: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    scheduler: str | None = None,
    seed: int = 0,
    batch_size: int = 64,
    device: str | None = None,
    dtype: str = "fp32",
    grid: str | None = None,
) -> PaintEvaluation:
    """Paint ``num`` images with the labels or captions of a split and compare their features with the real ones'.

    Args:
        pipeline, scheduler, dtype, device: see ``sample.load_pipeline``.
        features: see ``extract.Extractor``.
        data: keys of PaintDataConfig that differ from those the pipeline was trained on.
        split: of the real images, by default that of training.
        num: images to paint; their conditions are evenly spaced over the split.
        real: at most so many real images, evenly spaced; by default all.
        steps, guidance: by default those of the pictures painted in training.
        grid: a file for a picture of the first hundred.

    Raises:
        UserError: an argument, the data or a checkpoint does not fit.
    """
    for name, value in (("--num", num), ("--real", real if real is not None else 4)):
        if value < 4:
            raise UserError(f"{name} must be at least 4, the nearest neighbours that are looked at, and is {value}")
    chosen = pick_device(device)
    config = _data_config(Path(pipeline), data)
    split = split or config.train_split
    extractor = Extractor(features, chosen)
    loaded = load_pipeline(pipeline, device=chosen, dtype=dtype, scheduler=scheduler)
    by_text = hasattr(loaded, "tokenizer")
    source = open_source(config, split, captions=by_text, classes=_classes(loaded))
    if not by_text:
        check_label_range(source, loaded.transformer.config.num_classes, split)
    real_features = extractor(_real(source, config, loaded, real, batch_size))

    options = {"num_inference_steps": 50, "guidance_scale": 4.0} | defaults(pipeline)
    given = {"num_inference_steps": steps, "guidance_scale": guidance}
    options |= {k: v for k, v in given.items() if v is not None}
    wanted = [_condition(source, i * len(source) // num) for i in range(num)]
    shown, parts, seconds = [], [], 0.0
    began = time.perf_counter()
    for images in paint(loaded, wanted, seed=seed, batch_size=batch_size, **options):
        seconds += time.perf_counter() - began
        shown += images[: _SHOWN - len(shown)]
        pixels = torch.from_numpy(np.stack([np.array(image.convert("RGB")) for image in images])).permute(0, 3, 1, 2)
        parts.append(extractor([pixels]))
        began = time.perf_counter()
    fake_features = torch.cat(parts)
    if grid:
        save_grid(shown, Path(grid))
    precision, recall = precision_recall(real_features[:: max(1, len(real_features) // num)], fake_features)
    kid, kid_std = kernel_distance(real_features, fake_features, seed=seed)
    return PaintEvaluation(
        frechet_distance=frechet_distance(*moments(real_features), *moments(fake_features)),
        precision=precision,
        recall=recall,
        kid=kid,
        kid_std=kid_std,
        images=len(fake_features),
        real_images=len(real_features),
        features=extractor.described,
        feature_dim=real_features.shape[1],
        split=split,
        scheduler=type(loaded.scheduler).__name__,
        steps=options["num_inference_steps"],
        guidance=options["guidance_scale"],
        seed=seed,
        images_per_second=len(fake_features) / seconds,
    )


def _data_config(pipeline: Path, data: dict[str, Any]) -> PaintDataConfig:
    trained = pipeline / "training.json"
    known = json.loads(trained.read_text(encoding="utf-8"))["config"]["data"] if trained.is_file() else {}
    return from_dict(PaintDataConfig, known | {k: v for k, v in data.items() if v is not None})


def _classes(pipeline) -> list[str] | None:
    names = pipeline.config.get("id2label")
    return [names[str(i)] for i in range(len(names))] if names else None


def _condition(source: Source, i: int) -> Any:
    return source.labels[i] if source.captions is None else caption_of(source, 0, Key(-1, i, i))


def _real(source: Source, config: PaintDataConfig, pipeline, limit: int | None, batch_size: int):
    """uint8 batches of the real images, in colour, brought to the size that the pipeline paints by default."""
    side = pipeline.transformer.config.sample_size
    height, width = (side, side) if isinstance(side, int) else side
    factor = pipeline.vae_scale_factor
    count = min(limit or len(source), len(source))
    keys = [Key(-1, i, i * len(source) // count) for i in range(count)]
    shape = (height * factor, width * factor)
    # grey pipelines paint grey images: the real ones are compared as they would paint them
    grey = pipeline.vae is None and pipeline.transformer.config.in_channels == 1
    items = PixelItems(
        source, np.zeros(len(source), dtype=np.int64), [shape], channels=1 if grey else 3, hflip=0.0, seed=0
    )
    bad = BadImages(config.on_error)
    found = 0
    for batch in WorkerReader(items, config.workers).read(
        [keys[at : at + batch_size] for at in range(0, count, batch_size)]
    ):
        bad.check({"skipped": batch["skipped"], "image": batch["pixels"]})
        if batch["pixels"] is not None:
            found += len(batch["pixels"])
            yield batch["pixels"]
    if found < 4:
        raise DataError(f"only {found} of {count} images can be read")

"""``scanvas evaluate denoise``: how alike the images of a pipeline and those of a data set are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import fresh_file, load_tensors, save_tensors
from .config import from_dict
from .denoise_config import PaintDataConfig
from .errors import DataError, UserError
from .evaluate import pick_device
from .extract import Extractor
from .generative_metrics import frechet_distance, kernel_distance, moments, precision_recall
from .paint_data import Key, PixelItems, WorkerReader, caption_of, fingerprint
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
    real_cache: str | None = None,
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
        real_cache: a directory that keeps the features of the real images for the next pipeline. They are worked out
            anew for other features, another root, split, number or size of images, and for changed files.

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
    wanted = _Wanted.of(source, config, loaded, real)
    real_features = _real_features(extractor, wanted, split, batch_size, real_cache)

    options = {"num_inference_steps": 50, "guidance_scale": 4.0} | defaults(pipeline)
    given = {"num_inference_steps": steps, "guidance_scale": guidance}
    options |= {k: v for k, v in given.items() if v is not None}
    conditions = [_condition(source, i * len(source) // num) for i in range(num)]
    shown, parts, seconds = [], [], 0.0
    began = time.perf_counter()
    for images in paint(loaded, conditions, seed=seed, batch_size=batch_size, **options):
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


@dataclass
class _Wanted:
    """The real images, as a pipeline would paint them."""

    source: Source
    config: PaintDataConfig
    count: int
    shape: tuple[int, int]  # the size that the pipeline paints by default
    channels: int

    @classmethod
    def of(cls, source: Source, config: PaintDataConfig, pipeline, limit: int | None) -> _Wanted:
        side, factor = pipeline.transformer.config.sample_size, pipeline.vae_scale_factor
        height, width = (side, side) if isinstance(side, int) else side
        grey = pipeline.vae is None and pipeline.transformer.config.in_channels == 1
        count = min(limit or len(source), len(source))
        return cls(source, config, count, (height * factor, width * factor), 1 if grey else 3)

    def read(self, batch_size: int) -> Iterator[Tensor]:
        """uint8 batches ``(B, channels, H, W)``."""
        source, config, count = self.source, self.config, self.count
        keys = [Key(-1, i, i * len(source) // count) for i in range(count)]
        items = PixelItems(
            source, np.zeros(len(source), dtype=np.int64), [self.shape], channels=self.channels, hflip=0.0, seed=0
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


def _real_features(extractor: Extractor, wanted: _Wanted, split: str, batch_size: int, folder: str | None) -> Tensor:
    """Features ``(N, D)`` of the real images; from ``folder`` where it has them, else put there."""
    if folder is None:
        return extractor(wanted.read(batch_size))
    about = (extractor.described, wanted.count, wanted.shape, wanted.channels)
    place = Path(folder) / f"real-{fingerprint(wanted.config, wanted.source, split, Path(folder), *about)}.safetensors"
    if not place.is_file():
        features = extractor(wanted.read(batch_size))
        with fresh_file(place) as fresh:
            save_tensors({"features": features}, fresh)
    return load_tensors(place)["features"].to(extractor.device)

"""``scanvas evaluate``: top-1 and top-5 accuracy and throughput of a saved classifier."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from .config import DataConfig, from_dict
from .data import class_names, eval_batches, eval_transform, open_split
from .errors import DataError, UserError
from .models import input_config, label_names, load_classifier
from .samples import BadImages, check_labels


@dataclass
class Evaluation:
    """What ``evaluate`` measured. Accuracies in percent; throughput in images per second."""

    top1: float
    top5: float
    loss: float
    images: int
    skipped: int
    images_per_second: float  # reading the images included
    model_images_per_second: float  # the forward pass alone
    device: str
    split: str


def accuracy(model: nn.Module, batches: Iterable[dict[str, Any]], num_classes: int, device) -> torch.Tensor:
    """Sums over ``batches``: [top-1 hits, top-5 hits, cross-entropy, images], float64 on the CPU.

    Raises DataError where a label lies outside the classes.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        if batch["image"] is None:
            continue
        check_labels(batch, num_classes)
        target = batch["target"].to(device)
        logits = model(batch["image"].to(device, non_blocking=True)).float()
        top = logits.topk(min(5, num_classes), dim=1).indices == target[:, None]
        loss = nn.functional.cross_entropy(logits, target, reduction="sum")
        hits = torch.stack([top[:, 0].sum().float(), top.sum().float(), loss]).double().cpu()
        sums += torch.cat([hits, torch.tensor([float(len(target))], dtype=torch.float64)])
    return sums


def as_metrics(sums: torch.Tensor) -> dict[str, float]:
    """``accuracy``'s sums as ``top1`` and ``top5`` (percent) and ``loss``. Raises DataError without any image."""
    top1, top5, loss, images = sums.tolist()
    if not images:
        raise DataError("the validation split has no readable image")
    return {"top1": 100 * top1 / images, "top5": 100 * top5 / images, "loss": loss / images}


def evaluate(
    checkpoint: str,
    data: dict[str, Any],
    *,
    split: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> Evaluation:
    """Measure a checkpoint directory on a split. ``data``: keys of DataConfig that differ from those it was trained on.

    Raises CheckpointError, DataError; the latter also where data and checkpoint disagree about the classes.
    """
    device = pick_device(device)
    model = load_classifier(checkpoint).to(device)
    config = _data_config(Path(checkpoint), data)
    split = split or config.val_split
    names = label_names(model) if model.pretrained_cfg.get("label_names") else None
    class_map = {name: i for i, name in enumerate(names)} if names and config.format == "folder" else None
    dataset = open_split(config, split, training=False, batch_size=batch_size, seed=0)
    _same_classes(class_names(dataset, config), names, model.num_classes, config)
    if class_map:
        dataset = open_split(config, split, class_map=class_map)
    inputs = input_config(model)
    bad, forward = BadImages(config.on_error), []

    def watched():
        for batch in eval_batches(dataset, config, eval_transform(inputs), batch_size=batch_size):
            bad.check(batch)
            yield batch

    timed = _timed(model, device, forward)
    began = time.perf_counter()
    with torch.inference_mode():
        sums = accuracy(timed, watched(), model.num_classes, device)
    seconds = time.perf_counter() - began
    images = int(sums[3])
    metrics = as_metrics(sums)
    if bad.seen:
        Console(stderr=True).print(bad.summary(), highlight=False, markup=False)
    return Evaluation(
        **metrics,
        images=images,
        skipped=len(bad.seen),
        images_per_second=images / seconds,
        model_images_per_second=images / sum(forward),
        device=str(device),
        split=split,
    )


def pick_device(device: str | None) -> torch.device:
    """The device named, else the accelerator, else the CPU. Raises UserError where it cannot be used."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {device!r} cannot be used here: {' '.join(str(error).split())[:200]}") from error
    return chosen


def _data_config(checkpoint: Path, data: dict[str, Any]) -> DataConfig:
    trained = checkpoint / "training.json"
    known = json.loads(trained.read_text(encoding="utf-8"))["config"]["data"] if trained.is_file() else {}
    return from_dict(DataConfig, known | {k: v for k, v in data.items() if v is not None})


def _same_classes(found: list[str] | None, names: list[str] | None, num_classes: int, config: DataConfig) -> None:
    if found is None:
        return
    if names is None and len(found) != num_classes:
        raise DataError(f"the checkpoint has {num_classes} classes, and {config.root} has {len(found)}")
    if names is None:
        return
    unknown = [name for name in found if name not in names]
    if unknown or (config.format != "folder" and found != names):
        what = f"classes the checkpoint does not know: {', '.join(unknown[:8])}" if unknown else "them in another order"
        raise DataError(
            f"num_classes mismatch: the checkpoint has {len(names)} classes ({', '.join(names[:5])}, …), and "
            f"{config.root} has {what}"
        )


def _timed(model: nn.Module, device: torch.device, seconds: list[float]):
    """``model`` with the seconds of each call appended to ``seconds``."""

    def call(image: torch.Tensor) -> torch.Tensor:
        wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        wait()
        began = time.perf_counter()
        logits = model(image)
        wait()
        seconds.append(time.perf_counter() - began)
        return logits

    return call

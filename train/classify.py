"""Training an image classifier: the task that ``scanvas train classify`` gives to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import save_for_hf
from torch import nn

from .config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from .data import TrainBatches, eval_batches, eval_transform, open_pair, train_transform
from .errors import ConfigError
from .evaluate import accuracy, as_metrics
from .loop import Loop, Result
from .models import build_model, input_config
from .samples import BadImages, check_labels

SAVED_INPUTS = ("input_size", "mean", "std", "interpolation", "crop_pct")


@dataclass
class ClassifyConfig:
    """All keys of a classification recipe."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


def train_classifier(config: ClassifyConfig) -> Result:
    """Run a recipe to the end."""
    return Loop(config, lambda accelerator: ClassifyTask(config, accelerator)).run()


class ClassifyTask:
    """Cross-entropy on images, with timm's augmentation. Metric: top-1 accuracy on the validation split, in percent."""

    metric = "top1"
    higher_is_better = True

    def __init__(self, config: ClassifyConfig, accelerator: Accelerator):
        self.config, self.accelerator = config, accelerator
        data, train, seed = config.data, config.train, config.train.seed
        self.train_set, self.val_set, self.names = open_pair(
            data, config.model.num_classes, batch_size=train.batch_size, seed=seed
        )
        self.num_classes = config.model.num_classes or len(self.names)
        self.model = self._model()
        self.inputs = input_config(
            self.model, mean=data.mean, std=data.std, interpolation=data.interpolation, crop_pct=data.crop_pct
        )
        if config.model.img_size:
            self.inputs["input_size"] = (self.inputs["input_size"][0], config.model.img_size, config.model.img_size)
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.loader = TrainBatches(
            self.train_set,
            data,
            train_transform(config.augment, self.inputs),
            batch_size=train.batch_size,
            seed=seed,
            rank=self.rank,
            world=self.world,
            repeats=config.augment.repeats,
        )
        self.batches_per_epoch = self.loader.per_epoch
        self.bad = BadImages(data.on_error)
        self.mixup, self.loss = self._mixing(config.augment)

    def _model(self) -> nn.Module:
        return build_model(self.config.model, self.num_classes)

    def _mixing(self, augment: AugmentConfig):
        if augment.mixup <= 0 and augment.cutmix <= 0:
            smoothing = augment.label_smoothing
            return None, LabelSmoothingCrossEntropy(smoothing) if smoothing > 0 else F.cross_entropy
        if self.config.train.batch_size % 2:
            raise ConfigError(
                f"train.batch_size={self.config.train.batch_size} must be even with augment.mixup or augment.cutmix, "
                "which mix images in pairs"
            )
        mixup = Mixup(
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            prob=augment.mixup_prob,
            switch_prob=augment.mixup_switch_prob,
            label_smoothing=augment.label_smoothing,
            num_classes=self.num_classes,
        )
        return mixup, SoftTargetCrossEntropy()

    def batches(self, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        for batch in self.loader.epoch(epoch, start):
            self.bad.check(batch)
            check_labels(batch, self.num_classes)
            yield batch | {
                "image": batch["image"].to(self.accelerator.device, non_blocking=True),
                "target": batch["target"].to(self.accelerator.device, non_blocking=True),
            }

    def size(self, batch: dict[str, Any]) -> int:
        return len(batch["index"])

    def describe(self, batch: dict[str, Any]) -> str:
        shown = ", ".join(map(str, batch["index"][:8]))
        return f"samples {shown}{', …' if len(batch['index']) > 8 else ''}"

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        image, target = self.draw(batch)
        return {"cross_entropy": self.loss(model(image).float(), target)}

    def draw(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and targets, mixed where the recipe says so."""
        image, target = batch["image"], batch["target"]
        return (image, target) if self.mixup is None else self.mixup(image, target)

    def held_out(self, poll: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Batches of the validation split, this process's share, not on the device yet."""
        loader = eval_batches(
            self.val_set,
            self.config.data,
            eval_transform(self.inputs),
            batch_size=self.config.train.batch_size,
            rank=self.rank,
            world=self.world,
        )
        for batch in loader:
            poll()
            self.bad.check(batch)
            yield batch

    def evaluate(self, model: nn.Module, poll: Callable[[], None], step: int) -> dict[str, float]:
        sums = accuracy(model, self.held_out(poll), self.num_classes, self.accelerator.device)
        return as_metrics(self.accelerator.reduce(sums.to(self.accelerator.device)))

    def export(self, model: nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        model.pretrained_cfg = model.pretrained_cfg | {k: self.inputs[k] for k in SAVED_INPUTS if k in self.inputs}
        labels = {"label_names": self.names} if self.names else {}
        save_for_hf(model, str(folder), model_config=labels, model_args=self._model_args(), safe_serialization=True)

    def _model_args(self) -> dict[str, Any]:
        args = dict(self.config.model.kwargs)
        if self.config.model.img_size:
            args["img_size"] = self.config.model.img_size
        return args

    def notes(self) -> list[str]:
        summary = self.bad.summary()
        if not summary:
            return []
        path = Path(self.config.run.out) / "skipped.txt"
        if self.accelerator.is_main_process:
            path.write_text("".join(f"{bad}\n" for bad in self.bad.seen.values()), encoding="utf-8")
        return [f"{summary}; all of them: {path}"]

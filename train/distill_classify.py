"""What distillation of a classifier takes from ``scanvas train classify``; see distill_denoise.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import scanvas

from .checkpoint import load_json, load_tensors, save_tensors, write_directory
from .classify import SAVED_INPUTS, ClassifyConfig, ClassifyTask
from .config import ModelConfig
from .data import train_transform
from .distill_config import DistillClassifyConfig, TeacherConfig
from .distill_losses import Seen
from .distill_student import Linear, linearized
from .errors import CheckpointError, ConfigError, nearest
from .latents import fingerprint
from .models import load_classifier
from .samples import MapSamples, collate, quiet_worker


def itself(net: nn.Module) -> nn.Module:
    """The module that paths of attention start from."""
    return net


@dataclass
class Pictures:
    """A batch: what a classifier is given, and what it is judged by."""

    inputs: tuple[Tensor]
    target: Tensor
    index: list[int]


def architecture(config: TeacherConfig) -> tuple[str, dict[str, Any]]:
    """The timm name of a teacher and the keywords it is created with, ``num_classes`` where its files tell. Raises
    ConfigError, CheckpointError."""
    folder = Path(config.checkpoint or "")
    if config.checkpoint and folder.is_dir():
        inner = [name for name in ("best", "final") if (folder / name / "config.json").is_file()]
        if not (folder / "config.json").is_file():
            hint = f"; its sub-directory {' or '.join(inner)} does" if inner else ""
            raise CheckpointError(f"teacher.checkpoint={config.checkpoint!r} holds no config.json{hint}")
        if config.name or config.kwargs:
            raise ConfigError(
                "teacher.checkpoint is a directory, which says itself what model it holds: leave out teacher.name and "
                "teacher.kwargs"
            )
        told = load_json(folder / "config.json")
        if "linearization" in told:
            raise ConfigError(f"teacher.checkpoint={config.checkpoint!r} is linearised already: give the softmax model")
        if "architecture" not in told:
            raise CheckpointError(f"teacher.checkpoint={config.checkpoint!r} holds no classifier of timm")
        return told["architecture"], {"num_classes": told["num_classes"], **told.get("model_args", {})}
    if not config.name:
        raise ConfigError(
            f"teacher.checkpoint={config.checkpoint!r} is no directory; for a file of weights teacher.name says which "
            "model of timm it is of"
        )
    if config.checkpoint and not folder.is_file():
        raise CheckpointError(f"teacher.checkpoint={config.checkpoint!r} is neither a file nor a directory")
    if not timm.is_model(config.name.split(".")[0]):
        raise ConfigError(
            f"teacher.name={config.name!r} is no model of timm or scanvas{nearest(config.name, timm.list_models())}"
        )
    return config.name, dict(config.kwargs)


def check_architecture(config: DistillClassifyConfig) -> Linear:
    """Raise what does not fit between the teacher's architecture and ``student`` before weights or data are read.
    Returns the student without weights."""
    name, kwargs = architecture(config.teacher)
    with torch.device("meta"):
        model = _create(name, kwargs)
    return linearized(model, config.student, None)


def _create(name: str, kwargs: dict[str, Any], **more: Any) -> nn.Module:
    try:
        return timm.create_model(name, **kwargs, **more)
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError, OSError) as error:
        text = " ".join(str(error).split())[:600]
        raise ConfigError(f"teacher: {name!r} cannot be built with {kwargs}: {text}") from error


class ClassifySource(ClassifyTask):
    """See the module's docstring. ``model`` is the teacher, a classifier of timm."""

    root = staticmethod(itself)
    learned = False

    def __init__(self, config: DistillClassifyConfig, accelerator: Accelerator):
        self.recipe = config
        self.name, self.create = architecture(config.teacher)
        size = self.create.get("img_size")
        derived = ClassifyConfig(
            model=ModelConfig(name=self.name, img_size=size if isinstance(size, int) else None),
            data=config.data,
            augment=config.augment,
            optim=config.optim,
            train=config.train,
            run=replace(config.run),
        )
        super().__init__(derived, accelerator)
        self.model.to(accelerator.device)
        self.logits: Tensor | None = None

    @property
    def remembers(self) -> bool:
        """Whether the teacher's outputs are at hand."""
        return self.logits is not None

    def _model(self) -> nn.Module:
        teacher = self.recipe.teacher
        wanted = self.create.get("num_classes")
        if wanted is not None and wanted != self.num_classes:
            raise ConfigError(
                f"the teacher has {wanted} classes, and the data {self.num_classes}: a teacher must know the classes "
                "that it teaches; fine-tune it on these data first (scanvas train classify model.checkpoint=…)"
            )
        if teacher.checkpoint and Path(teacher.checkpoint).is_dir():
            return load_classifier(teacher.checkpoint)
        self.create["num_classes"] = self.num_classes
        if teacher.checkpoint:  # told so, timm does not leave out a head of another size, but refuses it
            overlay = {"file": teacher.checkpoint, "num_classes": self.num_classes}
            return _create(self.name, self.create, pretrained=True, pretrained_cfg_overlay=overlay)
        model = _create(self.name, self.create, pretrained=True)
        if model.pretrained_cfg["num_classes"] != self.num_classes:
            raise ConfigError(
                f"the weights of {self.name} know {model.pretrained_cfg['num_classes']} classes, and the data have "
                f"{self.num_classes}: fine-tune the teacher first and give it as teacher.checkpoint"
            )
        return model

    # ---- what teacher and student are given, and what they made of it

    def draw(self, batch: dict[str, Any]) -> Pictures:
        image, target = super().draw(batch)
        return Pictures((image,), target, batch["index"])

    def cast(self, inputs: tuple, dtype: torch.dtype) -> tuple:
        """Inputs of the network in a dtype."""
        return tuple(part.to(dtype) for part in inputs)

    def see(self, seen: Seen, pictures: Pictures, output: Tensor, teacher: Tensor | None) -> Seen:
        """Enter what the networks made of a batch."""
        seen.logits, seen.target, seen.cross_entropy = output.float(), pictures.target, self.loss
        seen.teacher_logits = None if teacher is None else teacher.float()
        return seen

    def measured(self, poll: Callable[[], None]) -> Iterator[Pictures]:
        """The validation batches, as ``draw`` gives them."""
        for batch in self.held_out(poll):
            if batch["image"] is not None:
                device = self.accelerator.device
                yield Pictures((batch["image"].to(device),), batch["target"].to(device), batch["index"])

    # ---- the teacher's outputs, worked out once

    @torch.no_grad()
    def remember(self, teacher: Callable, net: nn.Module, folder: Path) -> None:
        """The teacher's logits for every training image, read from ``folder/teacher`` or worked out and written there,
        whole, before training: a run that goes on sees the same numbers."""
        place, config = folder / "teacher", self.config
        about = {"teacher": fingerprint(net), "images": len(self.train_set), "root": config.data.root}
        if not (place / "about.json").is_file() or load_json(place / "about.json") != about:
            data = MapSamples(self.train_set, train_transform(config.augment, self.inputs), seed=0, substitute=True)
            loader = DataLoader(
                data,
                batch_size=config.train.batch_size,
                sampler=[(0, i, i) for i in range(len(data))],
                num_workers=config.data.workers,
                collate_fn=collate,
                worker_init_fn=quiet_worker,
                generator=torch.Generator(),
            )
            parts = [teacher((batch["image"].to(self.accelerator.device),)).float().cpu() for batch in loader]

            def fill(at: Path) -> None:
                save_tensors({"logits": torch.cat(parts)}, at / "logits.safetensors")
                (at / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

            if self.accelerator.is_main_process:
                write_directory(place, fill)
        self.accelerator.wait_for_everyone()
        self.logits = load_tensors(place / "logits.safetensors")["logits"].to(self.accelerator.device)

    def remembered(self, pictures: Pictures) -> Tensor:
        """The teacher's logits of a batch."""
        return self.logits[torch.tensor(pictures.index, device=self.logits.device)]

    # ---- models

    def student_of(self, model: nn.Module) -> nn.Module:
        """The network that a linearised classifier is."""
        return model

    def load_student(self, path: str) -> nn.Module:
        """A linearised classifier. Raises CheckpointError."""
        try:
            return scanvas.load_linearized(path).train()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"student.checkpoint={path!r} cannot be loaded: {' '.join(str(error).split())[:400]}"
            ) from error

    def export(self, model: nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        scanvas.save_linearized(model, folder, **self.create)
        told = load_json(folder / "config.json")
        inputs = {key: self.inputs[key] for key in SAVED_INPUTS if key in self.inputs}
        told["pretrained_cfg"] = inputs | ({"label_names": self.names} if self.names else {})
        (folder / "config.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

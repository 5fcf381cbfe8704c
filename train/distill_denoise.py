"""What distillation of a denoiser takes from ``scanvas train denoise``: data, conditions, losses, measurements and
files, with the teacher in the place of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import scanvas
from scanvas.diffusion.denoiser import LinearDiTTransformer2DModel

from .denoise import DenoiseTask, Noised
from .denoise_config import DenoiseConfig, DenoiserConfig, LossConfig, NoiseConfig, TextConfig
from .denoise_parts import Painter, Parts
from .distill_config import DistillDenoiseConfig
from .distill_families import FAMILIES, Condition, Family
from .distill_losses import Seen
from .distill_models import DTYPES, move
from .distill_student import Linear, linearized
from .errors import CheckpointError, ConfigError
from .quiet import no_bars

OWN = "LinearDiTTransformer2DModel"


def denoiser_of(net: nn.Module) -> nn.Module:
    """The module that paths of attention start from."""
    return net.denoiser


class Folder:
    """What the files of a teacher say before anything is loaded.

    Args:
        path: directory of a pipeline or of a model.
        option: key of the recipe, for errors.

    Raises:
        CheckpointError: it is neither.
    """

    def __init__(self, path: str, option: str = "teacher.checkpoint"):
        self.path, folder = Path(path), Path(path)
        index = self._json(folder / "model_index.json")
        self.index = index or {}
        self.component = next((name for name in ("transformer", "unet") if self._has(name)), None) if index else None
        self.model = folder / self.component if self.component else folder
        config = self._json(self.model / "config.json")
        if config is None or "_class_name" not in config:
            inner = [name for name in ("best", "final") if (folder / name / "model_index.json").is_file()]
            hint = f"; its sub-directory {' or '.join(inner)} is" if inner else ""
            raise CheckpointError(
                f"{option}={str(path)!r} is neither the directory of a denoiser nor of a pipeline{hint}"
            )
        self.config, self.cls = config, config["_class_name"]
        self.scheduler = self._json(folder / "scheduler" / "scheduler_config.json")
        trained = self._json(folder / "training.json") or {}
        self.noise = trained.get("config", {}).get("noise", {})

    def prediction(self, family: Family | None) -> str:
        """What the denoiser predicts."""
        if family is None:
            return self.config.get("prediction_type", "epsilon")
        return (self.scheduler or {}).get("prediction_type") or family.prediction

    def _has(self, component: str) -> bool:
        return bool((self.index.get(component) or [None])[0])

    def has(self, component: str) -> bool:
        """Whether the pipeline has it."""
        return bool(self.index) and self._has(component)

    @staticmethod
    def _json(path: Path) -> dict[str, Any] | None:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            return None
        except ValueError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def derived_config(config: DistillDenoiseConfig, folder: Folder, learned: bool, prediction: str) -> DenoiseConfig:
    """The recipe of ``scanvas train denoise`` that the teacher could be trained by on these data. What the
    distillation's recipe does not say comes from the teacher's pipeline and the settings it was trained with."""
    noise, text = config.noise, config.text
    if noise.scheduler is None and folder.scheduler:
        kwargs = {k: v for k, v in folder.scheduler.items() if not k.startswith("_")}
        noise = replace(noise, scheduler=folder.scheduler["_class_name"], kwargs={**kwargs, **noise.kwargs})
    elif noise.scheduler is None:
        flow = prediction == "flow_prediction"
        noise = replace(noise, scheduler="FlowMatchEulerDiscreteScheduler" if flow else "DDPMScheduler")
    if noise.times is None:
        told = {key: folder.noise[key] for key in ("times", "logit_mean", "logit_std") if key in folder.noise}
        noise = replace(noise, **{"times": "uniform", **told})
    if text.pretrained is None and folder.has("text_encoder"):
        length = text.max_length or folder.index.get("max_sequence_length")
        text = replace(text, pretrained=str(folder.path), max_length=length)
    vae = config.vae
    if vae.path is None and folder.has("vae"):
        vae = replace(vae, path=str(folder.path))
    terms = config.loss.terms or {"mse": 1.0, **({"vlb": 1.0} if learned else {})}
    return DenoiseConfig(
        model=DenoiserConfig(checkpoint=str(config.teacher.checkpoint)),
        text=TextConfig(pretrained=text.pretrained, train=False, max_length=text.max_length or 77),
        vae=vae,
        noise=NoiseConfig(**vars(noise)),
        loss=LossConfig(**{**vars(config.loss), "terms": terms}),
        data=config.data,
        optim=config.optim,
        train=config.train,
        grid=config.grid,
        run=replace(config.run),
    )


class FamilyPainter(Painter):
    """One of diffusers' denoisers, called as its family says."""

    def __init__(self, denoiser: nn.Module, family: Family):
        super().__init__(denoiser)
        self.family = family

    def forward(self, noisy: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """``noisy`` ``(B, C, H, W)``, ``timestep`` ``(B,)``, the family's conditions → the prediction."""
        return self.family.call(self.denoiser, noisy, timestep, condition)


class TeacherParts(Parts):
    """Data, VAE and noise of a recipe whose denoiser is one of diffusers', out of its own pipeline."""

    def __init__(self, config: DenoiseConfig, device: torch.device, source: DenoiseSource, *, alone: bool):
        self.folder, self.family, self.teacher = source.folder, source.family, source.recipe.teacher
        super().__init__(config, device, alone=alone)

    def _wanted(self) -> dict[str, Any]:
        wanted = {**self.family.wanted(self.folder.config), "prediction_type": self.folder.prediction(self.family)}
        if wanted["caption_channels"] and not self.folder.index:
            raise ConfigError(
                f"teacher.checkpoint={str(self.folder.path)!r} is a {self.folder.cls} alone: give the directory of its "
                "pipeline, whose text encoders the captions need"
            )
        return wanted

    def _size_multiple(self, wanted: dict[str, Any]) -> int:
        return wanted["patch_size"]

    def _open_text(self, records: Any, width: int) -> None:
        self.tokenizer = self.text_encoder = None  # the pipeline's, of which there may be several
        self.train_text = False

    def _denoiser(self, wanted: dict[str, Any], factor: int) -> nn.Module:
        folder = self.folder
        try:
            if not folder.index:
                model = getattr(diffusers, folder.cls).from_pretrained(folder.model)
                self.made = None
            else:
                # encoders may be as coarse as the teacher where the run is mixed anyway
                coarse = DTYPES[self.teacher.dtype] if self.config.train.mixed_precision != "no" else torch.float32
                dtypes = {"default": coarse, folder.component: torch.float32}
                with no_bars():
                    self.made = diffusers.DiffusionPipeline.from_pretrained(folder.path, torch_dtype=dtypes)
                self.made.set_progress_bar_config(disable=True)
                model = getattr(self.made, folder.component)
                for name, part in self.made.components.items():
                    if isinstance(part, nn.Module) and name not in (folder.component, "vae"):
                        part.requires_grad_(False).eval().to(self.device)
                self.made.register_modules(**({"vae": self.vae} if self.vae is not None else {}))
        except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
            raise CheckpointError(
                f"teacher.checkpoint={str(folder.path)!r} cannot be loaded: {' '.join(str(error).split())[:400]}"
            ) from error
        return self.family.prepare(model.float())

    @torch.no_grad()
    def encoded(self, captions: list[str]) -> Condition:
        """The conditions of captions."""
        with torch.autocast(self.device.type, enabled=False):
            return self.family.encode(self.made, captions, self.device)

    def pipeline(self, painter: Painter):
        """The teacher's pipeline around another denoiser; None where the teacher came without one."""
        if self.made is not None:
            self.made.register_modules(**{self.folder.component: painter.denoiser})
        return self.made


class DenoiseSource(DenoiseTask):
    """See the module's docstring. ``model`` is the teacher, a ``Painter``."""

    root = staticmethod(denoiser_of)
    remembers = False  # other noise in every step

    def __init__(self, config: DistillDenoiseConfig, accelerator: Accelerator):
        self.recipe, self.folder = config, Folder(config.teacher.checkpoint)
        self.family = FAMILIES.get(self.folder.cls)
        wanted = self.family.wanted(self.folder.config) if self.family else self.folder.config
        self.learned = wanted.get("out_channels") not in (None, wanted["in_channels"])
        prediction = self.folder.prediction(self.family)
        super().__init__(derived_config(config, self.folder, self.learned, prediction), accelerator)
        self.model = self.student_of(self.parts.denoiser).to(self.device)

    def _parts(self) -> Parts:
        if self.family is None:
            return super()._parts()
        return TeacherParts(self.config, self.device, self, alone=self.world == 1)

    def _condition(self, batch: dict[str, Any], drop: Tensor | None) -> tuple:
        if self.family is None:
            return super()._condition(batch, drop)
        if not self.parts.by_text:
            return ({"class_labels": super()._condition(batch, drop)[0]},)
        condition = self.parts.encoded(batch["caption"])
        if drop is not None and drop.any():
            empty = self.parts.encoded([""])
            condition = {
                name: torch.where(drop.view(-1, *[1] * (value.ndim - 1)), empty[name], value)
                for name, value in condition.items()
            }
        return ({name: move(value, torch.Tensor.float) for name, value in condition.items()},)

    # ---- what teacher and student are given, and what they made of it

    def cast(self, inputs: tuple, dtype: torch.dtype) -> tuple:
        """Inputs of the network in a dtype; timesteps stay exact."""
        noisy, times, *condition = inputs
        return (noisy.to(dtype), times, *move(condition, lambda part: part.to(dtype)))

    def see(self, seen: Seen, noised: Noised, output: Tensor, teacher: Tensor | None) -> Seen:
        """Enter what the networks made of a batch."""
        seen.step, seen.loss_config = noised.step(output), self.config.loss
        seen.teacher_step = None if teacher is None else noised.step(teacher)
        return seen

    def measured(self, poll: Callable[[], None]) -> Iterator[Noised]:
        """The held-out batches, as ``draw`` gives them."""
        for noised in self.held_out():
            poll()
            yield noised

    def _paint(self, model: nn.Module, step: int) -> None:
        # the student; the teacher is measured as a function
        if isinstance(model, Painter) and not (self.family and self.parts.made is None):
            super()._paint(model, step)

    def export(self, model: nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        """A pipeline; of one with text encoders, which may be large and are the teacher's still, the denoiser alone."""
        if self.family is None:
            super().export(model, folder, metrics)
        elif self.parts.by_text or self.parts.made is None:
            model.denoiser.save_pretrained(folder / (self.folder.component or "."))
        else:
            with no_bars():
                self.parts.pipeline(model).save_pretrained(folder)

    # ---- models

    def student_of(self, denoiser: nn.Module) -> Painter:
        """The network around a denoiser."""
        return Painter(denoiser) if self.family is None else FamilyPainter(denoiser, self.family)

    def load_student(self, path: str) -> nn.Module:
        """A linearised denoiser, or the one of a pipeline. Raises CheckpointError."""
        folder = Folder(path, "student.checkpoint")
        cls = getattr(scanvas, folder.cls, None)
        if cls is None:
            raise ConfigError(
                f"student.checkpoint={path!r} is a {folder.cls}, and no linearised model; leave it out to linearise "
                "the teacher, or write one with scanvas linearize"
            )
        try:
            return cls.from_pretrained(folder.model).float()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"student.checkpoint={path!r} cannot be loaded: {' '.join(str(error).split())[:400]}"
            ) from error


def check_architecture(config: DistillDenoiseConfig) -> Linear:
    """Raise what does not fit between the teacher's config and ``student`` before weights or data are looked at.
    Returns the student without weights."""
    folder = Folder(config.teacher.checkpoint)
    if folder.cls.startswith("Linearized"):
        raise ConfigError(
            f"teacher.checkpoint={config.teacher.checkpoint!r} is linearised already: give the softmax model"
        )
    if folder.cls not in (OWN, *FAMILIES):
        raise ConfigError(
            f"teacher.checkpoint={config.teacher.checkpoint!r} holds a {folder.cls}, which distillation does not know "
            f"how to call; it knows {', '.join((OWN, *FAMILIES))}"
        )
    cls = LinearDiTTransformer2DModel if folder.cls == OWN else getattr(diffusers, folder.cls)
    with torch.device("meta"):
        model = cls.from_config(folder.config)
    return linearized(model, config.student, None)

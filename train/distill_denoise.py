"""What distillation of a denoiser takes from ``scanvas train denoise``: data, conditions, losses, measurements and
files, with the teacher in the place of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import scanvas
from scanvas.diffusion.denoiser import LinearDiTTransformer2DModel

from .denoise import DenoiseTask, Noised
from .denoise_config import DenoiseConfig, DenoiserConfig, LossConfig, NoiseConfig, TextConfig
from .denoise_parts import Painter
from .distill_config import DistillDenoiseConfig
from .distill_losses import Seen
from .distill_student import linearized
from .errors import CheckpointError, ConfigError, nearest

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


class DenoiseSource(DenoiseTask):
    """See the module's docstring. ``model`` is the teacher, a ``Painter``."""

    root = staticmethod(denoiser_of)
    remembers = False  # other noise in every step

    def __init__(self, config: DistillDenoiseConfig, accelerator: Accelerator):
        self.recipe, self.folder = config, Folder(config.teacher.checkpoint)
        if self.folder.cls != OWN:
            raise ConfigError(f"teacher.checkpoint is a {self.folder.cls}{nearest(self.folder.cls, [OWN])}")
        wanted = self.folder.config
        self.learned = wanted.get("out_channels") not in (None, wanted["in_channels"])
        prediction = wanted.get("prediction_type", "epsilon")
        super().__init__(derived_config(config, self.folder, self.learned, prediction), accelerator)
        self.model.to(self.device)

    # ---- what teacher and student are given, and what they made of it

    def cast(self, inputs: tuple, dtype: torch.dtype) -> tuple:
        """Inputs of the network in a dtype; timesteps stay exact."""
        noisy, times, *condition = inputs
        floating = [part.to(dtype) if part is not None and part.is_floating_point() else part for part in condition]
        return (noisy.to(dtype), times, *floating)

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
        if isinstance(model, Painter):  # the student; the teacher is measured as a function
            super()._paint(model, step)

    # ---- models

    def student_of(self, denoiser: nn.Module) -> Painter:
        """The network around a linearised denoiser."""
        return Painter(denoiser)

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


def check_architecture(config: DistillDenoiseConfig) -> None:
    """Raise what does not fit between the teacher's config and ``student`` before weights or data are looked at."""
    folder = Folder(config.teacher.checkpoint)
    with torch.device("meta"):
        model = LinearDiTTransformer2DModel.from_config(folder.config)
    linearized(model, config.student, None)

"""The recipe of ``scanvas train distill``: its sections, their defaults, and what of it can be checked before any work.

``task: denoise`` or ``task: classify`` says whose data and losses are used; the sections of ``scanvas train denoise``
and ``scanvas train classify`` keep their names and keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

from .config import AugmentConfig, DataConfig, OptimConfig, RunConfig, TrainConfig, load, read_tree
from .denoise_config import GridConfig, LossConfig, PaintDataConfig, VaeConfig
from .distill_losses import LOSSES, TASKS
from .errors import ConfigError, nearest
from .loop import check_train

KINDS = ("attention", "block", "end_to_end")
TRAINABLE = ("new", "attention", "lora", "all")


@dataclass
class TeacherConfig:
    """The softmax model, which is not changed."""

    checkpoint: str | None = None  # directory of a pipeline or of a denoiser; of a classifier, or its weights' file
    name: str | None = None  # classifiers: timm's name, where the checkpoint is a file of weights
    kwargs: dict[str, Any] = field(default_factory=dict)  # classifiers: keywords of timm.create_model, with the name
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # of its weights while it teaches
    offload: bool = False  # weights stay in the CPU's memory and visit the GPU layer by layer
    quantize: Literal["int8", "int4"] | None = None  # weights only, by torchao
    cache: bool = False  # classifiers without augmentation: work out its logits once, into RUN/teacher.safetensors


@dataclass
class StudentConfig:
    """What ``scanvas.linearize`` makes of the teacher; see docs/linearize.md for targets and their options."""

    mixer: str = "lit"
    layers: Any = "all"  # pattern, patterns, indices, or a number or fraction of the least sensitive layers
    heads: int | None = None
    inherit: str = "qkvo"
    options: dict[str, Any] = field(default_factory=dict)
    calibration: int = 1  # training batches that what is new is fitted to in closed form; 0 for none
    checkpoint: str | None = None  # a linearised model to go on with, in place of all that
    seed: int = 0


@dataclass
class StageConfig:
    """One stage. ``attention`` and ``block`` give each linearised layer, or block, the inputs of the teacher's own, all
    of them side by side in one pass; ``end_to_end`` runs the student as a whole."""

    kind: str = "end_to_end"
    epochs: int | None = None  # None: train.epochs
    steps: int | None = None  # instead: so many optimiser steps, measured once at their end
    lr: float | None = None  # None: optim.lr
    new_lr: float = 1.0  # times that for tensors that the teacher lacks
    warmup: float | None = None  # fraction of the stage; None: optim.warmup_epochs
    terms: dict[str, float] = field(default_factory=dict)  # losses and weights; empty: those of ``default_terms``
    train: str | None = None  # new, attention, lora or all; None: attention, and all end to end
    temperature: float = 1.0  # of the term logits
    lora_rank: int = 8
    lora_alpha: float = 16.0


@dataclass
class TeacherText:
    """The encoder of captions; what is not said is the teacher's own."""

    pretrained: str | None = None
    max_length: int | None = None


@dataclass
class TeacherNoise:
    """The forward process, see NoiseConfig; what is not said is the teacher's own."""

    scheduler: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    times: Literal["uniform", "logit_normal"] | None = None
    logit_mean: float = 0.0
    logit_std: float = 1.0


@dataclass
class _Distill:
    task: str
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    stages: list[StageConfig] = field(default_factory=lambda: [StageConfig("attention"), StageConfig("end_to_end")])
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(out="runs/distill"))


@dataclass
class DistillDenoiseConfig(_Distill):
    """All keys of a recipe for a denoiser."""

    task: str = "denoise"
    text: TeacherText = field(default_factory=TeacherText)
    vae: VaeConfig = field(default_factory=VaeConfig)  # where no path is given, the teacher's
    noise: TeacherNoise = field(default_factory=TeacherNoise)
    # terms here are what held-out images are measured by; empty: mse, and vlb for a learned variance
    loss: LossConfig = field(default_factory=lambda: LossConfig(terms={}))
    data: PaintDataConfig = field(default_factory=PaintDataConfig)
    grid: GridConfig = field(default_factory=GridConfig)


@dataclass
class DistillClassifyConfig(_Distill):
    """All keys of a recipe for a classifier."""

    task: str = "classify"
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)


CONFIGS = {"denoise": DistillDenoiseConfig, "classify": DistillClassifyConfig}
DistillConfig = DistillDenoiseConfig | DistillClassifyConfig


def load_distill(recipe: str | None, overrides: list[str] = ()) -> DistillConfig:
    """The recipe with overrides; its key ``task`` says which keys there are. Raises ConfigError, see ``load``."""
    task = read_tree(recipe, "distill").get("task", "denoise")
    for item in overrides:
        key, _, text = item.partition("=")
        task = yaml.safe_load(text) if key == "task" else task
    if task not in CONFIGS:
        raise ConfigError(f"task={task!r} is no task{nearest(str(task), CONFIGS)}")
    return load(CONFIGS[task], recipe, overrides, task="distill")


def default_terms(kind: str, task: str, learned_variance: bool = False) -> dict[str, float]:
    """Losses of a stage that names none. For denoisers end to end those of LiT (arXiv:2501.12976: λ₁ = 0.5, λ₂ = 0.05),
    for classifiers cross-entropy and the teacher's logits alike."""
    if kind != "end_to_end":
        return {f"{kind}_relative": 1.0}
    if task == "classify":
        return {"cross_entropy": 1.0, "logits": 1.0}
    return {"mse": 1.0, "prediction": 0.5, **({"vlb": 1.0, "variance": 0.05} if learned_variance else {})}


def check_config(config: DistillConfig) -> None:
    """Raise ConfigError for all that is wrong with a recipe by itself."""
    check_train(config.train)
    if not (config.teacher.checkpoint or (config.task == "classify" and config.teacher.name)):
        raise ConfigError("teacher.checkpoint is not set: give the directory of the softmax model")
    if config.student.calibration < 0:
        raise ConfigError(f"student.calibration must be at least 0 batches, and is {config.student.calibration}")
    if not config.stages:
        raise ConfigError(f"stages is empty: give at least one of the kinds {', '.join(KINDS)}")
    for number, stage in enumerate(config.stages):
        _check_stage(stage, f"stages.{number}", config.task)
    if config.teacher.cache:
        _check_cache(config)
    if config.teacher.quantize and (config.teacher.offload or config.teacher.dtype == "fp16"):
        raise ConfigError("teacher.quantize does not go with teacher.offload, nor with teacher.dtype=fp16")


def _check_stage(stage: StageConfig, where: str, task: str) -> None:
    if stage.kind not in KINDS:
        raise ConfigError(f"{where}.kind={stage.kind!r} is no kind of stage{nearest(stage.kind, KINDS)}")
    if stage.train is not None and stage.train not in TRAINABLE:
        raise ConfigError(f"{where}.train={stage.train!r} is nothing to train{nearest(stage.train, TRAINABLE)}")
    if stage.kind == "attention" and stage.train == "all":
        raise ConfigError(
            f"{where}.train=all: the stage 'attention' reaches nothing but attention; use new, attention or lora"
        )
    if stage.epochs is not None and stage.steps is not None:
        raise ConfigError(f"{where} has both epochs and steps: leave one out")
    for name in ("epochs", "steps", "lora_rank", "lr", "new_lr", "temperature", "lora_alpha"):
        value = getattr(stage, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{where}.{name} must be positive, and is {value}")
    if stage.warmup is not None and not 0 <= stage.warmup < 1:
        raise ConfigError(f"{where}.warmup must lie in [0, 1), and is {stage.warmup}")
    for name, weight in stage.terms.items():
        if name not in LOSSES:
            raise ConfigError(f"{where}.terms: unknown loss {name!r}{nearest(name, LOSSES)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
            raise ConfigError(f"{where}.terms.{name} must be a weight of at least 0, and is {weight!r}")
        loss = LOSSES[name]
        if task not in loss.tasks:
            other = "classifiers" if task == "denoise" else "denoisers"
            raise ConfigError(
                f"{where}.terms: {name!r} is a loss of {other}, and task is {task}; of {TASKS[task]} are "
                f"{', '.join(n for n, t in LOSSES.items() if task in t.tasks)}"
            )
        if stage.kind not in loss.stages:
            raise ConfigError(
                f"{where}.terms: {name!r} is not for the stage {stage.kind!r}, which has "
                f"{', '.join(n for n, t in LOSSES.items() if stage.kind in t.stages and task in t.tasks)}"
            )


def _check_cache(config: DistillConfig) -> None:
    """The teacher's outputs stay the same from epoch to epoch only if its inputs do."""
    if config.task != "classify":
        raise ConfigError(
            "teacher.cache is for classifiers: a denoiser's teacher sees other noise in every step, so nothing it says "
            "comes again"
        )
    if config.data.format == "wds":
        raise ConfigError("teacher.cache needs images that can be told apart; webdataset shards are read as a stream")
    plain = AugmentConfig(scale=[1.0, 1.0], ratio=[1.0, 1.0], hflip=0.0)
    wrong = [
        f"augment.{key}={value!r}"
        for key, value in vars(config.augment).items()
        if value != getattr(plain, key)
        and key not in ("label_smoothing", "random_erasing_mode", "mixup_prob", "mixup_switch_prob")
    ]
    if wrong:
        raise ConfigError(
            f"teacher.cache needs training without augmentation, and there is {', '.join(wrong)}; set augment.scale="
            "[1,1] augment.ratio=[1,1] augment.hflip=0 and leave out the others, or set teacher.cache=false"
        )
    if not any(stage.kind == "end_to_end" and not needs_layers(stage, config.task) for stage in config.stages):
        raise ConfigError(
            "teacher.cache holds logits, and no stage could do with them alone: attention and block losses need the "
            "teacher itself"
        )


def needs_layers(stage: StageConfig, task: str) -> bool:
    """Whether a stage looks inside the teacher."""
    return any(LOSSES[name].needs for name in stage.terms or default_terms(stage.kind, task))


def stage_config(config: DistillConfig, number: int, learned_variance: bool) -> DistillConfig:
    """The settings of one stage, as the loop takes them. The last one writes to ``run.out`` itself, others below it;
    what comes after a stage is no setting of its. Each draws random numbers of its own: with the same seed, a stage
    would be given the very times and noise that the one before was trained on."""
    stage = config.stages[number]
    terms = stage.terms or default_terms(stage.kind, config.task, learned_variance)
    stage = replace(stage, terms=terms, train=stage.train or ("all" if stage.kind == "end_to_end" else "attention"))
    epochs = 1 if stage.steps else stage.epochs or config.train.epochs
    warmup = config.optim.warmup_epochs if stage.warmup is None else stage.warmup * epochs
    last = number == len(config.stages) - 1
    out = config.run.out if last else f"{config.run.out}/stage-{number + 1}-{stage.kind}"
    return replace(
        config,
        stages=[*config.stages[:number], stage],
        optim=replace(config.optim, lr=stage.lr or config.optim.lr, warmup_epochs=warmup),
        train=replace(config.train, epochs=epochs, seed=config.train.seed + 1000 * number),
        run=replace(config.run, out=out),
    )

"""What ``scanvas bench mixers`` trains: the same plain ViG with every mixer, for an equal budget, on images that lie on
the device as a whole; and a softmax teacher's weights in every mixer, before and after a little training. How fast such
a backbone is, is a row of its own, so that trainings may share a device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import scanvas
from scanvas.diffusion.linear_cores import TARGETS
from scanvas.diffusion.linear_neutral import start_neutral

from .bench_gpu import graphed_ms
from .bench_mixers_images import Images
from .bench_mixers_step import Step
from .checkpoint import fresh_file
from .config import OptimConfig
from .distill_losses import Seen, logits
from .errors import NonFiniteError
from .flops import count_flops
from .measure import peak_memory, times
from .optim import create_optimizer, create_scheduler

_SMOOTHING = 0.1
_CALIBRATION = 64  # images on which linearize fits what is new
_WIDE = ("gdn", "gdn2", "gla", "kda")  # have fewer channels of keys, or more of values, than a softmax by default


@dataclass(frozen=True)
class Budget:
    """What every mixer is given. Two figures belong into one table only if ``text`` is the same."""

    model: str = "vig_tiny_patch16_224"
    depth: int = 4
    patch: int = 2
    epochs: float = 5.0
    recover_epochs: float = 0.5
    batch: int = 256
    lr: float = 1e-3
    images: int | None = None
    dtype: str = "float32"

    def text(self, recovery: bool = False) -> str:
        """The budget in words, ``recovery``: of the softmax teacher and what comes after."""
        model = self._model()
        training = f"{self.images} images × {self.epochs:g} epochs in batches of {self.batch}, AdamW {self.lr:g}"
        return f"{model}; {training}, {self.dtype}" + (
            f"; linearised with {_CALIBRATION} images, or by the names of weights where linearize has no such target; "
            f"then {self.recover_epochs:g} epochs"
            if recovery
            else ""
        )

    def speed_text(self, device: str, side: int) -> str:
        """What speed depends on, in words."""
        return f"{device}, {self._model()}, {side}² pixels in batches of {self.batch}, {self.dtype}"

    def _model(self) -> str:
        return f"{self.model}, {self.depth} blocks, patches of {self.patch}"


def build(mixer: str, images: Images, budget: Budget, device: Any = None, **mixer_kwargs: Any) -> nn.Module:
    """The backbone, by default on the device of the images."""
    with torch.device(device or images.device):
        return timm.create_model(
            budget.model,
            img_size=images.side,
            patch_size=budget.patch,
            num_classes=images.classes,
            depth=budget.depth,
            mixer=mixer,
            mixer_kwargs=mixer_kwargs,
        )


def _autocast(device: torch.device, dtype: str):
    return nullcontext() if dtype == "float32" else torch.autocast(device.type, getattr(torch, dtype))


def train(
    model: nn.Module, images: Images, budget: Budget, epochs: float, seed: int, teacher: nn.Module | None = None
) -> None:
    """Train by cross-entropy, and with a ``teacher`` by the divergence of its classes too; AdamW, warm-up for a fifth
    of the steps, then a cosine. All mixers see the same images in the same order.

    Raises NonFiniteError: the loss became infinite or NaN.
    """
    device, count = images.device, len(images.labels)
    batch = min(budget.batch, count)
    steps = max(1, round(epochs * count / batch))
    kwargs = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    config = OptimConfig(lr=budget.lr, warmup_epochs=steps // 5, kwargs=kwargs)  # one step is one of its epochs
    optimizer = create_optimizer(model, config, batch)
    scheduler = create_scheduler(optimizer, config, epochs=steps, steps_per_epoch=1)
    generator = _seeded(images, seed)
    order = torch.empty(0, dtype=torch.long, device=device)
    model.train()
    image = torch.empty(batch, 3, images.side, images.side, device=device)
    target, unhealthy = torch.empty(batch, dtype=torch.long, device=device), torch.zeros((), device=device)

    def compute() -> None:
        with _autocast(device, budget.dtype):
            output = model(image)
        loss = F.cross_entropy(output.float(), target, label_smoothing=_SMOOTHING)
        if teacher is not None:
            with torch.no_grad(), _autocast(device, budget.dtype):
                wanted = teacher(image)
            loss = loss + logits(Seen(logits=output.float(), teacher_logits=wanted.float()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        unhealthy.add_(~loss.detach().isfinite())  # looked at once: a look waits for the device

    step = Step(compute, optimizer, device)
    for number in range(steps):
        if len(order) < batch:
            order = torch.randperm(count, device=device, generator=generator)
        for place, drawn in zip((image, target), images.draw(order[:batch], generator)):
            place.copy_(drawn)
        order = order[batch:]
        step()
        scheduler.step_update(number + 1)
    optimizer.zero_grad()  # gradients of recorded steps would keep the memory of the graph
    if unhealthy > 0:
        raise NonFiniteError(f"the loss was not finite in {int(unhealthy)} of {steps} steps")


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, budget: Budget) -> float:
    """Percent of the test images whose most probable class is right."""
    model.eval()
    hits = torch.zeros((), device=images.device)
    for image, target in zip(images.test.split(1000), images.test_labels.split(1000)):
        with _autocast(images.device, budget.dtype):
            hits += (model(images.scaled(image)).argmax(-1) == target).sum()
    return 100 * hits.item() / len(images.test_labels)


def measure_speed(row: dict[str, Any], mixer: str, images: Images, budget: Budget) -> None:
    """Parameters and FLOPs of the backbone; images a second of inference with the weights in the budget's dtype, and of
    training, which is forward and backward without the optimizer; and the peak of memory (MiB, beyond the weights) of
    the latter. What Python does between launches is left out where a GPU can record the calls. The device should do
    nothing else."""
    torch.manual_seed(0)
    model, device = build(mixer, images, budget), images.device
    row["parameters"] = sum(p.numel() for p in model.parameters())
    image = torch.randn(budget.batch, 3, images.side, images.side, device=device)
    target = torch.arange(budget.batch, device=device) % images.classes

    def step() -> tuple[Tensor | None, ...]:
        with _autocast(device, budget.dtype):
            output = model(image)
        loss = F.cross_entropy(output.float(), target, label_smoothing=_SMOOTHING)
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    row["trained_mb"] = peak_memory(step, device) / 2**20
    row["trained_per_second"] = budget.batch / _seconds(step, device)
    dtype = getattr(torch, budget.dtype)
    half, small = copy.deepcopy(model).eval().to(dtype), image.to(dtype)

    def infer() -> Tensor:
        with torch.no_grad():
            return half(small)

    row["images_per_second"] = budget.batch / _seconds(infer, device)
    counted = build(mixer, images, budget, "meta").eval()
    row["flops"] = count_flops(counted, (3, images.side, images.side))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    return graphed_ms(call, 2, 3) / 1e3 if device.type == "cuda" else times({"": call}, device, rounds=2)[""]


def speeds(
    mixers: list[str], images: Images, budget: Budget, device: str
) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]]:
    """What each row of speed is of, and what fills it."""
    for mixer in mixers:
        name = {"what": "speed", "mixer": mixer, "budget": budget.speed_text(device, images.side)}
        yield name, lambda row, mixer=mixer: measure_speed(row, mixer, images, budget)


def measure_accuracy(row: dict[str, Any], mixer: str, seed: int, images: Images, budget: Budget, out: Path) -> None:
    """Train one backbone; that with a softmax is kept in ``out`` as the teacher of ``measure_recovery``."""
    torch.manual_seed(seed)
    model = build(mixer, images, budget)
    train(model, images, budget, budget.epochs, seed)
    row["accuracy"] = accuracy(model, images, budget)
    if mixer == "softmax":
        _keep(model, row["accuracy"], budget, _place(out, seed))


def measure_recovery(
    row: dict[str, Any], mixer: str, seed: int, images: Images, budget: Budget, teacher: tuple[nn.Module, float]
) -> None:
    """A mixer with the teacher's weights: accuracy after the exchange, and after training with its logits."""
    row["teacher"] = teacher[1]
    model, row["how"], row["kept"] = convert(mixer, seed, images, budget, teacher[0])
    row["swapped"] = accuracy(model, images, budget)
    train(model, images, budget, budget.recover_epochs, seed, teacher[0])
    row["recovered"] = accuracy(model, images, budget)
    if teacher[1]:
        row["recovered_fraction"] = row["recovered"] / teacher[1]


def convert(mixer: str, seed: int, images: Images, budget: Budget, teacher: nn.Module) -> tuple[nn.Module, str, float]:
    """The teacher with a mixer instead of its softmax, how it was made, and the share of its weights that were the
    teacher's: by ``scanvas.linearize`` where that has such a target, else by ``inherit``."""
    target = "lit" if mixer == "linear" else mixer
    if target in TARGETS:
        batch, _ = images.draw(
            torch.arange(min(_CALIBRATION, len(images.labels)), device=images.device), _seeded(images)
        )
        model, report = scanvas.linearize(
            teacher, target, calibration=[batch], sizes=[], keep_original=False, seed=seed
        )
        new = sum(math.prod(tensor["shape"]) for tensor in report.tensors if tensor["status"] == "new")
        return model, "linearize", 1 - new / sum(parameter.numel() for parameter in model.parameters())
    torch.manual_seed(seed)
    model = build(mixer, images, budget, **({"expand_k": 1.0, "expand_v": 1.0} if mixer in _WIDE else {}))
    return model, "names", inherit(model, teacher)


def _seeded(images: Images, seed: int = 0) -> torch.Generator:
    return torch.Generator(images.device).manual_seed(seed)


@torch.no_grad()
def inherit(model: nn.Module, teacher: nn.Module) -> float:
    """Give ``model`` all tensors of ``teacher`` that fit by name and shape, and let what its mixers add start as
    nothing. Returns the share of its parameters that were taken over."""
    teacher = copy.deepcopy(teacher)
    for part in (model, teacher):
        for block in part.blocks:
            block.mixer.fuse_projections(False)
    for block in model.blocks:
        start_neutral(block.mixer)
    own, given = dict(model.named_parameters()), dict(teacher.named_parameters())
    fitting = [name for name, parameter in own.items() if name in given and given[name].shape == parameter.shape]
    for name in fitting:
        own[name].copy_(given[name])
    for block in model.blocks:
        block.mixer.fuse_projections()
    return sum(own[name].numel() for name in fitting) / sum(parameter.numel() for parameter in own.values())


def load_teacher(seed: int, images: Images, budget: Budget, out: Path) -> tuple[nn.Module, float]:
    """The backbone with a softmax and its accuracy: that of ``out`` if it is of this budget, else trained anew."""
    place = _place(out, seed)
    torch.manual_seed(seed)
    model = build("softmax", images, budget)
    try:
        with safe_open(place, "pt", device=str(images.device)) as stored:
            about = stored.metadata()
            if about.get("budget") == budget.text():
                model.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
                return model.eval(), float(about["accuracy"])
    except (OSError, SafetensorError):
        pass  # none is there, or a process that was killed has left half of one: train it
    train(model, images, budget, budget.epochs, seed)
    reached = accuracy(model, images, budget)
    _keep(model, reached, budget, place)
    return model.eval(), reached


def _place(out: Path, seed: int) -> Path:
    return out / f"teacher-seed{seed}.safetensors"


def _keep(model: nn.Module, reached: float, budget: Budget, place: Path) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    with fresh_file(place) as fresh:  # other shards may be looking for it
        save_file(tensors, fresh, {"format": "pt", "budget": budget.text(), "accuracy": repr(reached)})


def trainings(
    what: str, mixers: list[str], seeds: list[int], images: Images, budget: Budget, out: Path
) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]]:
    """What each row is of, and what fills it, seed by seed."""
    teachers: dict[int, tuple[nn.Module, float]] = {}

    def measure(row: dict[str, Any], mixer: str, seed: int) -> None:
        if what == "accuracy":
            measure_accuracy(row, mixer, seed, images, budget, out)
            return
        if seed not in teachers:
            teachers.clear()
            teachers[seed] = load_teacher(seed, images, budget, out)
        measure_recovery(row, mixer, seed, images, budget, teachers[seed])

    for seed in seeds:
        for mixer in mixers:
            name = {"what": what, "mixer": mixer, "seed": seed, "budget": budget.text(what == "recovery")}
            yield name, lambda row, mixer=mixer, seed=seed: measure(row, mixer, seed)


def complete(budget: Budget, images: Images) -> Budget:
    """The budget with the number of images there are."""
    return replace(budget, images=len(images.labels), batch=min(budget.batch, len(images.labels)))

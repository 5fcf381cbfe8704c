"""``scanvas train distill``: a softmax model made linear, and what it lost by that learnt from itself again.

Every stage is a run of the one training loop (loop.py) with its own losses, trained parameters and length; the last one
writes to ``run.out`` itself, the others below it. The same command goes on where it stopped, in whichever stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from rich.console import Console
from torch import Tensor, nn

from . import distill_classify, distill_denoise
from .checkpoint import fresh_file, load_json
from .distill_config import DistillConfig, StageConfig, check_config, stage_config
from .distill_losses import LOSSES, Seen, loss_terms
from .distill_maps import MapProbe
from .distill_models import Calls, Forced, Student, Teacher, choose_trained, merge_lora, merged, reach, tensors
from .distill_student import Linear, linearized, matched
from .errors import ConfigError
from .loop import Loop, Result

_SOURCES = {
    "denoise": (distill_denoise.DenoiseSource, distill_denoise.check_architecture),
    "classify": (distill_classify.ClassifySource, distill_classify.check_architecture),
}


def train_distill(config: DistillConfig) -> tuple[Result, dict[str, dict[str, float]]]:
    """Run a recipe to the end. Returns the last stage's result, and what was measured: of the teacher, of the student
    before the first stage, and after each."""
    check_config(config)
    source_class, check_architecture = _SOURCES[config.task]
    if config.student.checkpoint is None:
        check_architecture(config)
    run = Distillation(config, source_class)
    for number in range(len(config.stages)):
        result = run.stage(number)
    return result, run.measured


class Distillation:
    """Teacher, student and data of a run, from stage to stage."""

    def __init__(self, config: DistillConfig, source_class: type):
        self.config, self.out = config, Path(config.run.out)
        set_seed(config.train.seed)
        self.accelerator = Accelerator(mixed_precision=config.train.mixed_precision, cpu=config.train.cpu)
        self.console = Console(stderr=True)
        self.source = source_class(config, self.accelerator)
        source, root = self.source, self.source.root
        self.teacher = Teacher(source.model, root, source.cast, self.accelerator.device)
        self.stages = [stage_config(config, number, source.learned) for number in range(len(config.stages))]
        for number, stage in enumerate(s.stages[-1] for s in self.stages):
            if "variance" in stage.terms and not source.learned:
                raise ConfigError(f"stages.{number}.terms: variance needs a teacher that predicts one")
            if "vlb" in stage.terms and not source.learned:
                raise ConfigError(f"stages.{number}.terms: vlb needs a teacher with a learned variance")
        self.linear = self._student()
        self.linear.model.to(self.accelerator.device)
        student = self.linear.model
        self.teacher.settle(config.teacher, {path: student.get_submodule(path) for path in self.linear.layers})
        self.net = source.student_of(student)
        if config.teacher.cache:
            source.remember(lambda inputs: self.teacher(inputs)[0], self.teacher.net, self.out)
        self.measured = self._before()
        if config.train.torch_compile and not config.teacher.offload:  # whose weights come and go
            self.teacher.compile()

    def _student(self) -> Linear:
        config, source = self.config.student, self.source
        teacher = source.root(self.teacher.net)
        if config.checkpoint is not None:
            return matched(teacher, source.load_student(config.checkpoint), config.checkpoint)
        report = self.out / "linearize.json"
        batches = self._calibration(config.calibration)
        with self.accelerator.main_process_first():  # its batches decide which layers, and what is fitted
            linear = linearized(teacher, config, batches, report)
            if self.accelerator.is_main_process and not report.is_file():
                self.out.mkdir(parents=True, exist_ok=True)
                linear.report.save(report)
        for tensor in linear.model.state_dict().values():
            broadcast(tensor)
        return linear

    @torch.no_grad()
    def _calibration(self, count: int) -> list[dict[str, Any]]:
        """What the model is called with on the first training batches."""
        calls: list[Any] = []
        root = self.source.root(self.teacher.net)
        handle = root.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(kwargs if kwargs else args), with_kwargs=True
        )
        try:
            for _, batch in zip(range(count), self.source.batches(0, 0)):
                self.teacher(self.source.draw(batch).inputs)
        finally:
            handle.remove()
        return calls

    def _before(self) -> dict[str, dict[str, float]]:
        """Teacher and student before any training; measured once in a run."""
        place = self.out / "distill.json"
        if place.is_file():
            return load_json(place)
        made, layers = {}, self.linear.layers
        with torch.no_grad(), self.accelerator.autocast():
            for name, call in (("teacher", lambda *inputs: self.teacher(inputs)[0]), ("linearized", self.net.eval())):
                made[name] = self.source.evaluate(call, lambda: None, 0)
                if call is self.net:
                    error, each = self.errors(self.student(), layers, lambda: None)
                    made[name] |= {"error": error}
                self._say(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in made[name].items()))
        self._keep(made)
        if self.accelerator.is_main_process:
            write_json(self.out / "linearized.json", each)
        return made

    def student(self) -> Student:
        """A new wrapping of the network: the loop's changes the one it is given."""
        return Student(self.net, self.source.root, self.linear.layers)

    def errors(self, student: Student, paths: list[str], poll: Callable[[], None]) -> tuple[float, dict[str, float]]:
        """Squared errors of layers or blocks, given the teacher's inputs, relative to its outputs, on the held-out
        data: their mean, and each."""
        sums = torch.zeros(len(paths), 2, dtype=torch.float64)
        for drawn in self.source.measured(poll):
            _, calls = self.teacher(drawn.inputs, paths)
            made, _ = student(None, forced=Forced(calls, self.teacher.grids()))
            for row, path in zip(sums, paths):
                for got, wanted in zip(tensors(made[path]), tensors(calls[path][2])):
                    wanted = wanted.float()
                    row += torch.stack(((got.float() - wanted).square().sum(), wanted.square().sum())).double().cpu()
        sums = self.accelerator.reduce(sums.to(self.accelerator.device)).cpu()
        each = (sums[:, 0] / sums[:, 1].clamp_min(1e-30)).tolist()
        return sum(each) / len(each), dict(zip(paths, each))

    def _keep(self, measured: dict[str, dict[str, float]]) -> None:
        if self.accelerator.is_main_process:
            write_json(self.out / "distill.json", measured)

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, number: int) -> Result:
        """Train one stage; the student is then what came out of it (EMA where there is one)."""
        config = self.stages[number]
        stage = config.stages[-1]
        self._say(
            f"stage {number + 1} of {len(self.stages)}, {stage.kind}: trains {stage.train} by "
            + ", ".join(f"{weight:g} × {name}" for name, weight in stage.terms.items())
        )
        loop = Loop(config, lambda accelerator: DistillTask(self, config, stage, accelerator))
        result = loop.run()
        model = loop.plain_model if loop.ema is None else loop.ema.module
        # Into the very modules that the teacher tells its grids to.
        for net in (self.net, model.net):
            merge_lora(self.source.root(net))
        self.net.load_state_dict(model.net.state_dict())
        self.measured[f"{number + 1}-{stage.kind}"] = result.metrics
        self._keep(self.measured)
        return result


def write_json(path: Path, value: Any) -> None:
    """A small file for people and tables, whole or as it was."""
    with fresh_file(path) as fresh:
        fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


class DistillTask:
    """One stage, as the loop takes it."""

    def __init__(self, run: Distillation, config: DistillConfig, stage: StageConfig, accelerator: Accelerator):
        self.run, self.stage, self.source, self.teacher = run, stage, run.source, run.teacher
        self.out = Path(config.run.out)
        self.source.accelerator, self.source.config.run.out = accelerator, config.run.out
        self.main = accelerator.is_main_process
        self.model = run.student()
        losses = [LOSSES[name] for name in stage.terms]
        self.needs = {loss.needs for loss in losses if loss.needs}
        self.asks_teacher = any(loss.teacher for loss in losses)
        self.paths = {kind: reach(self.model, kind) for kind in ("attention", "block")}
        choose_trained(self.model, stage, run.linear.new)
        self.probes = {}
        if "attention_map" in self.needs:
            root = self.source.root(self.teacher.net)
            self.probes = {p: MapProbe(root, p, self.model.root.get_submodule(p)) for p in self.model.layers}
        self.whole = stage.kind == "end_to_end"
        self.metric = self.source.metric if self.whole else "error"
        self.higher_is_better = self.source.higher_is_better and self.whole
        steps = stage.steps and stage.steps * config.train.grad_accum_steps
        self.batches_per_epoch = steps or self.source.batches_per_epoch

        self.new = run.linear.new
        self.rate_of = None if stage.new_lr == 1.0 else self._rate_of

    def _rate_of(self, name: str) -> float:
        """Of parameters of ``model``; LoRA's are as new as any."""
        inside = name.removeprefix("net.").removeprefix("denoiser.")
        return self.stage.new_lr if inside in self.new or "lora_" in inside else 1.0

    # ---- data, as the task's own

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """A stage that counts steps may run through the data many times, or through a part of them."""
        if not self.stage.steps:
            yield from self.source.batches(epoch, start)
            return
        each = self.source.batches_per_epoch
        while True:
            yield from self.source.batches(start // each, start % each)
            start = (start // each + 1) * each

    def size(self, batch: Any) -> int:
        return self.source.size(batch)

    def describe(self, batch: Any) -> str:
        return self.source.describe(batch)

    # ---- losses

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        drawn = self.source.draw(batch)
        seen = self._whole(model, drawn) if self.whole else self._forced(model, drawn)
        return loss_terms(seen, self.stage.terms)

    def _forced(self, model: nn.Module, drawn: Any) -> Seen:
        _, calls = self.teacher(drawn.inputs, self.paths[self.stage.kind])
        forced = Forced(calls, self.teacher.grids(), self.probes, outputs=self.stage.kind in self.needs)
        made, maps = model(None, forced=forced)
        seen = Seen(attention_map=list(maps.values()))
        return self._enter(seen, made, calls)

    def _whole(self, model: nn.Module, drawn: Any) -> Seen:
        watched = [path for kind, paths in self.paths.items() if kind in self.needs for path in paths]
        wanted, calls = None, {}
        if self.asks_teacher and self.source.remembers and not watched:
            wanted = self.source.remembered(drawn)
        elif self.asks_teacher:
            wanted, calls = self.teacher(drawn.inputs, watched)
        output, made = model(drawn.inputs, watched)
        seen = self._enter(Seen(temperature=self.stage.temperature), made, calls)
        return self.source.see(seen, drawn, output, wanted)

    def _enter(self, seen: Seen, made: dict[str, Any], calls: Calls) -> Seen:
        for kind, paths in self.paths.items():
            if kind in self.needs:
                pairs = [pair for path in paths for pair in zip(tensors(made[path]), tensors(calls[path][2]))]
                setattr(seen, kind, pairs)
        return seen

    # ---- results

    def evaluate(self, model: nn.Module, poll: Callable[[], None], step: int) -> dict[str, float]:
        """What the task measures; where layers or blocks are trained, first their mean error, each one's in
        ``layers.json``."""
        measured = self.source.evaluate(model.net, poll, step)
        if self.whole:
            return measured
        error, each = self.run.errors(model, self.paths[self.stage.kind], poll)
        if self.main:
            write_json(self.out / "layers.json", each)
        return {"error": error, **measured}

    def export(self, model: nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        self.source.export(merged(model.net, self.source.root), folder, metrics)

    def notes(self) -> list[str]:
        return self.source.notes()

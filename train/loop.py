"""The one training loop. A task says what is learnt; everything else is here, on accelerate.

``Loop(config, make_task).run()``: ``config`` has the sections ``optim``, ``train``, ``run`` (config.py) and
``make_task(accelerator)`` gives a ``Task``. Under ``accelerate launch`` the same code runs on many devices.

A killed run goes on from its newest checkpoint, and on a CPU ends with bit-identical parameters: augmentation depends
on the place in the data alone (samples.py), every other random number on states that the checkpoint holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from rich.console import Console
from torch import nn

from . import optim
from .checkpoint import CheckpointStore, load_json, write_directory
from .config import TrainConfig
from .errors import ConfigError, DataError, Interrupted, NonFiniteError
from .guard import FiniteGuard, StopRequest
from .logs import Logs
from .state import capture, restore, rng_state

_AGREE_EVERY = 10  # optimiser steps between asking the other processes whether one of them was told to stop


class Task(Protocol):
    """What a kind of training brings to the loop."""

    model: nn.Module  # what is trained; parameters that do not require gradients stay as they are
    batches_per_epoch: int  # micro-batches of this process
    metric: str  # key of ``evaluate``'s result that decides which weights are best
    higher_is_better: bool

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Micro-batches ``start``, ``start + 1``, … of an epoch, on the device. The same for the same arguments."""

    def size(self, batch: Any) -> int:
        """Images in a batch."""

    def describe(self, batch: Any) -> str:
        """Which samples are in a batch, for the error when its loss is not finite."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Named scalar terms, already weighted; their sum is minimised. ``model`` is ``self.model``, wrapped."""

    def evaluate(self, model: nn.Module, poll: Callable[[], None], step: int) -> dict[str, float]:
        """Measure ``model`` (EMA where there is one), the same on every process. Call ``poll`` between batches.

        ``step``: optimiser steps done, to name pictures after. No random number of the process may be drawn.
        """

    def export(self, model: nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        """Write into ``folder`` what others load. Called on the main process."""

    # A task may also have ``rate_of(name) -> float``: what a parameter's learning rate is multiplied by.

    def notes(self) -> list[str]:
        """Lines to print at the end, e.g. how many images were skipped."""


@dataclasses.dataclass
class Result:
    """How a run ended: last and best measurements, and where the exported weights are."""

    metrics: dict[str, float]
    best: dict[str, Any]
    out: Path
    main: bool  # whether this is the process that speaks


def check_train(train: TrainConfig) -> None:
    """Raise ConfigError for what no training could use."""
    if train.mixed_precision == "fp16" and (train.cpu or not torch.cuda.is_available()):
        raise ConfigError("train.mixed_precision=fp16 needs a GPU; on a CPU use no or bf16")
    for name in ("epochs", "batch_size", "grad_accum_steps"):
        if getattr(train, name) < 1:
            raise ConfigError(f"train.{name} must be at least 1, and is {getattr(train, name)}")


class Loop:
    """See the module's docstring. Raises UserError for what the user can mend, Interrupted after Ctrl-C."""

    def __init__(self, config: Any, make_task: Callable[[Accelerator], Task]):
        self.config, self.out = config, Path(config.run.out)
        train = config.train
        check_train(train)
        if train.threads is not None:
            torch.set_num_threads(max(1, train.threads))
        self.accelerator = Accelerator(mixed_precision=train.mixed_precision, cpu=train.cpu)
        self.device, self.main = self.accelerator.device, self.accelerator.is_main_process
        self.console = Console(stderr=True)
        set_seed(train.seed)
        self.task = make_task(self.accelerator)
        self.steps_per_epoch = self.task.batches_per_epoch // train.grad_accum_steps
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"train.grad_accum_steps={train.grad_accum_steps} is more than the {self.task.batches_per_epoch} "
                "batches of an epoch"
            )
        self.total = self.steps_per_epoch * train.epochs
        self._build()
        set_seed(train.seed + 1 + self.accelerator.process_index)  # drop path and mixup differ between processes
        self.epoch = self.place = self.step = 0  # place: optimiser steps done in this epoch
        self.store = CheckpointStore(self.out, config.run.keep)
        self.best: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.guard = FiniteGuard(self.device)
        self.stop = StopRequest()

    def _build(self) -> None:
        train, optim_config = self.config.train, self.config.optim
        model = self.task.model.to(self.device)
        if train.gradient_checkpointing:
            switch = getattr(model, "set_grad_checkpointing", None) or getattr(
                model, "enable_gradient_checkpointing", None
            )
            if switch is None:
                raise ConfigError(f"train.gradient_checkpointing: {type(model).__name__} does not offer it")
            switch()
        # Before `prepare`, which for mixed precision replaces `forward` on the very object that EMA copies.
        self.ema = optim.create_ema(model, optim_config)
        if train.torch_compile:
            model.compile()
        self.global_batch = train.batch_size * train.grad_accum_steps * self.accelerator.num_processes
        scale_of = getattr(self.task, "rate_of", None)
        optimizer = optim.create_optimizer(model, optim_config, self.global_batch, scale_of)
        self.plain_model = model
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = optim.create_scheduler(optimizer, optim_config, train.epochs, self.steps_per_epoch)

    def run(self) -> Result:
        """Train to the end, from the newest checkpoint in ``run.out`` if there is one."""
        resumed = self._resume()
        self.logs = Logs(
            self.out,
            main=self.main,
            resume_step=self.step if resumed else None,
            tensorboard=self.config.run.tensorboard,
            console=self.console,
        )
        if resumed:
            self.logs.say(f"resuming from {resumed} (step {self.step} of {self.total})")
        finished = False
        try:
            with self.stop:
                self.logs.start(self.total, self.step)
                if self.place == 0 and self.epoch > 0 and not self._evaluated():
                    self._evaluate(self.epoch - 1)
                while self.epoch < self.config.train.epochs:
                    self._train_epoch()
                    self._save()
                    self._evaluate(self.epoch - 1)
            self._export("final", {"step": self.step, "epoch": self.epoch, **self.metrics})
            finished = True
        except NonFiniteError as error:
            newest = self.store.newest()
            kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint had been saved yet"
            raise NonFiniteError(f"{error}. Training stopped; {kept}.") from error
        finally:
            picture = self.logs.close(plot=finished and self.config.run.plot)
            for note in self.task.notes():
                self.logs.say(note)
        if picture:
            self.logs.say(f"curves: {picture}")
        return Result(self.metrics, self.best, self.out, self.main)

    def _train_epoch(self) -> None:
        accum = self.config.train.grad_accum_steps
        batches = iter(self.task.batches(self.epoch, self.place * accum))
        images, since = 0, time.monotonic()
        loss = float("nan")
        while self.place < self.steps_per_epoch:
            group = list(islice(batches, accum))
            if len(group) < accum:
                raise DataError(
                    f"the data ended after {self.place} of {self.steps_per_epoch} steps of epoch {self.epoch + 1}; "
                    "data.train_samples may be larger than what is there"
                )
            self._update(group)
            images += sum(self.task.size(batch) for batch in group) * self.accelerator.num_processes
            self.step += 1
            self.place += 1
            self.scheduler.step_update(self.step)
            if self.ema is not None:
                self.ema.update(self.plain_model, step=self.step)
            if self.step % self.config.run.log_every == 0 or self.place == self.steps_per_epoch:
                self.guard.flush()
                means = self.guard.means()
                loss, rate = means["loss"], images / max(1e-9, time.monotonic() - since)
                images, since = 0, time.monotonic()
                lr = max(group["lr"] for group in self.optimizer.param_groups)
                row = {
                    "step": self.step,
                    "epoch": self.epoch + 1,
                    "lr": lr,
                    **means,
                    "images_per_second": round(rate, 1),
                }
                self.logs.row("train", row)
                self.logs.progress(self.step, self.epoch, loss, rate)
            if self._told_to_stop():
                self._leave()
            every = self.config.run.save_every
            if every and self.step % every == 0 and self.place < self.steps_per_epoch:
                self._save()
        self.epoch, self.place = self.epoch + 1, 0

    def _update(self, group: list[Any]) -> None:
        """One optimiser step over ``group`` micro-batches."""
        self.model.train()
        for i, batch in enumerate(group):
            last = i == len(group) - 1
            # gradients of all processes are averaged once per optimiser step, with the last micro-batch
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    terms = self.task.losses(self.model, batch)
                total = sum(terms.values())
                number = self.place * len(group) + i
                where = (
                    f"step {self.step + 1} (epoch {self.epoch + 1}, batch {number + 1}: {self.task.describe(batch)})"
                )
                self.guard.put({**terms, "loss": total}, where)
                self.accelerator.backward(total / len(group))
        if self.config.optim.clip_grad is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_grad)
            if self.accelerator.scaler is None:  # a loss scaler finds its way by skipping such steps
                self.guard.put({"gradient_norm": norm}, where)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _told_to_stop(self) -> bool:
        told = self.stop.signal is not None
        if self.accelerator.num_processes == 1:
            return told
        if self.step % _AGREE_EVERY:
            return False
        return bool(self.accelerator.reduce(torch.tensor(float(told), device=self.device)).item())

    def _leave(self) -> None:
        place = self._save()
        raise Interrupted(
            f"stopped by {self.stop.signal or 'a signal'} at step {self.step}; saved {place}. The same command goes on "
            "from there."
        )

    def _poll(self) -> None:
        if self.stop.signal is not None and self.accelerator.num_processes == 1:
            raise Interrupted(
                f"stopped by {self.stop.signal} while evaluating; {self.store.newest()} is up to date. The same "
                "command goes on from there."
            )

    def _evaluate(self, epoch: int) -> None:
        """Measure the weights after ``epoch`` (0-based), log it, and export them if they are the best."""
        last = epoch + 1 == self.config.train.epochs
        if (epoch + 1) % self.config.run.eval_every and not last:
            return
        model = self.ema.module if self.ema is not None else self.plain_model
        model.eval()
        with torch.no_grad(), self.accelerator.autocast():
            self.metrics = self.task.evaluate(model, self._poll, self.step)
        value, best = self.metrics[self.task.metric], self.best.get(self.task.metric)
        better = best is None or (value > best if self.task.higher_is_better else value < best)
        if better:
            self.best = {"step": self.step, "epoch": epoch + 1, **self.metrics}
            self._export("best", self.best)
        self.logs.row("eval", {"step": self.step, "epoch": epoch + 1, **self.metrics})
        shown = "  ".join(f"{k} {v:.4g}" for k, v in self.metrics.items())
        self.logs.say(f"epoch {epoch + 1}: {shown}{'  (best so far)' if better else ''}")

    def _evaluated(self) -> bool:
        """Whether the epoch just before the place resumed from was already measured (main process knows)."""
        done = bool(self.main and any(row["step"] == self.step for row in self.logs.eval.rows))
        if done:
            row = next(row for row in self.logs.eval.rows if row["step"] == self.step)
            self.metrics = {k: v for k, v in row.items() if k not in ("step", "epoch")}
        return bool(self.accelerator.reduce(torch.tensor(float(done), device=self.device)).item())

    def _export(self, name: str, metrics: dict[str, Any]) -> None:
        if self.main:
            model = self.ema.module if self.ema is not None else self.plain_model
            info = {"metrics": metrics, "config": dataclasses.asdict(self.config)}

            def fill(folder: Path) -> None:
                self.task.export(model, folder, metrics)
                (folder / "training.json").write_text(json.dumps(info, indent=1), encoding="utf-8")

            write_directory(self.out / name, fill)
        self.accelerator.wait_for_everyone()

    def _save(self) -> Path:
        self.guard.flush()
        rng = gather_object([rng_state(self.device)])
        if self.main:
            self.store.save(self.step, *capture(self, rng))
        self.accelerator.wait_for_everyone()
        return self.store.place(self.step)

    def _resume(self) -> Path | None:
        if self.main:
            self.out.mkdir(parents=True, exist_ok=True)
            self.store.tidy()
        self.accelerator.wait_for_everyone()
        place = self.store.newest()
        if place is not None:
            if self.config.run.resume == "never":
                raise ConfigError(
                    f"run.resume=never, but {self.store.folder} holds checkpoints; choose another run.out"
                )
            restore(self, place)
            best = self.out / "best" / "training.json"
            if best.exists():
                self.best = load_json(best)["metrics"]
        return place

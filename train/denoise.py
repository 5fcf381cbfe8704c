"""Training a denoiser: the task that ``scanvas train denoise`` gives to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .denoise_config import DenoiseConfig
from .denoise_parts import Painter, Parts, Split
from .errors import ConfigError, DataError
from .latents import encode, to_latents, to_unit
from .loop import Loop, Result
from .losses import Step, loss_terms
from .paint_data import Order, fixed_order
from .pictures import save_grid
from .process import Process
from .quiet import no_bars
from .samples import BadImages

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, spread evenly however many there are


def train_denoiser(config: DenoiseConfig) -> Result:
    """Run a recipe to the end."""
    return Loop(config, lambda accelerator: DenoiseTask(config, accelerator)).run()


@dataclass
class Noised:
    """Images with noise: what a model is given, and what it is judged by."""

    process: Process
    clean: Tensor
    noise: Tensor
    noisy: Tensor
    place: Tensor
    inputs: tuple  # of the model

    def step(self, output: Tensor) -> Step:
        """The batch with what a model made of it, ``(B, C or 2·C, H, W)``."""
        output, channels = output.float(), self.clean.shape[1]
        variance = output[:, channels:] if output.shape[1] > channels else None
        return Step(self.process, self.clean, self.noise, self.noisy, self.place, output[:, :channels], variance)


class DenoiseTask:
    """Diffusion or flow matching on images or latents, by class or caption. Metric: the loss on held-out images, with
    the same times and the same noise at every evaluation and for every model."""

    metric = "loss"
    higher_is_better = False

    def __init__(self, config: DenoiseConfig, accelerator: Accelerator):
        self.config, self.accelerator = config, accelerator
        self.device = accelerator.device
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        if config.data.val_images < 1:
            raise ConfigError(f"data.val_images must be at least 1, and is {config.data.val_images}")
        self.parts = self._parts()
        self.process = self.parts.process
        self.model = Painter(self.parts.denoiser, self.parts.text_encoder if self.parts.train_text else None)
        self.order = Order(
            self.parts.train.shape_of,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            rank=self.rank,
            world=self.world,
        )
        self.batches_per_epoch = self.order.per_epoch
        self.bad = BadImages(config.data.on_error)

    def _parts(self) -> Parts:
        return Parts(self.config, self.device, alone=self.world == 1)

    # ---- data

    def batches(self, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        yield from self._read(self.parts.train, self.order.epoch(epoch, start))

    def _read(self, split: Split, plan) -> Iterator[dict[str, Any]]:
        for batch in split.reader.read(plan):
            images = batch.get("pixels", batch.get("moments"))
            self.bad.check({"skipped": batch["skipped"], "image": images})
            if images is None:
                continue
            if not self.parts.by_text:
                batch["label"] = batch["label"].to(self.device, non_blocking=True)
            yield batch | {"images": images.to(self.device, non_blocking=True)}

    def size(self, batch: dict[str, Any]) -> int:
        return len(batch["index"])

    def describe(self, batch: dict[str, Any]) -> str:
        shown = ", ".join(map(str, batch["index"][:8]))
        return f"images {shown}{', …' if len(batch['index']) > 8 else ''}"

    def _clean(self, batch: dict[str, Any], *, draw: bool) -> Tensor:
        if self.parts.vae is None:
            return to_unit(batch["images"])
        moments = batch["images"] if "moments" in batch else encode(self.parts.vae, batch["images"])
        return to_latents(self.parts.vae, moments, draw=draw)

    def _condition(
        self, batch: dict[str, Any], drop: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """``(label, text, mask)``; ``drop`` ``(B,)`` bool says where to hide the condition."""
        if not self.parts.by_text:
            label = batch["label"]
            return label if drop is None else label.masked_fill(drop, self.parts.num_classes), None, None
        text, mask = self._text(batch["caption"])
        if drop is not None:
            empty, empty_mask = self._text([""])
            text = torch.where(drop.view(-1, *[1] * (text.ndim - 1)), empty, text)
            mask = torch.where(drop[:, None], empty_mask, mask)
        return None, text, mask

    def _text(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        parts = self.parts
        if parts.train_text:
            made = parts.tokens(captions)
        elif parts.text_cache:
            cache = next(cache for cache in parts.text_cache if all(caption in cache.row for caption in captions))
            made = cache(captions)
        else:
            made = parts.frozen_text(captions)
        return tuple(t.to(self.device, non_blocking=True) for t in made)

    # ---- loss

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        noised = self.draw(batch)
        step = noised.step(model(*noised.inputs))
        return {name: value.mean() for name, value in loss_terms(step, self.config.loss).items()}

    def draw(self, batch: dict[str, Any]) -> Noised:
        """A batch with times and noise, conditions dropped at random: what a model is trained on."""
        clean = self._clean(batch, draw=True)
        count = len(clean)
        place = self.process.place(torch.rand(count, device=self.device))
        drop = torch.rand(count, device=self.device) < self.config.loss.drop_condition
        return self._noised(clean, torch.randn_like(clean), place, self._condition(batch, drop))

    def _noised(self, clean: Tensor, noise: Tensor, place: Tensor, condition: tuple) -> Noised:
        noisy = self.process.noisy(clean, noise, place)
        inputs = (noisy, self.process.times(place), *condition)
        return Noised(self.process, clean, noise, noisy, place, inputs)

    def held_out(self) -> Iterator[Noised]:
        """The held-out images, always with the same times and the same noise; this process's share."""
        val, config = self.parts.val, self.config
        plan = fixed_order(
            val.shape_of,
            limit=config.data.val_images,
            batch_size=config.train.batch_size,
            rank=self.rank,
            world=self.world,
        )
        for batch in self._read(val, plan):
            clean = self._clean(batch, draw=False)
            slots = batch["slot"]
            u = torch.tensor([(slot + 1) * _GOLDEN % 1 for slot in slots], device=self.device)
            noise = torch.stack([_noise(slot, clean.shape[1:]) for slot in slots]).to(self.device)
            yield self._noised(clean, noise, self.process.place(u), self._condition(batch, None))

    def evaluate(self, model: nn.Module, poll: Callable[[], None], step: int) -> dict[str, float]:
        config = self.config
        names = list(config.loss.terms)
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)
        for noised in self.held_out():
            poll()
            terms = loss_terms(noised.step(model(*noised.inputs)), config.loss)
            sums += torch.tensor([*(float(terms[name].double().sum()) for name in names), len(noised.clean)]).double()
        *totals, count = self.accelerator.reduce(sums.to(self.device)).tolist()
        if not count:
            raise DataError(f"split {config.data.val_split!r} has no readable image")
        means = {name: total / count for name, total in zip(names, totals)}
        if self.accelerator.is_main_process and config.grid.images > 0:
            self._paint(model, step)
        return {"loss": sum(means.values()), **(means if len(means) > 1 else {})}

    # ---- results

    def _paint(self, model: nn.Module, step: int) -> None:
        grid, val = self.config.grid, self.parts.val.source
        chosen = [i * len(val) // grid.images for i in range(grid.images)]
        if self.parts.by_text:
            prompts = grid.prompts or [val.captions[i][0] for i in chosen]
            wanted = {"prompt": [prompts[i % len(prompts)] for i in range(grid.images)]}
        else:
            wanted = {"class_labels": [i % self.parts.num_classes for i in range(grid.images)]}
        generators = [torch.Generator().manual_seed(grid.seed + i) for i in range(grid.images)]
        images = self.parts.pipeline(model)(
            **wanted, num_inference_steps=grid.steps, guidance_scale=grid.guidance, generator=generators
        ).images
        save_grid(images, Path(self.config.run.out) / "samples" / f"step-{step:08d}.png")

    def export(self, model: nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        with no_bars():
            self.parts.pipeline(model).save_pretrained(folder)

    def notes(self) -> list[str]:
        summary = self.bad.summary()
        return [summary] if summary else []


def _noise(slot: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(slot))

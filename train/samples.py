"""Reading one image at a time: seeds that depend on the place in the data and on nothing else, and bad images.

Every random augmentation of a sample is drawn under a seed made of (run seed, epoch, place in the epoch). So the same
training images come out for any number of worker processes, and after a resume in the middle of an epoch.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from .errors import DataError

# What PIL raises on files that are missing, cut short or not images. SyntaxError is its word for a broken PNG.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)

_MOST_IN_A_ROW = 100  # unreadable images one after the other, before the data as a whole is called unusable


class BadImage(NamedTuple):
    """An image that could not be read."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Sample(NamedTuple):
    """One item of a batch. ``image`` is None where there was nothing to put in the place of an unreadable one."""

    image: torch.Tensor | None
    target: int
    index: int | str
    skipped: tuple[BadImage, ...] = ()


@contextlib.contextmanager
def seeded(*keys: int) -> Iterator[None]:
    """python, numpy and torch (CPU) random numbers drawn inside depend on ``keys`` alone.

    In the training process the three states are put back afterwards; a worker process has no other use for them.
    """
    restore = get_worker_info() is None
    if restore:
        before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    a, b = (int(x) for x in np.random.SeedSequence(keys).generate_state(2))
    random.seed(a << 32 | b)
    np.random.seed(a)
    torch.default_generator.manual_seed(a << 32 | b)  # torch.manual_seed would reseed the accelerator too
    try:
        yield
    finally:
        if restore:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.default_generator.set_state(before[2])


def read_image(file: Any) -> Image.Image:
    """The image in ``file`` (path or binary file), decoded to RGB. Raises one of UNREADABLE."""
    with Image.open(file) as image:
        return image.convert("RGB")


class MapSamples(Dataset):
    """A timm ``ImageDataset``, read by keys ``(epoch, slot, index)``.

    ``substitute``: an unreadable image is replaced by the next readable one, so batches keep their size; otherwise
    it comes back as a Sample without image.
    """

    def __init__(self, dataset, transform, *, seed: int, substitute: bool):
        self.dataset, self.transform, self.seed, self.substitute = dataset, transform, seed, substitute

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int, int]) -> Sample:
        epoch, slot, index = key
        skipped: list[BadImage] = []
        image, target = None, -1
        for step in range(_MOST_IN_A_ROW if self.substitute else 1):
            at = (index + step) % len(self.dataset)
            try:
                file, target = self.dataset.reader[at]
                with file:
                    image = read_image(file)
                break
            except UNREADABLE as error:
                skipped.append(BadImage(self._name(at), f"{type(error).__name__}: {error}"))
        if image is None:
            return Sample(None, -1, at, tuple(skipped))
        with seeded(self.seed, epoch, slot):
            return Sample(self.transform(image), -1 if target is None else int(target), at, tuple(skipped))

    def _name(self, index: int) -> str:
        return self.dataset.filename(index, absolute=True) or f"row {index}"


class StreamSamples(IterableDataset):
    """A timm ``IterableImageDataset`` over webdataset shards. timm's reader drops what it cannot decode and only
    logs it; the log is listened to, so that the count and the list are kept."""

    def __init__(self, dataset, transform, *, seed: int, epoch: int):
        self.dataset, self.transform, self.seed, self.epoch = dataset, transform, seed, epoch

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker = info.id if info else 0
        rank = self.dataset.reader.dist_rank
        with _ReaderLog() as log:
            for slot, (image, target) in enumerate(self.dataset):
                with seeded(self.seed, self.epoch, slot, worker, rank):
                    tensor = self.transform(image)
                yield Sample(tensor, int(target), f"{worker}:{slot}", log.take())
            left = log.take()
            if left:
                yield Sample(None, -1, "end", left)


class _ReaderLog(logging.Handler):
    """Collects what timm's webdataset reader says about samples it had to drop."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.logger = logging.getLogger("timm.data.readers.reader_wds")
        self.bad: list[BadImage] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.bad.append(BadImage("shard sample", " ".join(record.getMessage().split())))

    def take(self) -> tuple[BadImage, ...]:
        bad, self.bad = tuple(self.bad), []
        return bad

    def __enter__(self):
        self.propagated = self.logger.propagate
        self.logger.addHandler(self)
        self.logger.propagate = False
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.propagate = self.propagated


class PlaceSampler(Sampler):
    """Keys ``(epoch, slot, index)`` of this process, from any place of any epoch.

    ``order`` is a sampler with ``set_epoch`` (torch's DistributedSampler, timm's RepeatAugSampler).
    """

    def __init__(self, order, *, rank: int, world: int):
        self.order, self.rank, self.world = order, rank, world
        self.epoch = self.start = 0

    def go_to(self, epoch: int, start: int) -> None:
        """The next iteration gives epoch ``epoch`` from its ``start``-th sample on."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        self.order.set_epoch(self.epoch)
        for slot, index in enumerate(self.order):
            if slot >= self.start:
                yield self.epoch, slot * self.world + self.rank, index

    def __len__(self) -> int:
        return len(self.order)


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Samples → ``image`` (B, C, H, W) float or None, ``target`` (B,) long, ``index`` and ``skipped`` lists."""
    good = [s for s in samples if s.image is not None]
    return {
        "image": torch.stack([s.image for s in good]) if good else None,
        "target": torch.tensor([s.target for s in good], dtype=torch.long),
        "index": [s.index for s in good],
        "skipped": [bad for s in samples for bad in s.skipped],
    }


def check_labels(batch: dict[str, Any], num_classes: int) -> None:
    """Raises DataError where a label lies outside 0 … num_classes − 1."""
    target = batch["target"]
    wrong = (target < 0) | (target >= num_classes)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise DataError(
            f"sample {batch['index'][at]} has label {int(target[at])}, and num_classes={num_classes} allows 0 to "
            f"{num_classes - 1}"
        )


def quiet_worker(_worker_id: int) -> None:
    """Ctrl-C reaches the whole process group; the training process decides, its workers carry on until told.

    One thread each, or workers and training process fight over the same cores.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


class BadImages:
    """The images that were skipped in this run, or the error for the first one when ``on_error`` is "stop"."""

    def __init__(self, on_error: str):
        self.on_error = on_error
        self.seen: dict[str, BadImage] = {}

    def check(self, batch: dict[str, Any]) -> None:
        """Note what ``batch`` had to skip. Raises DataError under "stop", or where nothing readable was left."""
        for bad in batch["skipped"]:
            if self.on_error == "stop":
                raise DataError(
                    f"cannot read image {bad}. Repair or remove it, or set data.on_error=skip to leave such images out."
                )
            self.seen.setdefault(bad.name if bad.name != "shard sample" else str(bad), bad)
        if len(batch["skipped"]) >= _MOST_IN_A_ROW and batch["image"] is None:
            raise DataError(f"{_MOST_IN_A_ROW} images in a row cannot be read; the last one is {batch['skipped'][-1]}.")

    def summary(self) -> str:
        """One line with the count and the first few, or an empty string."""
        if not self.seen:
            return ""
        first = "; ".join(str(bad) for bad in list(self.seen.values())[:3])
        more = f"; and {len(self.seen) - 3} more" if len(self.seen) > 3 else ""
        return f"{len(self.seen)} image(s) could not be read and were skipped: {first}{more}"

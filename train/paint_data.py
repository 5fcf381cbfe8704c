"""From sources to batches of a denoiser: shapes, cropping, the order of an epoch, reading with workers or from memory.

A batch is a dict: ``pixels`` ``(B, C, H, W)`` uint8 or ``moments`` of the latents (latents.py), ``label`` ``(B,)``,
``caption`` (list of str), ``index`` (list of int) and ``skipped`` (list of BadImage). What is random about an image,
its flip and which of its captions is taken, depends on the run's seed and its place in the epoch alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .checkpoint import fresh_file, load_tensors, save_tensors
from .denoise_config import PaintDataConfig
from .errors import ConfigError, DataError
from .samples import UNREADABLE, BadImage, quiet_worker, read_image
from .sources import Source

_MOST_IN_A_ROW = 100


class Key(NamedTuple):
    """What to read: image ``index`` for place ``slot`` of ``epoch``; epoch −1 is evaluation, without chance."""

    epoch: int
    slot: int
    index: int


def bucket_shapes(config: PaintDataConfig, multiple: int) -> list[tuple[int, int]]:
    """``(height, width)`` in pixels of the shapes images are brought to, divisible by ``multiple``.

    ``data.buckets`` of them, evenly spaced in log aspect ratio from 1:2 to 2:1, all of about the same area
    (NovelAI's aspect ratio bucketing, as in SDXL, arXiv:2307.01952, section 2.3).
    """
    if config.size < multiple or config.size % multiple:
        below = max(multiple, config.size // multiple * multiple)
        raise ConfigError(
            f"data.size={config.size} must be divisible by {multiple}, the pixels of a patch; the nearest sizes are "
            f"{below} and {below + multiple}"
        )
    if config.buckets < 0:
        raise ConfigError(f"data.buckets must be at least 0, and is {config.buckets}")
    if config.buckets <= 1:
        return [(config.size, config.size)]
    ratios = [2 ** (2 * i / (config.buckets - 1) - 1) for i in range(config.buckets)]
    nearest = [
        tuple(max(1, round(config.size * side / multiple)) * multiple for side in (math.sqrt(r), 1 / math.sqrt(r)))
        for r in ratios
    ]
    return list(dict.fromkeys(nearest))


def assign_shapes(source: Source, shapes: list[tuple[int, int]]) -> np.ndarray:
    """``(N,)``: which of ``shapes`` is nearest to each image in aspect ratio."""
    if len(shapes) == 1:
        return np.zeros(len(source), dtype=np.int64)
    sizes = np.array(source.sizes(), dtype=np.float64)
    there = np.log(sizes[:, 1] / sizes[:, 0])
    wanted = np.log([h / w for h, w in shapes])
    return np.abs(there[:, None] - wanted[None]).argmin(1)


def fit(image: Image.Image, shape: tuple[int, int], channels: int) -> torch.Tensor:
    """Resized to cover ``(height, width)`` and cropped at the centre → ``(channels, height, width)`` uint8; grey for
    one channel. Halved by averaging before the bicubic step, as in ADM (arXiv:2105.05233)."""
    image = image.convert("L" if channels == 1 else "RGB")
    height, width = shape
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    size = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    pixels = np.array(image.crop((left, top, left + width, top + height)))
    return torch.from_numpy(pixels).reshape(height, width, channels).permute(2, 0, 1).contiguous()


class Order:
    """Which images make up the batches of an epoch: each from one shape, all images at least once, in an order that
    depends on seed and epoch; the last batch of a shape is filled up from its beginning."""

    def __init__(self, shape_of: np.ndarray, *, batch_size: int, seed: int, rank: int = 0, world: int = 1):
        self.groups = [np.flatnonzero(shape_of == s) for s in np.unique(shape_of)]
        self.batch_size, self.seed, self.rank, self.world = batch_size, seed, rank, world
        self.per_epoch = sum(math.ceil(len(group) / (batch_size * world)) for group in self.groups)

    def epoch(self, epoch: int, start: int = 0) -> list[list[Key]]:
        """Batches ``start``, ``start + 1``, … of this process."""
        rng = np.random.default_rng([self.seed, epoch])
        together = self.batch_size * self.world
        batches = []
        for group in self.groups:
            filled = np.resize(rng.permutation(group), math.ceil(len(group) / together) * together)
            batches += list(filled.reshape(-1, together))
        order = rng.permutation(len(batches))
        own = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        return [
            [Key(epoch, place * together + own.start + i, int(index)) for i, index in enumerate(batches[b][own])]
            for place, b in enumerate(order)
            if place >= start
        ]


def fixed_order(shape_of: np.ndarray, *, limit: int, batch_size: int, rank: int = 0, world: int = 1) -> list[list[Key]]:
    """At most ``limit`` images, evenly spaced, for evaluation: batches of one shape, shared out over the processes.
    ``slot`` numbers the images over all processes."""
    count = min(limit, len(shape_of))
    chosen = np.arange(count) * len(shape_of) // count
    batches, slot = [], 0
    for shape in np.unique(shape_of[chosen]):
        group = chosen[shape_of[chosen] == shape]
        for first in range(0, len(group), batch_size):
            part = group[first : first + batch_size]
            batches.append([Key(-1, slot + i, int(index)) for i, index in enumerate(part)])
            slot += len(part)
    return batches[rank::world]


def flipped(seed: int, key: Key, probability: float) -> bool:
    """Whether an image is mirrored."""
    return key.epoch >= 0 and probability > 0 and np.random.default_rng([seed, *key]).random() < probability


def caption_of(source: Source, seed: int, key: Key) -> str | None:
    """One of an image's captions; the first in evaluation."""
    if source.captions is None:
        return None
    texts = source.captions[key.index]
    if key.epoch < 0 or len(texts) == 1:
        return texts[0]
    return texts[int(np.random.default_rng([seed, 1, *key]).integers(len(texts)))]


class PixelItems(Dataset):
    """Images of a source by Key, brought to their shape. One that cannot be read is replaced by the next readable one
    of the same shape, or left out in evaluation."""

    def __init__(self, source: Source, shape_of: np.ndarray, shapes, *, channels: int, hflip: float, seed: int):
        self.source, self.shape_of, self.shapes = source, shape_of, shapes
        self.channels, self.hflip, self.seed = channels, hflip, seed

    def __getitem__(self, key: Key) -> dict[str, Any]:
        key, skipped = Key(*key), []
        shape, index = self.shape_of[key.index], key.index
        for _ in range(_MOST_IN_A_ROW if key.epoch >= 0 else 1):
            try:
                with self.source.open(index) as file:
                    pixels = fit(read_image(file), self.shapes[shape], self.channels)
            except UNREADABLE as error:
                skipped.append(BadImage(self.source.names[index], f"{type(error).__name__}: {error}"))
                index = self._next(index)
                continue
            if flipped(self.seed, key, self.hflip):
                pixels = pixels.flip(-1)
            return {
                "pixels": pixels,
                **described(self.source, self.seed, key._replace(index=index)),
                "skipped": skipped,
            }
        return {"pixels": None, "skipped": skipped}

    def _next(self, index: int) -> int:
        same = np.flatnonzero(self.shape_of == self.shape_of[index])
        return int(same[(np.searchsorted(same, index) + 1) % len(same)])


def described(source: Source, seed: int, key: Key) -> dict[str, Any]:
    """What is known of an image besides its pixels."""
    label = -1 if source.labels is None else source.labels[key.index]
    return {"label": label, "caption": caption_of(source, seed, key), "index": key.index, "slot": key.slot}


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Items → a batch, see the module's docstring. Items without image only tell what was skipped."""
    what = "moments" if "moments" in items[0] else "pixels"
    good = [item for item in items if item[what] is not None]
    batch = {key: [item[key] for item in good] for key in ("caption", "index", "slot")}
    return batch | {
        what: torch.stack([item[what] for item in good]) if good else None,
        "label": torch.tensor([item["label"] for item in good], dtype=torch.long),
        "skipped": [bad for item in items for bad in item["skipped"]],
    }


class _Plan:
    """Batches of keys, to be exchanged between epochs. Not the reader itself, which would then be part of a circle and
    leave its workers running until the process ends and waits seconds for each."""

    def __init__(self):
        self.batches: list[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class WorkerReader:
    """Reads batches of keys with worker processes, which end with it."""

    def __init__(self, items: Dataset, workers: int):
        self.plan = _Plan()
        self.loader = DataLoader(
            items,
            batch_sampler=self.plan,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=quiet_worker,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # or it would draw from the random numbers of the training process
        )

    def read(self, plan: list[list[Key]]) -> Iterator[dict[str, Any]]:
        """The batches of a plan, in order."""
        self.plan.batches = plan
        return iter(self.loader)


def _keep(pixels: Tensor, place: Path) -> None:
    """Write a file of images, whole or not at all; processes may do so at the same time."""
    try:
        with fresh_file(place) as fresh:
            save_tensors({"pixels": pixels}, fresh)
    except OSError as error:
        raise DataError(f"data.decoded: cannot write {place}: {error}") from error


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device. From pageable memory a copy would first wait for all the work that is queued there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _stamp(place: Path) -> tuple[int, int]:
    """Size and time of the last change of a file."""
    about = place.stat()
    return about.st_size, about.st_mtime_ns


def fingerprint(config: PaintDataConfig, source: Source, split: str, own: Path, *about: Any) -> str:
    """A name for what is made of the images of a split, as far as ``about`` tells: another root, split or number, and
    files that have changed, give another one. What lies in ``own`` does not count."""
    root, own = Path(config.root).absolute(), own.absolute()
    told: list[Any] = [str(root), config.format, config.image_key, split, len(source), *about]
    # None, if the root is a name at a hub.
    files = (place for place in sorted(root.rglob("*")) if place.is_file() and own not in place.parents)
    told += [(str(place.relative_to(root)), *_stamp(place)) for place in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def decoded_place(config: PaintDataConfig, split: str, items: PixelItems) -> Path:
    """The file in ``data.decoded`` that holds the images of a split at their size. Another root, split, number, size or
    colour, and files that have changed, have a file of their own."""
    folder = Path(config.decoded)
    name = fingerprint(config, items.source, split, folder, items.shapes, items.channels)
    return folder / f"{name}.safetensors"


class MemoryReader:
    """Reads batches of keys from one tensor of all images, on the device if it fills less than half of what is free
    there. Images that cannot be read are missing from it: their places go to the ones after them.

    ``place``: a file to take the tensor from; written if it is not there, unless an image could not be read.
    """

    def __init__(self, items: PixelItems, device: torch.device, *, workers: int, place: Path | None = None):
        if len(items.shapes) > 1:
            raise ConfigError("data.in_memory keeps all images as one tensor and needs data.buckets=0")
        self.items, self.skipped = items, []
        count = len(items.source)
        if place is not None and place.is_file():
            pixels, readable = load_tensors(place)["pixels"], np.arange(count)
        else:
            pixels, readable = self._decoded(workers)
            if place is not None and len(readable) == count:
                _keep(pixels, place)
        # image i is row row_of[i]: its own, or that of the next image that could be read
        self.row_of = np.searchsorted(readable, np.arange(count)) % len(readable)
        self.readable = readable
        fits = device.type == "cuda" and pixels.nbytes < 0.5 * torch.cuda.mem_get_info(device)[0]
        self.pixels = pixels.to(device) if fits else pixels

    def _decoded(self, workers: int, batch_size: int = 500) -> tuple[Tensor, np.ndarray]:
        """All images that can be read, and which they are."""
        count = len(self.items.source)
        plan = [[Key(-1, i, i) for i in range(at, min(count, at + batch_size))] for at in range(0, count, batch_size)]
        parts = list(WorkerReader(self.items, workers).read(plan))
        self.skipped = [bad for part in parts for bad in part["skipped"]]
        if len(self.skipped) == count:
            raise DataError(f"none of the {count} images can be read; the first one is {self.skipped[0]}")
        readable = np.array([index for part in parts for index in part["index"]])
        return torch.cat([part["pixels"] for part in parts if part["pixels"] is not None]), readable

    def read(self, plan: list[list[Key]]) -> Iterator[dict[str, Any]]:
        """The batches of a plan, in order."""
        items, told, device = self.items, self.skipped, self.pixels.device
        for keys in plan:
            rows = self.row_of[[key.index for key in keys]]
            pixels = self.pixels[without_waiting(torch.from_numpy(rows), device)]
            if keys[0].epoch >= 0 and items.hflip > 0:
                chance = np.random.default_rng([items.seed, keys[0].epoch, keys[0].slot]).random(len(keys))
                flip = without_waiting(torch.from_numpy(chance < items.hflip), device)
                pixels = torch.where(flip[:, None, None, None], pixels.flip(-1), pixels)
            known = [
                described(items.source, items.seed, key._replace(index=int(self.readable[row])))
                for key, row in zip(keys, rows)
            ]
            batch = {key: [item[key] for item in known] for key in ("caption", "index", "slot")}
            label = torch.tensor([item["label"] for item in known], dtype=torch.long)
            yield batch | {"pixels": pixels, "label": label, "skipped": told}
            told = []

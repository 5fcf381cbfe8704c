"""The images of ``scanvas bench mixers``: all of them in the device's memory, shifted and mirrored there."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from .checkpoint import fresh_file
from .errors import DataError

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's channels
_PADDING = 4  # pixels by which a training image is shifted at most


class Images:
    """All images on the device, in bytes.

    Args:
        train, test: ``(N, 3, S, S)`` uint8 and labels ``(N,)``.
        device: where they go.
    """

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], device: torch.device):
        self.device, self.side = device, train[0].shape[-1]
        self.classes = 1 + int(max(train[1].max(), test[1].max()))
        self.padded = F.pad(train[0].to(device), (_PADDING,) * 4)
        self.test = test[0].to(device)
        self.labels, self.test_labels = train[1].to(device), test[1].to(device)
        # Made once: a small tensor that is copied to a GPU waits for all that is queued there.
        self.mean, self.std = (255 * torch.tensor(c, device=device).view(3, 1, 1) for c in (_MEAN, _STD))

    def scaled(self, image: Tensor) -> Tensor:
        """Bytes ``(B, 3, S, S)`` → what a model is given."""
        return (image.float() - self.mean) / self.std

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Training images, each shifted and mirrored by chance, with their labels."""
        count, place = len(index), torch.arange(self.side, device=self.device)
        shift = torch.randint(2 * _PADDING + 1, (2, count, 1), device=self.device, generator=generator)
        flip = torch.rand(count, 1, device=self.device, generator=generator) < 0.5
        rows = shift[0] + place
        columns = shift[1] + torch.where(flip, self.side - 1 - place, place)
        channels = torch.arange(3, device=self.device)[:, None, None]
        image = self.padded[index[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None]]
        return self.scaled(image), self.labels[index]


def random_images(device: torch.device, side: int = 32, classes: int = 10, count: int = 4096) -> Images:
    """Noise of CIFAR-10's shape, to measure how fast a model is."""
    pixels = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
    labels = torch.arange(count) % classes
    return Images((pixels, labels), (pixels[:classes], labels[:classes]), device)


def load_images(folder: str, device: torch.device, limit: int | None = None, cache: Path | None = None) -> Images:
    """``train*.parquet`` and ``test*.parquet`` (or ``valid*``) of a folder, with the columns ``image`` (encoded, as
    Hugging Face datasets have it) and ``label``; the first ``limit`` of each. What was decoded is kept in the file
    ``cache``, and taken from there for as long as the files have their size and time: decoding 60,000 images takes
    longer than training on them for a moment.

    Raises DataError: nothing there, other columns, an image that cannot be read or is of another size.
    """
    files = [_files(Path(folder), names) for names in (("train",), ("test", "valid"))]
    marks = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for split in files for path in split]
    source = json.dumps([str(Path(folder).resolve()), marks, limit])
    kept = _cached(cache, source) if cache else None
    if kept is None:
        train, test = (_read(split, limit) for split in files)
        if train[0].shape[1:] != test[0].shape[1:]:
            raise DataError(f"--data {folder}: images are {train[0].shape[-1]} and {test[0].shape[-1]} pixels a side")
        kept = [*train, *test]
        if cache:
            _keep(cache, source, kept)
    return Images(tuple(kept[:2]), tuple(kept[2:]), device)


_PARTS = ("train", "train_labels", "test", "test_labels")


def _cached(place: Path, source: str) -> list[Tensor] | None:
    try:
        with safe_open(place, "pt") as stored:  # mapped: processes side by side share the pages
            return [stored.get_tensor(name) for name in _PARTS] if stored.metadata().get("source") == source else None
    except (OSError, SafetensorError):
        return None  # none is there, or what another version or a full disk has left


def _keep(place: Path, source: str, tensors: list[Tensor]) -> None:
    with fresh_file(place) as fresh:  # other shards may be looking for it
        save_file(dict(zip(_PARTS, tensors)), fresh, {"format": "pt", "source": source})


def _files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    files = [path for name in names for path in sorted(folder.glob(f"{name}*.parquet"))]
    if not files:
        raise DataError(f"--data {folder} holds no {' or '.join(f'{name}*.parquet' for name in names)}")
    return files


def _read(files: list[Path], limit: int | None) -> tuple[Tensor, Tensor]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError("--data: reading parquet files needs pyarrow: pip install 'scanvas[train]'") from error
    try:
        rows = [row for path in files for row in parquet.read_table(path, columns=["image", "label"]).to_pylist()]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"--data: {files[0]} has no columns image and label: {' '.join(str(error).split())}") from error
    rows = rows[:limit]
    if not rows:
        raise DataError(f"--data: {files[0]} holds no image")
    workers = min(8, os.cpu_count() or 1) if len(rows) > 5000 else 0
    batches = DataLoader([row["image"] for row in rows], 512, num_workers=workers, collate_fn=_all_decoded)
    decoded = [image for batch in batches for image in batch]
    for number, image in enumerate(decoded):
        if isinstance(image, str):
            raise DataError(f"--data: image {number} of {files[0]} cannot be read: {image}")
        if image.shape != (*decoded[0].shape[:1] * 2, 3):
            size = "×".join(map(str, image.shape[:2]))
            raise DataError(f"--data: images must be squares of one size; number {number} of {files[0]} is {size}")
    images = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([row["label"] for row in rows])


def _all_decoded(images: list[bytes | dict]) -> list[np.ndarray | str]:
    return [_decoded(image) for image in images]


def _decoded(image: bytes | dict) -> np.ndarray | str:
    """``(S, S, 3)`` bytes, or what is wrong with it."""
    try:
        return np.asarray(Image.open(io.BytesIO(image["bytes"] if isinstance(image, dict) else image)).convert("RGB"))
    except (OSError, TypeError, ValueError, KeyError) as error:
        return " ".join(str(error).split())

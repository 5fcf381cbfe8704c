"""Image folders, Hugging Face datasets and webdataset shards, read through timm.

What is added to timm here: batches can be had from any place of any epoch (so a killed run resumes exactly), images
that cannot be read are counted and listed, and classes of the two splits are compared before anything is trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timm.data import create_dataset, create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from .config import AugmentConfig, DataConfig
from .errors import DataError, nearest
from .samples import MapSamples, PlaceSampler, StreamSamples, collate, quiet_worker

_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval"))


def open_split(config: DataConfig, split: str, *, class_map: dict[str, int] | None = None, **stream):
    """The timm dataset of one split, without transform. ``stream``: keywords of webdataset reading alone.

    Raises DataError: nothing at ``data.root``, no such split, no image in it, a column that does not exist, a package
    that is not installed.
    """
    if not config.root:
        raise DataError("data.root is not set; give the folder of images, for example data.root=/path/to/imagenet")
    if config.format == "folder":
        return _open_folder(config, split, class_map)
    if config.format == "hfds":
        return _open_hfds(config, split)
    return _open_wds(config, split, **stream)


def _open_folder(config: DataConfig, split: str, class_map: dict[str, int] | None):
    folder = split_folder(Path(config.root), split)
    try:
        return create_dataset("", root=str(folder), search_split=False, class_map=class_map)
    except RuntimeError as error:
        raise DataError(
            f"no image in {folder}: it must hold one folder per class, with image files (jpg, png, …) in it."
        ) from error


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split, which may also be called by one of its usual other names. Raises DataError."""
    if not root.is_dir():
        raise DataError(f"data.root={str(root)!r} is not a folder")
    names = next((s for s in _SYNONYMS if split in s), ())
    for name in (split, *names):
        if (root / name).is_dir():
            return root / name
    found = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())[:12]) or "no folder at all"
    raise DataError(
        f"{root} has no folder for the split {split!r}; it holds {found}. Set data.train_split and data.val_split."
    )


def _open_hfds(config: DataConfig, split: str):
    try:
        import datasets
    except ImportError as error:
        raise DataError("data.format=hfds needs the package datasets: pip install 'scanvas[train]'") from error
    problems = (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError)
    keys = {"input_key": config.image_key or "image", "target_key": config.label_key or "label"}
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        dataset = create_dataset(f"hfds/{config.root}", root=config.cache_dir, split=split, **keys)
    except problems as error:
        raise DataError(
            f"cannot open the Hugging Face dataset data.root={config.root!r} (a hub id, or a folder with parquet files "
            f"or images), split {split!r}: {' '.join(str(error).split())}"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    if len(dataset) == 0:
        raise DataError(f"split {split!r} of {config.root} has no rows")
    rows = dataset.reader.dataset.data
    columns = [c for c in rows.column_names if rows.column(c).null_count < len(dataset)]
    # (the reader casts the image column, by which a column that does not exist comes to be, empty)
    for option, column in (("data.image_key", keys["input_key"]), ("data.label_key", keys["target_key"])):
        if column not in columns:
            raise DataError(f"{option}={column!r} is no column of {config.root}{nearest(column, columns)}")
    return dataset


def _open_wds(config: DataConfig, split: str, *, training: bool, batch_size: int, seed: int):
    try:
        import webdataset  # noqa: F401 - timm's reader imports it lazily and fails late
    except ImportError as error:
        raise DataError("data.format=wds needs the package webdataset: pip install 'scanvas[train]'") from error
    keys = {"input_key": config.image_key, "target_key": config.label_key}
    samples = config.train_samples if training else config.val_samples
    try:
        dataset = create_dataset(
            "wds/",
            root=config.root,
            split=split,
            is_training=training,
            batch_size=batch_size,
            seed=seed,
            num_samples=samples,
            **keys,
        )
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"cannot open the shards data.root={config.root!r}, split {split!r}: {' '.join(str(error).split())}. Give "
            "a split named in _info.json, or names such as 'train-{000..007}.tar' with data.train_samples."
        ) from error
    shards = dataset.reader.split_info.filenames
    for shard in shards:
        # the reader would log a missing local shard and go on, for ever if all are missing
        path = os.path.join(config.root, shard)
        if "://" not in path and not path.startswith("pipe:") and not os.path.isfile(path):
            raise DataError(f"shard {path} does not exist")
    return dataset


def class_names(dataset, config: DataConfig) -> list[str] | None:
    """Class names by index, or None where the data does not say (webdataset, label columns without names)."""
    mapping = getattr(dataset.reader, "class_to_idx", None)
    if mapping:
        return [name for name, _ in sorted(mapping.items(), key=lambda item: item[1])]
    if config.format == "hfds":
        labels = dataset.reader.dataset.unique(config.label_key or "label")
        return [str(i) for i in range(max(labels) + 1)]
    return None


def open_pair(config: DataConfig, num_classes: int | None, **stream):
    """Train and validation dataset and the class names (or None), after comparing their classes.

    Raises DataError: a class of the training split is missing in validation or the other way round, or ``num_classes``
    is not what the data has.
    """
    train = open_split(config, config.train_split, training=True, **stream)
    names = class_names(train, config)
    if names is None and num_classes is None:
        raise DataError("webdataset shards do not say how many classes they have; set model.num_classes")
    if names is not None and num_classes is not None and len(names) != num_classes:
        raise DataError(
            f"model.num_classes={num_classes}, but the training data has {len(names)} classes "
            f"({', '.join(names[:5])}{', …' if len(names) > 5 else ''}); leave it out to use what the data has"
        )
    class_map = train.reader.class_to_idx if config.format == "folder" else None
    if class_map is not None:
        _compare_folders(config, class_map)
    val = open_split(config, config.val_split, class_map=class_map, training=False, **stream)
    if config.format == "hfds":
        _compare_labels(class_names(val, config), names, val, config)
    return train, val, names


def _compare_folders(config: DataConfig, class_map: dict[str, int]) -> None:
    folder = split_folder(Path(config.root), config.val_split)
    present = {name for _, folders, _ in os.walk(folder, followlinks=True) for name in folders}
    missing = sorted(set(class_map) - present)
    with_images = set(open_split(config, config.val_split).reader.class_to_idx)
    unknown = sorted(with_images - set(class_map))
    if missing:
        raise DataError(
            f"{folder} lacks the folder of {len(missing)} class(es) that the training split has: "
            f"{', '.join(missing[:8])}. Add it (it may be empty), or accuracy would leave it out unnoticed."
        )
    if unknown:
        raise DataError(
            f"{folder} has {len(unknown)} class(es) that the training split lacks: {', '.join(unknown[:8])}"
        )


def _compare_labels(val_names: list[str] | None, names: list[str] | None, val, config: DataConfig) -> None:
    has_names = bool(val.reader.class_to_idx)
    if has_names and val_names != names:
        raise DataError(f"the two splits of {config.root} name their classes differently: {names} and {val_names}")
    present = set(val.reader.dataset.unique(config.label_key or "label"))
    missing = [names[i] for i in range(len(names)) if i not in present]
    if missing:
        raise DataError(
            f"split {config.val_split!r} of {config.root} has no image of {len(missing)} class(es) that the training "
            f"split has: {', '.join(missing[:8])}"
        )


def train_transform(augment: AugmentConfig, input_config: dict[str, Any]):
    """timm's training transform: PIL image → normalised (C, H, W) tensor, random erasing included."""
    return create_transform(
        input_size=input_config["input_size"],
        is_training=True,
        scale=tuple(augment.scale),
        ratio=tuple(augment.ratio),
        hflip=augment.hflip,
        vflip=augment.vflip,
        color_jitter=augment.color_jitter or None,
        auto_augment=augment.auto_augment,
        re_prob=augment.random_erasing,
        re_mode=augment.random_erasing_mode,
        interpolation=input_config["interpolation"],
        mean=input_config["mean"],
        std=input_config["std"],
    )


def eval_transform(input_config: dict[str, Any]):
    """timm's evaluation transform: PIL image → normalised (C, H, W) tensor."""
    keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    return create_transform(is_training=False, **{k: input_config[k] for k in keys if k in input_config})


class TrainBatches:
    """Training batches of this process (dicts of ``samples.collate``), from any place of any epoch."""

    def __init__(
        self, dataset, config: DataConfig, transform, *, batch_size: int, seed: int, rank=0, world=1, repeats=1
    ):
        self.config, self.transform, self.batch_size, self.seed = config, transform, batch_size, seed
        self.stream = config.format == "wds"
        self.workers = config.workers
        if self.stream:
            shards = len(dataset.reader.split_info.filenames)
            if shards < world:
                raise DataError(f"{shards} training shard(s) cannot be shared out to {world} processes")
            if repeats > 1:
                raise DataError("augment.repeats must be 1 with webdataset shards, which are read in a stream")
            self.workers = min(config.workers, shards // world)
            dataset.set_loader_cfg(num_workers=self.workers)
            samples = len(dataset)  # of this process, in whole batches per worker
        else:
            if repeats > 1:
                order = RepeatAugSampler(dataset, num_replicas=world, rank=rank, num_repeats=repeats)
            else:
                order = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=seed, drop_last=True)
            self.sampler = PlaceSampler(order, rank=rank, world=world)
            data = MapSamples(dataset, transform, seed=seed, substitute=True)
            self.loader = self._loader(data, sampler=self.sampler, persistent_workers=self.workers > 0)
            samples = len(order)
        self.per_epoch = samples // batch_size
        if self.per_epoch == 0:
            raise DataError(
                f"the training split gives {samples} image(s) per epoch and process, fewer than one batch of "
                f"{batch_size}; lower train.batch_size"
            )

    def _loader(self, data, **kwargs) -> DataLoader:
        # An own generator: without it a loader draws its base seed from the random numbers of the training process.
        return DataLoader(
            data,
            batch_size=self.batch_size,
            num_workers=self.workers,
            collate_fn=collate,
            drop_last=True,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=quiet_worker,
            generator=torch.Generator(),
            **kwargs,
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Batches ``start``, ``start + 1``, … of epoch ``epoch``."""
        if not self.stream:
            self.sampler.go_to(epoch, start * self.batch_size)
            return iter(self.loader)
        # Opened anew: the reader's shuffle goes on from epoch to epoch, which a resumed run could not repeat.
        dataset = open_split(
            self.config, self.config.train_split, training=True, batch_size=self.batch_size, seed=self.seed + epoch
        )
        dataset.set_loader_cfg(num_workers=self.workers)
        loader = self._loader(StreamSamples(dataset, self.transform, seed=self.seed, epoch=epoch))
        loader.generator.manual_seed(self.seed * 1_000_003 + epoch)
        return islice(iter(loader), start, self.per_epoch)


def eval_batches(dataset, config: DataConfig, transform, *, batch_size: int, rank=0, world=1) -> DataLoader:
    """Every sample of a split once, shared out over the processes without padding."""
    workers = config.workers
    if config.format == "wds":
        workers = min(workers, max(1, len(dataset.reader.split_info.filenames) // world))
        dataset.set_loader_cfg(num_workers=workers)
        data, sampler = StreamSamples(dataset, transform, seed=0, epoch=0), None
    else:
        data = MapSamples(dataset, transform, seed=0, substitute=False)
        sampler = [(0, i, i) for i in range(rank, len(dataset), world)]
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=quiet_worker,
        generator=torch.Generator(),
    )

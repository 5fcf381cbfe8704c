"""Images with labels or captions, by number: folders of classes or with captions, Hugging Face datasets, shards.

All sources answer the same questions without decoding an image, so that everything can be checked before any work, and
in any order, so that a run can go on from any place.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from .config import DataConfig
from .data import class_names, open_split, split_folder
from .denoise_config import PaintDataConfig
from .errors import DataError, nearest
from .samples import UNREADABLE

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass
class Files:
    """Opens files."""

    paths: list[str]

    def __call__(self, i: int) -> BinaryIO:
        return open(self.paths[i], "rb")


@dataclass
class Rows:
    """Opens the encoded images of a column of a Hugging Face dataset."""

    table: Any
    key: str

    def __call__(self, i: int) -> BinaryIO:
        cell = self.table[i][self.key]
        return io.BytesIO(cell["bytes"]) if cell.get("bytes") else open(cell["path"], "rb")


@dataclass
class Members:
    """Opens members of tar files: ``(shard, offset, size)`` in bytes."""

    places: list[tuple[str, int, int]]

    def __call__(self, i: int) -> BinaryIO:
        shard, offset, size = self.places[i]
        with open(shard, "rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size))


@dataclass
class Source:
    """``len(names)`` images.

    ``open(i)`` gives a binary file; ``names`` say where images are; ``labels`` and ``captions`` are per image, or None
    where the data has none; an image may have several captions. ``classes``: names of the classes, or None.
    """

    open: Callable[[int], BinaryIO]
    names: list[str]
    labels: list[int] | None = None
    captions: list[list[str]] | None = None
    classes: list[str] | None = None
    known_sizes: list[tuple[int, int]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def sizes(self) -> list[tuple[int, int]]:
        """``(width, height)`` of every image, from the data or else from its header; (1, 1) if it cannot be read."""
        if self.known_sizes is None:
            self.known_sizes = [self._size(i) for i in range(len(self))]
        return self.known_sizes

    def _size(self, i: int) -> tuple[int, int]:
        try:
            with self.open(i) as file, Image.open(file) as image:
                return image.size
        except UNREADABLE:
            return 1, 1  # reported when it is its turn to be decoded


def open_source(config: PaintDataConfig, split: str, *, captions: bool, classes: list[str] | None = None) -> Source:
    """One split. ``captions``: they are needed, else labels are; ``classes``: those of the training split, in order.

    Raises DataError: nothing there, captions missing, a column or file that does not exist.
    """
    if not config.root:
        raise DataError("data.root is not set; give the folder of images, for example data.root=/path/to/images")
    if config.format == "wds":
        source = _shards(config, split, captions)
    elif config.format == "hfds":
        source = _rows(config, split, captions)
    elif captions:
        source = _captioned_folder(config, split)
    else:
        source = _class_folders(config, split, classes)
    if captions:
        _check_captions(source, config)
    elif source.labels is None:
        raise DataError(f"data.root={config.root!r} has no labels, and the denoiser is conditioned on classes")
    return source


def _timm_config(config: PaintDataConfig, label_key: str | None) -> DataConfig:
    return DataConfig(
        format=config.format,
        root=config.root,
        image_key=config.image_key,
        label_key=label_key,
        cache_dir=config.cache_dir,
    )


def _class_folders(config: PaintDataConfig, split: str, classes: list[str] | None) -> Source:
    folder = split_folder(Path(config.root), split)
    if (folder / "metadata.jsonl").is_file() and not any(path.is_dir() for path in folder.iterdir()):
        raise DataError(
            f"{folder} has captions (metadata.jsonl) and no class folders; use a denoiser with text, such as "
            "model.name=dig_t2i_s_2"
        )
    timm_config = _timm_config(config, None)
    class_map = {name: i for i, name in enumerate(classes)} if classes else None
    dataset = open_split(timm_config, split, class_map=class_map)
    paths, labels = zip(*dataset.reader.samples)
    return Source(Files(paths), list(paths), list(labels), None, class_names(dataset, timm_config))


def _captioned_folder(config: PaintDataConfig, split: str) -> Source:
    """Hugging Face's "imagefolder": each line of metadata.jsonl holds ``file_name`` and the caption."""
    root = Path(config.root)
    folder = root if (root / "metadata.jsonl").is_file() else split_folder(root, split)
    listing = folder / "metadata.jsonl"
    if not listing.is_file():
        raise DataError(
            f"the denoiser needs captions, and {folder} has no metadata.jsonl; it must hold a line such as "
            '{"file_name": "0001.png", "text": "a red boat"} for each image'
        )
    key = config.caption_key or "text"
    paths, captions = [], []
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = row["file_name"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{listing}, line {number}: not JSON with a file_name: {line[:80]}") from error
        if key not in row:
            raise DataError(
                f"{listing}, line {number}: {name} has no caption under {key!r} (data.caption_key){nearest(key, row)}"
            )
        paths.append(folder / name)
        captions.append(_as_list(row[key]))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"{listing} names {len(missing)} image(s) that do not exist: {', '.join(missing[:3])}")
    listed = set(paths)
    left = sorted(str(p) for p in folder.rglob("*") if p.suffix.lower() in _IMAGES and p not in listed)
    if left:
        raise DataError(
            f"{len(left)} image(s) have no caption in {listing}: {', '.join(left[:3])}. Add or remove them."
        )
    names = [str(path) for path in paths]
    return Source(Files(names), names, None, captions)


def _rows(config: PaintDataConfig, split: str, captions: bool) -> Source:
    timm_config = _timm_config(config, config.label_key)
    if captions:
        timm_config.label_key = config.caption_key or "text"
    try:
        dataset = open_split(timm_config, split)
    except DataError as error:
        # the words of classification, with the option that was meant
        raise DataError(
            str(error).replace("data.label_key", "data.caption_key" if captions else "data.label_key")
        ) from error
    rows, image_key = dataset.reader.dataset, config.image_key or "image"
    key = timm_config.label_key or "label"
    column = rows.select_columns([key])[:][key]
    open_row = Rows(rows.select_columns([image_key]), image_key)
    sizes = None
    if {"width", "height"} <= set(rows.column_names):
        table = rows.select_columns(["width", "height"])[:]
        sizes = list(zip(table["width"], table["height"]))
    names = [f"row {i}" for i in range(len(rows))]
    if captions:
        return Source(open_row, names, None, [_as_list(text) for text in column], None, sizes)
    classes = class_names(dataset, timm_config)
    labels = [_label(label, name, key) for label, name in zip(column, names)]
    return Source(open_row, names, labels, None, classes, sizes)


def _shards(config: PaintDataConfig, split: str, captions: bool) -> Source:
    """Local tar files, indexed by the place of each member, so that samples can be read in any order."""
    extensions = [e.strip(" .") for e in (config.image_key or "jpg;jpeg;png;webp").split(";")]
    places: list[tuple[str, int, int]] = []
    names, captions_found, labels = [], [], []
    for shard in _shard_files(config.root, split):
        for key, members in _samples(shard).items():
            image = next((members[e] for e in extensions if e in members), None)
            if image is None:
                continue
            places.append((shard, image.offset_data, image.size))
            names.append(f"{shard}:{key}")
            if captions:
                captions_found.append(_as_list(_entry(shard, members, config.caption_key, "txt")))
            else:
                labels.append(_label(_entry(shard, members, config.label_key, "cls"), names[-1], config.label_key))
    if not names:
        raise DataError(
            f"the shards of data.root={config.root!r}, split {split!r}, hold no image ({'; '.join(extensions)})"
        )
    return Source(Members(places), names, None if captions else labels, captions_found if captions else None)


def _shard_files(root: str, split: str) -> list[str]:
    span = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", split)
    if span:
        before, first, last, after = span.groups()
        found = [Path(root) / f"{before}{i:0{len(first)}d}{after}" for i in range(int(first), int(last) + 1)]
    else:
        found = [Path(root) / split] if split.endswith(".tar") else sorted(Path(root).glob(f"{split}*.tar"))
    if not found:
        raise DataError(
            f"{root} has no shards {split}*.tar; set data.train_split and data.val_split, e.g. 'train-{{000..007}}.tar'"
        )
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise DataError(f"shard {missing[0]} does not exist")
    return [str(path) for path in found]


def _samples(shard: str) -> dict[str, dict[str, tarfile.TarInfo]]:
    """Members of a shard by sample and extension: a name is ``key.extension``, the key up to its first dot."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                folder, name = os.path.split(member.name)
                key, _, extension = name.partition(".")
                if member.isfile():
                    samples.setdefault(os.path.join(folder, key), {})[extension.lower()] = member
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"cannot read shard {shard}: {error}") from error
    return samples


def _entry(shard: str, members: dict[str, tarfile.TarInfo], key: str | None, extension: str) -> Any:
    """The text of ``extension``'s member, or entry ``key`` of the .json member; None where there is none."""
    member = members.get("json" if key else extension)
    if member is None:
        return None
    with open(shard, "rb") as file:
        file.seek(member.offset_data)
        text = file.read(member.size).decode("utf-8", errors="replace")
    if key is None:
        return text
    try:
        return json.loads(text).get(key)
    except (ValueError, AttributeError) as error:
        raise DataError(f"{shard}: {member.name} is not a JSON object") from error


def _label(value: Any, name: str, key: str | None) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} has no label that is a number: {value!r} (data.label_key={key!r})") from error


def _as_list(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]


def _check_captions(source: Source, config: PaintDataConfig) -> None:
    empty = [i for i, texts in enumerate(source.captions) if not texts or not all(text.strip() for text in texts)]
    if empty:
        shown = ", ".join(source.names[i] for i in empty[:3])
        raise DataError(
            f"{len(empty)} of {len(source)} image(s) have no caption: {shown}. Add them, remove the images, or name "
            f"the right key with data.caption_key (now {config.caption_key!r})"
        )


def check_label_range(source: Source, num_classes: int, split: str) -> None:
    """Raise DataError where a label lies outside 0 … num_classes − 1."""
    for i, label in enumerate(source.labels):
        if not 0 <= label < num_classes:
            raise DataError(
                f"{source.names[i]} (split {split!r}) has label {label}, and num_classes={num_classes} allows 0 to "
                f"{num_classes - 1}"
            )

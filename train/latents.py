"""Latents: the autoencoder of a recipe, and a cache of what it (and a frozen text encoder) makes of a data set.

``DIR/<split>/``: ``cache.json`` says what was encoded by what; ``records.json`` holds names, labels and captions;
``moments-*.safetensors`` the latents of images of one shape, ``(n, 1 or 2, C or 2C, h, w)`` float16: as they are and,
with flips, mirrored; 2C for autoencoders that give a mean and a log variance, which are drawn from anew in every epoch.
``text.safetensors`` holds the features ``(U, T, D)`` and masks ``(U, T)`` of all captions; the first is the empty one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset

from .checkpoint import load_json, load_tensors, save_tensors, write_directory
from .denoise_config import PaintDataConfig, VaeConfig
from .errors import ConfigError, DataError
from .paint_data import Key, PixelItems, WorkerReader, described, flipped
from .samples import BadImages
from .sources import Source

_SHARD = 2048  # images in a file
_CLASSES = ("AutoencoderKL", "AutoencoderDC", "AutoencoderTiny")


def load_vae(config: VaeConfig) -> nn.Module | None:
    """The autoencoder of a recipe, frozen, or None. Raises ConfigError where it cannot be loaded."""
    if config.path is None:
        return None
    from diffusers import AutoModel

    inside = (Path(config.path) / "model_index.json").is_file()
    try:
        vae = AutoModel.from_pretrained(config.path, subfolder="vae" if inside else None)
    except (OSError, ValueError, KeyError, TypeError) as error:  # the last: a pipeline without an autoencoder
        raise ConfigError(f"vae.path={config.path!r} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    if type(vae).__name__ not in _CLASSES:
        raise ConfigError(
            f"vae.path={config.path!r} is a {type(vae).__name__}, and must be one of {', '.join(_CLASSES)}"
        )
    return vae.requires_grad_(False).eval()


def vae_factor(vae: nn.Module | None) -> int:
    """Pixels per latent along each axis."""
    if vae is None:
        return 1
    ratio = getattr(vae, "spatial_compression_ratio", None)
    return int(ratio or 2 ** (len(vae.config.block_out_channels) - 1))


def vae_channels(vae: nn.Module) -> int:
    """Channels of its images."""
    return vae.config.get("in_channels", 3)


@torch.no_grad()
def encode(vae: nn.Module, pixels: Tensor) -> Tensor:
    """uint8 images ``(B, C, H, W)`` → moments ``(B, 2C', h, w)`` float32 (mean, log variance), or the latents
    ``(B, C', h, w)`` of an autoencoder without variance."""
    with torch.autocast(pixels.device.type, enabled=False):
        output = vae.encode(to_unit(pixels).to(vae.dtype))
    if hasattr(output, "latent_dist"):
        return torch.cat((output.latent_dist.mean, output.latent_dist.logvar), dim=1).float()
    return (output.latents if hasattr(output, "latents") else output.latent).float()


def to_latents(vae: nn.Module, moments: Tensor, *, draw: bool) -> Tensor:
    """Moments → what the denoiser is trained on: drawn (else the mean), shifted and scaled."""
    moments = moments.float()
    if moments.shape[1] == 2 * vae.config.latent_channels:
        mean, log_variance = moments.chunk(2, dim=1)
        moments = mean + (0.5 * log_variance.clamp(-30, 20)).exp() * torch.randn_like(mean) if draw else mean
    shift = vae.config.get("shift_factor") or 0.0
    return (moments - shift) * vae.config.get("scaling_factor", 1.0)


def to_unit(pixels: Tensor) -> Tensor:
    """uint8 → float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of a model's weights, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def description(config: PaintDataConfig, vae: nn.Module, vae_path: str, text: dict[str, Any] | None) -> dict[str, Any]:
    """What a cache must have been made with to serve a run."""
    return {
        "format": 1,
        "vae": type(vae).__name__,
        "vae_path": vae_path,
        "vae_sha256": fingerprint(vae),
        "size": config.size,
        "buckets": config.buckets,
        "flips": config.hflip > 0,
        "text": text,
    }


def write_cache(
    folder: Path,
    source: Source,
    shape_of: np.ndarray,
    shapes: list[tuple[int, int]],
    *,
    vae: nn.Module,
    about: dict[str, Any],
    text_features: dict[str, Tensor] | None,
    batch_size: int,
    workers: int,
    on_error: str,
) -> None:
    """Encode all images of ``source``; the folder appears when it is complete."""
    device = next(vae.parameters()).device
    items = PixelItems(source, shape_of, shapes, channels=vae_channels(vae), hflip=0.0, seed=0)
    reader, bad = WorkerReader(items, workers), BadImages(on_error)

    def fill(place: Path) -> None:
        kept: list[list[int]] = []
        for shape in np.unique(shape_of):
            group = np.flatnonzero(shape_of == shape)
            for first in range(0, len(group), _SHARD):
                part = group[first : first + _SHARD]
                plan = [
                    [Key(-1, int(i), int(i)) for i in part[at : at + batch_size]]
                    for at in range(0, len(part), batch_size)
                ]
                indices, moments = [], []
                for batch in reader.read(plan):
                    bad.check({"skipped": batch["skipped"], "image": batch["pixels"]})
                    if batch["pixels"] is None:
                        continue
                    pixels = batch["pixels"].to(device)
                    views = [pixels, pixels.flip(-1)] if about["flips"] else [pixels]
                    moments.append(torch.stack([encode(vae, view).half().cpu() for view in views], dim=1))
                    indices += batch["index"]
                if indices:
                    save_tensors({"moments": torch.cat(moments)}, place / f"moments-{len(kept):05d}.safetensors")
                    kept.append(indices)
        if not kept:
            raise DataError(f"none of the {len(source)} images can be read")
        order = [index for indices in kept for index in indices]
        records = {
            "names": [source.names[i] for i in order],
            "labels": source.labels and [source.labels[i] for i in order],
            "captions": source.captions and [source.captions[i] for i in order],
            "classes": source.classes,
            "texts": unique_captions(source) if text_features else None,
            "files": [len(indices) for indices in kept],
            "shape_of": [int(shape_of[i]) for i in order],
        }
        (place / "records.json").write_text(json.dumps(records), encoding="utf-8")
        if text_features is not None:
            save_tensors(text_features, place / "text.safetensors")
        (place / "cache.json").write_text(json.dumps(about, indent=1), encoding="utf-8")

    write_directory(folder, fill)


def check_cache(folder: Path, about: dict[str, Any]) -> None:
    """Raise DataError where the cache at ``folder`` was made otherwise than ``about`` says."""
    found = load_json(folder / "cache.json")
    for key, wanted in about.items():
        if key != "vae_path" and found.get(key) != wanted:
            named = (
                f" (made with {found.get('vae_path')}, and this run has {about['vae_path']})" if "vae" in key else ""
            )
            raise DataError(
                f"data.latents: {folder} was written with {key}={found.get(key)!r}, and this run has {wanted!r}"
                f"{named}; give the same, or another data.latents to encode anew"
            )


class LatentCache(Dataset):
    """A cache by Key, and as a ``Source`` without pixels. Files are opened when they are first read from, and mapped
    into memory, not loaded."""

    def __init__(self, folder: Path, *, hflip: float, seed: int):
        records = load_json(folder / "records.json")
        self.folder, self.hflip, self.seed = folder, hflip, seed
        self.source = Source(
            _no_pixels, records["names"], records["labels"], records["captions"], classes=records["classes"]
        )
        self.shape_of = np.array(records["shape_of"], dtype=np.int64)
        self.ends = np.cumsum(records["files"])
        self.files: dict[int, Any] = {}

    def __getitem__(self, key: Key) -> dict[str, Any]:
        key = Key(*key)
        file = int(np.searchsorted(self.ends, key.index, side="right"))
        if file not in self.files:
            opened = safe_open(self.folder / f"moments-{file:05d}.safetensors", framework="pt")
            self.files[file] = opened.get_slice("moments")
        row = key.index - (int(self.ends[file - 1]) if file else 0)
        view = int(flipped(self.seed, key, self.hflip))
        moments = self.files[file][row : row + 1, view : view + 1][0, 0].float()
        return {"moments": moments, **described(self.source, self.seed, key), "skipped": []}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"files": {}}  # each worker process opens its own


def _no_pixels(i: int):
    raise DataError("a cache of latents holds no pixels")


class TextCache:
    """The features of all captions of a cache."""

    def __init__(self, folder: Path):
        self.tensors = load_tensors(folder / "text.safetensors")
        self.row = {caption: i for i, caption in enumerate(load_json(folder / "records.json")["texts"])}

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """``(features (B, T, D), mask (B, T))``."""
        rows = torch.tensor([self.row[caption] for caption in captions])
        return self.tensors["features"][rows].float(), self.tensors["mask"][rows]


def unique_captions(source: Source) -> list[str]:
    """The empty caption, then all others once, in order."""
    return list(dict.fromkeys(["", *(text for texts in source.captions for text in texts)]))

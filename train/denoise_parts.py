"""What a denoiser's recipe is built of, with everything checked before any work: data, denoiser, text, VAE, process."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scanvas.diffusion.denoiser import LinearDiTTransformer2DModel
from scanvas.diffusion.denoiser_base import Denoiser
from scanvas.diffusion.pipeline_class import LinearDiTClassPipeline
from scanvas.diffusion.presets import PRESETS, create_denoiser, denoiser_class
from scanvas.diffusion.u_denoiser import LinearUDiTTransformer2DModel

from .denoise_config import DenoiseConfig, DenoiserConfig
from .errors import ConfigError, UserError, nearest
from .evaluate import pick_device
from .latents import (
    LatentCache,
    TextCache,
    check_cache,
    description,
    fingerprint,
    load_vae,
    unique_captions,
    vae_factor,
    write_cache,
)
from .losses import check_terms
from .paint_data import MemoryReader, PixelItems, WorkerReader, assign_shapes, bucket_shapes, decoded_place
from .process import Process, create_scheduler
from .sources import Source, check_label_range, open_source
from .text import Tokens, create_text


class Painter(nn.Module):
    """A denoiser and, where it is trained along, its text encoder: what the loop optimises."""

    def __init__(self, denoiser: Denoiser, text_encoder: nn.Module | None = None):
        super().__init__()
        self.denoiser, self.text_encoder = denoiser, text_encoder

    def enable_gradient_checkpointing(self) -> None:
        """See the loop."""
        self.denoiser.enable_gradient_checkpointing()

    def forward(self, noisy: Tensor, timestep: Tensor, label: Tensor | None, text: Tensor | None, mask: Tensor | None):
        """``noisy`` ``(B, C, H, W)``, ``timestep`` ``(B,)``, ``label`` ``(B,)`` or None; ``text``: features
        ``(B, T, D)``, or token ids ``(B, T)`` for the text encoder here; ``mask`` ``(B, T)`` → the prediction."""
        if text is not None and self.text_encoder is not None:
            text = self.text_encoder(text, attention_mask=mask)[0]
        return self.denoiser(
            hidden_states=noisy,
            timestep=timestep * self.denoiser.config.timestep_scale,
            class_labels=label,
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]


@dataclass
class Split:
    """One split, ready to be read."""

    source: Source
    shape_of: np.ndarray
    reader: Any


class Parts:
    """All of a recipe but the loop. Raises UserError for whatever does not fit together."""

    def __init__(self, config: DenoiseConfig, device: torch.device, *, alone: bool = True):
        self.config, self.device, self.alone = config, device, alone
        wanted = self._wanted()
        self.by_text = wanted.get("caption_channels") is not None
        by_class = wanted.get("num_classes") is not None
        if self.by_text == by_class:
            raise ConfigError(
                "the denoiser must be conditioned either on classes (model.kwargs.num_classes) or on text "
                f"(model.kwargs.caption_channels); {config.model.checkpoint or config.model.name} has "
                f"{'both' if by_class else 'neither'}"
            )
        channels, predicts = wanted["in_channels"], wanted.get("prediction_type", "epsilon")
        learned = wanted.get("out_channels") not in (None, channels)
        check_terms(config.loss, predicts, learned)
        self.scheduler = create_scheduler(config.noise, predicts, learned)
        self.process = Process(self.scheduler, predicts, config.noise, device)
        self.vae = self._vae(channels)
        factor = vae_factor(self.vae)
        self.shapes = bucket_shapes(config.data, factor * self._size_multiple(wanted))
        self.channels = channels
        self._try(wanted)
        self._open(wanted)
        self.denoiser = self._denoiser(wanted, factor)

    def _wanted(self) -> dict[str, Any]:
        return denoiser_config(self.config.model)

    def _size_multiple(self, wanted: dict[str, Any]) -> int:
        """What sides of the denoiser's input must be divisible by."""
        return _class_of(self.config.model).size_multiple(wanted)

    def _vae(self, channels: int) -> nn.Module | None:
        data = self.config.data
        vae = load_vae(self.config.vae)
        if vae is None:
            if data.latents:
                raise ConfigError("data.latents needs vae.path: the autoencoder whose latents they are")
            if channels not in (1, 3):
                raise ConfigError(
                    f"the denoiser has in_channels={channels}: set vae.path to an autoencoder with that many latent "
                    "channels, or train on pixels with model.kwargs.in_channels=3, or 1 for grey images"
                )
            return None
        if vae.config.latent_channels != channels:
            raise ConfigError(
                f"vae.path={self.config.vae.path!r} has {vae.config.latent_channels} latent channels, and the denoiser "
                f"takes in_channels={channels}: set model.kwargs.in_channels={vae.config.latent_channels}"
            )
        if data.in_memory:
            raise ConfigError("data.in_memory is for pixels; with a VAE use data.latents=DIRECTORY")
        return vae.to(self.device)

    # ---- data

    def _open(self, wanted: dict[str, Any]) -> None:
        data = self.config.data
        self.cached = None
        if data.decoded and not data.in_memory:
            raise ConfigError(f"data.decoded={data.decoded!r} goes with data.in_memory=true, which is not set")
        if data.latents and (Path(data.latents) / data.train_split / "cache.json").is_file():
            self.cached = Path(data.latents)
            records = LatentCache(self.cached / data.train_split, hflip=0.0, seed=0).source
        else:
            records = open_source(data, data.train_split, captions=self.by_text)
        self.classes = records.classes
        if self.by_text:
            self.num_classes = None
            self._open_text(records, wanted["caption_channels"])
        else:
            if records.labels is None:
                raise ConfigError("data.latents holds no labels, and the denoiser is conditioned on classes")
            explicit = self.config.model.kwargs.get("num_classes") or (
                self.config.model.checkpoint and wanted["num_classes"]
            )
            self.num_classes = explicit or (len(self.classes) if self.classes else max(records.labels) + 1)
            self.tokenizer = self.text_encoder = None
            self.train_text = False
        self.about = self._about()
        self.text_cache = None
        self.train = self._split(data.train_split, records)
        self.val = self._split(data.val_split) if data.val_split else self.train

    def _open_text(self, records: Source, width: int) -> None:
        texts = (text for texts in records.captions for text in texts)
        self.tokenizer, self.text_encoder, self.train_text = create_text(self.config.text, width, texts)
        self.tokens = Tokens(self.tokenizer, self.config.text.max_length)
        if not self.train_text:
            self.text_encoder.requires_grad_(False).eval().to(self.device)

    def _about(self) -> dict[str, Any] | None:
        config = self.config
        if not config.data.latents:
            return None
        text = None
        if self.by_text and self.text_encoder is not None and not self.train_text:
            length = min(config.text.max_length, self.tokenizer.model_max_length)
            text = {"sha256": fingerprint(self.text_encoder), "max_length": length}
        return description(config.data, self.vae, config.vae.path, text)

    def _split(self, split: str, source: Source | None = None) -> Split:
        data, seed = self.config.data, self.config.train.seed
        if data.latents:
            folder = Path(data.latents) / split
            if not (folder / "cache.json").is_file():
                if not self.alone:
                    raise ConfigError(
                        f"data.latents: {folder} has not been written yet; write it with one process, by "
                        "`scanvas latents` with the same recipe, then train with many"
                    )
                self._write(folder, source or open_source(data, split, captions=self.by_text, classes=self.classes))
            check_cache(folder, self.about)
            cache = LatentCache(folder, hflip=data.hflip, seed=seed)
            if self.about["text"]:
                self.text_cache = [*(self.text_cache or []), TextCache(folder)]
            source, shape_of, reader = cache.source, cache.shape_of, WorkerReader(cache, data.workers)
        else:
            source = source or open_source(data, split, captions=self.by_text, classes=self.classes)
            shape_of = assign_shapes(source, self.shapes)
            items = PixelItems(
                source, shape_of, self.shapes, channels=self._pixel_channels(), hflip=data.hflip, seed=seed
            )
            if data.in_memory:
                place = decoded_place(data, split, items) if data.decoded else None
                reader = MemoryReader(items, self.device, workers=data.workers, place=place)
            else:
                reader = WorkerReader(items, data.workers)
        if not self.by_text:
            check_label_range(source, self.num_classes, split)
        return Split(source, shape_of, reader)

    def _pixel_channels(self) -> int:
        return self.channels if self.vae is None else self.vae.config.get("in_channels", 3)

    def _write(self, folder: Path, source: Source) -> None:
        data = self.config.data
        features = None
        if self.about["text"]:
            parts = [self.frozen_text([text]) for text in unique_captions(source)]
            features = {
                "features": torch.cat([text.half().cpu() for text, _ in parts]),
                "mask": torch.cat([mask.cpu() for _, mask in parts]),
            }
        write_cache(
            folder,
            source,
            assign_shapes(source, self.shapes),
            self.shapes,
            vae=self.vae,
            about=self.about,
            text_features=features,
            batch_size=self.config.vae.batch_size,
            workers=data.workers,
            on_error=data.on_error,
        )

    # ---- model

    def _denoiser(self, wanted: dict[str, Any], factor: int) -> Denoiser:
        model = self.config.model
        if model.checkpoint:
            return _load_denoiser(model)
        kwargs = dict(model.kwargs)
        shape = tuple(side // factor for side in self.shapes[len(self.shapes) // 2])
        kwargs.setdefault("sample_size", shape[0] if shape[0] == shape[1] else list(shape))
        kwargs["num_classes"] = self.num_classes
        return create_denoiser(model.name, **kwargs)

    def _try(self, wanted: dict[str, Any]) -> None:
        model = self.config.model
        if model.checkpoint:
            return
        try:
            with torch.device("meta"):
                _class_of(model)(**wanted)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model {model.name!r} cannot be built with {model.kwargs}: {error}") from error

    @torch.no_grad()
    def frozen_text(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Features and mask of captions by the frozen encoder, on the device."""
        ids, mask = (t.to(self.device) for t in self.tokens(captions))
        return self.text_encoder(ids, attention_mask=mask)[0], mask

    def pipeline(self, painter: Painter):
        """The diffusers pipeline around a trained model."""
        common = {"transformer": painter.denoiser, "scheduler": self.scheduler, "vae": self.vae}
        if not self.by_text:
            pipeline = LinearDiTClassPipeline(**common, id2label=dict(enumerate(self.classes or [])))
        else:
            from scanvas.diffusion.pipeline_text import LinearDiTTextToImagePipeline

            pipeline = LinearDiTTextToImagePipeline(
                tokenizer=self.tokenizer,
                text_encoder=painter.text_encoder or self.text_encoder,
                max_sequence_length=self.tokens.length,
                **common,
            )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def write_latents(config: DenoiseConfig) -> str:
    """Write the cache of a recipe, where it is not there yet; returns what to say."""
    if not config.data.latents:
        raise ConfigError("data.latents is not set; give the directory the latents are to be written to")
    parts = Parts(config, pick_device("cpu" if config.train.cpu else None))
    held_out = f", {len(parts.val.source)} held out" if config.data.val_split else ""
    return f"{len(parts.train.source)} images to train on{held_out}: {config.data.latents}"


def denoiser_config(model: DenoiserConfig) -> dict[str, Any]:
    """The keywords a recipe's denoiser is built with. Raises ConfigError for an unknown name or keyword."""
    if model.checkpoint:
        if model.kwargs:
            raise ConfigError("model.checkpoint brings its own config; leave out model.kwargs")
        return dict(LinearDiTTransformer2DModel.load_config(_denoiser_folder(model.checkpoint)))
    if model.name not in PRESETS:
        raise ConfigError(f"model.name={model.name!r} is no denoiser{nearest(model.name, PRESETS)}")
    allowed = [name for name in inspect.signature(_class_of(model).__init__).parameters if name != "self"]
    for key in model.kwargs:
        if key not in allowed:
            raise ConfigError(f"model.kwargs: the denoiser has no keyword {key!r}{nearest(key, allowed)}")
    return {**PRESETS[model.name], **model.kwargs}


def _class_of(model: DenoiserConfig) -> type[Denoiser]:
    """The class of a recipe's denoiser."""
    if not model.checkpoint:
        return denoiser_class(model.name)
    name = LinearDiTTransformer2DModel.load_config(_denoiser_folder(model.checkpoint)).get("_class_name")
    shaped_like_u = name == LinearUDiTTransformer2DModel.__name__
    return LinearUDiTTransformer2DModel if shaped_like_u else LinearDiTTransformer2DModel


def _denoiser_folder(path: str) -> str:
    folder = Path(path)
    folder = folder / "transformer" if (folder / "model_index.json").is_file() else folder
    if not (folder / "config.json").is_file():
        raise UserError(f"model.checkpoint={path!r} is neither the directory of a denoiser nor that of a pipeline")
    return str(folder)


def _load_denoiser(model: DenoiserConfig) -> Denoiser:
    try:
        return _class_of(model).from_pretrained(_denoiser_folder(model.checkpoint)).float()
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise UserError(f"model.checkpoint={model.checkpoint!r} cannot be loaded: {reason}") from error

"""The recipe of ``scanvas train denoise``: its sections and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .config import OptimConfig, RunConfig, TrainConfig


@dataclass
class DenoiserConfig:
    """What ``scanvas.create_denoiser`` is called with. Where ``kwargs`` does not say, ``sample_size`` and
    ``num_classes`` come from the data."""

    name: str = "dig_s_2"
    checkpoint: str | None = None  # directory of a denoiser or pipeline to start from, in place of `name`
    kwargs: dict[str, Any] = field(default_factory=dict)  # keywords of LinearDiTTransformer2DModel


@dataclass
class TextConfig:
    """Where text features come from, for a denoiser with ``caption_channels``."""

    pretrained: str | None = None  # directory or id of a transformers model or of a pipeline; None: a small CLIP anew
    train: bool | None = None  # train it along; None: only where it is new
    layers: int = 2  # of a new one, as wide as the denoiser's caption_channels
    heads: int = 4
    max_length: int = 77  # tokens of a caption


@dataclass
class VaeConfig:
    """The autoencoder of latent diffusion; without one the denoiser works on pixels in [-1, 1]."""

    path: str | None = None  # directory or id of an AutoencoderKL or AutoencoderDC, or of a pipeline that has one
    batch_size: int = 16  # images encoded at a time


@dataclass
class NoiseConfig:
    """The forward process: a diffusers scheduler, which is saved with the pipeline, and how times are drawn."""

    scheduler: str = "DDPMScheduler"
    kwargs: dict[str, Any] = field(default_factory=dict)
    times: Literal["uniform", "logit_normal"] = "uniform"
    logit_mean: float = 0.0  # of logit_normal (arXiv:2403.03206, section 3.1): larger means more noise
    logit_std: float = 1.0


@dataclass
class LossConfig:
    """Which functions of losses.py are summed, and the chance to hide the condition (arXiv:2207.12598)."""

    terms: dict[str, float] = field(default_factory=lambda: {"mse": 1.0})  # name → weight
    min_snr_gamma: float = 5.0  # of the term min_snr
    drop_condition: float = 0.1


@dataclass
class PaintDataConfig:
    """Images with classes or captions, in ``root``.

    ``folder``: a folder per split, with a folder per class or with ``metadata.jsonl`` (``file_name``, caption);
    ``hfds``: a Hugging Face dataset, parquet files among others; ``wds``: local webdataset shards.
    """

    format: Literal["folder", "hfds", "wds"] = "folder"
    root: str = ""
    train_split: str = "train"
    val_split: str | None = "val"  # None: the loss is measured on training images
    val_images: int = 10000  # at most so many, evenly spaced, each with the same noise at every evaluation
    image_key: str | None = None  # hfds: "image"; wds: "jpg;jpeg;png;webp"
    label_key: str | None = None  # hfds: "label"; wds: the .cls file, or a key of the .json file
    caption_key: str | None = None  # folder, hfds: "text"; wds: the .txt file, or a key of the .json file
    cache_dir: str | None = None  # hfds
    size: int = 256  # pixels; with buckets, the root of the area
    buckets: int = 0  # shapes of about that area, from 1:2 to 2:1, each image goes to; 0 crops to squares
    hflip: float = 0.5
    in_memory: bool = False  # decode all once and keep them on the device: for small images
    decoded: str | None = None  # directory where in_memory keeps them for the next run; written if they are not there
    latents: str | None = None  # directory of the cache of latents and text features; written if it is not there
    workers: int = 4
    on_error: Literal["skip", "stop"] = "skip"  # an image that cannot be read


@dataclass
class GridConfig:
    """The pictures painted at each evaluation, always from the same noise."""

    images: int = 16  # 0 for none
    prompts: list[str] = field(default_factory=list)  # empty: captions of the validation images, or classes in turn
    steps: int = 25
    guidance: float = 4.0
    seed: int = 0


@dataclass
class DenoiseConfig:
    """All keys of a denoiser's recipe."""

    model: DenoiserConfig = field(default_factory=DenoiserConfig)
    text: TextConfig = field(default_factory=TextConfig)
    vae: VaeConfig = field(default_factory=VaeConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: PaintDataConfig = field(default_factory=PaintDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    run: RunConfig = field(default_factory=RunConfig)

"""What tests of pipelines share."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusion_parts import denoiser, text_encoder, tokenizer, vae

from scanvas import LinearDiTClassPipeline, LinearDiTTextToImagePipeline

NAMES = {0: "tench, Tinca tinca", 1: "goldfish", 2: "cock"}
KINDS = ["class", "class, pixels", "text", "text, pixels"]


def components(kind):
    """Class-conditional with a learned variance and diffusion; text with flow matching."""
    pixels = "pixels" in kind
    channels = 3 if pixels else 4
    autoencoder = None if pixels else vae()
    if kind.startswith("class"):
        return {
            "transformer": denoiser(in_channels=channels, out_channels=2 * channels, num_classes=3),
            "scheduler": DDIMScheduler(),
            "vae": autoencoder,
        }
    transformer = denoiser(
        in_channels=channels, caption_channels=16, norm_type="ada_norm_single", prediction_type="flow_prediction"
    )
    return {
        "tokenizer": tokenizer(),
        "text_encoder": text_encoder(),
        "transformer": transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": autoencoder,
    }


def pipeline(kind, **changes):
    cls = LinearDiTClassPipeline if kind.startswith("class") else LinearDiTTextToImagePipeline
    if cls is LinearDiTClassPipeline:
        changes = {"id2label": NAMES, **changes}
    pipe = cls(**{**components(kind), **changes})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def inputs(kind, seed=0, **changes):
    condition = {"class_labels": [1]} if kind.startswith("class") else {"prompt": "a handwritten seven"}
    common = {"num_inference_steps": 2, "output_type": "pt", "guidance_scale": 3.0}
    return {**condition, **common, "generator": torch.Generator().manual_seed(seed), **changes}


def paint(pipe, kind, **changes):
    return pipe(**inputs(kind, **changes), return_dict=False)[0]


def close(a, b, atol=1e-4):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param

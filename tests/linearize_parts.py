"""What tests of linearize share beside its models: what a model was, a pipeline and what it paints."""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline
from linear_parts import build

from scanvas.diffusion.linear_attention_modules import LinearizedLayer


def snapshot(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(model, before):
    state = model.state_dict()
    return state.keys() == before.keys() and all(torch.equal(state[key], value) for key, value in before.items())


def linear_layers(model):
    return [m for m in model.modules() if isinstance(m, LinearizedLayer)]


def pipeline():
    model, _ = build("dit")
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",), sample_size=8,
    )  # fmt: skip
    pipe = DiTPipeline(transformer=model, vae=vae.eval(), scheduler=DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def paint(pipe):
    g = torch.Generator().manual_seed(0)
    return torch.from_numpy(
        pipe([1, 2], guidance_scale=1.0, num_inference_steps=2, generator=g, output_type="np").images
    )

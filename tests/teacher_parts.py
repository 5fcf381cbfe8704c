"""Pipelines of diffusers, small and with random weights, that take prompts."""

import diffusers
from linear_parts import dit, flux, pixart, sd35, unet
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from scanvas.train.text import word_tokenizer

CAPTIONS = {"apple": "a red apple", "boat": "a boat", "cup": "a cup of tea"}


def tokenizer():
    return word_tokenizer(CAPTIONS.values(), 8)


def clip(width, cls=CLIPTextModel, projection=4):
    ids = {f"{name}_token_id": getattr(tokenizer(), f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = CLIPTextConfig(
        vocab_size=32, hidden_size=width, intermediate_size=8, projection_dim=projection, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8, **ids,
    )  # fmt: skip
    return cls(config).eval()


def t5():
    return T5EncoderModel(T5Config(vocab_size=32, d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).eval()


def vae(channels, **config):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8), sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels, norm_num_groups=4, **config,
    )  # fmt: skip


def dit_pipeline():
    return diffusers.DiTPipeline(dit()[0], vae(4), diffusers.DDIMScheduler(), id2label={0: "apple"})


def pixart_pipeline():
    return diffusers.PixArtSigmaPipeline(
        tokenizer(), t5(), vae(4), pixart()[0], diffusers.DPMSolverMultistepScheduler()
    )


def sd_pipeline():
    return diffusers.StableDiffusionPipeline(
        vae(4),
        clip(12),
        tokenizer(),
        unet()[0],
        diffusers.PNDMScheduler(skip_prk_steps=True),
        None,
        None,
        requires_safety_checker=False,
    )


def sdxl_pipeline():
    told = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    told["projection_class_embeddings_input_dim"] = 6 * 8 + 4
    small = {name: value for name, value in unet()[0].config.items() if not name.startswith("_")}
    model = diffusers.UNet2DConditionModel(**{**small, **told})
    return diffusers.StableDiffusionXLPipeline(
        vae(4), clip(4), clip(8, CLIPTextModelWithProjection), tokenizer(), tokenizer(), model,
        diffusers.EulerDiscreteScheduler(), add_watermarker=False,
    )  # fmt: skip


def sd3_pipeline():
    encoders = [clip(4, CLIPTextModelWithProjection, 5) for _ in range(2)]
    return diffusers.StableDiffusion3Pipeline(
        sd35()[0], diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae(4), encoders[0], tokenizer(), encoders[1],
        tokenizer(), t5(), tokenizer(),
    )  # fmt: skip


def flux_pipeline():
    return diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae(1, shift_factor=0.1), clip(10),
        tokenizer(), t5(), tokenizer(), flux()[0],
    )  # fmt: skip


PIPELINES = {
    f.__name__: f for f in (dit_pipeline, pixart_pipeline, sd_pipeline, sdxl_pipeline, sd3_pipeline, flux_pipeline)
}

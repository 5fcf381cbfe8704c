"""What pipelines refuse, and what they warn of."""

import pipeline_parts
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusion_parts import denoiser, text_encoder, vae
from pipeline_parts import close, inputs, paint, pipeline

kind = pipeline_parts.kind


def test_long_prompts_are_cut_with_a_warning(caplog):
    pipe = pipeline("text", max_sequence_length=5)
    cut = paint(pipe, "text", prompt="a very long painting of seven")
    assert "truncated because the text encoder handles sequences up to 5 tokens" in caplog.text
    assert "of seven" in caplog.text
    caplog.clear()
    close(paint(pipe, "text", prompt="a very long painting"), cut)
    assert not caplog.text


class NoWork(torch.nn.Module):
    """Stands in for a network that must not be run."""

    def forward(self, *args, **kwargs):
        raise AssertionError("work was done before the arguments were checked")


BAD = [
    ("class", {"class_labels": 3}, ValueError, r"class_labels must be in 0…2, got 3"),
    ("class", {"class_labels": [0, -1]}, ValueError, r"got -1"),
    ("class", {"class_labels": 1.0}, TypeError, r"numbers or names, got float"),
    ("class", {"class_labels": "goldfisch"}, ValueError, r"no class 'goldfisch'; did you mean goldfish"),
    ("class", {"class_labels": []}, ValueError, "at least one image"),
    ("class", {"height": 18}, ValueError, r"height must be divisible by pixels of a patch = 4, got 18; .*16 and 20"),
    ("text", {"width": 3}, ValueError, r"width must be .*got 3; the nearest size is 4"),
    ("text", {"num_inference_steps": 0}, ValueError, r"num_inference_steps must be .*at least 1, got 0"),
    ("text", {"output_type": "jpg"}, ValueError, r"output_type must be one of pil, np, pt, latent; got 'jpg'"),
    ("text", {"guidance_rescale": 2.0}, ValueError, r"guidance_rescale must be in 0…1, got 2.0"),
    ("text", {"guidance_interval": (0.7, 0.2)}, ValueError, r"guidance_interval must be"),
    ("text", {"generator": [torch.Generator()] * 2}, ValueError, r"generator has 2 entries for 1 images"),
    ("text", {"latents": torch.zeros(1, 3, 8, 8)}, ValueError, r"latents must be \(1, 4, 8, 8\), got \(1, 3, 8, 8\)"),
    ("text", {"callback_on_step_end_tensor_inputs": ["x"]}, ValueError, r"must be among latents, .*got x"),
    ("text", {"prompt": None}, ValueError, "prompt is missing"),
    ("text", {"prompt": 7}, TypeError, "prompt must be a string or a list of strings, got 7"),
    ("text", {"prompt_embeds": torch.zeros(1, 4, 16)}, ValueError, "give prompt or prompt_embeds, not both"),
    ("text", {"prompt": None, "prompt_embeds": torch.zeros(1, 4, 9)}, ValueError, r"must be \(B, T, 16\)"),
    ("text", {"negative_prompt": ["a", "b"]}, ValueError, "negative_prompt has 2 entries for 1 prompts"),
    ("text", {"num_images_per_prompt": 0}, ValueError, "num_images_per_prompt must be at least 1"),
]


@pytest.mark.parametrize(("kind", "changes", "error", "message"), BAD, ids=[f"{k}-{next(iter(c))}" for k, c, *_ in BAD])
def test_bad_arguments(kind, changes, error, message):
    pipe = pipeline(kind)
    pipe.transformer.forward = NoWork().forward
    if kind == "text":
        pipe.text_encoder.forward = NoWork().forward
    with pytest.raises(error, match=message):
        pipe(**inputs(kind, **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("class", {"vae": vae(latent_channels=3)}, r"latents of AutoencoderKL have 3 channels, .*in_channels = 4"),
        (
            "class",
            {"scheduler": FlowMatchEulerDiscreteScheduler()},
            r"expects prediction_type 'flow_prediction', .*DDIM",
        ),
        (
            "class",
            {"scheduler": DDIMScheduler(prediction_type="sample")},
            r"'sample', the transformer predicts 'epsilon'",
        ),
        ("class", {"scheduler": DPMSolverMultistepScheduler(variance_type="learned")}, "variance_type=None"),
        ("text", {"scheduler": DDPMScheduler()}, r"use FlowMatchEulerDiscreteScheduler"),
        ("text", {"scheduler": DPMSolverMultistepScheduler(prediction_type="flow_prediction")}, "use_flow_sigmas=True"),
        ("text", {"transformer": denoiser(num_classes=3)}, "the transformer has no text"),
        ("class", {"transformer": denoiser(caption_channels=16)}, "must have classes"),
        ("text", {"text_encoder": text_encoder(8)}, r"features are 8 wide, .*caption_channels = 16"),
    ],
)
def test_components_that_do_not_fit(kind, changes, message):
    pipe = pipeline(kind, **changes)
    pipe.transformer.forward = NoWork().forward
    with pytest.raises(ValueError, match=message):
        pipe(**inputs(kind))
    fixed = DDPMScheduler(variance_type="learned_range")
    with pytest.raises(ValueError, match="the transformer predicts no variance"):
        pipeline("class", transformer=denoiser(num_classes=3), scheduler=fixed)(0)

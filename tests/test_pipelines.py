"""Both pipelines, on latents and on pixels: the points of diffusers' PipelineTesterMixin which need no accelerator, and
what the pipelines promise beyond them."""

import inspect

import pipeline_parts
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusion_parts import denoiser
from PIL import Image
from pipeline_parts import close, inputs, paint, pipeline

from scanvas.diffusion.sampling import guide

kind = pipeline_parts.kind


def test_outputs(kind):
    pipe = pipeline(kind)
    side = 8 * pipe.vae_scale_factor
    images = paint(pipe, kind)
    assert images.shape == (1, 3, side, side)
    assert 0 <= images.min() < images.max() <= 1
    close(pipe(**inputs(kind)).images, images)
    array = paint(pipe, kind, output_type="np")
    close(torch.from_numpy(array).permute(0, 3, 1, 2), images)
    (pil,) = paint(pipe, kind, output_type="pil")
    assert isinstance(pil, Image.Image)
    assert pil.size == (side, side)
    assert paint(pipe, kind, output_type="latent").shape == (1, pipe.transformer.config.in_channels, 8, 8)
    # any rectangle of whole patches
    factor = pipe.vae_scale_factor
    assert paint(pipe, kind, height=6 * factor, width=20 * factor).shape == (1, 3, 6 * factor, 20 * factor)
    parameters = inspect.signature(type(pipe).__call__).parameters
    for name in ("num_inference_steps", "num_images_per_prompt", "generator", "latents", "output_type", "return_dict"):
        assert parameters[name].default is not inspect.Parameter.empty


def test_grey_pixels():
    pipe = pipeline("class, pixels", transformer=denoiser(in_channels=1, num_classes=3))
    (image,) = paint(pipe, "class")
    assert image.shape == (1, 8, 8)
    assert paint(pipe, "class", output_type="pil")[0].mode == "L"


@pytest.mark.parametrize(
    "scheduler",
    [
        DDPMScheduler(),
        DDPMScheduler(variance_type="learned_range"),
        DDIMScheduler(prediction_type="v_prediction"),
        DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
        EulerDiscreteScheduler(prediction_type="sample"),
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    ],
    ids=lambda s: f"{type(s).__name__}-{s.config.get('prediction_type')}-{s.config.get('variance_type')}",
)
@pytest.mark.parametrize("family", ["class", "text"])
def test_schedulers_and_single_runs(family, scheduler):
    """Image i of a batch is the image of a single run with generator i, random steps or not."""
    prediction = scheduler.config.get("prediction_type") or "flow_prediction"
    learned = str(scheduler.config.get("variance_type")).startswith("learned")
    condition = {"num_classes": 3} if family == "class" else {"caption_channels": 16}
    transformer = denoiser(prediction_type=prediction, out_channels=8 if learned else 4, **condition)
    pipe = pipeline(family, transformer=transformer, scheduler=scheduler)
    many = {"class_labels": ["goldfish", 2]} if family == "class" else {"prompt": ["a seven", "a two"]}
    seeds = [torch.Generator().manual_seed(i) for i in range(4)]
    batch = paint(pipe, family, **many, num_images_per_prompt=2, generator=seeds, num_inference_steps=3)
    assert batch.shape[0] == 4
    assert batch.isfinite().all()
    for i in (0, 3):
        one = {key: value[i // 2] for key, value in many.items()}
        close(paint(pipe, family, **one, seed=i, num_inference_steps=3)[0], batch[i])
    assert (batch[0] - batch[1]).abs().max() > 1e-2


def test_batches(kind):
    pipe = pipeline(kind)
    key = "class_labels" if kind.startswith("class") else "prompt"
    value = inputs(kind)[key]
    for repeats in (1, 2):
        assert len(paint(pipe, kind, num_images_per_prompt=repeats)) == repeats
        assert len(paint(pipe, kind, **{key: [value, value]}, num_images_per_prompt=repeats)) == 2 * repeats
    noise = torch.randn(1, pipe.transformer.config.in_channels, 8, 8)
    close(paint(pipe, kind, latents=noise), paint(pipe, kind, latents=noise, seed=1))


def test_labels():
    pipe = pipeline("class")
    assert pipe.get_label_ids(["Tinca tinca", "tench, Tinca tinca", "cock"]) == [0, 0, 2]
    close(paint(pipe, "class", class_labels="goldfish"), paint(pipe, "class", class_labels=torch.tensor([1])))
    assert (paint(pipe, "class", class_labels=0) - paint(pipe, "class", class_labels=1)).abs().max() > 1e-3


def test_guide():
    c, u = torch.randn(2, 6, 4, 4), torch.randn(2, 6, 4, 4)
    close(guide(c, u, 1.0, 0.0, 6), c)
    guided = guide(c, u, 3.0, 0.0, 4)
    close(guided[:, :4], 3 * c[:, :4] - 2 * u[:, :4])
    close(guided[:, 4:], c[:, 4:])  # the variance is the conditional one
    rescaled = guide(c, u, 3.0, 1.0, 4)
    close(rescaled[:, :4].std((1, 2, 3)), c[:, :4].std((1, 2, 3)))
    half = guide(c, u, 3.0, 0.5, 4)
    close(half, (guided + rescaled) / 2)


def test_guidance(kind):
    pipe = pipeline(kind)
    plain, guided = paint(pipe, kind, guidance_scale=1.0), paint(pipe, kind)
    assert (plain - guided).abs().max() > 1e-3
    close(paint(pipe, kind, guidance_interval=(0.1, 0.2)), plain)
    close(paint(pipe, kind, guidance_interval=(0, 1)), guided)
    part = paint(pipe, kind, guidance_interval=(0.9, 1.0) if kind.startswith("text") else (0.4, 1.0))
    assert min((part - plain).abs().max(), (part - guided).abs().max()) > 1e-4
    assert (paint(pipe, kind, guidance_rescale=0.7) - guided).abs().max() > 1e-4
    if kind.startswith("text"):
        close(paint(pipe, kind, negative_prompt=""), guided)
        assert (paint(pipe, kind, negative_prompt="a two") - guided).abs().max() > 1e-4
        close(paint(pipe, kind, negative_prompt="a handwritten seven"), plain, atol=1e-3)


def test_callbacks(kind):
    pipe = pipeline(kind)
    seen = []

    def record(pipe, step, timestep, tensors):
        seen.append(set(tensors))
        if step == pipe.num_timesteps - 1:
            tensors["latents"] = torch.zeros_like(tensors["latents"])
        return tensors

    out = paint(
        pipe,
        kind,
        callback_on_step_end=record,
        callback_on_step_end_tensor_inputs=pipe._callback_tensor_inputs,
        output_type="latent",
    )
    assert out.abs().sum() == 0
    assert seen == [set(pipe._callback_tensor_inputs)] * 2

    def more_guidance(pipe, step, timestep, tensors):
        pipe._guidance_scale += 1.0
        return tensors

    paint(pipe, kind, guidance_scale=2.0, callback_on_step_end=more_guidance)
    assert pipe.guidance_scale == 2.0 + pipe.num_timesteps
    paint(pipe, kind, guidance_scale=0.5, callback_on_step_end=more_guidance)  # turned on on the way
    steps = []

    def stop(pipe, step, timestep, tensors):
        steps.append(step)
        pipe._interrupt = True
        return tensors

    paint(pipe, kind, callback_on_step_end=stop, num_inference_steps=5)
    assert steps == [0]


def test_progress_bar(kind, capsys):
    pipe = pipeline(kind)
    pipe.set_progress_bar_config(disable=False)
    paint(pipe, kind)
    assert "2/2" in capsys.readouterr().err

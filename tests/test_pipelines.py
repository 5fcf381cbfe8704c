"""Both pipelines, on latents and on pixels: the points of diffusers' PipelineTesterMixin which need no accelerator, and
what the pipelines promise beyond them."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.utils.source_code_parsing_utils import ReturnNameVisitor
from diffusion_parts import denoiser, text_encoder, tokenizer, vae
from PIL import Image

from scanvas import LinearDiTClassPipeline, LinearDiTTextToImagePipeline
from scanvas.diffusion.sampling import guide

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


def test_without_the_vae(kind, tmp_path):
    """An optional component set to None later, as diffusers' own test does: latents are then the image."""
    pipe = pipeline(kind)
    pipe.vae = None
    out = paint(pipe, kind)
    assert out.shape == (1, pipe.transformer.config.in_channels, 8, 8)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.vae is None
    close(paint(loaded, kind), out)


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


def test_dtypes(kind, tmp_path):
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path, torch_dtype={"transformer": torch.bfloat16, "default": torch.float32})
    assert loaded.transformer.dtype == torch.bfloat16
    loaded.set_progress_bar_config(disable=True)
    assert (paint(loaded, kind) - expected).abs().max() < 0.1
    pipe.to(dtype=torch.bfloat16)
    images = paint(pipe, kind)
    assert images.dtype == torch.float32
    assert (images - expected).abs().max() < 0.1


def test_saving(kind, tmp_path):
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    for folder, options in (("plain", {}), ("variant", {"variant": "fp16", "safe_serialization": False})):
        pipe.save_pretrained(tmp_path / folder, **options)
        loaded = type(pipe).from_pretrained(tmp_path / folder, variant=options.get("variant"))
        loaded.set_progress_bar_config(disable=True)
        close(paint(loaded, kind), expected)
        assert set(loaded.components) == set(pipe.components)
        files = {file.name for file in (tmp_path / folder / "transformer").iterdir()}
        weights = "diffusion_pytorch_model." + ("fp16.bin" if options else "safetensors")
        assert files == {"config.json", weights}
    with pytest.raises(ValueError, match="variant=fp16"):
        type(pipe).from_pretrained(tmp_path / "plain", variant="fp16")
    index = json.loads((tmp_path / "plain" / "model_index.json").read_text())
    assert index["transformer"] == ["scanvas", "LinearDiTTransformer2DModel"]
    assert index["vae"] == ([None, None] if "pixels" in kind else ["diffusers", "AutoencoderKL"])
    copied = type(pipe).from_pipe(pipe)
    copied.set_progress_bar_config(disable=True)
    assert copied.transformer is pipe.transformer
    assert copied.vae is pipe.vae
    close(paint(copied, kind), expected)


_FRESH = """
import sys, torch, scanvas
from diffusers import DiffusionPipeline
for folder, condition in {runs}:
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    images = pipe(condition, num_inference_steps=2, output_type="pt", guidance_scale=3.0,
                  generator=torch.Generator().manual_seed(0)).images
    torch.save(images, folder + "/images.pt")
"""


def test_fresh_process(tmp_path):
    """What is saved here is loaded by ``DiffusionPipeline`` elsewhere, names of classes included."""
    runs, expected = [], {}
    for kind, condition in (("class", "goldfish"), ("text, pixels", "a handwritten seven")):
        pipe = pipeline(kind)
        folder = str(tmp_path / kind)
        pipe.save_pretrained(folder)
        runs.append((folder, condition))
        expected[folder] = paint(pipe, kind)
    code = _FRESH.format(runs=runs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder, images in expected.items():
        close(torch.load(f"{folder}/images.pt", weights_only=True), images)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_lora(kind, tmp_path):
    peft = pytest.importorskip("peft")
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    with_lora = paint(pipe, kind)
    assert (with_lora - expected).abs().max() > 1e-3
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(tmp_path, layers, transformer_lora_adapter_metadata=config.to_dict())
    pipe.transformer.delete_adapters("default")

    pipe = pipeline(kind)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    assert pipe.get_active_adapters() == ["style"]
    close(paint(pipe, kind), with_lora)
    close(paint(pipe, kind, attention_kwargs={"scale": 0.0}), expected)
    pipe.fuse_lora()
    close(paint(pipe, kind), with_lora)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    close(paint(pipe, kind), expected)
    with pytest.raises(ValueError, match=r"not LoRA weights: a\.weight"):
        pipe.load_lora_weights({"a.weight": torch.zeros(1)})
    with pytest.raises(TypeError, match="unknown keyword wieght_name"):
        pipe.load_lora_weights(tmp_path, wieght_name="x")


def test_prompt_encoding_in_isolation():
    finder = ReturnNameVisitor()  # how diffusers' own test learns the names of the results
    finder.visit(finder.get_ast_tree(cls=LinearDiTTextToImagePipeline))
    full = pipeline("text")
    expected = paint(full, "text", negative_prompt="a two")
    empty = dict.fromkeys(("transformer", "scheduler", "vae"))
    text_only = LinearDiTTextToImagePipeline(**{**components("text"), **empty})
    names = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    assert tuple(finder.return_names) == names
    encoded = dict(zip(names, text_only.encode_prompt("a handwritten seven", negative_prompt="a two")))
    assert encoded["prompt_embeds"].shape == (1, 77, 16)
    assert encoded["prompt_attention_mask"].sum() == 4
    without = pipeline("text", tokenizer=None, text_encoder=None)
    close(paint(without, "text", prompt=None, **encoded), expected)
    with pytest.raises(ValueError, match="without text_encoder and tokenizer give prompt_embeds"):
        paint(without, "text")


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

"""Maps while a pipeline paints: words, steps, guidance; the grid, the animation, the command."""

import diffusion_parts as parts
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusionPipeline
from PIL import Image

import scanvas
from scanvas.train.maps.steps import word_tokens


def text_pipeline(**config):
    denoiser = parts.denoiser(caption_channels=16, in_channels=3, **config)
    scheduler = DDIMScheduler()
    if config.get("prediction_type") == "flow_prediction":
        scheduler = FlowMatchEulerDiscreteScheduler()
    pipeline = scanvas.LinearDiTTextToImagePipeline(
        tokenizer=parts.tokenizer(),
        text_encoder=parts.text_encoder(),
        transformer=denoiser,
        scheduler=scheduler,
        max_sequence_length=8,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(pipeline, prompt, **options):
    generator = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 3, "height": 8, "width": 12, "generator": generator, **options}
    return scanvas.attention_over_steps(pipeline, prompt, **options)


def test_words_get_their_tokens():
    assert word_tokens(parts.tokenizer(), "a handwritten seven, a two") == {
        "a": [0], "handwritten": [1], "seven": [2], "a (2)": [3], "two": [4],
    }  # fmt: skip


@pytest.mark.parametrize("prediction", ["epsilon", "flow_prediction"])
def test_maps_are_those_of_the_conditional_half(prediction):
    pipeline = text_pipeline(prediction_type=prediction)
    found = run(pipeline, "a handwritten seven", guidance_scale=4.0)
    assert found.rows == ["a", "handwritten", "seven"]
    assert found.maps.shape == (3, 3, 4, 6)
    assert len(found.pictures) == len(found.timesteps) == 3
    assert found.timesteps == sorted(found.timesteps, reverse=True)
    options = {"num_inference_steps": 3, "height": 8, "width": 12, "generator": torch.Generator().manual_seed(0)}
    plain = pipeline("a handwritten seven", guidance_scale=4.0, **options).images[0]
    assert found.image.tobytes() == plain.tobytes()  # looking changes nothing
    assert "step" not in vars(pipeline.scheduler)
    assert found.pictures[-1].tobytes() == plain.tobytes()  # the estimate of the last step is what was painted
    text, mask, *_ = pipeline.encode_prompt("a handwritten seven", False)
    first = torch.randn(1, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    inputs = {"timestep": torch.tensor([found.timesteps[0]]), "encoder_hidden_states": text}
    layers = scanvas.attention_maps(pipeline.transformer, first, kind="cross", encoder_attention_mask=mask, **inputs)
    expected = sum(layer.word_maps().mean(1)[0, :3] for layer in layers) / 2
    torch.testing.assert_close(found.maps[0], expected, atol=1e-5, rtol=1e-4)
    one = run(pipeline, "a handwritten seven", words=["seven"], layers=-1)
    assert one.rows == ["seven"]
    assert one.maps.shape == (3, 1, 4, 6)


def test_patches_and_classes():
    found = run(text_pipeline(), "a two", query=[(0, 0), (3, 5)])
    assert found.rows == ["patch 0, 0", "patch 3, 5"]
    assert found.signed
    denoiser = parts.denoiser(num_classes=3, in_channels=3)
    pipeline = scanvas.LinearDiTClassPipeline(transformer=denoiser, scheduler=DDIMScheduler(), vae=None)
    pipeline.set_progress_bar_config(disable=True)
    found = run(pipeline, [1, 2])
    assert found.rows == ["patch 2, 3"]
    assert found.maps.shape == (3, 1, 4, 6)
    torch.testing.assert_close(found.maps, run(pipeline, 1).maps, atol=1e-5, rtol=1e-4)  # the first of the images


def test_a_unet_of_diffusers_with_a_vae():
    import linear_parts
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet, _ = linear_parts.unet()
    text = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(parts.WORDS), hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip
    tokenizer = parts.tokenizer()
    tokenizer.model_max_length = 8
    pipeline = StableDiffusionPipeline(
        vae=parts.vae(), text_encoder=text, tokenizer=tokenizer, unet=unet, scheduler=DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    found = run(pipeline, "a seven", height=16, width=32, num_inference_steps=2)
    assert found.maps.shape == (2, 2, 8, 16)
    assert found.pictures[0].size == (32, 16)


def test_grid_and_animation(tmp_path):
    found = run(text_pipeline(), "a handwritten seven", num_inference_steps=5)
    found.grid(tmp_path / "grid.png", columns=4)
    grid = Image.open(tmp_path / "grid.png")
    assert grid.height > 4 * 112
    found.gif(tmp_path / "steps.gif", milliseconds=100)
    with Image.open(tmp_path / "steps.gif") as animation:
        assert animation.n_frames == 5
        assert animation.info["duration"] == 100


def test_the_command(tmp_path, command):
    text_pipeline().save_pretrained(tmp_path / "pipe")
    base = ("attention-map", "--pipeline", tmp_path / "pipe", "--steps", 2)
    code, out, error = command(
        *base, "--prompt", "a seven", "--out", tmp_path / "s.png", "--gif", tmp_path / "s.gif", "--words", "seven"
    )
    assert code == 0, error
    assert out.split() == [str(tmp_path / "s.gif"), str(tmp_path / "s.png")]
    assert Image.open(tmp_path / "s.png").size[0] > 2 * 112
    for options, message in (
        (("--prompt", "a seven", "--words", "cat"), "words: cat not in the prompt, which has a, seven"),
        (("--prompt", "a seven", "--html", "x.html"), "--html: only with an image"),
        (("--prompt", "a", "--label", "1"), "give either --prompt or --label"),
        (("--prompt", "a", "--query", "9,9"), "query must be within 4×4 patches, got (9, 9)"),
        (("--prompt", "a", "--gif", "x.mp4"), "--gif must end in .gif"),
    ):
        code, _, error = command(*base, *options)
        assert code == 1
        assert message in error
    code, _, error = command("attention-map")
    assert (code, "give either an image or --pipeline" in error) == (1, True)
    code, _, error = command("attention-map", "x.png", "--model", "test_vig", "--gif", "x.gif")
    assert "--gif: only with --pipeline" in error

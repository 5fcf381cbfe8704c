"""Sizes that a model was never trained at: linearised denoisers, memory, tiled decoding."""

import pytest
import torch
from linear_parts import SMALL_OPTIONS, build, run
from pipeline_parts import pipeline

import scanvas
from scanvas.diffusion.linear_swap import records_of
from scanvas.train.measure import peak_memory

NAMES = ["dit", "pixart", "sana", "sd3", "flux", "qwen", "auraflow", "wan", "unet", "vit", "denoiser"]


def enlarged(name, inputs):
    """Inputs of four to six times the tokens, another shape, and their grid."""
    g = torch.Generator().manual_seed(3)
    if name == "flux":
        ids = torch.zeros(10, 12, 3)
        ids[..., 1], ids[..., 2] = torch.arange(10)[:, None], torch.arange(12)
        return inputs | {"hidden_states": torch.randn(2, 120, 4, generator=g), "img_ids": ids.view(-1, 3)}, (10, 12)
    if name == "qwen":
        more = {"hidden_states": torch.randn(2, 120, 4, generator=g), "img_shapes": [[(1, 10, 12)]] * 2}
        return inputs | more, (10, 12)
    if name == "vit":
        return {"x": torch.randn(2, 3, 160, 96, generator=g)}, (10, 6)
    key = "sample" if name == "unet" else "hidden_states"
    shape = inputs[key].shape
    large = {"dit": (16, 16), "sd3": (16, 24), "auraflow": (16, 32), "unet": (32, 56)}.get(name, (20, 28))
    patches = {"unet": (16, 28), "sana": (20, 28)}.get(name, tuple(n // 2 for n in large))
    grid = (5, *patches) if len(shape) == 5 else patches
    frames = (5,) if len(shape) == 5 else ()
    return inputs | {key: torch.randn(*shape[:2], *frames, *large, generator=g)}, grid


@pytest.mark.parametrize("mixer", ["lit", "local", "t5"])
@pytest.mark.parametrize(
    "name", ["dit", "pixart", "sana", "sd3", "flux", "qwen", "auraflow", "wan", "unet", "vit", "denoiser"]
)
def test_sizes_never_seen(name, mixer):
    """Calibrated at one size, run at another: each layer sees the new grid, and the answer is that of the base model
    where nothing was taken from it."""
    model, inputs = build(name)
    if name == "vit":
        model.set_input_size(img_size=(160, 96))  # timm's way, before or after; positions are interpolated
    large, grid = enlarged(name, inputs)
    options = SMALL_OPTIONS.get(mixer, {})
    student, _ = scanvas.linearize(model, mixer, **options)
    out = run(student, large)
    assert out.shape == run(model, large).shape
    assert out.isfinite().all()
    if name != "denoiser":
        assert grid in {tuple(record.value) for record in records_of(student)}
    if mixer == "local" and name not in ("sana", "denoiser"):
        wide, _ = scanvas.linearize(model, "local", radius=99)
        torch.testing.assert_close(run(wide, large), run(model, large), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["lit", "hedgehog", "local", "t5", "hybrid"])
def test_memory_grows_with_the_tokens_not_with_their_square(mixer):
    model, inputs = build("denoiser")
    student, _ = scanvas.linearize(
        model, mixer, **SMALL_OPTIONS.get(mixer, {}) | ({"pool": 0} if mixer == "local" else {})
    )
    peaks = []
    for side in (32, 64):
        batch = inputs | {"hidden_states": torch.randn(2, 4, side, side)}
        peaks.append(peak_memory(lambda batch=batch: run(student, batch), torch.device("cpu")))
    assert peaks[1] / peaks[0] < 5  # of four times the tokens; a map of all pairs would be 16 times as large


def test_tiled_decoding():
    """Tiles of 16 pixels, seams blended: nearly the image in one piece, which comes back when it is switched off."""
    pipe = pipeline("class")
    assert pipe.vae.config.sample_size == 16

    def paint():
        generator = torch.Generator().manual_seed(0)
        kwargs = {"num_inference_steps": 2, "guidance_scale": 1.0, "generator": generator, "output_type": "pt"}
        return pipe(1, height=64, width=48, **kwargs).images

    whole = paint()
    pipe.enable_vae_tiling()
    seen = []
    pipe.vae.decoder.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape[-2:])))
    tiled = paint()
    assert tiled.shape == whole.shape == (1, 3, 64, 48)
    assert len(seen) > 1
    assert max(max(size) for size in seen) <= 16
    assert 0 < (tiled - whole).abs().mean() < 0.1
    pipe.disable_vae_tiling()
    assert torch.equal(paint(), whole)
    pipe.enable_vae_slicing()
    torch.testing.assert_close(paint(), whole)
    pipe.disable_vae_slicing()
    assert not pipe.vae.use_slicing
    for call in ("enable_vae_tiling", "disable_vae_tiling", "enable_vae_slicing", "disable_vae_slicing"):
        with pytest.raises(ValueError, match="paints pixels and has no vae"):
            getattr(pipeline("class, pixels"), call)()

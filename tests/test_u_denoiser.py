"""The U-shaped denoiser: sizes, groups of tokens, any mixer, merging, and what diffusers asks of a model."""

import math

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DiffusionPipeline, FirstBlockCacheConfig
from PIL import Image
from torch import nn

import scanvas
from scanvas import (
    LinearDiTClassPipeline,
    LinearDiTTransformer2DModel,
    LinearUDiTTransformer2DModel,
    create_denoiser,
    create_mixer,
    list_mixers,
)
from scanvas.diffusion.presets import PRESETS, denoiser_class
from scanvas.diffusion.u_block import RepConvMLP, UDiTBlock, from_groups, to_groups
from scanvas.train import denoise
from scanvas.train.config import load
from scanvas.train.denoise_config import DenoiseConfig

SMALL = {"sample_size": 16, "num_attention_heads": 2, "attention_head_dim": 8, "depths": (1, 1, 1, 1, 1)}
COSINE = {"cosine": True, "rope": True}


def build(**overrides):
    torch.manual_seed(0)
    return LinearUDiTTransformer2DModel(**{**SMALL, "num_classes": 5, "out_channels": 8, **overrides}).eval()


def inputs(batch=2, size=(16, 24), dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, *size, generator=g).to(dtype),
        "timestep": torch.tensor([3, 700][:batch]),
        "class_labels": torch.tensor([1, 4][:batch]),
    }


@pytest.mark.parametrize(("size", "millions"), [("s", 52.0), ("b", 204.4), ("l", 810.2)])
def test_published_sizes(size, millions):
    with torch.device("meta"):
        model = create_denoiser(f"udit_{size}", mlp="conv")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert len(model.transformer_blocks) == 2 * (2 + 5 + 8 + 5 + 2)
    assert denoiser_class(f"udit_{size}") is LinearUDiTTransformer2DModel


def test_groups():
    """Every other row and column, and back."""
    grid = (4, 6)
    tokens = torch.arange(24.0).view(1, 24, 1)
    groups = to_groups(tokens, grid)
    assert groups.shape == (4, 6, 1)
    for group in groups.flatten(1).long():
        assert len({(int(i) // 6 % 2, int(i) % 6 % 2) for i in group}) == 1
        assert (group.view(2, 3) % 6 == group.view(2, 3)[0] % 6).all()  # in raster order
    batch = torch.randn(3, 24, 5)
    assert torch.equal(from_groups(to_groups(batch, grid), grid), batch)
    assert torch.equal(to_groups(batch, grid)[4:8], to_groups(batch[1:2], grid))


@torch.no_grad()
def test_the_mixer_joins_tokens_of_one_group():
    torch.manual_seed(0)
    block, grid = UDiTBlock(16, 2, 32, mixer="softmax", mixer_kwargs=COSINE).double(), (4, 6)
    nn.init.zeros_(block.conv.weight)
    x = torch.randn(1, 24, 16, dtype=torch.float64)
    other = x.clone()
    other[:, 8] += 1  # row 1, column 2
    changed = (block.mix(x, grid) - block.mix(other, grid)).abs().sum(-1)[0].view(grid)
    assert (changed[1::2, 0::2] > 1e-6).all()
    changed[1::2, 0::2] = 0
    assert changed.max() == 0
    # as a loop over the groups
    for i in range(2):
        for j in range(2):
            part = x.view(1, 4, 6, 16)[:, i::2, j::2].flatten(1, 2)
            expected = block.mixer(part + block.conv.bias, (2, 3))
            got = block.mix(x, grid).view(1, 4, 6, 16)[:, i::2, j::2].flatten(1, 2)
            torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_cosine_attention():
    mixer = create_mixer("softmax", 24, 2, cosine=True, dtype=torch.float64)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    scores = mixer.attention_map(x, (2, 5)).log()
    q, k, _ = (z.transpose(1, 2) for z in mixer.qkv(x))
    cosine = F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    torch.testing.assert_close(scores - scores.mean(-1, keepdim=True), 10 * (cosine - cosine.mean(-1, keepdim=True)))
    mixer.q_norm.log_scale[1] = 9.0  # no more than 100
    scores = mixer.attention_map(x, (2, 5))[:, 1]
    torch.testing.assert_close(scores, (100 * cosine[:, 1]).softmax(-1))
    with pytest.raises(ValueError, match="leave out qk_norm"):
        create_mixer("softmax", 24, 2, cosine=True, qk_norm=True)
    model = LinearDiTTransformer2DModel(num_layers=1, mixer="softmax", mixer_kwargs={"cosine": True})
    with pytest.raises(ValueError, match=r"transformer_blocks.0.mixer: softmax of cosines .* can not be linearised"):
        scanvas.linearize(model, mixer="local")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_merging_changes_nothing(dtype):
    model = build(mlp="rep").to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.normal_(std=0.3)
    expected = model(**inputs(dtype=dtype)).sample
    assert isinstance(model.transformer_blocks[0].mlp, RepConvMLP)
    merged = model.merge_feed_forward()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(merged(**inputs(dtype=dtype)).sample, expected, atol=tolerance, rtol=tolerance)
    again = LinearUDiTTransformer2DModel.from_config(merged.config)
    assert not again.load_state_dict(merged.state_dict()).missing_keys


@pytest.mark.parametrize("mixer", list_mixers())
def test_every_mixer_trains_on_any_rectangle(mixer):
    model = build(mixer=mixer, attention_head_dim=4, depths=(1, 1, 2, 1, 1), mlp="rep").train()
    out = model(**inputs(size=(8, 24))).sample
    assert out.shape == (2, 8, 8, 24)
    out.square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    still = [n for n, p in model.named_parameters() if not p.grad.any()]
    assert all(n.endswith("class_embed.weight") for n in still), still


def test_conditions_reach_their_levels():
    model = build()
    x = inputs()
    expected = model(**x).sample
    for key, value in (("timestep", torch.tensor([3, 701])), ("class_labels", torch.tensor([1, 5]))):
        changed = model(**{**x, key: value}).sample
        torch.testing.assert_close(changed[0], expected[0], atol=1e-5, rtol=1e-5)
        assert (changed[1] - expected[1]).abs().max() > 1e-4
    none = {**x, "class_labels": None}
    torch.testing.assert_close(model(**none).sample, model(**{**x, "class_labels": torch.tensor([5, 5])}).sample)
    seen = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args[1].shape[1], args[2], out.shape[2])))
    model(**x)
    assert seen == [(16, (16, 24), 16), (32, (8, 12), 32), (64, (4, 6), 64), (32, (8, 12), 32), (32, (16, 24), 32)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"depths": (1, 1, 1)}, r"depths must be five positive numbers.*got \(1, 1, 1\)"),
        ({"sample_size": 20}, r"sample_size \(height\) must be divisible by .* = 8, got 20.*16 and 24"),
        ({"mlp": "gelu"}, "mlp must be one of conv, rep; got 'gelu'"),
        ({"out_channels": 5}, "out_channels must be in_channels = 4 or"),
        ({"mixer": "nope"}, "got 'nope'"),
    ],
)
def test_bad_configuration(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(**overrides)


def test_bad_inputs():
    model = build()
    with pytest.raises(ValueError, match=r"width of hidden_states must be divisible by .* = 8, got 20.*16 and 24"):
        model(**inputs(size=(16, 20)))
    with pytest.raises(ValueError, match="model without text"):
        model(**inputs(), encoder_hidden_states=torch.zeros(2, 3, 8))
    with pytest.raises(ValueError, match="FirstBlockCacheConfig skips blocks"):
        model.enable_cache(FirstBlockCacheConfig())


def test_training_features_and_saving(tmp_path):
    """Checkpointing, fused projections, saving, and a pipeline saved and loaded with it."""
    model = build(mixer_kwargs=COSINE)
    x = inputs()
    expected = model(**x).sample
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.enable_gradient_checkpointing()
    model.train()(**x).sample.square().sum().backward()
    for a, p in zip(gradients, model.parameters()):
        torch.testing.assert_close(p.grad, a, atol=1e-5, rtol=1e-4)
    model.eval().fuse_qkv_projections()
    torch.testing.assert_close(model(**x).sample, expected, atol=1e-5, rtol=1e-5)
    pipeline = LinearDiTClassPipeline(transformer=model, scheduler=DDIMScheduler(), id2label={1: "one"})
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(tmp_path)
    loaded = LinearDiTClassPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.transformer) is LinearUDiTTransformer2DModel
    assert loaded.transformer.config.mixer_kwargs == COSINE
    torch.testing.assert_close(loaded.transformer(**x).sample, expected, atol=1e-5, rtol=1e-5)


def test_preset_starts_at_zero_and_half_precision_is_near():
    small = {"depths": (1, 1, 1, 1, 1), "num_attention_heads": 2, "attention_head_dim": 8, "num_classes": 5}
    model = create_denoiser("udit_s", **small)
    assert model(**inputs()).sample.abs().max() == 0
    assert PRESETS["udit_s"]["mlp"] == "rep"
    assert math.isclose(model.transformer_blocks[0].mixer.q_norm.log_scale[0].item(), math.log(10), rel_tol=1e-6)
    model = build(mixer_kwargs=COSINE)
    expected = model(**inputs()).sample
    got = model.bfloat16()(**inputs(dtype=torch.bfloat16)).sample
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=0.1 * expected.abs().max().item(), rtol=0)


def test_training_by_recipe_and_painting(tmp_path):
    """``scanvas train denoise`` with a U: sizes of images are whole for it, and what it writes loads again."""
    for split in ("train", "val"):
        for name in ("blue", "red"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                Image.effect_noise((16, 24), 50 + 20 * i).convert("RGB").save(tmp_path / split / name / f"{i}.png")
    small = "{in_channels: 3, out_channels: null, depths: [1, 1, 1, 1, 1], num_attention_heads: 2}"
    settings = ["model.name=udit_s", f"model.kwargs={small}", f"data.root={tmp_path}", f"run.out={tmp_path / 'run'}"]
    settings += ["data.size=16", "data.workers=0", "train.batch_size=2", "train.epochs=1", "train.cpu=true"]
    settings += ["grid.images=0", "run.tensorboard=false", "run.plot=false"]
    denoise.train_denoiser(load(DenoiseConfig, None, settings))
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "final")
    assert type(pipeline.transformer) is LinearUDiTTransformer2DModel
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(["red"], height=16, width=24, num_inference_steps=2, output_type="pt").images
    assert image.shape == (1, 3, 16, 24)
    assert image.isfinite().all()
    more = [*settings[2:3], f"run.out={tmp_path / 'more'}", *settings[4:], f"model.checkpoint={tmp_path / 'run/final'}"]
    denoise.train_denoiser(load(DenoiseConfig, None, more))
    assert (tmp_path / "more" / "final" / "transformer" / "config.json").is_file()

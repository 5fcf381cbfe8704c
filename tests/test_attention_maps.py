"""``scanvas.attention_maps``: exact for every family, without ``N²`` memory; what is told about maps is true."""

import diffusion_parts
import linear_parts
import numpy as np
import pytest
import timm
import torch
from maps_parts import PIXELS, vig
from PIL import Image
from timm.utils import AttentionExtract
from torch import nn

import scanvas
from scanvas.backbones.mixers import MIXERS
from scanvas.backbones.scan import permutation
from scanvas.train.maps import effective_receptive_field
from scanvas.train.maps.statistics import decay_lengths, describe
from scanvas.train.measure import peak_memory

FAMILIES = [*linear_parts.TIMM, *linear_parts.DIFFUSERS]
MAPPED = [name for name, mixer in MIXERS.items() if mixer.has_map]
TEXT = {"sd3": slice(24, 29), "flux": slice(0, 5), "qwen": slice(0, 5), "auraflow": slice(0, 13)}


def family(name):
    model, inputs = linear_parts.build(name)
    return model, inputs.get("x", inputs)


@pytest.mark.parametrize("name", FAMILIES)
def test_map_times_values_is_what_the_model_computed(name):
    model, inputs = family(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    maps = scanvas.attention_maps(model, inputs, kind="all")
    assert maps.error() < 2e-6
    assert not maps.skipped
    if name in linear_parts.GRIDS:
        grids = {(layer.grid[0], layer.grid[1]) for layer in maps}
        assert {(g[0] * g[1], g[2]) if len(g) == 3 else g for g in linear_parts.GRIDS[name]} == grids
    for layer in maps:
        assert layer.rows().dtype == torch.float32
        if layer.kind == "self" and name in TEXT:
            assert layer.text == (TEXT[name] if "attn2" not in layer.name else None)
        if layer.kind == "cross":
            assert layer.word_maps().shape == (2, layer.heads, layer.keys, *layer.grid)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["vit_reg_qk_norm", "eva02"])
def test_softmax_maps_are_those_of_timm(name):
    model, x = family(name)
    maps = scanvas.attention_maps(model, x)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    extracted = AttentionExtract(model, method="hook")(x)
    assert len(extracted) == len(maps)
    for layer, expected in zip(maps, extracted.values()):
        torch.testing.assert_close(layer.rows(), expected, atol=1e-6, rtol=1e-5)
    unfused = scanvas.attention_maps(model, x)  # timm's slow form is recorded as well, and put back
    torch.testing.assert_close(unfused[0].rows(), maps[0].rows())
    assert not any(getattr(module, "fused_attn", False) for module in model.modules())


@pytest.mark.parametrize("target", ["lit", "linfusion", "hedgehog", "gla"])
@pytest.mark.parametrize("name", ["eva02", "sd35", "flux"])
def test_linearised_models_show_their_maps(name, target):
    model, inputs = family(name)
    student, _ = scanvas.linearize(model, target)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    teacher, maps = (scanvas.attention_maps(m, inputs) for m in (model, student))
    assert maps.error() < 5e-6
    for ours, theirs in zip(maps, teacher):
        assert (ours.name, ours.grid, ours.prefix, ours.text) == (theirs.name, theirs.grid, theirs.prefix, theirs.text)
        assert ours.map((1, 2)).shape[-2:] == ours.grid


@pytest.mark.parametrize("mixer", MAPPED)
def test_every_mixer_in_backbone_and_denoiser(mixer):
    model = vig(mixer, class_token=True, global_pool="token")
    maps = scanvas.attention_maps(model, PIXELS, query="class")
    assert maps.error() < 2e-6
    assert [layer.grid for layer in maps] == [(6, 10)] * 2
    torch.testing.assert_close(maps.maps()[1][:, :, 2, 3], maps[1].rows(torch.tensor([0]))[:, :, 0, 1 + 2 * 10 + 3])
    image = maps[0].rows()[:, :, 1:]
    torch.testing.assert_close(maps.maps("mean")[0].flatten(2), image.mean(2)[..., 1:], atol=1e-6, rtol=1e-5)
    denoiser = diffusion_parts.build(mixer, caption_channels=12, num_classes=5)
    maps = scanvas.attention_maps(denoiser, diffusion_parts.inputs(denoiser, grid=(8, 12)), kind="all")
    assert maps.error() < 5e-6
    assert {layer.kind for layer in maps} == {"self", "cross"}
    assert maps[1].word_maps()[..., 4:, :, :].abs().max() == 0  # the mask of the prompt


def test_a_mixer_without_a_map_shows_what_it_depends_on(tmp_path):
    model = vig("t5", class_token=True, global_pool="token")
    maps = scanvas.attention_maps(model, PIXELS, query=(2, 3))
    assert [layer.exact for layer in maps] == [False] * 2
    mixer, x = maps[1].mixer, maps[1].x
    expected = mixer.dependence(x, (6, 10), torch.tensor([1 + 2 * 10 + 3]), prefix=1)[:, :, 0, 1:]
    torch.testing.assert_close(maps.maps()[1].flatten(2), expected)
    assert 0 < describe(maps[1])["entropy"].min() <= describe(maps[1])["entropy"].max() < 1
    maps.plot(tmp_path / "map.png")
    assert "∂output/∂value" in maps.page(tmp_path / "map.html").read_text(encoding="utf-8")
    for told in (maps, maps[0]):
        with pytest.raises(ValueError, match="attention map that could be exact"):
            told.error()


def test_scan_orders_are_undone():
    """A denoiser walks columns, or from the end; the map tells of places in the image all the same."""
    kwargs = {"bidirectional": False, "local": False, "output": "swish"}
    model = diffusion_parts.build("gla", mixer_kwargs=kwargs)
    inputs = {"hidden_states": torch.randn(1, 4, 6, 10), "timestep": torch.tensor([5])}
    maps = scanvas.attention_maps(model, inputs)
    assert maps.error() < 5e-6
    for layer, order in zip(maps, model.config.scan_orders):
        visit = permutation(order, (3, 5))[1]  # when each place is visited
        assert layer.grid == (3, 5)
        seen = layer.rows()[0].abs().sum(0) > 0
        assert torch.equal(seen, visit[None, :] <= visit[:, None])


def test_directions_add_up_and_the_rows_are_those_asked_for():
    layer = scanvas.attention_maps(vig(), PIXELS)[1]
    both, forward, backward = (layer.map((2, 4), part) for part in ("both", "forward", "backward"))
    torch.testing.assert_close(forward + backward, both)
    assert not forward[..., 3:, :].any()
    assert not backward[..., :2, :].any()
    torch.testing.assert_close(layer.rows(torch.tensor([24, 3])), layer.rows()[:, :, [24, 3]])
    torch.testing.assert_close(layer.map(24), both)


def test_coarser_stages_show_the_patch_around_the_same_place():
    torch.manual_seed(0)
    model = timm.create_model("test_vig_h", num_classes=3).eval()
    maps = scanvas.attention_maps(model, torch.randn(1, 3, 64, 96), query=(9, 23))
    grids = [(16, 24), (8, 12), (4, 6), (4, 6), (2, 3)]
    assert [layer.grid for layer in maps] == grids
    assert [maps.query_for(layer) for layer in maps] == [(9, 23), (4, 11), (2, 5), (2, 5), (1, 2)]
    assert [tuple(m.shape[-2:]) for m in maps.maps()] == grids
    assert maps.error() < 5e-6


SQUARE = 4096 * 4096 * 2 * 4  # bytes of the full maps of two heads, for the 4,096 tokens of 1024² in patches of 16²


@pytest.mark.parametrize("mixer", [*MIXERS, "pooled"])
def test_4096_tokens_need_no_quadratic_memory(mixer):
    cfg = {"mixer_kwargs": {"radius": 4, "pool": 4}} if mixer == "pooled" else {}
    model = vig("local" if cfg else mixer, img_size=16, patch_size=4, depth=1, mlp_hidden=8, **cfg)
    layer = scanvas.attention_maps(model, torch.randn(1, 3, 256, 256))[0]
    assert peak_memory(lambda: layer.map((3, 60)), torch.device("cpu")) < 0.15 * SQUARE


@pytest.mark.parametrize("mixer", ["gla", "softmax"])
def test_the_mean_over_4096_tokens_needs_no_quadratic_memory(mixer):
    model = vig(mixer, img_size=16, patch_size=4, depth=1)
    x = torch.randn(1, 3, 256, 256)

    def look():
        assert scanvas.attention_maps(model, x)[0].map().shape == (1, 2, 64, 64)

    assert peak_memory(look, torch.device("cpu")) < 0.5 * SQUARE


def test_statistics_of_maps_that_are_known():
    """Softmax with equal scores: entropy 1, and the mean distance of a uniform row. Decays set by hand."""
    model = vig("softmax", depth=1)
    nn.init.zeros_(model.blocks[0].mixer.to_qkv.weight[:64])
    nn.init.zeros_(model.blocks[0].mixer.to_qkv.bias[:64])
    row = describe(scanvas.attention_maps(model, PIXELS)[0])
    place = torch.cartesian_prod(torch.arange(6.0), torch.arange(10.0))
    torch.testing.assert_close(row["entropy"], torch.ones(2))
    torch.testing.assert_close(row["distance"], torch.cdist(place, place).mean().expand(2))
    assert all(row[key] is None for key in ("decay_length", "local_share", "forward_share", "negative_share"))

    model = vig(depth=1)
    decay = model.blocks[0].mixer.decay_proj
    nn.init.zeros_(decay[1].weight)
    with torch.no_grad():  # log σ(x)/16 = −1/20 for one head, −1/5 for the other, in both directions
        lengths = torch.tensor([20.0, 5.0]).repeat_interleave(8).repeat(2)
        probability = (-16 / lengths).exp()
        decay[1].bias.copy_((probability / (1 - probability)).log())
    layer = scanvas.attention_maps(model, PIXELS)[0]
    torch.testing.assert_close(decay_lengths(layer), lengths.view(2, 2, 8))
    row = describe(layer)
    torch.testing.assert_close(row["decay_length"], torch.tensor([20.0, 5.0]))
    assert 0 < row["negative_share"].min() < row["negative_share"].max() < 1
    parts = layer.branches()
    norms = {name: part.unflatten(-1, (2, -1)).norm(dim=-1) for name, part in parts.items()}
    share = (norms["forward"] / (norms["forward"] + norms["backward"])).mean((0, 1))
    torch.testing.assert_close(row["forward_share"], share)
    with torch.no_grad():
        model.blocks[0].mixer.gate_proj.weight.zero_()
        model.blocks[0].mixer.gate_proj.bias.fill_(30.0)
    assert describe(scanvas.attention_maps(model, PIXELS)[0])["local_share"].max() < 1e-6
    assert "decay (tokens)" in str(scanvas.attention_maps(model, PIXELS))
    row = describe(scanvas.attention_maps(vig("sla", mixer_kwargs={"block": 8, "keep": 0.3}), PIXELS)[1])
    assert 0 < row["linear_share"].min() < 1  # which is no convolution's
    assert row["local_share"] is None


def test_effective_receptive_field():
    """Of a 3×3 convolution: nine pixels. Of a ViG: everything, the place itself most."""

    class Blur(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return (self.conv(x),)

    field = effective_receptive_field(Blur(), torch.randn(1, 3, 9, 11), at=(4, 5))
    expected = torch.zeros(9, 11, dtype=torch.bool)
    expected[3:6, 4:7] = True
    assert torch.equal(field.map > 0, expected)
    assert field.radius(1.0) == pytest.approx(2**0.5)
    assert field.area(1.0) == pytest.approx(9 / 99)
    field = effective_receptive_field(vig(), PIXELS, at=(3, 7), layer=-1)
    assert (field.map > 0).all()
    assert field.centre == (13.5, 29.5)
    row, column = divmod(int(field.map.argmax()), 40)
    assert abs(row - 13.5) < 4
    assert abs(column - 29.5) < 4


def test_photographs_keep_their_shape(tmp_path):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (43, 64, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    maps = scanvas.attention_maps(vig(patch_size=8), tmp_path / "photo.png", query=(0, 7))
    assert (maps.grid, maps.picture.size) == ((5, 8), (64, 40))
    assert scanvas.attention_maps(vig(patch_size=8), photo, size=32).grid == (3, 4)
    vit = timm.create_model("test_vit", img_size=64, dynamic_img_size=False, num_classes=3)
    assert scanvas.attention_maps(vit, photo).grid == (4, 4)  # takes nothing but its own size
    vit.set_input_size((48, 64))
    assert scanvas.attention_maps(vit, photo).grid == (3, 4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"layers": 2}, r"layers: 2 is none of the 2 that ran; give numbers from -2 to 1.*blocks\.0\.mixer"),
        ({"layers": "stages.*"}, "layers: 'stages"),
        ({"query": (6, 0)}, r"query must be \(row, column\) within 6×10 patches .* got \(6, 0\)"),
        ({"query": "class"}, "no class token; 'mean'"),
        ({"query": "median"}, "query must be .*'median'"),
        ({"kind": "other"}, "kind must be"),
        ({"kind": "cross"}, "no cross-attention of Vig"),
    ],
)
def test_what_is_not_there_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        scanvas.attention_maps(vig(), PIXELS, **kwargs)
    with pytest.raises(ValueError, match="part must be one of both, forward, backward"):
        scanvas.attention_maps(vig(), PIXELS)[0].rows(part="up")
    with pytest.raises(ValueError, match="sees no text"):
        scanvas.attention_maps(vig(), PIXELS)[0].word_maps()


def test_layers_by_number_name_and_pattern():
    model = vig()
    names = ["blocks.0.mixer", "blocks.1.mixer"]
    for layers, expected in ((-1, names[1:]), ([1, 0], names), ("blocks.*", names), ("blocks.0.mixer", names[:1])):
        assert [layer.name for layer in scanvas.attention_maps(model, PIXELS, layers)] == expected
    assert model.training is False
    model.train()
    scanvas.attention_maps(model, PIXELS)
    assert model.training

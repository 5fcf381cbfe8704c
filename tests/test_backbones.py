"""Everything timm asks of a model, for every architecture."""

import backbone_parts
import pytest
import timm
import torch
from backbone_parts import FORMS, PLAIN, PYRAMIDS, STAGED, WITH_BATCHNORM, build, images

import scanvas  # noqa: F401 - registers the models
from scanvas.backbones.mixers import MIXERS
from scanvas.backbones.vig import conv_of_blocks

name = backbone_parts.name


SIZES = {  # millions of parameters, to three digits
    "vig_tiny_patch16_224": 5.83,
    "vig_small_patch16_224": 22.6,
    "vig_base_patch16_224": 89.0,
    "vig_h_tiny_224": 28.6,
    "vig_h_small_224": 50.1,
    "vig_h_base_224": 88.9,
    # Published as 15, 26, 48 and 95; MAViT's to the digit.
    "ravlt_tiny": 14.9,
    "ravlt_small": 25.6,
    "ravlt_base": 48.2,
    "ravlt_large": 95.2,
    "mavit_tiny": 16.4,
    "mavit_small": 27.1,
    "mavit_base": 49.8,
    "mavit_large": 97.8,
    # Published as 8, 15, 26, 52 and 95. The first two do not fit the configurations published with them.
    "nalaformer_xtiny": 6.14,
    "nalaformer_tiny": 15.9,
    "nalaformer_small": 25.7,
    "nalaformer_base": 52.0,
    "nalaformer_large": 95.4,
    # Published as 25, 43 and 96; 24.39, 43.02 and 95.98 by the shapes of their layers.
    "mlla_tiny": 24.4,
    "mlla_small": 43.0,
    "mlla_base": 96.0,
    # Published as 6.1; FLatten's paper has no small model.
    "flatten_deit_tiny": 6.19,
    "flatten_deit_small": 23.0,
    # Published as 6.0, 22.7 and 87.2.
    "agent_deit_tiny": 6.02,
    "agent_deit_small": 22.6,
    "agent_deit_base": 87.2,
    # Published as 6.5, 16.7 and 23.8.
    "inline_deit_tiny": 6.48,
    "inline_deit_small": 16.7,
    "inline_deit_base": 23.8,
}


@pytest.mark.parametrize("name", SIZES)
def test_published_parameter_counts(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert float(f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g}") == SIZES[name]
    assert model.num_classes == 1000


def test_overrides_that_the_design_promises():
    model = timm.create_model(
        "vig_tiny_patch16_224", device="meta", embed_dim=96, depth=3, num_heads=6, mixer="softmax"
    )
    assert (model.embed_dim, len(model.blocks), model.blocks[0].mixer.num_heads) == (96, 3, 6)
    assert type(model.blocks[0].mixer) is MIXERS["softmax"]
    model = timm.create_model(
        "vig_h_tiny_224", device="meta", depths=[1, 2, 1, 1], embed_dim=32, num_heads=[1, 2, 4, 8], mixer="linear"
    )
    assert [len(stage.blocks) for stage in model.stages] == [1, 2, 1, 1]
    assert model.num_features == 256
    assert type(model.stages[2].blocks[0].mixer) is MIXERS["linear"]


def test_only_the_tiny_model_has_the_extra_activations():
    tiny, small = (timm.create_model(f"vig_{size}_patch16_224", device="meta") for size in ("tiny", "small"))
    assert (tiny.blocks[0].mixer.conv_act, tiny.blocks[0].mixer.out_act) == ("silu", "silu")
    assert (small.blocks[0].mixer.conv_act, small.blocks[0].mixer.out_act) == (None, None)


def test_pyramids_have_softmax_in_late_stages_or_nowhere():
    """Either form has the same parameters; another mixer takes the place of the linear one."""
    for name, mixer in zip(PYRAMIDS, ("rala", "mala", "nala")):
        parameters = []
        for all_linear, late in ((False, "gated_softmax"), (True, mixer)):
            model = timm.create_model(name, device="meta", all_linear=all_linear)
            mixers = [type(block.mixer) for stage in model.stages for block in stage.blocks]
            assert mixers == [MIXERS[mixer]] * 2 + [MIXERS[late]] * 3
            parameters.append({n: p.shape for n, p in model.named_parameters()})
        assert parameters[0] == parameters[1]
    two = {"depths": [1, 1], "embed_dims": [8, 16], "num_heads": [1, 2], "layer_scale": [1.0, 0.5]}
    model = timm.create_model("ravlt_tiny", device="meta", mixer="gla", mixer_kwargs={"rope": True}, **two)
    assert all(type(stage.blocks[0].mixer) is MIXERS["gla"] and stage.blocks[0].mixer.rope for stage in model.stages)
    with pytest.raises(ValueError, match=r"one entry a stage, got .*\(1, 1\), .*\(64, 128, 256, 512\)"):
        timm.create_model("ravlt_tiny", device="meta", depths=(1, 1))


def test_unknown_keywords_are_refused(name):
    with pytest.raises(TypeError, match="unheard_of"):
        timm.create_model(name, unheard_of=1)
    with pytest.raises(TypeError, match="unheard_of"):
        timm.create_model(name, mixer_kwargs={"unheard_of": 1})
    if name in PYRAMIDS:
        with pytest.raises(TypeError, match="unheard_of"):
            timm.create_model(name, softmax_kwargs={"unheard_of": 1})
    with pytest.raises(ValueError, match=r"gla.*softmax.*got 'nope'"):
        timm.create_model(name, mixer="nope")


@pytest.mark.parametrize("size", [(64, 96), (40, 56), (8, 120)])
@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_any_rectangle(name, kwargs, size):
    if name in STAGED:
        size = (size[0] - 3, size[1] - 1)  # nor need it be divisible by anything
    model = build(name, **kwargs)
    x = images(2, 3, *size)
    with torch.no_grad():
        out = model(x)
        turned = model(x.flip(0))
    assert out.shape == (2, 7)
    assert out.isfinite().all()
    torch.testing.assert_close(turned, out.flip(0), atol=1e-5, rtol=1e-5)  # images of a batch do not mix
    assert (out[0] - out[1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((65, 96), r"height.*8, got 65 .*64 and 72"),
        ((64, 100), r"width.*got 100.*96 and 104"),
        ((4, 96), r"height.*got 4 .*nearest size is 8"),
    ],
)
@pytest.mark.parametrize("name", PLAIN)
def test_indivisible_size_names_the_nearest(name, size, message):
    model = build(name)
    with pytest.raises(ValueError, match=message):
        model(images(1, 3, *size))
    with pytest.raises(ValueError, match=message):
        build(name, img_size=size)
    with pytest.raises(ValueError, match=message):
        model.set_input_size(size)
    assert model.grid_size == [8, 12]  # a refused size changes nothing
    model(images(1, 3, 64, 96))


def test_dynamic_img_size_off_refuses_another_size_and_changes_nothing_at_its_own():
    dynamic, fixed = build("test_vig"), build("test_vig", dynamic_img_size=False)
    x = images(1, 3, 64, 96)
    torch.testing.assert_close(dynamic(x), fixed(x), atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"8×12 patches, got 12×8.*set_input_size.*dynamic_img_size=True"):
        fixed(x.transpose(2, 3))


@pytest.mark.parametrize("size", [(96, 64), (64, 64), (128, 48)])
@pytest.mark.parametrize("name", PLAIN)
def test_set_input_size_is_what_dynamic_size_does(name, size):
    """From rectangle to rectangle, also to one of as many places."""
    model = build(name)
    x = images(1, 3, *size)
    expected = model(x)
    model.set_input_size(size)
    assert model.grid_size == [size[0] // 8, size[1] // 8]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    model.dynamic_img_size = False
    model(x)


def test_position_embeddings_are_resampled_per_axis():
    """A ramp along one axis stays one, which it would not if height and width were mistaken for each other."""
    model = build("test_vig")
    with torch.no_grad():
        model.pos_embed.copy_(torch.linspace(-1, 1, 12).repeat(8)[None, :, None].expand_as(model.pos_embed))
    model.set_input_size((96, 192))
    grid = model.pos_embed.detach().view(12, 24, -1)
    assert grid.std(dim=0).max() < 1e-6
    assert (grid.diff(dim=1)[:, 3:-3] > 0.03).all()


def test_frozen_stays_frozen(name):
    model = build(name).requires_grad_(False)
    model.set_input_size((96, 128))
    model.reset_classifier(0)
    assert not [n for n, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("kwargs", [{}, {"mixer": "softmax", "mixer_kwargs": {"qk_norm": True}}, {"mixer": "linear"}])
def test_meta_device_and_dtype_reach_every_tensor(name, kwargs):
    kwargs = kwargs if name in STAGED else {**kwargs, "class_token": True}
    model = build(name, device="meta", dtype=torch.bfloat16, **kwargs)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    counts = {torch.long} if name in WITH_BATCHNORM else set()  # of batches, in BatchNorm
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16} | counts
    assert {t.device.type for t in tensors.values()} == {"meta"}
    model.set_input_size((32, 32))
    model.reset_classifier(9)
    assert not [n for n, t in model.named_parameters() if t.device.type != "meta" or t.dtype != torch.bfloat16]
    assert model(torch.empty(2, 3, 32, 64, device="meta", dtype=torch.bfloat16)).shape == (2, 9)


def test_meta_model_is_filled_by_init_weights_or_a_state_dict(name):
    kwargs = {"num_classes": 500} if name in STAGED else {"class_token": True, "num_classes": 500}
    torch.manual_seed(0)
    reference = timm.create_model(name, **kwargs)
    model = timm.create_model(name, device="meta", **kwargs).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    for (n, a), b in zip(model.named_parameters(), reference.parameters()):
        assert abs(a.mean() - b.mean()) < 0.2 * b.std() + 1e-3 or a.numel() < 99, n
        rtol = 0.3 if a.numel() > 99 else 0.6  # five times the deviation of such a root mean square
        torch.testing.assert_close(a.square().mean().sqrt(), b.square().mean().sqrt(), rtol=rtol, atol=1e-3, msg=n)
    model = timm.create_model(name, device="meta", **kwargs)
    model.load_state_dict(reference.state_dict(), assign=True)
    x = images(1, 3, 64, 64)
    torch.testing.assert_close(model.eval()(x), reference.eval()(x), atol=0, rtol=0)


@pytest.mark.parametrize(("stride", "channels", "size"), [(8, 3, (48, 32)), (2, 1, (6, 4)), (7, 4, (28, 14))])
def test_convolution_of_blocks_is_the_convolution(stride, channels, size):
    torch.manual_seed(0)
    x = torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)
    conv = torch.nn.Conv2d(channels, 6, stride + 1, stride=stride, padding=1, dtype=torch.float64)
    inputs = (x, conv.weight, conv.bias)
    expected, actual = conv(x), conv_of_blocks(*inputs, stride)
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    for got, value in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (actual, expected))):
        torch.testing.assert_close(got, value)

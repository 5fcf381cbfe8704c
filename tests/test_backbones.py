"""Everything timm asks of a model, for every architecture."""

import copy
import json

import pytest
import timm
import torch
from mixer_cases import TYPICAL
from timm.models._manipulate import group_parameters
from timm.optim import param_groups_layer_decay
from torch import nn

import scanvas  # noqa: F401 - registers the models
from scanvas.backbones.mixers import MIXERS

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
PYRAMIDS = ["test_ravlt", "test_mavit", "test_nalaformer"]
WITH_BATCHNORM = [*PYRAMIDS, "test_mlla"]
STAGED = ["test_vig_h", *WITH_BATCHNORM]
PLAIN = ["test_vig", "test_agent_deit"]
SMALL = [*PLAIN, *STAGED]
FORMS = [
    *[(name, {"mixer": mixer}) for name in ("test_vig", "test_vig_h") for mixer in TYPICAL],
    ("test_ravlt", {}),
    ("test_mavit", {"all_linear": True}),
    ("test_nalaformer", {}),
    ("test_mlla", {}),
    ("test_agent_deit", {}),
]
"""Models with the mixers that are tried in them; a paper's own architecture with its own."""
HALF = {torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def build(name, **kwargs):
    """A model for images of 64×96 with random weights that let every part matter."""
    torch.manual_seed(0)
    size = {} if name in STAGED else {"patch_size": 8, "depth": 3}
    model = timm.create_model(name, **{"img_size": (64, 96), "num_classes": 7, **size, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.device.type != "meta":
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name in WITH_BATCHNORM and parameter.device.type != "meta":
                # As they start, weights of 0.02 rely on BatchNorm to keep what passes their convolutions alive.
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def images(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=SMALL)
def name(request):
    return request.param


# Registration and sizes


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


# Sizes of images


@pytest.mark.parametrize("size", [(64, 96), (96, 64), (40, 56), (8, 120)])
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


# Features


@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_forward_intermediates_equal_hooks(name, kwargs):
    model = build(name, **kwargs)
    layers = model.blocks if name not in STAGED else model.stages
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(out))
    x = images(2, 3, 40, 72)
    with torch.no_grad():
        final, got = model.forward_intermediates(x)
        expected = list(seen)
        seen.clear()
        early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    assert len(seen) == 2  # the rest was not computed
    prefix = model.num_prefix_tokens
    if name not in STAGED:
        expected = [y[:, prefix:].transpose(1, 2).unflatten(2, (5, 9)) for y in expected]
    assert len(got) == len(layers)
    for a, b, info in zip(got, expected, model.feature_info):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
        assert a.is_contiguous()
        sides = [-(-side // info["reduction"]) for side in (40, 72)]
        assert a.shape == (2, info["num_chs"], *sides)
    for a, b in zip(early, expected):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    torch.testing.assert_close(final, model.forward_features(x))
    last = model.forward_intermediates(x, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True)
    normed = final if name in STAGED else final[:, prefix:].transpose(1, 2).unflatten(2, (5, 9))
    torch.testing.assert_close(last[0], normed)


@pytest.mark.parametrize("name", PLAIN)
def test_forward_intermediates_forms_of_the_plain_models(name):
    model = build(name, class_token=True)
    x = images(1, 3, 40, 72)
    maps = model.forward_intermediates(x, indices=2, intermediates_only=True)
    tokens = model.forward_intermediates(x, indices=2, output_fmt="NLC", intermediates_only=True)
    pairs = model.forward_intermediates(x, indices=2, return_prefix_tokens=True, intermediates_only=True)
    named = model.forward_intermediates(x, indices=2, return_prefix_tokens=True, output_dict=True)
    for i in range(2):
        torch.testing.assert_close(maps[i].flatten(2).transpose(1, 2), tokens[i])
        torch.testing.assert_close(pairs[i][0], maps[i])
        assert pairs[i][1].shape == (1, 1, 64)
        torch.testing.assert_close(named["image_intermediates"][i], maps[i])
        torch.testing.assert_close(named["image_intermediates_prefix"][i], pairs[i][1])
    torch.testing.assert_close(named["image_features"], model.forward_features(x))


@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_features_only(name, kwargs):
    whole, indices = build(name, **kwargs).double(), (0, 2)
    model = build(name, **kwargs, features_only=True, out_indices=indices).double()
    # timm names what lies in a Sequential by its place in it; MLLA's stem is none.
    flat = ("stages.",) if name == "test_mlla" else ("stages.", "stem.")
    state = whole.state_dict() if name in STAGED else {f"model.{k}": v for k, v in whole.state_dict().items()}
    for part in flat:
        state = {k.replace(part, part[:-1] + "_", 1) if k.startswith(part) else k: v for k, v in state.items()}
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert not missing
    x = images(2, 3, 64, 80, dtype=torch.float64)
    expected = whole.forward_intermediates(x, indices=list(indices), intermediates_only=True)
    got = model(x)
    assert [y.shape[1] for y in got] == model.feature_info.channels()
    assert [80 // y.shape[3] for y in got] == model.feature_info.reduction()
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)  # where weights lie in memory changes rounding


@pytest.mark.parametrize(("prune_norm", "prune_head"), [(False, True), (True, True), (False, False)])
def test_pruning_keeps_the_features(name, prune_norm, prune_head):
    model = build(name)
    x = images(1, 3, 64, 64)
    expected = model.forward_intermediates(x, indices=[1], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([1], prune_norm=prune_norm, prune_head=prune_head) == [1]
    assert len(model.blocks if name not in STAGED else model.stages) == 2
    torch.testing.assert_close(model.forward_intermediates(x, indices=[1], intermediates_only=True)[0], expected)
    assert model(x).isfinite().all()
    assert model.num_features == expected.shape[1]


# Heads


def test_reset_classifier(name):
    model = build(name)
    x = images(2, 3, 64, 64)
    features = model.forward_features(x)
    pooled = model.forward_head(features, pre_logits=True)
    dims = (1,) if name not in STAGED else (2, 3)
    torch.testing.assert_close(pooled, features[:, 0] if model.num_prefix_tokens else features.mean(dims))
    torch.testing.assert_close(model(x), model.get_classifier()(pooled))
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), features)
    model.reset_classifier(5, "max")
    assert model(x).shape == (2, 5)
    assert model.num_classes == 5
    assert not any(module.training for module in model.modules())  # a new head is in the mode of the model
    model.reset_classifier(3)
    image = features if name in STAGED else features[:, model.num_prefix_tokens :]
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), image.amax(dims))
    if name not in STAGED:
        model = build(name, class_token=False, global_pool="avg")
        with pytest.raises(ValueError, match="global_pool='token' needs class_token=True"):
            model.reset_classifier(3, "token")
        with pytest.raises(ValueError, match=r"global_pool must be one of.*got 'median'"):
            build(name, global_pool="median")
    else:
        model.reset_classifier(3, "catavgmax")
        assert (
            model.head_hidden_size == model.get_classifier().in_features == model.forward_head(features, True).shape[1]
        )


# Training


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *[(name, {"mixer": mixer}) for name in ("test_vig", "test_vig_h") for mixer in MIXERS],
        *[form for form in FORMS if form[0] not in ("test_vig", "test_vig_h")],
    ],
)
def test_every_parameter_gets_a_gradient(name, kwargs):
    model = build(name, mixer_kwargs={"fused_projections": False}, **kwargs).train()
    model(images(2, 3, 64, 96)).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not [n for n, p in model.named_parameters() if not p.grad.any()]


@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_checkpointing_gives_equal_gradients(name, kwargs):
    gradients, saved = [], []
    x = images(2, 3, 64, 96)
    for enable in (False, True):
        model = build(name, **kwargs).train()
        model.set_grad_checkpointing(enable)
        size = 0

        def pack(tensor):
            nonlocal size
            size += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).square().sum()
        saved.append(size)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    # It does save memory. MLLA's stem and merging are not done twice: their BatchNorm would count the batch twice.
    assert saved[1] < saved[0] / (2 if name == "test_mlla" else 3)
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kwargs", [{}, {"class_token": True, "rope": True}])
def test_train_equals_eval(name, kwargs):
    """But for BatchNorm, which pyramids and MLLA have outside of their blocks."""
    if name in STAGED:
        kwargs = {"mixer_kwargs": {"rope": "rope" in kwargs}}
    elif name == "test_agent_deit":
        kwargs = {"class_token": "class_token" in kwargs, "global_pool": "avg"}
    model = build(name, **kwargs)
    x = images(2, 3, 40, 72)
    expected = model(x)
    model.train()
    norms = [module.eval() for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == (8 if name in WITH_BATCHNORM else 0)
    torch.testing.assert_close(model(x), expected, atol=0, rtol=0)


@pytest.mark.parametrize("rate", ["drop_rate", "drop_path_rate", "proj_drop_rate", "pos_drop_rate"])
def test_drop_rates_act_in_training_only(name, rate):
    if name in STAGED and rate == "pos_drop_rate":
        with pytest.raises(TypeError, match=rate):
            build(name, **{rate: 0.5})
        return
    model, plain = build(name, **{rate: 0.5}), build(name)
    x = images(4, 3, 64, 64)
    torch.testing.assert_close(model(x), plain(x))
    model.train()
    assert (model(x) - model(x)).abs().max() > 1e-4


@pytest.mark.parametrize("coarse", [False, True])
def test_layer_decay_groups(name, coarse):
    model = build(name, **({"class_token": True} if name not in STAGED else {}))
    names = {n for n, _ in model.named_parameters()}
    groups = group_parameters(model, model.group_matcher(coarse=coarse))
    members = [n for group in groups.values() for n in group]
    assert sorted(members) == sorted(names)
    layers = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    stem = {n for n in names if n.startswith(("patch_embed", "pos_embed", "cls_token", "stem"))}
    assert {n for n in names if layers[n] == 0} == stem
    first, last = ("blocks.0.", "blocks.2.") if name not in STAGED else ("stages.0.", "stages.3.")
    assert max(layers[n] for n in names if n.startswith(first)) < min(layers[n] for n in names if n.startswith(last))
    head = model.default_cfg["classifier"]
    assert layers[f"{head}.weight"] == max(layers.values())
    scales = [g["lr_scale"] for g in param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)]
    assert len(set(scales)) > 4
    decayed = {
        id(p)
        for g in param_groups_layer_decay(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
        if g["weight_decay"]
        for p in g["params"]
    }
    for parameter_name, p in model.named_parameters():
        assert (id(p) in decayed) == (p.ndim > 1 and parameter_name not in model.no_weight_decay()), parameter_name


# Devices and dtypes


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


@pytest.mark.parametrize("dtype", list(HALF))
@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_half_precision_is_near_float32(name, kwargs, dtype):
    model = build(name, **kwargs)
    x = images(2, 3, 64, 96)
    with torch.no_grad():
        expected = model(x)
        got = copy.deepcopy(model).to(dtype)(x.to(dtype))
        again = model.to(dtype).float()(x)
    assert got.dtype == dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(got.float(), expected, atol=HALF[dtype] * scale, rtol=0)
    torch.testing.assert_close(again, expected, atol=HALF[dtype] * scale, rtol=0)  # no dtype was remembered


@pytest.mark.parametrize("half_parameters", [False, True])
@pytest.mark.parametrize("autocast", list(HALF))
@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_autocast_with_backward(name, kwargs, autocast, half_parameters):
    model = build(name, **kwargs)
    x = images(2, 3, 64, 96)
    expected = model(x)
    expected.square().sum().backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    parameters = autocast if half_parameters else torch.float32
    model.to(parameters)
    with torch.autocast("cpu", autocast):
        got = model(x.to(parameters))
    got.float().square().sum().backward()
    torch.testing.assert_close(got.float(), expected, atol=HALF[autocast] * expected.abs().max().item(), rtol=0)
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    assert nn.functional.cosine_similarity(gradient, reference, dim=0) > 0.97


# Saving


SAVED = [
    {},
    {"mixer": "softmax", "mixer_kwargs": {"qk_norm": True, "fused_projections": False}},
    {"mixer": "gla", "mixer_kwargs": {"conv_act": True, "expand_k": 1.0}},
]


@pytest.mark.parametrize("kwargs", SAVED)
def test_save_for_hf_round_trip(name, kwargs, tmp_path):
    kwargs = dict(kwargs)
    if name == "test_vig" and not kwargs:
        kwargs = {"class_token": True, "rope": True, "global_pool": "token"}
    if name in ("test_vig_h", "test_mlla"):
        kwargs |= {"depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8), "embed_dim": 16}
    if name in PYRAMIDS:
        if "conv_act" in str(kwargs):
            kwargs = {"all_linear": True, "mixer_kwargs": {"rope": False}, "softmax_kwargs": {"kernel_size": 3}}
        kwargs |= {"depths": (1, 1, 1, 1), "layer_scale": (1.0, 1e-2, 1.0, 1.0), "mlp_ratio": 2.5}
    model = build(name, **kwargs)
    model.set_input_size((72, 104))
    model.reset_classifier(4)
    timm.models.save_for_hf(model, str(tmp_path), model_config={"label_names": list("abcd")}, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == name
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(2, 3, 72, 104)
    torch.testing.assert_close(loaded(x), model(x), atol=0, rtol=0)
    # Fine-tuned with other classes at another size.
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=6, img_size=(48, 80)).eval()
    model.set_input_size((48, 80))
    x = images(2, 3, 48, 80)
    torch.testing.assert_close(other.forward_features(x), model.forward_features(x), atol=1e-6, rtol=1e-6)
    assert other(x).shape == (2, 6)


# Depth


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_activations_do_not_double_per_layer(mixer):
    torch.manual_seed(0)
    model = timm.create_model("test_vig", img_size=64, depth=16, mixer=mixer).eval()
    with torch.no_grad():
        outputs = model.forward_intermediates(images(2, 3, 64, 64), intermediates_only=True)
        rms = torch.stack([y.square().mean().sqrt() for y in outputs])
    assert rms[-1] < 4 * rms[0]
    assert (rms[1:] < 1.5 * rms[:-1]).all()


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_a_residual_branch_adds_no_more_than_its_norm_lets_it(mixer):
    """With projections that keep the size of what they are given, a bidirectional scan must not double it."""
    torch.manual_seed(0)
    model = timm.create_model("test_vig", img_size=128, depth=1, mixer=mixer).eval()
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        nn.init.orthogonal_(mixer.to_out[0].weight)
        x = images(2, 64, 64)
        out = mixer(x, (8, 8))
    assert out.square().mean().sqrt() < 1.5 * x.square().mean().sqrt()

"""Backbones in training: gradients, checkpointing, dropout, groups of parameters, half precision, initial scale."""

import copy

import backbone_parts
import pytest
import timm
import torch
from backbone_parts import FORMS, STAGED, WITH_BATCHNORM, build, images
from timm.models._manipulate import group_parameters
from timm.optim import param_groups_layer_decay
from torch import nn

import scanvas  # noqa: F401 - registers the models
from scanvas.backbones.mixers import MIXERS

name = backbone_parts.name


HALF = {torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


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


@pytest.mark.parametrize(
    ("autocast", "half_parameters"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
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

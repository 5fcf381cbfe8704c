"""Features of the backbones as timm wants them: intermediates, pyramids, pruning, a new classifier."""

import json

import backbone_parts
import pytest
import timm
import torch
from backbone_parts import FORMS, PLAIN, PYRAMIDS, STAGED, build, images

import scanvas  # noqa: F401 - registers the models

name = backbone_parts.name


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

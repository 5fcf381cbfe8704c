"""Checkpoints of our own models: other projections, sizes, classes and channels, and misfits that are named."""

import pytest
import timm
import torch
from original_parts import load, save, vig_h_state, vig_state

import scanvas  # noqa: F401 - registers the models


@pytest.mark.parametrize("name", ["test_vig", "test_vig_h"])
@pytest.mark.parametrize("mixer", ["gla", "softmax"])
@pytest.mark.parametrize(("saved_fused", "wanted_fused"), [(True, True), (True, False), (False, True), (False, False)])
def test_our_checkpoints_with_joint_and_separate_projections(name, mixer, saved_fused, wanted_fused, tmp_path):
    def kwargs(fused):
        return {"img_size": 32, "mixer": mixer, "mixer_kwargs": {"fused_projections": fused}}

    model = timm.create_model(name, **kwargs(saved_fused)).eval()
    loaded = load(name, save(model.state_dict(), tmp_path / "ours.safetensors"), **kwargs(wanted_fused))
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)


def test_positions_of_a_rectangle(tmp_path):
    """Equal places are left alone, others resampled if their grid is known, else refused by name."""
    model = timm.create_model("test_vig", img_size=(32, 128)).eval()
    file = save(model.state_dict(), tmp_path / "ours.safetensors")
    assert torch.equal(load("test_vig", file, img_size=(32, 128)).pos_embed, model.pos_embed)
    with pytest.raises(ValueError, match=r"pos_embed has 8 places"):
        load("test_vig", save({**model.state_dict(), "pos_embed": torch.zeros(1, 8, 64)}, tmp_path / "odd.pth"))
    timm.models.save_for_hf(model, str(tmp_path / "dir"), safe_serialization=True)
    other = timm.create_model(f"local-dir:{tmp_path / 'dir'}", pretrained=True, img_size=(128, 32))
    model.set_input_size((128, 32))
    torch.testing.assert_close(other.pos_embed, model.pos_embed)


@pytest.mark.parametrize("name", ["test_vig", "test_vig_h"])
def test_other_classes_channels_and_features_as_timm_does_it(name, tmp_path):
    model = timm.create_model(name, num_classes=12, img_size=160).eval()
    file = save(model.state_dict(), tmp_path / "ours.safetensors")
    x = torch.randn(1, 3, 64, 64)
    for classes in (12, 5, 0):
        loaded = load(name, file, num_classes=classes)
        torch.testing.assert_close(loaded.forward_features(x), model.forward_features(x))
        assert loaded(x).shape[1] == (classes or model.num_features)
        if classes == 12:  # a classifier that fits is kept, whatever timm takes for the file's number of classes
            torch.testing.assert_close(loaded(x), model(x))
    grey = load(name, file, num_classes=12, in_chans=1)
    torch.testing.assert_close(grey(x[:, :1]), model(x[:, :1].expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)
    features = load(name, file, features_only=True, out_indices=(0, 2))(x)
    torch.testing.assert_close(features, model.forward_intermediates(x, indices=[0, 2], intermediates_only=True))
    with pytest.raises(
        ValueError,
        match=rf"{model.default_cfg['classifier']}.weight has 12 classes, the model 1000; pass num_classes=12",
    ):
        load(name, file)


def first(state, suffix):
    return next(key for key in state if key.endswith(suffix))


@pytest.mark.parametrize("name", ["vig_small_patch16_224", "vig_h_small_224"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda s: s.update({first(s, "g_norm.weight"): torch.ones(5)}),
            r"out_norm\.weight has shape \(5,\), the model's is",
        ),
        (lambda s: s.pop(first(s, "o_proj.weight")), r"to_out\.0\.weight is missing"),
        (lambda s: s.update({first(s, "qkv_proj.weight"): torch.ones(7, 5)}), r"to_qkv\.weight has shape \(7, 5\)"),
        (lambda s: s.update(extra=torch.ones(1)), r"extra has no place in the model"),
        (
            lambda s: s.update(
                {first(s, "norm.bias" if "layers.0.blocks.0.norm.bias" in s else "norm.weight"): torch.ones(2, 2)}
            ),
            r"norm1?\.\w+ has shape \(2, 2\)",
        ),
        (lambda s: s.pop(first(s, "head.bias")), r"head\.(fc\.)?bias is missing"),
        (
            lambda s: s.pop(first(s, "patch_embed.proj.0.weight" if "pos_embed" in s else "patch_embed.0.weight")),
            r"(proj|stem)\.0\.weight is missing",
        ),
    ],
)
def test_a_misfit_is_named(name, damage, message, tmp_path):
    if name == "vig_small_patch16_224":
        state, kwargs = vig_state(32, 1, 2, 16), {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 64}
    else:
        state = vig_h_state(8, (1, 1), (1, 1))
        kwargs = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1)}
    load(name, save(state, tmp_path / "good.pth"), num_classes=10, **kwargs)
    damage(state)
    with pytest.raises(ValueError, match=message):
        load(name, save(state, tmp_path / "bad.pth"), num_classes=10, **kwargs)


def test_a_checkpoint_of_another_size_names_a_few_and_counts_the_rest(tmp_path):
    file = save(vig_state(32, 3, 2, 16), tmp_path / "original.pth")
    with pytest.raises(ValueError, match=r"does not fit Vig: .*has shape.*; and \d+ more$") as error:
        load("vig_small_patch16_224", file, embed_dim=64, depth=2, num_heads=2, num_classes=10)
    assert len(str(error.value)) < 1500

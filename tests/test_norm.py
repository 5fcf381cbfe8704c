"""PRepBN: its equation while training, what it is afterwards, and that it folds away."""

import pytest
import timm
import torch
import torch.nn.functional as F

from scanvas.backbones.norm import ChannelAffine, PRepBN, fold_norms


def test_prepbn_is_its_definition():
    norm = PRepBN(6, steps=4).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ln, bn, alpha = norm.layer_norm, norm.batch_norm, norm.alpha
    mean, variance = torch.zeros(6).double(), torch.ones(6).double()
    for step in range(6):
        x = torch.randn(3, 5, 6, dtype=torch.float64) + 1
        flat, share = x.flatten(0, 1), max(0, 1 - step / 4)
        batch = (x - flat.mean(0)) / (flat.var(0, unbiased=False) + 1e-5).sqrt() * bn.weight + bn.bias
        layer = F.layer_norm(x, (6,), ln.weight, ln.bias, 1e-5)
        torch.testing.assert_close(norm(x), share * layer + (1 - share) * (batch + alpha * x))
        mean, variance = 0.9 * mean + 0.1 * flat.mean(0), 0.9 * variance + 0.1 * flat.var(0)
    norm.eval()
    expected = (x - mean) / (variance + 1e-5).sqrt() * bn.weight + bn.bias + alpha * x
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(x), norm(x))  # and counts no steps
    assert norm.state_dict()["step"] == 6
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        PRepBN(6, steps=0)


@pytest.mark.parametrize(("mixer", "merged"), [("slab", True), ("softmax", True), ("gla", False)])
@pytest.mark.parametrize("fused", [False, True])
def test_norms_fold_away_exactly(mixer, merged, fused):
    torch.manual_seed(0)
    size = {"img_size": (16, 24), "patch_size": 8, "depth": 2, "num_classes": 5}
    options = {"mixer": mixer, "mixer_kwargs": {"fused_projections": fused}}
    model = timm.create_model("test_vig", norm="prepbn", **size, **options).double()
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    for _ in range(3):
        model(x).square().sum().backward()
    model.eval()
    expected = model(x)
    if not fused and mixer == "slab":
        torch.testing.assert_close(torch.jit.script(model)(x), expected)
    assert fold_norms(model) is model
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)
    assert not [m for m in model.modules() if isinstance(m, PRepBN)]
    kinds = [type(norm) for block in model.blocks for norm in (block.norm1, block.norm2)]
    assert kinds == [torch.nn.Identity if merged else ChannelAffine, torch.nn.Identity] * 2


def test_norm_refuses_what_it_can_not_do():
    with pytest.raises(ValueError, match="norm must be 'rms' or 'prepbn', got 'batch'"):
        timm.create_model("test_vig", norm="batch")
    with pytest.raises(ValueError, match="fold_norms needs a model in evaluation mode"):
        fold_norms(timm.create_model("test_vig", norm="prepbn", depth=1))

"""PRepBN: its equation while training, what it is afterwards, and that it folds away; a norm behind a convolution."""

import pytest
import timm
import torch
import torch.nn.functional as F

from scanvas.backbones.norm import ChannelAffine, LayerNorm2d, PRepBN, convolve_and_normalise, fold_norms


def test_convolution_and_norm_at_once():
    conv = torch.nn.Conv2d(5, 8, 3, stride=2, padding=1).double()
    norm = LayerNorm2d(8, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 6, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(convolve_and_normalise(conv, norm, x), norm(conv(x)))


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


def trained(name, shape, **options):
    """A float64 model after three training steps of a kind, in evaluation mode, with images of its size."""
    torch.manual_seed(0)
    model = timm.create_model(name, norm="prepbn", num_classes=5, **options).double()
    x = torch.randn(2, 3, *shape, dtype=torch.float64)
    for _ in range(3):
        model(x).square().sum().backward()
    return model.eval(), x


MERGED = pytest.mark.parametrize(("mixer", "merged"), [("slab", True), ("softmax", True), ("gla", False)])


def check_folding(model, x, blocks, merged):
    """The model computes the same and no PRepBN is left, nor anything in its place where the mixer allows it."""
    expected = model(x)
    assert len([m for m in model.modules() if isinstance(m, PRepBN)]) >= 2 * len(blocks)
    assert fold_norms(model) is model
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)
    assert not [m for m in model.modules() if isinstance(m, PRepBN)]
    for block in blocks:
        assert type(block.norm1) is (torch.nn.Identity if merged else ChannelAffine)
        assert type(block.norm2) is torch.nn.Identity


@MERGED
@pytest.mark.parametrize("fused", [False, True])
def test_norms_fold_away_exactly(mixer, merged, fused):
    size = {"img_size": (16, 24), "patch_size": 8, "depth": 2}
    model, x = trained("test_vig", (16, 24), mixer=mixer, mixer_kwargs={"fused_projections": fused}, **size)
    if not fused and mixer == "slab":
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    check_folding(model, x, list(model.blocks), merged)


@MERGED
def test_norms_of_stages_fold_away_exactly(mixer, merged):
    model, x = trained("test_vig_h", (64, 96), mixer=mixer, depths=(1, 1, 2, 1))
    check_folding(model, x, [block for stage in model.stages for block in stage.blocks], merged)


def test_norm_refuses_what_it_can_not_do():
    with pytest.raises(ValueError, match="norm must be 'rms' or 'prepbn', got 'batch'"):
        timm.create_model("test_vig", norm="batch")
    with pytest.raises(ValueError, match="norm must be 'layer' or 'prepbn', got 'rms'"):
        timm.create_model("test_vig_h", norm="rms")
    with pytest.raises(ValueError, match="fold_norms needs a model in evaluation mode"):
        fold_norms(timm.create_model("test_vig", norm="prepbn", depth=1))

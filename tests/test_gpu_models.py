"""Backbones and denoisers on a GPU, where fused kernels run, against the same on the CPU: outputs and gradients."""

import copy

import backbone_parts
import pytest
import timm
import torch
from diffusion_parts import VARIANTS, build, inputs

from scanvas import LinearUDiTTransformer2DModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def exact_matmul():
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def randomise(model):
    """Weights that leave no branch silent: norms and gates start at one and zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05
    return model


def outputs_and_gradients(model, call, arguments):
    model.zero_grad()
    out = call(model, arguments)
    out.square().mean().backward()
    return {"output": out.detach().cpu()} | {
        n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None
    }


def check(model, call, arguments):
    expected = outputs_and_gradients(model, call, arguments)
    moved = {k: v.cuda() for k, v in arguments.items()}
    actual = outputs_and_gradients(model.cuda(), call, moved)
    assert actual.keys() == expected.keys()
    with torch.no_grad():  # other kernels, and sums in place
        inference = call(model, moved).cpu()
        half = call(
            copy.deepcopy(model).bfloat16(), {k: v.bfloat16() if v.is_floating_point() else v for k, v in moved.items()}
        )
    assert (inference - expected["output"]).norm() < 1e-3 * expected["output"].norm()
    assert (half.float().cpu() - expected["output"]).norm() < 5e-2 * expected["output"].norm()
    # A gradient that is zero but for rounding, as that of a bias of softmax's keys, is measured by the largest one.
    largest = max(value.norm() for value in expected.values())
    for name, value in expected.items():
        error = (actual[name] - value).norm() / value.norm().clamp(min=1e-3 * largest)
        assert error < 1e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vig", {}),
        ("test_vig", {"class_token": True, "rope": True}),
        ("test_vig", {"norm": "prepbn", "drop_path_rate": 0.0}),
        ("test_vig_h", {}),
        ("vig_tiny_patch16_224", {"depth": 2}),
    ],
)
def test_backbone(name, options):
    model = timm.create_model(name, num_classes=5, **options).eval()
    check(randomise(model), lambda m, a: m(a["x"]), {"x": torch.randn(2, 3, 96, 128)})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_mlla", {}),
        ("test_agent_deit", {}),
        ("test_ravlt", {}),
        ("test_ravlt", {"all_linear": True}),
        ("test_mavit", {}),
        ("test_mavit", {"all_linear": True}),
        ("test_nalaformer", {}),
        ("test_vig_h", {"norm": "prepbn"}),
    ],
)
def test_other_architectures(name, options):
    torch.manual_seed(1)
    model = randomise(backbone_parts.build(name, **options))
    check(model, lambda m, a: m(a["x"]), {"x": torch.randn(2, 3, 64, 96)})


@pytest.mark.parametrize("mixer", ["gla", "softmax"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_denoiser(mixer, variant):
    model = build(mixer, **VARIANTS[variant])
    check(randomise(model), lambda m, a: m(**a).sample, inputs(model))


@pytest.mark.parametrize("mlp", ["conv", "rep"])
@pytest.mark.parametrize(
    ("mixer", "mixer_kwargs"), [("softmax", {"cosine": True, "rope": True}), ("gla", None), ("gdn", None)]
)
def test_u_shaped_denoiser(mixer, mixer_kwargs, mlp):
    torch.manual_seed(0)
    size = {"sample_size": 16, "num_attention_heads": 2, "attention_head_dim": 8, "depths": (1, 1, 1, 1, 1)}
    model = LinearUDiTTransformer2DModel(mixer=mixer, mixer_kwargs=mixer_kwargs, mlp=mlp, num_classes=5, **size).eval()
    check(randomise(model), lambda m, a: m(**a).sample, inputs(model, grid=(16, 24)))

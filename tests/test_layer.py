"""``gated_layer``: one operator, against its steps in float64 and against the mixer that takes them one by one."""

import pytest
import torch
from elementwise_parts import DEVICE

import scanvas
from scanvas.kernels import dispatch
from scanvas.kernels.layer import compose_projections, gated_layer

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or dispatch.INTERPRETED), reason="needs a GPU, or Triton's interpreter"
)
NAMES = ("features", "weight", "bias", "o_weight", "local_weight")


def inputs(B, N, C, K, heads, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(4 * K + 2 * C, C, generator=g) * C**-0.5
    weight[2 * K + C : 4 * K + C] *= 4  # gates from open to shut
    vectors = torch.randn(2 * K + C, generator=g), *(torch.rand(C // heads, generator=g) + 0.5 for _ in range(2))
    return torch.randn(B, N, C, generator=g), weight, *vectors


def results(tensors, impl, upstream, **options):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = gated_layer(*tensors, impl=impl, **options)
    return [out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]


def error(actual, exact):
    assert actual.shape == exact.shape
    assert actual.isfinite().all()
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("shape", "activation", "dtype"),
    [
        ((1, 70, 32, 16, 2), "silu", torch.float32),
        ((2, 37, 32, 16, 2), "silu", torch.bfloat16),
        ((1, 37, 32, 16, 2), None, torch.float16),
        ((1, 1, 12, 6, 3), None, torch.float32),
        ((3, 18, 40, 20, 2), None, torch.float32),
        ((1, 20, 96, 16, 1), "silu", torch.bfloat16),
        ((1, 20, 96, 16, 1), None, torch.float32),
    ],
    ids=str,
)
def test_values_and_gradients(shape, activation, dtype):
    """float32 differs from float64 by rounding only; half precision by no more than the same steps in PyTorch."""
    tensors = [x.to(DEVICE, dtype) for x in inputs(*shape)]
    upstream = torch.randn(shape[1], shape[0], shape[2], generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    options = {"num_heads": shape[-1], "activation": activation, "upstream": upstream.transpose(0, 1)}
    exact = results([x.double() for x in tensors], "torch", **options)
    steps = results(tensors, "torch", **options)
    for name, a, b, x in zip(("out", *NAMES), results(tensors, "triton", **options), steps, exact):
        assert a.dtype == dtype
        budget = 4e-6 if dtype == torch.float32 else 1.5 * error(b, x) + torch.finfo(dtype).eps
        assert error(a, x) < budget, name


def test_operator_is_what_pytorch_takes_it_for():
    tensors = [x.to(DEVICE).requires_grad_() for x in inputs(1, 5, 8, 4, 1)]
    found = torch.library.opcheck(torch.ops.scanvas.gated_layer.default, (*tensors, 1, 16.0, 1e-6, True))
    assert set(found.values()) == {"SUCCESS"}


def test_nothing_in_nothing_out():
    tensors = [x.to(DEVICE) for x in inputs(2, 5, 12, 6, 3)]
    tensors[0] = tensors[0][:0]
    for gradient in results(tensors, "triton", torch.zeros(0, 5, 12, device=DEVICE), num_heads=3)[1:]:
        assert not gradient.any()


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_mixer_takes_it_in_training(halves, monkeypatch):
    """All gradients of the mixer, in either way, in float32; a hook on a projection must still be heard."""
    from scanvas.backbones.mixers import gla
    from scanvas.kernels.gated import launch

    if halves:
        monkeypatch.setattr(launch, "WORKSPACE", 1)  # batch and heads one after the other: results are moved
    taken = []
    monkeypatch.setattr(gla, "gated_layer_pays", lambda features: True)
    monkeypatch.setattr(gla, "_at_once", lambda features, layers, *others: gla.is_plain(*layers, *others))
    monkeypatch.setattr(gla, "gated_layer", lambda *a, **k: taken.append(k) or gated_layer(*a, impl="triton", **k))
    torch.manual_seed(0)
    mixer = scanvas.create_mixer("gla", 16, 2, conv_act=True, out_act=True, device=DEVICE)
    x = torch.randn(2, 3 + 3 * 5, 16, device=DEVICE)

    def gradients():
        out = mixer(x, (3, 5), 3)
        return [out, *torch.autograd.grad(out.square().sum(), list(mixer.parameters()))]

    at_once = gradients()
    assert len(taken) == 1
    handle = mixer.to_k.register_forward_hook(lambda *_: None)
    one_by_one = gradients()
    handle.remove()
    assert len(taken) == 1
    for (name, _), a, b in zip([("out", None), *mixer.named_parameters()], at_once, one_by_one):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "up", "gate", "C"), [((24, 24, 48), 48, 48, 48), ((70,), 17, 0, 40)], ids=str)
def test_composed_weights(sizes, up, gate, C, dtype):
    tensors = [torch.randn(n, m, device=DEVICE).to(dtype) for n, m in ((5, C), (up, 5), (gate, C))]
    tensors = [torch.randn(n, C, device=DEVICE).to(dtype) for n in sizes], *tensors
    up_bias, gate_bias = torch.randn(up, device=DEVICE).to(dtype), None
    weight, bias = compose_projections(*tensors, up_bias, gate_bias, impl="triton")
    steps = compose_projections(*tensors, up_bias, gate_bias, impl="torch")
    exact = torch.cat([*tensors[0], tensors[2].double() @ tensors[1].double(), tensors[3]])
    assert error(weight, exact) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
    assert torch.equal(bias, steps[1])
    copied = [weight[: sum(sizes)], weight[sum(sizes) + up :]]
    assert torch.equal(torch.cat(copied), torch.cat([steps[0][: sum(sizes)], steps[0][sum(sizes) + up :]]))


def test_bad_arguments_are_named():
    features, weight, *vectors = inputs(1, 4, 12, 6, 3)
    with pytest.raises(ValueError, match=r"weight must be \(4·K \+ 2·C, C\) with C = 12, got \(47, 12\)"):
        gated_layer(features, weight[1:], *vectors, num_heads=3)
    with pytest.raises(ValueError, match="num_heads must divide K = 6 and C = 12, got 4"):
        gated_layer(features, weight, *vectors, num_heads=4)
    with pytest.raises(ValueError, match=r"bias must be \(24,\), got \(23,\)"):
        gated_layer(features, weight, vectors[0][1:], *vectors[1:], num_heads=3)
    with pytest.raises(ValueError, match="heads are at most 256 wide, got 6 and 258"):
        gated_layer(*inputs(1, 4, 258, 6, 1), num_heads=1)
    with pytest.raises(ValueError, match="at least one token"):
        gated_layer(features[:, :0], weight, *vectors, num_heads=3)
    with pytest.raises(TypeError, match="must have one dtype"):
        gated_layer(features, weight.double(), *vectors, num_heads=3)

"""SwiGLU's first linear layer and product as one operation, and when the layer takes it. Its kernel is tested in
test_triton_elementwise.py."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

from scanvas.backbones import block
from scanvas.backbones.block import SwiGLU
from scanvas.kernels.glu import swiglu, swiglu_is_fused, swiglu_linear


def definition(x, weight):
    """With loops over channels."""
    D = weight.shape[0] // 2
    columns = []
    for d in range(D):
        a, b = (x * weight[d]).sum(-1), (x * weight[D + d]).sum(-1)
        columns.append(a / (1 + torch.exp(-a)) * b)
    return torch.stack(columns, -1)


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 3, 5)])
def test_definition(shape, impl):
    torch.manual_seed(0)
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in (shape, (14, 5)))
    out, expected = swiglu_linear(x, weight, impl=impl), definition(x, weight)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(expected)
    for got, true in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in (out, expected))):
        torch.testing.assert_close(got, true)
    with torch.no_grad():
        torch.testing.assert_close(swiglu_linear(x, weight, impl=impl), expected)


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_autocast_is_that_of_a_linear_layer(impl):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5), torch.randn(14, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu_linear(x, weight, impl=impl)
        wide = swiglu_linear(x.double(), weight.double(), impl=impl)
    assert (out.dtype, wide.dtype) == (torch.bfloat16, torch.float64)
    torch.testing.assert_close(out.double(), definition(x.double(), weight.double()), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(
    ("x", "weight", "error", "message"),
    [
        (torch.ones(2, 5), torch.ones(7, 5), ValueError, r"weight must be \(2·D, C\), got shape \(7, 5\)"),
        (torch.ones(2, 5), torch.ones(5), ValueError, r"weight must be \(2·D, C\), got shape \(5,\)"),
        (torch.ones(2, 4), torch.ones(6, 5), ValueError, r"x must be \(…, C\) with C = 5, got shape \(2, 4\)"),
        (torch.ones(()), torch.ones(6, 5), ValueError, r"x must be .* got shape \(\)"),
        (torch.ones(2, 5), torch.ones(6, 5).half(), TypeError, "weight must have x's dtype, torch.float32, got"),
        (torch.ones(2, 5).int(), torch.ones(6, 5), TypeError, "x must have a floating dtype, got torch.int32"),
        (torch.ones(2, 5), torch.ones(6, 5, device="meta"), ValueError, "weight is on meta, but x is on cpu"),
    ],
)
def test_wrong_arguments_are_named(x, weight, error, message):
    with pytest.raises(error, match=f"swiglu_linear: {message}"):
        swiglu_linear(x, weight)


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"swiglu_linear: impl must be one of .* got 'cuda'"):
        swiglu_linear(torch.ones(2, 5), torch.ones(6, 5), impl="cuda")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float32, "autocast": True}, True),
        ({"dtype": torch.float64, "autocast": True}, False),
        ({"C": 1152}, True),
        ({"C": 1216}, False),
        ({"C": 100}, False),
        ({"rows": 196}, False),
        ({"rows": 0}, False),
        ({"grad": True}, False),
        ({"device": "cpu"}, False),
        ({"hopper": False}, False),
    ],
    ids=str,
)
def test_auto_fuses_where_that_was_measured_to_pay(monkeypatch, change, expected):
    case = {"rows": 65536, "C": 192, "dtype": torch.bfloat16, "device": "cuda", "hopper": True} | change
    monkeypatch.setitem(swiglu.LINEAR_IMPLEMENTATIONS, "triton", None)
    monkeypatch.setattr(swiglu.dispatch, "is_hopper", lambda index: case["hopper"])
    monkeypatch.setattr(swiglu.dispatch, "autocasts", lambda device: case.get("autocast", False))
    with FakeTensorMode():
        x = torch.empty(1, case["rows"], case["C"], dtype=case["dtype"], device=case["device"])
        weight = torch.empty(1024, case["C"], dtype=x.dtype, device=x.device, requires_grad=True)
        with torch.set_grad_enabled(case.get("grad", False)):
            assert swiglu_is_fused(x, weight) == expected


@pytest.fixture
def fused(monkeypatch):
    """Calls of ``swiglu_linear`` by a layer that would have the kernel wherever it may."""
    calls = []

    def record(x, weight):
        calls.append(weight)
        return swiglu_linear(x, weight)

    monkeypatch.setattr(block, "swiglu_is_fused", lambda x, weight: True)
    monkeypatch.setattr(block, "swiglu_linear", record)
    return calls


def layer():
    torch.manual_seed(0)
    return SwiGLU(4, 6), torch.randn(2, 3, 4)


def test_layer_takes_one_kernel(fused):
    mlp, x = layer()
    expected = mlp.fc2(definition(x, mlp.fc1.weight))
    torch.testing.assert_close(mlp(x), expected)
    mlp(x).sum().backward()
    assert len(fused) == 2
    assert mlp.fc1.weight.grad.any()
    assert not swiglu_is_fused(x, mlp.fc1.weight)  # on a CPU


class Adapter(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Quantised(torch.Tensor):
    pass


def _subclass(fc1):
    fc1.__class__ = Adapter


def _weight(fc1):
    fc1.weight = nn.Parameter(fc1.weight.detach().as_subclass(Quantised))


def _bias(fc1):
    fc1.bias = nn.Parameter(torch.randn(12))


def _offload(fc1):
    forward = fc1.forward
    fc1.forward = lambda x: forward(x) * 2


def _parametrize(fc1):
    parametrize.register_parametrization(fc1, "weight", nn.Softplus())


CHANGES = {
    "subclass": _subclass,
    "weight": _weight,
    "bias": _bias,
    "forward": _offload,
    "parametrization": _parametrize,
    "hook": lambda fc1: fc1.register_forward_hook(lambda module, args, out: out * 2),
    "pre-hook": lambda fc1: fc1.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward hook": lambda fc1: fc1.register_full_backward_hook(lambda module, d_in, d_out: (d_in[0] * 2,)),
    "global hook": lambda fc1: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if module is fc1 else None
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layer_calls_fc1_where_that_is_more_than_a_product(fused, change):
    mlp, x = layer()
    handle = CHANGES[change](mlp.fc1)
    try:
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = mlp.fc1(inputs[0]).chunk(2, -1)
        expected = mlp.fc2(nn.functional.silu(a) * b)
        out = mlp(inputs[1])
    finally:
        if change == "global hook":
            handle.remove()
    torch.testing.assert_close(out, expected)
    got, true = (torch.autograd.grad(y.sum(), z)[0] for y, z in zip((out, expected), inputs[::-1]))
    torch.testing.assert_close(got, true)
    assert not fused


def _fx(mlp, x):
    graph = torch.fx.symbolic_trace(mlp)
    assert "fc1" in [str(node.target) for node in graph.graph.nodes]
    return graph


TRACERS = {
    "fx": _fx,
    "trace": lambda mlp, x: torch.jit.trace(mlp, x, check_trace=False),
    "script": lambda mlp, x: torch.jit.script(mlp),
    "export": lambda mlp, x: torch.export.export(mlp, (x,)).module(),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_graphs_hold_fc1(fused, tracer):
    mlp, x = layer()
    traced = TRACERS[tracer](copy.deepcopy(mlp), x)
    torch.testing.assert_close(traced(x), mlp.fc2(definition(x, mlp.fc1.weight)))
    assert not fused


def test_compiled_layer(fused):
    torch._dynamo.reset()
    mlp, x = layer()
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mlp.fc2(definition(x, mlp.fc1.weight)))
    assert fused

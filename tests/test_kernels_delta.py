"""What ``gated_delta_rule`` asks of flash-linear-attention, and when, with stand-ins for its three operations.

The stand-ins are its documented recurrences, token by token, and as particular about layouts and dtypes as its kernels
are. The kernels themselves are compared in test_gpu_delta.py.
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from scanvas.backbones.mixers import create_mixer
from scanvas.kernels.delta import fla, gated_delta_rule

KINDS = {"gdn": "gated_delta_rule", "kda": "kda", "gdn2": "gdn2"}


def scan(q, k, v, g, b, w, scale):
    """``S ← diag(exp(g)) S``, ``S ← S + k (w v − (b k)ᵀ S)ᵀ``, ``o = scale · Sᵀ q``."""
    assert q.dtype == k.dtype == v.dtype
    assert v.dtype in (torch.float16, torch.bfloat16)
    dtype, out = v.dtype, []
    q, k, v, g, b, w = (x.double() for x in (q, k, v, g, b, w))
    state = torch.zeros(*q.shape[::2], q.shape[3], v.shape[3], dtype=torch.float64)
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        update = w[:, t] * v[:, t] - ((b[:, t] * k[:, t])[..., None] * state).sum(-2)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        out.append(scale * (q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1).to(dtype), None


def chunk_gated_delta_rule(*, q, k, v, g, beta, scale):
    assert g.shape == beta.shape == q.shape[:3]
    assert g.dtype == beta.dtype == torch.float32
    return scan(q, k, v, g[..., None], beta[..., None], beta[..., None], scale)


def chunk_kda(*, q, k, v, g, beta, scale):
    assert (g.shape, beta.shape) == (q.shape, q.shape[:3])
    assert g.dtype == beta.dtype == torch.float32
    return scan(q, k, v, g, beta[..., None], beta[..., None], scale)


def chunk_gdn2(*, q, k, v, g, b, w, scale):
    assert (g.shape, b.shape, w.shape) == (q.shape, q.shape, v.shape)
    assert (g.dtype, b.dtype, w.dtype) == (torch.float32, torch.float32, v.dtype)
    return scan(q, k, v, g, b, w, scale)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that the package is there and the CPU a GPU → names of the operations that are called."""
    called = []

    def recording(function):
        def record(**arguments):
            called.append(function.__name__)
            return function(**arguments)

        return record

    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for function in (chunk_gated_delta_rule, chunk_kda, chunk_gdn2):
        module = ModuleType(f"fla.ops.{function.__name__.removeprefix('chunk_')}")
        setattr(module, function.__name__, recording(function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla, "INSTALLED", True)
    monkeypatch.setattr(fla, "_on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    fla._load.cache_clear()
    yield called
    fla._load.cache_clear()


def inputs(kind, N=11, Dk=16, Dv=24, *, write=False):
    """Tensors that float16 holds exactly, so that only results are rounded."""
    generator = torch.Generator().manual_seed(N)
    width, one = {"gdn": (1, 1), "kda": (Dk, 1), "gdn2": (Dk, Dk)}[kind]
    q, k, v, g, b, w = (torch.randn(2, N, 3, d, generator=generator) for d in (Dk, Dk, Dv, width, one, Dv))
    k, g, b, w = F.normalize(k, dim=-1), -g.abs(), b.sigmoid(), w.sigmoid()
    return [x.half().float() for x in ((q, k, v, g, b, w) if write else (q, k, v, g, b))]


def results(tensors, kind, impl, dtype, **options):
    """Output and all gradients, with v in ``dtype``."""
    leaves = [x.to(dtype if dtype == torch.float64 or i == 2 else x.dtype) for i, x in enumerate(tensors)]
    leaves = [x.requires_grad_() for x in leaves]
    shared = () if kind == "gdn2" else (leaves[4],)
    out = gated_delta_rule(*leaves, *shared, impl=impl, **options)
    assert out.dtype == leaves[2].dtype
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("impl", ["auto", "fla"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize(("kind", "write"), [("gdn", False), ("kda", False), ("gdn2", False), ("gdn2", True)])
def test_kernels_compute_the_recurrence(kind, write, options, impl, installed):
    tensors = inputs(kind, write=write)
    got = results(tensors, kind, impl, torch.float16, **options)
    assert installed == [f"chunk_{KINDS[kind]}"]
    for actual, expected in zip(got, results(tensors, kind, "recurrent", torch.float64, **options)):
        assert (actual.double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("decays", [1, 16])
@pytest.mark.parametrize("gates", ["two", "per channel"])
def test_gates_of_any_widths_are_computed(decays, gates, installed):
    """Two gates per head, or one decay with gates per channel: no mixer of ours, and no kernel of their own."""
    q, k, v, g, b, w = inputs("gdn2", write=True)
    g, v = g[..., :decays], v.half()
    if gates == "two":
        b, w = b[..., :1], w[..., :1]
    exact = gated_delta_rule(*(x.double() for x in (q, k, v, g, b, w)), impl="recurrent")
    out = gated_delta_rule(q, k, v, g, b, w, impl="fla")
    assert installed == ["chunk_gdn2"]
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_mixers_take_their_kernel(name, bidirectional, installed):
    """Both directions in one call, the second one turned round; outputs, map and gradients as with the torch form."""
    torch.manual_seed(0)
    mixer = create_mixer(name, 64, 2, bidirectional=bidirectional).half()
    x = torch.randn(2, 17, 64, dtype=torch.float16)
    grad, found = torch.randn(2, 17, 64, dtype=torch.float16), {}
    for impl in ("auto", "torch"):
        mixer.impl = impl
        mixer.zero_grad()
        out = mixer(x, (3, 5), prefix=2)
        out.backward(grad)
        found[impl] = [out.detach(), *(p.grad for p in mixer.parameters())]
    assert installed == [f"chunk_{KINDS[name]}"]
    for (parameter, _), actual, expected in zip(
        [("out", None), *mixer.named_parameters()], found["auto"], found["torch"]
    ):
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < 1e-2, f"{parameter}: {error:.1e}"


def test_refusals_name_the_reason(installed, monkeypatch):
    q, k, v, g, b = inputs("gdn")
    half = v.half()

    def refused(reason, *tensors):
        with pytest.raises(RuntimeError, match=rf"impl='fla' can not run here: .*{reason}.*Use impl='torch'"):
            gated_delta_rule(*tensors, impl="fla")
        torch.testing.assert_close(gated_delta_rule(*tensors), gated_delta_rule(*tensors, impl="torch"))

    refused("float16 or bfloat16, the dtype of v, got v in torch.float32", q, k, v, g, b, b)
    refused("got v in torch.float16 and q in torch.float64", q.double(), k, half, g, b, b)
    for Dk, Dv, which in ((15, 24, "15 for q"), (20, 24, "20 for q"), (16, 264, "264 for v")):
        others = inputs("gdn", 2, Dk, Dv)
        others[2] = others[2].half()
        refused(f"multiples of 8 from 16 to 256, got {which}", *others, others[4])
    with monkeypatch.context() as hopper:
        hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        hopper.setattr(fla, "version", lambda package: "3.5.1")
        fla._miscompiled.cache_clear()
        refused(r"Triton 3\.5\.1 miscompiles its backward on this GPU", q, k, half, g, b, b)
        hopper.setattr(fla, "version", lambda package: "3.7.1+git1")
        fla._miscompiled.cache_clear()
        gated_delta_rule(q, k, half, g, b, b, impl="fla")
    fla._miscompiled.cache_clear()
    with monkeypatch.context() as older:
        older.setitem(sys.modules, "fla.ops.gdn2", None)
        fla._load.cache_clear()
        refused("the installed flash-linear-attention gives no chunk_gdn2", q, k, half, g, b)
    with monkeypatch.context() as traced:
        traced.setattr(torch.compiler, "is_compiling", lambda: True)
        refused("can not be traced", q, k, half, g, b, b)
    with monkeypatch.context() as cpu:
        cpu.setattr(fla, "_on_gpu", lambda device: device.type == "cuda")
        refused("needs tensors on a CUDA device, got device 'cpu'", q, k, half, g, b, b)
    monkeypatch.setattr(fla, "INSTALLED", False)
    refused(r"'flash-linear-attention' is not installed \(pip install 'scanvas\[fla\]'\)", q, k, half, g, b, b)


def test_compiled_code_takes_the_torch_form(installed):
    q, k, v, g, b = inputs("gdn")
    v = v.half()
    compiled = torch.compile(gated_delta_rule, backend="eager", fullgraph=True)(q, k, v, g, b, b)
    assert installed == []
    torch.testing.assert_close(compiled, gated_delta_rule(q, k, v, g, b, b, impl="torch"))

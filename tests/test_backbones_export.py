"""Compilers, tracers and exporters give what eager gives, at gates from harmless to hostile."""

import warnings

import numpy as np
import pytest
import timm
import torch
from mixer_cases import TYPICAL

import scanvas  # noqa: F401 - registers the models


def build(name, gate=0.0, **kwargs):
    """Gates around a logit, of which -400 decays by exp(-25) a token; other parameters random; 8×12 pixels are 2×3
    tokens."""
    torch.manual_seed(0)
    size = {"patch_size": 4, "depth": 1}
    if name in ("test_vig_h", "test_mlla"):
        size = {"depths": (1, 1) if name == "test_vig_h" else (0, 1), "num_heads": (1, 2)}
    elif name in ("test_ravlt", "test_mavit", "test_nalaformer"):  # a stage of each kind
        size = {"depths": (1, 0, 1), "embed_dims": (8, 8, 16), "num_heads": (1, 1, 2), "layer_scale": (1.0, 1.0, 1.0)}
    model = timm.create_model(name, **{"img_size": (8, 12), "num_classes": 7, **size, **kwargs}).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if parameter_name.endswith("decay_proj.1.bias"):
                parameter.add_(gate)
                parameter[::3] = 0.5
    return model


def images(batch, seed=0, size=(8, 12)):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


OPTIONS = {"local": {"mixer_kwargs": {"radius": 2, "pool": 4}}, "hybrid": {"mixer_kwargs": {"radius": 2}}}
CASES = [
    *[("test_vig", {"mixer": mixer, **OPTIONS.get(mixer, {})}) for mixer in TYPICAL],
    ("test_vig", {"class_token": True, "rope": True}),
    ("test_vig_h", {}),
    ("test_agent_deit", {}),
    ("test_mlla", {}),
    ("test_nalaformer", {}),
    ("test_ravlt", {}),
    ("test_mavit", {"all_linear": True}),
]
SLOW = [
    ("test_vig", {"mixer": "linear"}),
    ("test_vig_h", {"mixer": "local", **OPTIONS["local"], "depths": (0, 1)}),
    ("test_agent_deit", {"depth": 2, "linear_layers": 1}),  # the second layer is a softmax
    ("test_mlla", {}),
    ("test_nalaformer", {}),
]
"""Every kind of mixer and of model once, in few pairs: each costs ten seconds to compile or export. With ``gla``, whose
graph is the largest, a model of its own."""


@pytest.mark.parametrize(("name", "kwargs"), [("test_vig", {"mixer": "gla"}), *SLOW])
def test_compile_fullgraph(name, kwargs):
    """The graph of eager operations, forward and backward, and under autocast."""
    torch._dynamo.reset()
    model = build(name, **kwargs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    x = images(2)
    expected = model(x)
    expected.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    got = compiled(x)
    got.square().sum().backward()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], atol=1e-3, rtol=1e-3, msg=n)
    if kwargs.get("mixer") == "gla":
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), atol=5e-2, rtol=5e-2)


def test_compile_with_inductor():
    torch._dynamo.reset()
    model = build("test_vig", -400.0)
    x = images(2)
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(got, model(x), atol=1e-4, rtol=1e-4)


# The first case is longer than a chunk of the scan.
@pytest.mark.parametrize(
    ("name", "kwargs"), [("test_vig", {"class_token": True, "rope": True, "img_size": (24, 48)}), *SLOW]
)
def test_export_and_onnx_with_dynamic_batch(name, kwargs, tmp_path):
    """Under hostile gates: the form of the scan that the graph holds must not be the one that only mild gates allow."""
    size = kwargs.get("img_size", (8, 12))
    model = build(name, -400.0, **kwargs)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images(2, size=size),), dynamic_shapes=({0: batch},))
    inputs = [images(count, seed=count, size=size) for count in (1, 5)]
    for x in inputs:
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-4, rtol=1e-4)
    if name in ("test_nalaformer", "test_mlla"):
        return  # the ONNX form takes 15 s and has no operation that the others have not

    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, f=tmp_path / "model.onnx", verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    for x in inputs:
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, model(x).detach().numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_torchscript(name, kwargs):
    model = build(name, **kwargs)
    scripted = torch.jit.script(model)
    for x in (images(2), images(1).transpose(2, 3)):
        torch.testing.assert_close(scripted(x), model(x), atol=1e-5, rtol=1e-5)
    scripted(images(1)).sum().backward()
    assert not [n for n, p in scripted.named_parameters() if p.grad is None]
    if name == "test_vig":
        with pytest.raises(RuntimeError, match=r"divisible by the patch size"):
            scripted(torch.zeros(1, 3, 15, 12))


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_fx(name, kwargs):
    from timm.layers import create_feature_extractor

    model = build(name, **kwargs)
    traced = create_feature_extractor(model, {model.default_cfg["classifier"].split(".")[0]: "out"})
    scripted = torch.jit.script(traced)
    for x in (images(2), images(1).transpose(2, 3)):
        torch.testing.assert_close(traced(x)["out"], model(x), atol=0, rtol=0)
        torch.testing.assert_close(scripted(x)["out"], model(x), atol=1e-5, rtol=1e-5)
    assert [node for node in traced.graph.nodes if node.op == "call_module" and node.target.endswith(".mixer")]

"""Which layers ``linearize`` takes, what it reports of them, and models that it does not know."""

import copy
import json

import pytest
import torch
from linear_parts import (
    build,
    run,
)
from torch import nn

import scanvas
from scanvas.diffusion.adapters import _ADAPTERS, Adapter, known_models, register_adapter
from scanvas.diffusion.linear_attention_modules import LinearizedLayer
from scanvas.diffusion.linear_select import select_layers


def test_choice_of_layers():
    paths = [f"transformer_blocks.{i}.attn" for i in range(3)] + [
        f"single_transformer_blocks.{i}.attn" for i in range(2)
    ]
    softmax = dict.fromkeys(paths)
    assert select_layers(softmax, "all") == paths
    assert select_layers(softmax, "single*") == paths[3:]
    assert select_layers(softmax, ["single*1.attn", "transformer_blocks.0.*"]) == [paths[0], paths[4]]
    assert select_layers(softmax, [-1, 0]) == [paths[0], paths[4]]
    assert select_layers(softmax, range(2)) == paths[:2]
    for layers, message in {
        "singel_transformer_blocks.0.attn": r"no attention layer; did you mean 'single_transformer_blocks.0.attn'",
        "xyz": r"'xyz' matches no attention layer; there are transformer_blocks.0.attn …",
    }.items():
        with pytest.raises(ValueError, match=message):
            select_layers(softmax, layers)
    with pytest.raises(ValueError, match="index 5 is out of range: there are 5"):
        select_layers(softmax, [5])
    with pytest.raises(ValueError, match="empty"):
        select_layers(softmax, [])
    for layers in (None, True, {"a": 1}, [1.5]):
        with pytest.raises(TypeError, match="layers must be 'all'"):
            select_layers(softmax, layers)

    model, inputs = build("flux")
    student, report = scanvas.linearize(model, "lit", "single*")
    kinds = {
        p: isinstance(student.get_submodule(p), LinearizedLayer)
        for p in _ADAPTERS["FluxTransformer2DModel"].attentions(student)
    }
    assert list(kinds.values()) == [False, True, True]
    assert {row["layer"] for row in report.tensors if row["status"] == "softmax"} == {"transformer_blocks.0.attn"}
    assert run(student, inputs).isfinite().all()


def test_report(tmp_path):
    model, _ = build("pixart")
    _, report = scanvas.linearize(model, "lit", [0, 1], sizes=[(128, 128), (256, 256)])
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    small, large = report.costs
    assert (small["tokens"], large["tokens"]) == (64 * 64, 128 * 128)
    # By hand: 3 layers of width 32; two of them linear, one head of 32, convolution 5×5.
    N, C = 64 * 64, 32
    assert small["flops_before"] == 3 * 4 * N * N * C
    assert small["flops_after"] == 4 * N * N * C + 2 * (N * (4 * C * C + 3 * C + C) + 2 * N * C * 25)
    assert small["bytes_before"] == 4 * N * N * 2
    assert large["flops_before"] == 16 * small["flops_before"]
    text = str(report)
    for part in (
        "2 attention layers to 'lit', 1 left softmax",
        "heads 4 → 1",
        "core.conv.weight (zero",
        "needs training",
    ):
        assert part in text

    # Of the new targets: what has a score of its own; and the products of the inner network and its gradients.
    _, report = scanvas.linearize(model, "local", radius=2, sizes=[(8, 12)])
    pairs = 24 + 2 * (3 * 6 + 4 * 5) + 2 * 2 * 3 * 5  # of 4 × 6 tokens: themselves, beside, below, diagonally
    assert report.costs[0]["flops_after"] == 3 * 4 * 32 * pairs
    assert report.costs[0]["bytes_after"] == 2 * 4 * pairs
    _, report = scanvas.linearize(model, "t5", sizes=[(8, 12)])
    assert report.costs[0]["flops_after"] == 3 * (18 * 24 * 32 * 8 + 2 * 2 * 9 * 24 * 32)
    assert "core.inner.w1 (truncated normal" in str(report)
    _, report = scanvas.linearize(build("sd3")[0], "hybrid", every=4, sizes=[(8, 12)])
    exact = 24 * 6 + 2 * 24 * 333 + 333 * 333
    assert report.costs[0]["bytes_after"] == 2 * 4 * exact + 8 * 32 * 8

    unet, _ = build("unet")
    (cost,) = scanvas.linearize(unet, "lit", sizes=[(16, 24)])[1].costs
    assert cost["tokens"] == 16 * 24
    assert cost["flops_before"] == 3 * 4 * (384**2) * 16 + 4 * 4 * (96**2) * 32
    (cost,) = scanvas.linearize(build("sana")[0], "lit", heads=4, kernel_size=0, sizes=[(8, 8)])[1].costs
    assert cost["flops_after"] == cost["flops_before"] == 2 * 64 * (4 * 32 * 8 + 3 * 32 + 32)
    vit, _ = build("vit")
    (cost,) = scanvas.linearize(vit, "lit", sizes=[(48, 64)])[1].costs
    assert cost["tokens"] == 13


def test_denoiser_swaps_mixers_and_keeps_its_class():
    model, inputs = build("denoiser")
    student, _ = scanvas.linearize(model, "lit", [1], heads=2)
    assert type(student) is type(model)
    assert student.config.layer_mixers == {
        "1": {"mixer": "linear", "num_heads": 2, "kernel_size": 5, "eps": 1e-6, "qkv_bias": True}
    }
    assert [type(b.mixer).__name__ for b in student.transformer_blocks] == [
        "SoftmaxAttention",
        "LinearAttention",
        "SoftmaxAttention",
    ]
    more, _ = scanvas.linearize(student, "gla", [0])  # the rest can follow
    assert [b.order for b in more.transformer_blocks] == ["raster"] * 3
    rebuilt = type(more).from_config(more.config)
    rebuilt.load_state_dict(more.state_dict())
    assert torch.equal(run(rebuilt.eval(), inputs), run(more, inputs))
    dropped = [row["name"] for row in scanvas.linearize(model, "gla")[1].tensors if row["status"] == "dropped"]
    assert "transformer_blocks.0.mixer.to_q.bias" in dropped


def test_adapter_of_a_few_lines():
    class Net(nn.Module):
        """A model of someone else's."""

        def __init__(self):
            super().__init__()
            self.config = {"sample_size": 8}
            self.inner = copy.deepcopy(build("pixart")[0].transformer_blocks)

        def forward(self, hidden_states):
            x = hidden_states.flatten(2).transpose(1, 2)
            for block in self.inner:
                x = x + block.attn1(x)
            return x

    try:
        register_adapter(
            Adapter("Net", r"inner\.\d+\.attn1", grid=lambda model, args, kwargs: tuple(args[0].shape[2:]))
        )
        assert "Net" in known_models()
        net = Net()
        student, report = scanvas.linearize(net, "lit", sizes=[])
        assert type(student).__name__ == "LinearizedNet"
        assert len(report.layers) == 3
        assert student(torch.randn(1, 32, 4, 6)).shape == (1, 24, 32)
        assert type(scanvas.delinearize(student)) is Net
    finally:
        _ADAPTERS.pop("Net")

"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1: the kernels of gated_linear_attention on a CPU."""

import pytest
import torch

from scanvas.kernels import testing
from scanvas.kernels.gated import gated_linear_attention, launch, plan

BOTH = "gated_linear_attention"


@pytest.fixture(params=["segments", "one segment", "fused", "fused segments"])
def cut(request, monkeypatch):
    """Cut even short sequences into segments, do not, take the single launch, or a walk before it."""
    monkeypatch.setattr(plan, "MIN_SEGMENT_CHUNKS", 1 if request.param == "segments" else 4)
    monkeypatch.setattr(plan, "FUSED_PROGRAMS", 1 if request.param == "fused" else 1 << 30)
    monkeypatch.setattr(plan, "MIN_FUSED_CHUNKS", 1 if request.param == "fused segments" else 1 << 30)
    monkeypatch.setattr(plan, "MANY_PROGRAMS", 1)


@pytest.mark.parametrize(("N", "H"), [(1, 1), (37, 2)])
def test_lengths(N, H, cut):
    testing.check(BOTH, testing.make_inputs(BOTH, 1, N, H, 8, 8), "triton", torch.float32)


@pytest.mark.parametrize("operation", ["gated_linear_attention_causal", "gated_linear_attention_from_logits"])
def test_operations(operation, cut):
    testing.check(operation, testing.make_inputs(operation, 1, 20, 1, 8, 16), "triton", torch.float32)


WAYS = {"fused": (1, 8), "chunks": (1 << 30, 8), "cut": (1 << 30, 1)}
"""FUSED_PROGRAMS and MIN_FUSED_CHUNKS."""


@pytest.mark.parametrize(
    ("way", "gate"),
    [
        *[(way, gate) for way in ("fused", "chunks") for gate in testing.GATES],
        *[("cut", gate) for gate in ("mild", "spike", "alternating")],  # the walk of "chunks", then "fused"
    ],
)
def test_gates(way, gate, monkeypatch):
    """Tiles of 16 tokens here (of 32 the far way takes the interpreter thrice as long)."""
    programs, chunks = WAYS[way]
    monkeypatch.setattr(plan, "FUSED_PROGRAMS", programs)
    monkeypatch.setattr(plan, "MIN_FUSED_CHUNKS", chunks)
    monkeypatch.setattr(plan, "MANY_PROGRAMS", 1)
    monkeypatch.setattr(plan, "CHUNK", 16)
    testing.check(BOTH, testing.make_inputs(BOTH, 1, 20, 1, 8, 8, gate=gate), "triton", torch.float32)


@pytest.mark.parametrize(("Dk", "Dv"), [(5, 72), (40, 9), (8, 96)])
def test_head_dimensions_and_tiles(Dk, Dv):
    testing.check(BOTH, testing.make_inputs(BOTH, 1, 18, 1, Dk, Dv), "triton", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_of_any_head_end_with_it_or_are_masked(dtype):
    """Kernels mask a tile's columns only if its width does not divide that of the head."""
    for D in range(1, 257):
        x = torch.empty(1, 300, 1, D, dtype=dtype, device="meta")
        plan_ = plan.make_plan(x, x, x, True)
        for step, widths in ((plan_.BK, {plan_.BK}), (plan_.BV + plan_.BV2, {plan_.BV, plan_.BV2} - {0})):
            assert D % step == 0 or all(D % width for width in widths), (D, plan_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, monkeypatch):
    """The interpreter truncates to bfloat16 where a GPU rounds, hence the generous allowance."""
    monkeypatch.setitem(testing.LEAST, torch.bfloat16, 3e-2)
    testing.check(BOTH, testing.make_inputs(BOTH, 1, 40, 1, 16, 16), "triton", dtype)


@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (2, 2)])
def test_halves_where_states_would_take_too_much_memory(batch, heads, monkeypatch):
    """Batch or heads one after the other, in halves."""
    monkeypatch.setattr(launch, "WORKSPACE", 1)
    check_states(batch, 9, heads, bidirectional=True)


def test_no_images(cut):
    """An empty batch, with its gradients."""
    tensors = [x.requires_grad_() for x in testing.make_inputs(BOTH, 0, 5, 2, 8, 8)]
    out = gated_linear_attention(*tensors, impl="triton")
    assert out.shape == (0, 5, 2, 8)
    assert [x.shape for x in torch.autograd.grad(out.sum(), tensors)] == [x.shape for x in tensors]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_states(bidirectional, cut):
    check_states(1, 37, 1, bidirectional)


def check_states(B, N, H, bidirectional):
    inputs = testing.make_inputs(BOTH, B, N, H, 8, 6)[: 5 if bidirectional else 4]
    start = torch.randn(2, B, H, 8, 6, generator=torch.Generator().manual_seed(3))
    results = []
    for impl in ("recurrent", "triton"):
        leaves = [x.clone().requires_grad_() for x in (*inputs, *start[: 2 if bidirectional else 1])]
        states = dict(zip(("initial_state", "reverse_initial_state"), leaves[len(inputs) :]))
        outputs = gated_linear_attention(*leaves[: len(inputs)], impl=impl, return_states=True, **states)
        outputs = [x for x in outputs if x is not None]
        sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs).backward()
        results.append([*outputs, *(x.grad for x in leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_operator_registration():
    """Fake tensors, autograd registration and schema, as torch.compile and torch.export use them."""
    inputs = [x.requires_grad_() for x in testing.make_inputs(BOTH, 1, 5, 1, 4, 4)]
    torch.library.opcheck(
        torch.ops.scanvas.gated_linear_attention.default, (*inputs, None, None, 0.5, 0.0, True), raise_exception=True
    )


def test_strides_mixed_dtypes_and_refusals():
    q, k, v, f, r = testing.make_inputs(BOTH, 1, 9, 2, 4, 4)
    expected = gated_linear_attention(q, k, v, f, r, impl="recurrent")
    odd = (q.transpose(1, 3).contiguous().transpose(1, 3), k.double().float(), v, f.expand(1, -1, -1, -1), r)
    leaves = [x.detach().requires_grad_() for x in odd]
    out = gated_linear_attention(*leaves, impl="triton")
    out.sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    mixed = gated_linear_attention(q, k.bfloat16(), v.half(), f.half(), r, impl="triton")
    assert mixed.dtype == torch.float16
    torch.testing.assert_close(mixed.float(), expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match="float64"):
        gated_linear_attention(q.double(), k, v, f, r, impl="triton")

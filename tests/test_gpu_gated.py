"""The Triton kernels of gated_linear_attention on a GPU: the sweep of shapes, gates and dtypes that once broke kernels.

The reference is the chunked form in float64 on the GPU, which agrees with the recurrence to 1e-14.
"""

import itertools

import pytest
import torch

from scanvas.kernels import dispatch, testing
from scanvas.kernels.gated import gated_linear_attention, gated_linear_attention_from_logits

if dispatch.TRITON_USABLE:
    from scanvas.kernels.gated import plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOTH = "gated_linear_attention"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [16, 24, 32, 36, 48, 64, 72, 80, 96, 128]


def check(inputs, dtype, operation=BOTH):
    testing.check(operation, inputs, "triton", dtype, oracle="torch")


def inputs(*shape, operation=BOTH, **options):
    return testing.make_inputs(operation, *shape, device="cuda", **options)


@pytest.mark.parametrize("N", [1, 2, 7, 8, 15, 16, 17, 49, 63, 65, 197])
def test_lengths(N):
    check(inputs(2, N, 3, 32, 64), torch.bfloat16)


@pytest.mark.parametrize("operation", testing.OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations(operation, dtype):
    check(inputs(2, 197, 2, 32, 64, operation=operation), dtype, operation)


@pytest.mark.parametrize(("batch", "segments"), [(1, False), (67, False), (1, True)], ids=["chunks", "fused", "cut"])
@pytest.mark.parametrize("gate", testing.GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(gate, dtype, batch, segments, monkeypatch):
    """From 132 (batch, head) pairs on the forward is a single launch; of long sequences, one after a walk."""
    if segments:
        monkeypatch.setattr(plan, "MIN_FUSED_CHUNKS", 1)
        monkeypatch.setattr(plan, "MANY_PROGRAMS", 1)
    check(inputs(batch, 99, 2, 16 if dtype != torch.bfloat16 else 32, 32, gate=gate), dtype)


@pytest.mark.parametrize(("Dk", "Dv"), list(itertools.product(HEAD_DIMS, HEAD_DIMS)))
def test_head_dimensions(Dk, Dv):
    for B in (1, 67):
        check(inputs(B, 40, 2, Dk, Dv), torch.bfloat16)


@pytest.mark.parametrize(("Dk", "Dv"), [(1, 1), (5, 7), (36, 72), (32, 96), (16, 160), (128, 192), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_and_large_heads(Dk, Dv, dtype):
    check(inputs(1, 70, 2, Dk, Dv), dtype)


@pytest.mark.parametrize("N", [4096, 43884])
def test_long(N):
    """Against the chunked form in float64; long enough to be cut into segments."""
    q, k, v, f, r = (x.bfloat16() for x in inputs(1, N, 2, 32, 64))
    grad = torch.randn_like(v)
    results = []
    for impl, dtype in (("torch", torch.float64), ("triton", torch.bfloat16)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, f, r)]
        out = gated_linear_attention(*leaves, impl=impl)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))])
    for exact, got in zip(*results):
        assert (got.double() - exact).norm() < 1e-2 * exact.norm()


def test_beyond_2_to_31_elements():
    """Only the last head is compared; its elements lie behind the 2³¹st."""
    B, N, H, D = 1, 2**18 + 7, 80, 128
    q = torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    g = torch.full((1, 1, 1, 1), -0.05, device="cuda", dtype=torch.bfloat16).expand(B, N, H, D)
    with torch.no_grad():
        out = gated_linear_attention(q, q, q, g, g, impl="triton")[:, -4096:, -1:]
        piece = q[:, -6144:, -1:]
        expected = gated_linear_attention(
            *(x.double() for x in (piece, piece, piece, g[:, -6144:, -1:], g[:, -6144:, -1:])), impl="torch"
        )[:, -4096:]
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()


def test_strides_and_expanded_gradients():
    plain = inputs(2, 50, 2, 32, 64)
    results = []
    for impl, tensors in (
        ("torch", plain),
        ("triton", [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]),
        ("triton", [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in plain]),
        ("triton", [x.transpose(1, 3).contiguous().transpose(1, 3) for x in plain]),
    ):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = gated_linear_attention(*leaves, impl=impl)
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for got in results[1:]:
        for a, b in zip(got, results[0]):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtypes", list(itertools.product([torch.float32, torch.bfloat16], repeat=3)), ids=str)
def test_autocast_and_mixed_dtypes(dtypes):
    """q and k, v, gates in any dtypes, under autocast, forward and backward; gradients come in the inputs' dtypes."""
    qk, vv, gg = dtypes
    q, k, v, f, r = inputs(1, 33, 2, 32, 64)
    leaves = [x.to(d).requires_grad_() for x, d in ((q, qk), (k, qk), (v, vv), (f, gg), (r, gg))]
    with torch.autocast("cuda", torch.bfloat16):
        out = gated_linear_attention(*leaves, impl="triton")
        out.float().square().mean().backward()
    assert out.dtype == vv
    assert all(x.grad.dtype == x.dtype and torch.isfinite(x.grad).all() for x in leaves)
    expected = gated_linear_attention(*leaves, impl="torch")
    assert (out - expected).norm() < 2e-2 * expected.norm()


def test_compile_checkpoint_and_export():
    def layer(q, k, v, f, r):
        return gated_linear_attention_from_logits(q, k, v, f, r, impl="triton").square()

    tensors = [x.bfloat16() for x in inputs(2, 70, 2, 32, 64, operation="gated_linear_attention_from_logits")]

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves)
        out.float().sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    eager = gradients(layer)
    compiled = gradients(torch.compile(layer, fullgraph=True))
    saved = gradients(lambda *x: torch.utils.checkpoint.checkpoint(layer, *x, use_reentrant=False))
    for a, b, c in zip(eager, compiled, saved):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(a, c, rtol=0, atol=0)

    class Layer(torch.nn.Module):
        def forward(self, *x):
            return layer(*x)

    exported = torch.export.export(Layer(), tuple(tensors)).module()
    torch.testing.assert_close(exported(*tensors), eager[0], rtol=0, atol=0)


def test_same_bits_twice():
    tensors = [x.bfloat16() for x in inputs(4, 197, 3, 32, 64)]
    first, second = (gated_linear_attention(*tensors, impl="triton") for _ in range(2))
    assert torch.equal(first, second)

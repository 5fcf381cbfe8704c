"""The Triton kernels of division-normalised linear attention, on a GPU or under the interpreter, against float64."""

import pytest
import torch
from elementwise_parts import DEVICE

from scanvas.kernels import dispatch
from scanvas.kernels.linear import linear_attention

pytestmark = pytest.mark.skipif(
    not dispatch.TRITON_USABLE, reason="needs a GPU, or TRITON_INTERPRET=1 (see test_triton_interpreted.py)"
)
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # as of the form in PyTorch
# B, N, H, D, Dv, D' of other features for the divisor. Under the interpreter few tokens, and segments of one step.
CASES = [(1, 70, 2, 8, 5, None), (1, 40, 1, 72, 36, 9)]
if not dispatch.INTERPRETED:
    CASES += [
        (2, 5000, 3, 64, 64, None),
        (1, 3001, 2, 144, 72, 72),
        (67, 197, 2, 32, 64, None),
        (1, 900, 1, 256, 256, 8),
    ]


def inputs(case, dtype):
    B, N, H, D, Dv, other = case
    torch.manual_seed(0)
    widths = [D, D, Dv] + [other] * (2 if other else 0)
    tensors = [torch.randn(B, N + 1, H, width)[:, 1:] for width in widths]  # not contiguous, as after a class token
    features = [x.relu() + 0.1 for x in tensors]
    features[2] = tensors[2] + 3  # values with a mean: the gradients of numerator and divisor nearly cancel
    return [x.to(DEVICE, dtype).requires_grad_() for x in features]


def call(tensors, impl):
    names = dict(zip(("normalizer_q", "normalizer_k"), tensors[3:]))
    return linear_attention(*tensors[:3], **names, impl=impl)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, dtype, monkeypatch):
    if dispatch.INTERPRETED:
        # Sums in segments of one tile, or so few programs that each takes two.
        steps, programs = (2, 1) if dtype == torch.float32 else (1, 1024)
        monkeypatch.setattr("scanvas.kernels.linear.triton._STEPS", steps)
        monkeypatch.setattr("scanvas.kernels.linear.triton._PROGRAMS", programs)
    low = inputs(case, dtype)
    high = [x.detach().double().requires_grad_() for x in low]
    out, exact = call(low, "triton"), call(high, "torch")
    assert out.dtype == dtype
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    out.backward(upstream)
    exact.backward(upstream.double())
    # What the form in PyTorch leaves of a gradient that cancels is the measure where a dtype cannot hold it.
    plain = [x.detach().requires_grad_() for x in low]
    call(plain, "torch").backward(upstream)
    for name, a, b, c in zip(("q", "k", "v", "normalizer_q", "normalizer_k"), low, high, plain):
        allowed = max(BUDGET[dtype] * b.grad.norm(), 2 * (c.grad.double() - b.grad).norm())
        assert (a.grad.double() - b.grad).norm() <= allowed, name
    assert (out.double() - exact).norm() <= BUDGET[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", BUDGET)
def test_one_token_looks_at_itself(dtype):
    q, k, v = ((x.detach() + 1).requires_grad_() for x in inputs((2, 1, 1, 1, 3, None), dtype))
    out = linear_attention(q, k, v, impl="triton")
    torch.testing.assert_close(out, v, rtol=BUDGET[dtype], atol=0)
    out.square().sum().backward()
    torch.testing.assert_close(v.grad, 2 * v, rtol=2 * BUDGET[dtype], atol=0)
    scale = (2 * v * v).sum((1, 2, 3)).amax()
    for x in (q, k):  # 0 but for eps, the difference of two parts as large as that over x
        assert x.grad.abs().max() < BUDGET[dtype] * scale


@pytest.mark.parametrize("dtype", BUDGET)
def test_rows_of_zeros_are_finite(dtype):
    q, k, v = (x.detach() for x in inputs((2, 9, 2, 4, 4, None), dtype))
    q[:, 3] = 0
    k[1] = 0
    out = linear_attention(q, k, v, impl="triton")
    assert (out[:, 3] == 0).all()
    assert (out[1] == 0).all()
    assert out.isfinite().all()


def test_float16_sums_may_leave_its_range():
    q, k, v = (torch.rand(1, 99, 1, 8, device=DEVICE, dtype=torch.float16) * 200 for _ in range(3))
    exact = linear_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(linear_attention(q, k, v, impl="triton").double(), exact, rtol=2e-3, atol=0)


@pytest.mark.skipif(dispatch.INTERPRETED, reason="torch.compile does not see through the interpreter")
def test_compiled():
    tensors = inputs((2, 50, 2, 16, 8, None), torch.float32)
    expected = call(tensors, "triton")
    actual = torch.compile(lambda *x: call(x, "triton"), fullgraph=True)(*tensors)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(torch.autograd.grad(actual.sum(), tensors), torch.autograd.grad(expected.sum(), tensors)):
        torch.testing.assert_close(a, e)

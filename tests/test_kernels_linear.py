"""Division-normalised linear attention against its quadratic definition in float64."""

import pytest
import torch

from scanvas.kernels.linear import IMPLEMENTATIONS, attention_matrix, linear_attention, reference

BUDGET = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(2, 33, 3, 8, 5), (1, 2, 1, 2, 1), (3, 64, 2, 16, 16), (1, 197, 2, 72, 36)]  # B, N, H, D, Dv


def inputs(shape, dtype=torch.float64, normalizers=False):
    B, N, H, D, Dv = shape
    torch.manual_seed(0)
    q, k = torch.randn(2, B, N, H, D, dtype=torch.float64).relu() + 0.1  # a row of zeros has a test of its own
    tensors = [q, k, torch.randn(B, N, H, Dv, dtype=torch.float64)]
    if normalizers:
        tensors += [torch.rand(B, N, H, D + 3, dtype=torch.float64) for _ in range(2)]
    return [x.to(dtype).requires_grad_() for x in tensors]


def call(tensors, **kwargs):
    names = dict(zip(("normalizer_q", "normalizer_k"), tensors[3:]))
    return linear_attention(*tensors[:3], **names, **kwargs)


def by_hand(q, k, v, normalizer_q=None, normalizer_k=None, eps=1e-6):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    nq, nk = (q, k) if normalizer_q is None else (normalizer_q.transpose(1, 2), normalizer_k.transpose(1, 2))
    return ((q @ k.mT) / ((nq @ nk.mT).sum(-1, keepdim=True) + eps) @ v).transpose(1, 2)


@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("normalizers", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, normalizers, dtype, impl):
    low = inputs(shape, dtype, normalizers)
    high = [x.detach().double().requires_grad_() for x in low]
    out, exact = call(low, impl=impl), by_hand(*high)
    assert out.dtype == dtype
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    out.backward(upstream)
    exact.backward(upstream.double())
    pairs = [(out, exact), *((a.grad, b.grad) for a, b in zip(low, high))]
    for a, b in pairs:
        assert (a.double() - b).norm() <= BUDGET[dtype] * (b.norm() + 1e-6)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("normalizers", [False, True])
def test_long_sequences_in_parts(normalizers, dtype, monkeypatch):
    """Where no gradient is recorded, part by part: the same, whatever remains for the last part."""
    low = inputs((2, 33, 3, 8, 5), dtype, normalizers)
    high = [x.detach().double() for x in low]
    monkeypatch.setattr(reference, "_AT_A_TIME", 10)
    parts = []
    in_parts = reference._in_parts
    monkeypatch.setattr(reference, "_in_parts", lambda *args: parts.append(1) or in_parts(*args))
    with torch.no_grad():
        out, exact = call(low), by_hand(*high)
    assert parts
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= BUDGET[dtype] * exact.norm()
    call(low).sum().backward()
    assert len(parts) == 1


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", BUDGET)
def test_rows_of_zeros_are_finite(dtype, impl):
    """FLatten #15, #32: the divisor of such a row is eps alone, which float16 can not even represent."""
    q, k, v = inputs((2, 9, 2, 4, 4), dtype)
    with torch.no_grad():
        q[:, 3] = 0
        k[1] = 0
    out = linear_attention(q, k, v, impl=impl)
    out.square().sum().backward()
    assert (out[:, 3] == 0).all()
    assert (out[1] == 0).all()
    for x in (out, q.grad, k.grad, v.grad):
        assert x.isfinite().all() or dtype == torch.float16  # a gradient of 1/eps is no float16 number
    assert out.isfinite().all()


@pytest.mark.parametrize("autocast", [False, True])
def test_float16_does_not_overflow_in_long_sequences(autocast):
    """Sums over 16,384 tokens of features around 30 are 1.5e7; float16 ends at 65,504."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 16384, 1, 8) * 60 for _ in range(3))
    exact = linear_attention(q.double(), k.double(), v.double())
    dtype = torch.float32 if autocast else torch.float16
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5 if autocast else 2e-3, atol=0)


@pytest.mark.parametrize("normalizers", [False, True])
def test_matrix_and_its_rows(normalizers):
    tensors = [x.detach() for x in inputs((2, 13, 2, 4, 3), normalizers=normalizers)]
    q, k, v = tensors[:3]
    names = dict(zip(("normalizer_q", "normalizer_k"), tensors[3:]))
    matrix = attention_matrix(q, k, **names)
    torch.testing.assert_close((matrix @ v.transpose(1, 2)).transpose(1, 2), call(tensors))
    rows = torch.tensor([12, 0, 5])
    torch.testing.assert_close(attention_matrix(q, k, rows=rows, **names), matrix[:, :, rows])


def test_strides_and_meta():
    q, k, v = (x.detach() for x in inputs((2, 12, 3, 4, 4)))
    expected = linear_attention(q, k, v)
    strided = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    torch.testing.assert_close(linear_attention(*strided), expected)
    q = q[:, :1].expand(-1, 12, -1, -1).requires_grad_()
    linear_attention(q, k, v).sum().backward()
    assert linear_attention(*(x.to("meta") for x in (q, k, v))).shape == expected.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 5, 8)}, r"q and k must be \(B, N, H, D\), got q \(2, 5, 8\)"),
        ({"k": (2, 6, 2, 4)}, r"q and k must be .* and k \(2, 6, 2, 4\)"),
        ({"v": (2, 6, 2, 4)}, r"v must be \(B, N, H, Dv\) with \(B, N, H\) = \(2, 5, 2\), got \(2, 6, 2, 4\)"),
        ({"normalizer_q": (2, 5, 2, 4)}, r"both normalizer_q and normalizer_k, or neither"),
        ({"normalizer_q": (2, 5, 2, 4), "normalizer_k": (2, 5, 2, 3)}, r"must be \(B, N, H, D'\).*got \(2, 5, 2, 4\)"),
        ({"normalizer_q": (2, 5, 1, 4), "normalizer_k": (2, 5, 1, 4)}, r"must be \(B, N, H, D'\) with .*= \(2, 5, 2\)"),
    ],
)
def test_errors_name_the_argument(change, message):
    shapes = {"q": (2, 5, 2, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 4), **change}
    with pytest.raises(ValueError, match=f"linear_attention: .*{message}"):
        linear_attention(**{name: torch.rand(shape) for name, shape in shapes.items()})


def test_wrong_dtypes_devices_and_implementations():
    q, k, v = (x.detach() for x in inputs((1, 4, 1, 2, 2)))
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', 'torch', 'quadratic', got 'cuda'"):
        linear_attention(q, k, v, impl="cuda")
    with pytest.raises(TypeError, match=r"k must have a floating dtype, got torch.int64"):
        linear_attention(q, k.long(), v)
    with pytest.raises(ValueError, match=r"v is on meta, but q is on cpu"):
        linear_attention(q, k, v.to("meta"))
    with pytest.raises(TypeError, match=r"q must be a tensor, got list"):
        linear_attention([1.0], k, v)

"""The fused stem against its definition in float64, on a GPU or under the interpreter; its checks anywhere."""

import pytest
import torch
from elementwise_parts import BUDGET, DEVICE, relative_error

from scanvas.kernels import dispatch
from scanvas.kernels.stem import is_fused, stem


def arguments(batch=2, channels=3, size=(24, 16), stride=8, width=20):
    torch.manual_seed(0)
    weight = torch.randn(width, channels, stride + 1, stride + 1) * 0.1
    vectors = torch.randn(width), torch.rand(width) + 0.5, torch.randn(width)
    return torch.randn(batch, channels, *size), weight, *vectors


@pytest.mark.skipif(not dispatch.TRITON_USABLE, reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "channels", "size", "stride", "width"),
    [(2, 3, (24, 16), 8, 20), (1, 1, (8, 88), 8, 16), (3, 4, (40, 8), 8, 33), (1, 3, (8, 8), 8, 200)],
)
def test_kernel(dtype, batch, channels, size, stride, width):
    given = [x.to(DEVICE, dtype) for x in arguments(batch, channels, size, stride, width)]
    given[0] = given[0].contiguous(memory_format=torch.channels_last)[..., ::1]
    exact = stem(*(x.double() for x in given), stride=stride, impl="torch")
    assert relative_error(stem(*given, stride=stride, impl="triton"), exact) < BUDGET[dtype]
    assert relative_error(stem(given[0].contiguous(), *given[1:], stride=stride, impl="triton"), exact) < BUDGET[dtype]
    empty = stem(given[0][:0], *given[1:], stride=stride, impl="triton")
    assert empty.shape == (0, *exact.shape[1:])


@pytest.mark.skipif(not dispatch.TRITON_USABLE, reason="needs a GPU, or TRITON_INTERPRET=1")
def test_kernel_refuses_what_it_cannot_do():
    given = [x.to(DEVICE) for x in arguments()]
    with pytest.raises(TypeError, match="takes float16 or bfloat16"):
        stem(*given, stride=8, impl="triton")
    half = [x.bfloat16().requires_grad_() for x in given]
    with pytest.raises(RuntimeError, match="has no gradient"):
        stem(*half, stride=8, impl="triton")
    assert stem(*half, stride=8).requires_grad
    with pytest.raises(ValueError, match="has a stride of 8, got 4"):
        stem(*(x.to(DEVICE, torch.bfloat16) for x in arguments(stride=4)), stride=4, impl="triton")
    assert not is_fused(*half[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(20, 3, 8, 8)}, r"weight must be \(D, C, k, k\) with k = stride \+ 1 = 9"),
        ({"x": torch.ones(2, 3, 24, 12)}, "stride 8 must divide the sides of x"),
        ({"norm_bias": torch.ones(19)}, r"norm_bias must be \(20,\), got \(19,\)"),
        ({"impl": "fast"}, "impl must be one of"),
    ],
)
def test_wrong_arguments(change, message):
    names = ("x", "weight", "bias", "norm_weight", "norm_bias")
    with pytest.raises(ValueError, match=message):
        stem(**{**dict(zip(names, arguments())), "stride": 8, **change})

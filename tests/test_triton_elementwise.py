"""The Triton kernels of the convolution, the gates of heads and SwiGLU's product, on a GPU or under the interpreter."""

import pytest
import torch
from elementwise_parts import BUDGET, DEVICE, compare

from scanvas.kernels import dispatch
from scanvas.kernels.conv import depthwise_conv2d
from scanvas.kernels.gate import gated_mix, swish_norm
from scanvas.kernels.glu import silu_product, silu_product_

pytestmark = pytest.mark.skipif(
    not dispatch.TRITON_USABLE, reason="needs a GPU, or TRITON_INTERPRET=1 (see test_triton_interpreted.py)"
)

# batch, grid, channels, size, bias, activation. The interpreter takes about a second for a tile: small ones only there.
CONVOLUTIONS = [(2, (3, 5), 6, 3, False, "silu"), (1, (1, 1), 3, 3, True, None), (1, (2, 7), 3, 5, True, "silu")]
if not dispatch.INTERPRETED:
    CONVOLUTIONS += [
        (33, (7, 5), 24, 3, False, "silu"),
        (8, (20, 31), 70, 5, True, "silu"),
        (2, (64, 48), 384, 3, True, None),
    ]


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize(
    ("batch", "grid", "channels", "size", "bias", "activation"),
    CONVOLUTIONS,
)
def test_convolution(dtype, batch, grid, channels, size, bias, activation):
    torch.manual_seed(0)
    tokens = grid[0] * grid[1]
    x = torch.randn(batch, tokens + 1, channels)[:, 1:]  # as after a class token: not contiguous
    weight = torch.randn(channels, 1, size, size) * 0.3
    inputs = (x, weight, torch.randn(channels) if bias else None)

    def function(x, weight, bias, impl):
        return depthwise_conv2d(x, weight, grid, bias, activation=activation, impl=impl)

    # Under autocast the parameters stay float32 while tokens are half precision.
    compare(function, inputs, (dtype, torch.float32, torch.float32))


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "activation"), [(2, 9, 3, 64, "silu"), (1, 1, 1, 5, None), (3, 41, 2, 72, None)]
)
def test_gated_mix(dtype, batch, tokens, heads, dim, activation):
    torch.manual_seed(1)
    inputs = (
        torch.randn(batch, heads, tokens, dim).transpose(1, 2),
        torch.randn(batch, tokens, heads * dim),
        torch.randn(batch, tokens, heads * dim + 7) * 4,
        torch.rand(dim) + 0.5,
        torch.rand(dim) + 0.5,
    )

    def function(o, local, wide, *weights, impl):  # the gate is a slice, as of a projection of everything at once
        return gated_mix(o, local, wide[..., 3:-4], *weights, activation=activation, impl=impl)

    compare(function, inputs, (dtype,) * 3 + (torch.float32,) * 2)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize(("batch", "tokens", "heads", "dim"), [(2, 9, 3, 64), (1, 1, 1, 5), (3, 41, 2, 72)])
def test_swish_norm(dtype, batch, tokens, heads, dim):
    torch.manual_seed(4)
    inputs = (
        torch.randn(batch, heads, tokens, dim).transpose(1, 2),
        torch.randn(batch, tokens, heads * dim + 7) * 4,
        torch.rand(dim) + 0.5,
    )

    def function(o, wide, weight, impl):
        return swish_norm(o, wide[..., 3:-4], weight, impl=impl)

    compare(function, inputs, (dtype, dtype, torch.float32))


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("shape", [(2, 3, 10), (1, 1, 2), (5, 700)])
def test_silu_product(dtype, shape):
    torch.manual_seed(3)
    compare(silu_product, (torch.randn(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1)) * 4,), (dtype,))


def test_silu_product_overwrites():
    x = torch.randn(2, 3, 700, device=DEVICE)
    for given in (x.clone(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        expected = silu_product(given, impl="torch")
        out = silu_product_(given, impl="triton")
        assert out.data_ptr() == given.data_ptr()
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e4])
def test_gated_mix_is_finite_for_any_magnitude(scale):
    torch.manual_seed(2)
    o, local, gate = (torch.randn(1, 4, 8, device=DEVICE) * scale for _ in range(3))
    weight = torch.ones(4, device=DEVICE)
    tensors = [x.requires_grad_() for x in (o.unflatten(2, (2, 4)), local, gate)]
    out = gated_mix(*tensors, weight, weight, impl="triton")
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors))
    torch.testing.assert_close(out, gated_mix(*tensors, weight, weight, impl="torch"), rtol=1e-5, atol=1e-6)


def test_float64_is_refused_by_the_kernels_and_kept_by_auto():
    x, weight = torch.randn(1, 4, 2, device=DEVICE, dtype=torch.float64), torch.randn(2, 1, 3, 3, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        depthwise_conv2d(x, weight, (2, 2), impl="triton")
    assert depthwise_conv2d(x, weight, (2, 2)).dtype == torch.float64

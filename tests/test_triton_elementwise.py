"""The Triton kernels of the convolution, the gates of heads and SwiGLU, on a GPU or under the interpreter."""

import pytest
import torch
from elementwise_parts import BUDGET, DEVICE, compare, relative_error, with_dtypes
from torch.utils.flop_counter import FlopCounterMode

from scanvas.kernels import dispatch
from scanvas.kernels.conv import depthwise_conv2d
from scanvas.kernels.gate import gated_mix, swish_norm
from scanvas.kernels.glu import silu_product, silu_product_, swiglu_linear

pytestmark = pytest.mark.skipif(
    not dispatch.TRITON_USABLE, reason="needs a GPU, or TRITON_INTERPRET=1 (see test_triton_interpreted.py)"
)

# batch, grid, channels, size, bias, activation. The interpreter takes about a second for a tile: small ones only there.
CONVOLUTIONS = [
    (2, (3, 5), 6, 3, False, "silu"),
    (1, (1, 1), 3, 3, True, None),
    (1, (6, 7), 3, 5, True, "silu"),
    (1, (5, 18), 2, 7, False, None),
    (2, (5, 9), 6, 3, True, "silu"),
]
if not dispatch.INTERPRETED:
    CONVOLUTIONS += [
        (33, (7, 5), 24, 3, False, "silu"),
        (8, (20, 31), 70, 5, True, "silu"),
        (2, (64, 48), 384, 3, True, None),
    ]


@pytest.fixture
def few_programs(monkeypatch):
    """For the interpreter, so that a program's tiles go on in the next column and in the next image."""
    if dispatch.INTERPRETED:
        from scanvas.kernels.conv import triton as kernels

        monkeypatch.setattr(kernels, "PROGRAMS", 3)
        for name in ("GRADIENTS", "WEIGHTS"):
            monkeypatch.setattr(kernels, name, kernels.Tile(1, 4))


@pytest.mark.parametrize(
    ("dtype", "batch", "grid", "channels", "size", "bias", "activation"),
    with_dtypes(CONVOLUTIONS, slow=CONVOLUTIONS[2:5]),
)
def test_convolution(dtype, batch, grid, channels, size, bias, activation, few_programs):
    torch.manual_seed(0)
    tokens = grid[0] * grid[1]
    x = torch.randn(batch, tokens + 1, channels)[:, 1:]  # as after a class token: not contiguous
    weight = torch.randn(channels, 1, size, size) * 0.3
    inputs = (x, weight, torch.randn(channels) if bias else None)

    def function(x, weight, bias, impl):
        return depthwise_conv2d(x, weight, grid, bias, activation=activation, impl=impl)

    # Under autocast the parameters stay float32 while tokens are half precision.
    compare(function, inputs, (dtype, torch.float32, torch.float32))


def test_convolution_of_nothing():
    """An empty batch has gradients of zero, not what the memory of the sums held."""
    x = torch.randn(0, 6, 5, device=DEVICE).requires_grad_()
    parameters = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in ((5, 1, 3, 3), (5,))]
    out = depthwise_conv2d(x, parameters[0], (2, 3), parameters[1], activation="silu", impl="triton")
    assert out.shape == x.shape
    gradients = torch.autograd.grad(out.sum(), [x, *parameters])
    assert [g.shape for g in gradients] == [x.shape, *(p.shape for p in parameters)]
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "beside", "activation"),
    [(2, 9, 3, 64, 7, "silu"), (1, 1, 1, 5, 7, None), (3, 41, 2, 72, 8, None)],
)
def test_gated_mix(dtype, batch, tokens, heads, dim, beside, activation):
    torch.manual_seed(1)
    inputs = (
        torch.randn(batch, heads, tokens, dim).transpose(1, 2),
        torch.randn(batch, tokens, heads * dim),
        torch.randn(batch, tokens, heads * dim + beside) * 4,
        torch.rand(dim) + 0.5,
        torch.rand(dim) + 0.5,
    )

    def function(o, local, wide, *weights, impl):  # the gate is a slice, as of a projection of everything at once
        return gated_mix(o, local, wide[..., 3 : 3 - beside], *weights, activation=activation, impl=impl)

    compare(function, inputs, (dtype,) * 3 + (torch.float32,) * 2)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "beside"), [(2, 9, 3, 64, 7), (1, 1, 1, 5, 7), (3, 41, 2, 72, 8)]
)
def test_swish_norm(dtype, batch, tokens, heads, dim, beside):
    torch.manual_seed(4)
    inputs = (
        torch.randn(batch, heads, tokens, dim).transpose(1, 2),
        torch.randn(batch, tokens, heads * dim + beside) * 4,
        torch.rand(dim) + 0.5,
    )

    def function(o, wide, weight, impl):
        return swish_norm(o, wide[..., 3 : 3 - beside], weight, impl=impl)

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


# rows, C, D
PRODUCTS = [((2, 9), 32, 40), ((3, 7), 37, 9), ((1, 1), 1, 1)]
if not dispatch.INTERPRETED:
    PRODUCTS += [((2, 1000), 192, 512), ((3, 257), 384, 1024), ((7, 11), 100, 130), ((1, 300), 768, 2048)]


@pytest.fixture
def small_tiles(monkeypatch):
    """For the interpreter, so that there are several in every direction and several for a program."""
    if dispatch.INTERPRETED:
        from scanvas.kernels.glu import triton_swiglu

        monkeypatch.setattr(triton_swiglu, "tiling", lambda x: triton_swiglu.Tiling(16, 16, 16, 4, 2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "C", "D"), PRODUCTS)
def test_swiglu_linear(dtype, rows, C, D, small_tiles):
    torch.manual_seed(5)
    # Rows which lie apart, and channels which do.
    x = torch.randn(*rows, C + 3)[..., :C]
    inputs = (x, torch.randn(C, 2 * D).T * 2 * C**-0.5)
    compare(swiglu_linear, inputs, (dtype, dtype))
    x, weight = (t.to(DEVICE, dtype) for t in inputs)
    kept = swiglu_linear(x.requires_grad_(), weight, impl="triton")
    with torch.no_grad():  # x Wᵀ is not written then
        assert torch.equal(swiglu_linear(x, weight, impl="triton"), kept)
    assert torch.equal(swiglu_linear(x[0, 0], weight, impl="triton"), kept[0, 0])


def test_swiglu_linear_of_nothing():
    for shape, C, D in (((0, 5), 5, 3), ((2, 5), 5, 0)):
        x = torch.randn(shape, device=DEVICE).bfloat16().requires_grad_()
        weight = torch.randn(2 * D, C, device=DEVICE).bfloat16().requires_grad_()
        out = swiglu_linear(x, weight, impl="triton")
        assert out.shape == (shape[0], D)
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (x, weight)))


def test_swiglu_linear_in_graphs():
    """Fake tensors, autograd's registration and the schema, as torch.compile uses them; and its operations, counted."""
    x, weight = torch.randn(2, 3, 8, device=DEVICE).half(), torch.randn(12, 8, device=DEVICE).half()
    operations = torch.ops.scanvas
    for needs in ((True, True), (False, True)):
        tensors = tuple(t.clone().requires_grad_(need) for t, need in zip((x, weight), needs))
        torch.library.opcheck(operations.swiglu_linear_kept, tensors, atol=1e-2, rtol=1e-2)
    torch.library.opcheck(operations.swiglu_linear, (x, weight))
    counts = []
    for call in (lambda *tensors: swiglu_linear(*tensors, impl="triton"), torch.nn.functional.linear):
        with FlopCounterMode(display=False) as counter:
            call(x.requires_grad_(), weight.requires_grad_()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_swiglu_linear_leaves_float32_to_torch_and_casts_under_autocast():
    x, weight = torch.randn(2, 3, 8, device=DEVICE), torch.randn(12, 8, device=DEVICE)
    with pytest.raises(TypeError, match="takes float16 and bfloat16, not torch"):
        swiglu_linear(x, weight, impl="triton")
    expected = swiglu_linear(x, weight)
    assert expected.dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        out = swiglu_linear(x, weight, impl="triton")
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected.double()) < 2 * BUDGET[torch.bfloat16]


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
    wide = torch.randn(2, 1, 9, 9, device=DEVICE)
    with pytest.raises(ValueError, match="kernels of up to 7, got 9"):
        depthwise_conv2d(x.float(), wide, (2, 2), impl="triton")
    assert depthwise_conv2d(x.float(), wide, (2, 2)).shape == x.shape
    assert depthwise_conv2d(x, weight, (2, 2)).dtype == torch.float64

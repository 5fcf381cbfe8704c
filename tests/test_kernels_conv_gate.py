"""Depthwise convolution of tokens, gated mix and SwiGLU's product in torch, against loops in float64."""

import pytest
import torch

from scanvas.backbones.block import SwiGLU
from scanvas.kernels.conv import depthwise_conv2d
from scanvas.kernels.gate import gated_mix
from scanvas.kernels.glu import silu_product, silu_product_

BUDGET = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compare(function, by_hand, tensors, dtype):
    low = [x.to(dtype).requires_grad_() for x in tensors]
    high = [x.detach().double().requires_grad_() for x in low]
    out, exact = function(*low), by_hand(*high)
    assert out.dtype == dtype
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(upstream)
    exact.backward(upstream.double())
    for a, b in [(out, exact), *((x.grad, y.grad) for x, y in zip(low, high))]:
        assert (a.double() - b).norm() <= BUDGET[dtype] * b.norm()


def silu(x):
    return x / (1 + (-x).exp())


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("grid", "size"), [((3, 5), 3), ((1, 1), 3), ((2, 7), 5), ((4, 1), 1)])
def test_convolution(grid, size, bias, activation, dtype):
    torch.manual_seed(0)
    H, W = grid
    tensors = [torch.randn(2, H * W, 3).double(), torch.randn(3, 1, size, size).double()]
    tensors += [torch.randn(3).double()] if bias else []

    def by_hand(x, weight, bias=None):
        rows = []
        for row in range(H):
            for column in range(W):
                total = x.new_zeros(2, 3) if bias is None else bias.expand(2, 3)
                for i in range(size):
                    for j in range(size):
                        r, c = row + i - size // 2, column + j - size // 2
                        if 0 <= r < H and 0 <= c < W:
                            total = total + weight[:, 0, i, j] * x[:, r * W + c]
                rows.append(total)
        out = torch.stack(rows, dim=1)
        return silu(out) if activation else out

    def function(x, weight, bias=None):
        return depthwise_conv2d(x, weight, grid, bias, activation=activation)

    compare(function, by_hand, tensors, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (2, 6, 3, 1)}, r"x must be \(B, H·W, C\) with grid \(H, W\) = \(2, 3\), got \(2, 6, 3, 1\)"),
        ({"x": (2, 7, 3)}, r"x must be .*got \(2, 7, 3\)"),
        ({"weight": (4, 1, 3, 3)}, r"weight must be \(C, 1, k, k\) with C = 3 and odd k, got \(4, 1, 3, 3\)"),
        ({"weight": (3, 1, 3, 5)}, r"weight must be .*got \(3, 1, 3, 5\)"),
        ({"weight": (3, 1, 4, 4)}, r"weight must be .*got \(3, 1, 4, 4\)"),
        ({"bias": (4,)}, r"bias must be \(C,\) = \(3,\), got \(4,\)"),
    ],
)
def test_convolution_names_a_wrong_shape(change, message):
    shapes = {"x": (2, 6, 3), "weight": (3, 1, 3, 3), "bias": (3,), **change}
    with pytest.raises(ValueError, match=f"depthwise_conv2d: {message}"):
        depthwise_conv2d(grid=(2, 3), **{name: torch.rand(shape) for name, shape in shapes.items()})


def test_convolution_refuses_what_it_does_not_know():
    x, weight = torch.rand(1, 6, 3), torch.rand(3, 1, 3, 3)
    with pytest.raises(ValueError, match=r"activation must be one of \(None, 'silu'\), got 'relu'"):
        depthwise_conv2d(x, weight, (2, 3), activation="relu")
    with pytest.raises(ValueError, match=r"depthwise_conv2d: impl must be one of 'auto', 'torch'.*got 'fast'"):
        depthwise_conv2d(x, weight, (2, 3), impl="fast")
    with pytest.raises(RuntimeError, match=r"impl='triton'"):
        depthwise_conv2d(x.to("meta"), weight.to("meta"), (2, 3), impl="triton")
    assert depthwise_conv2d(x.to("meta"), weight.to("meta"), (2, 3)).shape == x.shape


def mix_by_hand(o, local, gate, o_weight, local_weight, activation=None, eps=1e-6):
    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    local, gate = (x.unflatten(-1, o.shape[-2:]) for x in (local, gate))
    weight = 1 / (1 + (-gate).exp())
    out = weight * norm(o, o_weight) + (1 - weight) * norm(local, local_weight)
    return (silu(out) if activation else out).flatten(2)


def mix_inputs(B=2, N=7, H=3, D=8):
    torch.manual_seed(0)
    shapes = [(B, N, H, D), (B, N, H * D), (B, N, H * D), (D,), (D,)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gated_mix(activation, dtype):
    def function(*tensors):
        return gated_mix(*tensors, activation=activation)

    def by_hand(*tensors):
        return mix_by_hand(*tensors, activation=activation)

    compare(function, by_hand, mix_inputs(), dtype)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_mix_at_extreme_sizes(scale, dtype):
    """Rows of zeros and rows whose squares do not fit into float16, with gates from −100 to 100; gradients too."""
    o, local, gate, *weights = mix_inputs()
    low = [x.to(dtype).requires_grad_() for x in (o * scale, local * scale, gate * 100, *weights)]
    out = gated_mix(*low)
    out.sum().backward()
    expected = mix_by_hand(*(x.detach().double() for x in low))
    torch.testing.assert_close(out.double(), expected, atol=5e-3 if dtype == torch.float16 else 1e-5, rtol=5e-3)
    assert all(x.grad.isfinite().all() for x in low if dtype == torch.float32 or scale > 1)


def test_gated_mix_takes_mixed_dtypes_as_under_autocast():
    o, local, gate, *weights = mix_inputs()
    out = gated_mix(o.float(), local.bfloat16(), gate.bfloat16(), *(w.float() for w in weights))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), mix_by_hand(o, local, gate, *weights), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": (2, 4, 6)}, r"o must be \(B, N, H, D\), got \(2, 4, 6\)"),
        ({"local": (2, 4, 5)}, r"local must be \(2, 4, 6\) for o of shape \(2, 4, 2, 3\), got \(2, 4, 5\)"),
        ({"gate": (2, 5, 6)}, r"gate must be \(2, 4, 6\)"),
        ({"o_weight": (6,)}, r"o_weight must be \(3,\)"),
        ({"local_weight": (1,)}, r"local_weight must be \(3,\)"),
    ],
)
def test_gated_mix_names_a_wrong_shape(change, message):
    shapes = {
        "o": (2, 4, 2, 3),
        "local": (2, 4, 6),
        "gate": (2, 4, 6),
        "o_weight": (3,),
        "local_weight": (3,),
        **change,
    }
    with pytest.raises(ValueError, match=f"gated_mix: {message}"):
        gated_mix(**{name: torch.rand(shape) for name, shape in shapes.items()})
    good = [x.float() for x in mix_inputs()]
    with pytest.raises(ValueError, match=r"activation must be one of \(None, 'silu'\), got 'gelu'"):
        gated_mix(*good, activation="gelu")
    with pytest.raises(ValueError, match=r"gated_mix: impl must be one of 'auto', 'torch'.*got 'x'"):
        gated_mix(*good, impl="x")


@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
def test_wrong_dtypes_and_devices_are_named(argument):
    good = {"x": torch.rand(1, 6, 3), "weight": torch.rand(3, 1, 3, 3), "bias": torch.rand(3)}
    with pytest.raises(TypeError, match=rf"depthwise_conv2d: {argument} must have a floating dtype, got torch.int64"):
        depthwise_conv2d(grid=(2, 3), **{**good, argument: good[argument].long()})
    if argument != "x":
        with pytest.raises(ValueError, match=rf"depthwise_conv2d: {argument} is on meta, but x is on cpu"):
            depthwise_conv2d(grid=(2, 3), **{**good, argument: good[argument].to("meta")})
    o, local, gate, *weights = mix_inputs()
    with pytest.raises(TypeError, match=r"gated_mix: gate must have a floating dtype, got torch.int64"):
        gated_mix(o, local, gate.long(), *weights)
    with pytest.raises(ValueError, match=r"gated_mix: local is on meta, but o is on cpu"):
        gated_mix(o, local.to("meta"), gate, *weights)


def test_silu_product_overwrites_only_what_nobody_wants():
    x = torch.randn(2, 3, 10)
    expected = silu_product(x)
    with pytest.raises(RuntimeError, match="requires grad"):
        silu_product_(x.clone().requires_grad_())
    out = silu_product_(x)
    assert out.data_ptr() == x.data_ptr()
    torch.testing.assert_close(out, expected)

    mlp, seen = SwiGLU(4, 6), []
    x = torch.randn(2, 3, 4)
    expected = mlp(x)  # with gradients
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
        mlp.fc1.register_forward_hook(lambda module, args, output: seen.append(output))
        torch.testing.assert_close(mlp(x), expected)
        torch.testing.assert_close(seen[0], mlp.fc1(x))

"""Norms of tokens with residual sum, modulation and scan order: the torch form by its parts, the kernels by it."""

import pytest
import torch
import torch.nn.functional as F
from elementwise_parts import DEVICE, compare, with_dtypes

from scanvas.kernels import dispatch
from scanvas.kernels.norm import add_norm, gated_add, token_norm
from scanvas.kernels.scan_order import ORDERS, permutation

needs_triton = pytest.mark.skipif(
    not dispatch.TRITON_USABLE, reason="needs a GPU, or TRITON_INTERPRET=1 (see test_triton_interpreted.py)"
)
GRID = (3, 5)


def arguments(batch, channels, modulated, weighted, biased, grid=GRID):
    torch.manual_seed(0)
    tokens = grid[0] * grid[1]
    x = torch.randn(batch, tokens + 1, channels)[:, 1:] * 3 + 1  # as after a class token: not contiguous
    branch = torch.randn(batch, channels, tokens).transpose(1, 2)
    condition = torch.randn(batch, 1, 3 * channels)
    gate, shift, scale = condition.chunk(3, dim=-1) if modulated else (None,) * 3
    weight = torch.rand(channels) + 0.5 if weighted else None
    bias = torch.randn(channels) if biased else None
    return x, branch, gate, weight, bias, shift, scale


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_against_the_parts(kind, order):
    """Every step apart, in float64."""
    x, branch, gate, weight, bias, shift, scale = (y.double() for y in arguments(2, 6, True, True, True))
    bias = bias if kind == "layer" else None
    visit, back = permutation(order, GRID)

    def norm(y):
        y = y - y.mean(-1, keepdim=True) if kind == "layer" else y
        y = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + (0 if bias is None else bias)
        return y * (1 + scale) + shift

    options = {"kind": kind, "weight": weight, "bias": bias, "shift": shift, "scale": scale, "eps": 1e-3}
    where = {"order": order, "grid": GRID}
    torch.testing.assert_close(token_norm(x, **options, **where), norm(x)[:, visit])
    total = x + gate * branch[:, back]
    for actual, exact in zip(add_norm(x, branch, gate, **options, **where), (total, norm(total))):
        torch.testing.assert_close(actual, exact)
    torch.testing.assert_close(gated_add(x, branch, gate, **where), total)
    torch.testing.assert_close(gated_add(x, branch, None), x + branch)


# batch, channels, kind, modulated, weighted, biased, order
CASES = [
    (2, 6, "layer", True, False, False, "reversed_column"),
    (3, 40, "rms", False, True, False, "raster"),
    (1, 5, "layer", False, True, True, "column"),
    (1, 3000, "rms", True, True, False, "reversed"),
]


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "batch", "channels", "kind", "modulated", "weighted", "biased", "order"),
    with_dtypes(CASES, slow=CASES[3:]),
)
def test_kernels(dtype, batch, channels, kind, modulated, weighted, biased, order):
    # On a GPU several steps of a program, and sums over programs; under the interpreter few tokens.
    grid = GRID if dispatch.INTERPRETED else (37, 61)
    x, branch, gate, weight, bias, shift, scale = arguments(batch, channels, modulated, weighted, biased, grid)
    where = {"order": order, "grid": grid}

    def norm(x, weight, bias, shift, scale, impl):
        options = {"weight": weight, "bias": bias, "shift": shift, "scale": scale}
        return token_norm(x, kind=kind, **options, **where, impl=impl)

    def sum_norm(x, branch, gate, weight, bias, shift, scale, impl):
        options = {"weight": weight, "bias": bias, "shift": shift, "scale": scale}
        return add_norm(x, branch, gate, kind=kind, **options, **where, impl=impl)

    def add(x, branch, gate, impl):
        return gated_add(x, branch, gate, **where, impl=impl)

    # Parameters stay float32 under autocast; what comes from a layer is in the tokens' dtype.
    compare(norm, (x, weight, bias, shift, scale), (dtype, torch.float32, torch.float32, dtype, dtype))
    compare(
        sum_norm,
        (x, branch, gate, weight, bias, shift, scale),
        (dtype, dtype, dtype, torch.float32, torch.float32, dtype, dtype),
    )
    compare(add, (x, branch, gate), (dtype,) * 3)


@needs_triton
def test_branch_shared_by_images_or_tokens():
    """Positions, or a bias: not copied to be of the size of x."""
    x, branch, _, weight, *_ = arguments(3, 40, False, True, False)

    def add(x, branch, impl):
        return gated_add(x, branch.expand_as(x), None, impl=impl)

    def sum_norm(x, branch, weight, impl):
        return add_norm(x, branch.expand_as(x), weight=weight, impl=impl)

    for shared in (branch[:1], branch[0, 0]):
        compare(add, (x, shared.contiguous()), (torch.float32,) * 2)
        compare(sum_norm, (x, shared.contiguous(), weight), (torch.float32,) * 3)


@needs_triton
def test_a_float32_stream_takes_a_half_precision_branch():
    x, branch, *_ = arguments(2, 6, False, False, False)
    x = x.to(DEVICE).requires_grad_()
    branch = branch.to(DEVICE, torch.bfloat16).requires_grad_()
    for total in (gated_add(x, branch, None, impl="triton"), add_norm(x, branch, impl="triton")[0]):
        assert total.dtype == torch.float32
        grads = torch.autograd.grad(total.sum(), (x, branch), retain_graph=True)
        assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16]
        assert all((g == 1).all() for g in grads)


@needs_triton
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e4])
def test_finite_for_any_magnitude(scale):
    x = (torch.randn(1, 4, 8, device=DEVICE) * scale).requires_grad_()
    for kind in ("rms", "layer"):
        out = token_norm(x, kind=kind, impl="triton")
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
        expected = F.layer_norm(x, (8,), eps=1e-6) if kind == "layer" else F.rms_norm(x, (8,), eps=1e-6)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@needs_triton
@pytest.mark.skipif(dispatch.INTERPRETED, reason="torch.compile does not see through the interpreter")
def test_compiled():
    x, branch, gate, weight, _, shift, scale = (
        None if y is None else y.to(DEVICE).requires_grad_() for y in arguments(2, 64, True, True, False)
    )

    def block(x, branch, gate, weight, shift, scale):
        total, y = add_norm(x, branch, gate, weight=weight, shift=shift, scale=scale, order="column", grid=GRID)
        return gated_add(total, y, gate).square().mean()

    tensors = (x, branch, gate, weight, shift, scale)
    expected, actual = block(*tensors), torch.compile(block, fullgraph=True)(*tensors)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(torch.autograd.grad(actual, tensors), torch.autograd.grad(expected, tensors)):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "batch"}, "kind must be one of"),
        ({"weight": torch.ones(7)}, r"weight must be \(6,\)"),
        ({"shift": torch.ones(2, 1, 6)}, "go together"),
        ({"bias": torch.ones(6)}, "has no bias"),
        ({"order": "column"}, "needs the grid"),
        ({"order": "diagonal"}, "scan order must be one of"),
        ({"grid": (2, 2)}, r"grid must be \(H, W\) of the 15 tokens of x, got \(2, 2\)"),
        ({"grid": (-3, -5)}, r"got \(-3, -5\)"),
        ({"impl": "cuda"}, "impl must be one of"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        token_norm(torch.ones(2, 15, 6), **change)
    with pytest.raises(ValueError, match=r"branch must be \(2, 15, 6\)"):
        add_norm(torch.ones(2, 15, 6), torch.ones(2, 14, 6))

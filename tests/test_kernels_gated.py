"""gated_linear_attention: every implementation against the recurrence in float64, values and gradients."""

import pytest
import torch

from scanvas.kernels import testing
from scanvas.kernels.gated import IMPLEMENTATIONS, attention_matrix, gated_linear_attention

OPERATIONS = list(testing.OPS)
LENGTHS = [1, 2, 7, 8, 15, 16, 17, 49, 63, 65, 197]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = ["quadratic", "torch"]
HERE = [*PLAIN, *(["triton"] if "triton" in IMPLEMENTATIONS and not torch.cuda.is_available() else [])]


@pytest.mark.parametrize("impl", PLAIN)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("N", LENGTHS)
def test_exact_in_float64(operation, impl, N):
    testing.check(operation, testing.make_inputs(operation, 2, N, 2, 5, 7), impl, torch.float64)


@pytest.mark.parametrize("impl", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", testing.GATES)
def test_hostile_gates(impl, dtype, gate):
    inputs = testing.make_inputs("gated_linear_attention", 1, 49, 2, 8, 6, gate=gate)
    testing.check("gated_linear_attention", inputs, impl, dtype)


@pytest.mark.parametrize("whole", [10, 39, 41, 50, 59, 61, 90])
def test_gradients_of_steady_decays(whole):
    """Chunks of 64 tokens that decay by exp(-whole) in all, where factors of decays near the end of float32's range."""
    q, k, v, f, r = testing.make_inputs("gated_linear_attention", 1, 128, 2, 6, 5)
    f, r = (torch.full_like(g, -whole / 64) for g in (f, r))
    testing.check("gated_linear_attention", (q, k, v, f, r), "torch", torch.float32)


@pytest.mark.parametrize("impl", PLAIN)
@pytest.mark.parametrize(("Dk", "Dv"), [(1, 1), (16, 80), (72, 8)])
def test_head_dimensions(impl, Dk, Dv):
    testing.check(
        "gated_linear_attention", testing.make_inputs("gated_linear_attention", 1, 17, 2, Dk, Dv), impl, torch.float64
    )


@pytest.mark.parametrize("impl", HERE)
def test_strides_and_expanded_gradients(impl):
    """Inputs that are transposed, sliced or expanded, and the gradient of a sum, which is expanded."""
    inputs = testing.make_inputs("gated_linear_attention", 2, 9, 2, 6, 4)
    reference = [x.clone().requires_grad_() for x in inputs]
    out = gated_linear_attention(*reference, impl="recurrent")
    out.sum().backward()
    q, k, v, f, r = (x.clone() for x in inputs)
    odd = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k.transpose(1, 3).contiguous().transpose(1, 3),
        torch.stack((v, v), -1).flatten(-2)[..., ::2],
        torch.cat((f, f), dim=1)[:, :9],
        r.flip(1).flip(1),
    ]
    leaves = [x.detach().requires_grad_() for x in odd]
    got = gated_linear_attention(*leaves, impl=impl)
    got.sum().backward()
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-5)
    for a, b in zip(leaves, reference):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", HERE)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_states_join_pieces(impl, bidirectional):
    """Two halves joined by their states give the whole, with the gradients of everything, the states included."""
    inputs = testing.make_inputs("gated_linear_attention", 1, 20, 2, 6, 5)
    if not bidirectional:
        inputs = inputs[:4]
    start = torch.randn(2, 1, 2, 6, 5, generator=torch.Generator().manual_seed(3))

    def whole(impl, *leaves):
        *tensors, left, right = leaves
        states = {"initial_state": left, "return_states": True, "impl": impl}
        if bidirectional:
            states["reverse_initial_state"] = right
        out, final, reverse_final = gated_linear_attention(*tensors, **states)
        return [out, final] + ([reverse_final] if bidirectional else [])

    results = []
    for name in ("recurrent", impl):
        leaves = [x.clone().requires_grad_() for x in (*inputs, *start)]
        outputs = whole(name, *leaves)
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs)
        loss.backward()
        results.append([*outputs, *(x.grad for x in leaves if x.grad is not None)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    if not bidirectional:
        first, state, _ = gated_linear_attention(*(x[:, :11] for x in inputs), impl=impl, return_states=True)
        second = gated_linear_attention(*(x[:, 11:] for x in inputs), impl=impl, initial_state=state)
        expected = gated_linear_attention(*inputs, impl="recurrent")
        torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", HERE)
def test_reversal_equivariance(impl):
    q, k, v, f, r = testing.make_inputs("gated_linear_attention", 1, 19, 1, 4, 4)
    out = gated_linear_attention(q, k, v, f, r, impl=impl)
    flipped = gated_linear_attention(*(x.flip(1) for x in (q, k, v, r, f)), impl=impl)
    torch.testing.assert_close(flipped.flip(1), out, rtol=1e-4, atol=1e-5)


def test_attention_matrix_gives_the_output():
    q, k, v, f, r = testing.make_inputs("gated_linear_attention", 2, 13, 2, 4, 6)
    matrix = attention_matrix(q, k, f, r)
    expected = gated_linear_attention(q, k, v, f, r, impl="recurrent")
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", matrix, v), expected, rtol=1e-4, atol=1e-5)


def test_errors_name_the_argument():
    q, k, v, f, r = testing.make_inputs("gated_linear_attention", 1, 5, 1, 4, 4)
    with pytest.raises(ValueError, match="impl must be one of"):
        gated_linear_attention(q, k, v, f, r, impl="fast")
    with pytest.raises(ValueError, match="k must be"):
        gated_linear_attention(q, k[:, :4], v, f, r)
    with pytest.raises(TypeError, match="log_decay must be a tensor, got NoneType"):
        gated_linear_attention(q, k, v, None, r)
    with pytest.raises(TypeError, match="reverse_log_decay must have a floating dtype"):
        gated_linear_attention(q, k, v, f, r.long())
    with pytest.raises(ValueError, match="reverse_initial_state was given without"):
        gated_linear_attention(q, k, v, f, reverse_initial_state=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="at most 256"):
        gated_linear_attention(*(x.expand(-1, -1, -1, 300) for x in (q[..., :1], k[..., :1])), v, f, r)


@pytest.mark.skipif("triton" in IMPLEMENTATIONS, reason="the kernels can run here")
def test_explicit_triton_is_refused_where_it_can_not_run():
    q, k, v, f, r = testing.make_inputs("gated_linear_attention", 1, 5, 1, 4, 4)
    with pytest.raises(RuntimeError, match="impl='triton'"):
        gated_linear_attention(q, k, v, f, r, impl="triton")

"""flash-linear-attention's kernels behind ``gated_delta_rule`` on a GPU, against our chunked form in float64.

The chunked form agrees with the recurrence to 1e-10 (test_mixers_gated.py).
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from scanvas.backbones.mixers import create_mixer
from scanvas.kernels.delta import fla, gated_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention"),
]

# Three times the largest error that the kernels have in float16 with exact products, under Triton's interpreter, and
# the same for a dtype of three bits less.
ALLOWED = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
KINDS = ["gdn", "kda", "gdn2", "two gates"]
DECAYS = {
    "mild": lambda u: 0.1 * u,
    "none": torch.zeros_like,
    "-5": lambda u: torch.full_like(u, -5.0),
    "-30": lambda u: torch.full_like(u, -30.0),
    "spike": lambda u: torch.where(torch.arange(u.shape[1])[:, None, None] == u.shape[1] // 2, -1e4, 0.1 * u),
}


def inputs(kind, B, N, H, Dk, Dv, *, decay="mild", dtype=torch.bfloat16, device="cuda"):
    """q, k, v, log decays and gates; q, k and v are exact in ``dtype``, in which v comes."""
    generator = torch.Generator().manual_seed(N + Dk)
    widths = {"gdn": (1, 1, 0), "kda": (Dk, 1, 0), "gdn2": (Dk, Dk, 0), "two gates": (Dk, Dk, Dv)}[kind]
    q, k, v = (torch.randn(B, N, H, d, generator=generator) for d in (Dk, Dk, Dv))
    g, *gates = (torch.rand(B, N, H, d, generator=generator) for d in widths if d)
    q, k, v = (x.to(dtype) for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    gates = [x.to(dtype).float() for x in gates]
    return [x.to(device) for x in (q.float(), k.float(), v, DECAYS[decay](-g), *gates)]


def results(tensors, kind, impl, grad):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    gates = leaves[4:] if kind in ("gdn2", "two gates") else leaves[4:] * 2
    out = gated_delta_rule(*leaves[:4], *gates, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(kind, *shape, dtype=torch.bfloat16, **options):
    tensors = inputs(kind, *shape, dtype=dtype, **options)
    q, k, v, g, *gates = tensors
    reason = fla.refusal(q, k, v, g, gates[0], gates[-1] if kind != "gdn2" else None)
    if reason is not None:
        pytest.skip(reason)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v)
    exact = results([x.double() for x in tensors], kind, "torch", grad)
    got = results(tensors, kind, "fla", grad)
    for name, x, reference in zip(("out", "dq", "dk", "dv", "dg", "db", "dw"), got, exact):
        # A decay's gradient is a sum of q ⊙ dq minus k ⊙ dk, which may cancel to nothing.
        size = torch.maximum(reference.norm(), (q.double() * exact[1]).norm()) if name == "dg" else reference.norm()
        error = float((x.double() - reference).norm() / size.clamp_min(1e-30))  # one token alone erases nothing
        assert error < ALLOWED[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("N", [2, 7, 16, 63, 64, 65, 197, 1025])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind, N, dtype):
    check(kind, 2, N, 3, 48, 96, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token(kind):
    """Of many heads: a head's gradient of q is one scalar product, which may all but cancel."""
    check(kind, 8, 1, 16, 32, 64)


@pytest.mark.parametrize(
    ("Dk", "Dv"), [(16, 16), (24, 48), (32, 64), (40, 72), (64, 64), (72, 72), (96, 192), (128, 128), (256, 256)]
)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_head_dimensions(kind, Dk, Dv):
    check(kind, 2, 99, 2, Dk, Dv)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_decays(kind, decay):
    check(kind, 2, 150, 2, 32, 64, decay=decay)


def test_long():
    for kind in KINDS[:3]:
        check(kind, 1, 16385, 2, 64, 64)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_auto_takes_the_kernels_for_strided_inputs_and_expanded_gradients(kind):
    tensors = inputs(kind, 2, 50, 2, 32, 64)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(tensors[2].shape)
    for actual, expected in zip(results(strided, kind, "auto", ones), results(tensors, kind, "fla", ones.contiguous())):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", KINDS[:3])
def test_mixers_under_autocast(name):
    """Float32 parameters, both directions, prefix tokens; against the same mixer in float64."""
    torch.manual_seed(0)
    mixer = create_mixer(name, 192, 3).cuda()
    x = torch.randn(2, 2 + 13 * 17, 192, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = mixer(x, (13, 17), prefix=2)
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    exact = mixer.double()(x.double(), (13, 17), prefix=2)
    assert (out.double() - exact).norm() < 3e-2 * exact.norm()

"""Kernels that work token by token against their torch form in float64."""

import torch

from scanvas.kernels import dispatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The float32 kernels differ from float64 by rounding only; bfloat16 and float16 by the rounding of inputs and outputs.
BUDGET = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def with_dtypes(cases, slow=()):
    """``(dtype, *case)`` for every case. The interpreter takes seconds for the ``slow`` ones, not repeated in float16:
    kernels compute in float32, and how they load and store float16 the other cases show."""
    skipped = slow if dispatch.INTERPRETED else ()
    return [(dtype, *case) for case in cases for dtype in BUDGET if dtype != torch.float16 or case not in skipped]


def relative_error(actual, exact):
    assert actual.isfinite().all()
    return ((actual.double() - exact).norm() / exact.norm()).item()


def compare(function, inputs, dtypes):
    """Outputs and gradients of the kernel against the torch form in float64 on the same, rounded, inputs."""
    rounded = [None if x is None else x.to(DEVICE, dtype) for x, dtype in zip(inputs, dtypes)]
    low = [None if x is None else x.detach().requires_grad_() for x in rounded]
    high = [None if x is None else x.detach().double().requires_grad_() for x in rounded]
    wanted, given = [x for x in high if x is not None], [x for x in low if x is not None]
    actual, exact = function(*low, impl="triton"), function(*high, impl="torch")
    budget = BUDGET[dtypes[0]]
    pairs = list(zip(actual, exact)) if isinstance(exact, tuple) else [(actual, exact)]
    for actual, exact in pairs:
        assert relative_error(actual, exact) < budget
        # A transposed gradient, and an expanded one, as of y.sum(). Converted to half precision that one is dense, and
        # the interpreter leaves it out.
        upstream = torch.randn(exact.shape[1], exact.shape[0], *exact.shape[2:], device=DEVICE).transpose(0, 1)
        upstreams = [upstream, torch.ones((), device=DEVICE).expand(exact.shape)]
        if dispatch.INTERPRETED and dtypes[0] != torch.float32:
            upstreams.pop()
        for gradient in upstreams:
            options = {"retain_graph": True, "allow_unused": True}
            got = torch.autograd.grad(actual, given, gradient.to(actual.dtype), **options)
            true = torch.autograd.grad(exact, wanted, gradient.to(actual.dtype).double(), **options)
            for g, t, x in zip(got, true, wanted):
                if t is None:
                    assert g is None or not g.any()
                    continue
                assert g.shape == x.shape
                assert relative_error(g, t) < 2 * budget

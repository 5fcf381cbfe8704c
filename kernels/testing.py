"""What the tests of operations share: the table of operations, inputs that once broke kernels, and an error budget.

An implementation in a low precision is judged by what that precision costs anyway: the same definition, computed by
PyTorch with every intermediate rounded to the dtype of the inputs, gives the error that may be expected, and a kernel
may have ``ALLOWANCE`` times that (after attention-gym's way of comparing; the reference is always float64).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scanvas.kernels.gated import IMPLEMENTATIONS as GATED
from scanvas.kernels.gated import gated_linear_attention, gated_linear_attention_from_logits

ALLOWANCE = 2.0
# Errors below these, of rounding inputs of this dtype once or twice, are never held against an implementation.
LEAST = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Operation:
    """An operation under test: ``function(*inputs, impl=…)`` and the names of its inputs, which all get gradients."""

    function: Callable
    implementations: Mapping[str, Callable]
    inputs: tuple[str, ...]


OPS = {
    "gated_linear_attention": Operation(
        gated_linear_attention, GATED, ("q", "k", "v", "log_decay", "reverse_log_decay")
    ),
    "gated_linear_attention_causal": Operation(gated_linear_attention, GATED, ("q", "k", "v", "log_decay")),
    "gated_linear_attention_from_logits": Operation(
        gated_linear_attention_from_logits, GATED, ("q", "k", "v", "gate_logits", "reverse_gate_logits")
    ),
}


def _spike(g: Tensor) -> Tensor:
    g = 0.1 * g
    g[:, g.shape[1] // 2] = -1e4
    return g


# name -> log decays made of a tensor of uniform numbers in (-1, 0), (B, N, H, D)
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "mild": lambda g: 0.1 * g,
    "zero": torch.zeros_like,
    "-1e-6": lambda g: torch.full_like(g, -1e-6),
    "-5": lambda g: torch.full_like(g, -5.0),
    "-30": lambda g: torch.full_like(g, -30.0),
    "spike": _spike,
    "alternating": lambda g: torch.where(torch.arange(g.shape[1], device=g.device) % 2 == 0, 0.0, -20.0)[
        None, :, None, None
    ].expand_as(g),
}


def make_inputs(
    operation: str, B: int, N: int, H: int, Dk: int, Dv: int, *, gate: str = "mild", seed: int = 0, device="cpu"
) -> list[Tensor]:
    """float32 inputs of an operation of ``OPS``, in its order; ``gate`` is a key of ``GATES``."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for name in OPS[operation].inputs:
        shape = (B, N, H, Dv if name == "v" else Dk)
        if name.endswith("log_decay"):
            x = GATES[gate](-torch.rand(shape, generator=generator))
        else:
            x = torch.randn(shape, generator=generator)
        result.append(x.to(device).contiguous())
    return result


def run(operation: str, inputs: list[Tensor], grad: Tensor, impl: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and all gradients with inputs in ``dtype``, detached."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = OPS[operation].function(*leaves, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


class _Round(torch.autograd.Function):
    """Round to a dtype and back, in both directions: what storing an intermediate in it does."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


def low_precision(operation: str, inputs: list[Tensor], grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of the definition in float64 arithmetic with its matrices rounded to ``dtype``."""
    leaves = [x.detach().to(dtype).double().requires_grad_() for x in inputs]
    q, k, v, *gates = leaves
    if operation.endswith("from_logits"):
        gates = [torch.nn.functional.logsigmoid(g) / 16.0 for g in gates]
    N = q.shape[1]
    scores = 0
    for index, g in enumerate(gates):
        total = g.cumsum(1) if index == 0 else g.flip(1).cumsum(1).flip(1)
        exponent = total[:, :, None] - total[:, None]
        seen = torch.ones(N, N, dtype=torch.bool, device=q.device)
        seen = seen.tril() if index == 0 else seen.triu()
        decay = exponent.masked_fill(~seen[None, :, :, None, None], -torch.inf).exp()
        keys = _Round.apply(k[:, None] * decay, dtype)
        scores = scores + torch.einsum("bihd,bijhd->bhij", q, keys) * q.shape[-1] ** -0.5 / len(gates)
    out = torch.einsum("bhij,bjhd->bihd", _Round.apply(scores, dtype), v)
    out = _Round.apply(out, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype).double())]


def check(operation: str, inputs: list[Tensor], impl: str, dtype: torch.dtype, *, oracle: str = "recurrent") -> None:
    """Assert that output and gradients of ``impl`` with inputs in ``dtype`` are within budget of the float64 oracle.

    Errors are norms of differences over the norm of the reference. A gate's gradient is a sum over tokens of q ⊙ dq
    minus k ⊙ dk which may cancel to nothing; its error is set against the norm of q ⊙ dq where that is larger.
    """
    exact_inputs = [x.to(dtype).double() for x in inputs]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(inputs[2].shape, generator=generator).to(inputs[2].device, dtype)
    exact = run(operation, exact_inputs, grad, oracle, torch.float64)
    rounded = low_precision(operation, exact_inputs, grad, dtype)
    got = run(operation, exact_inputs, grad, impl, dtype)
    names = ["out", *("d" + name for name in OPS[operation].inputs)]
    for name, x, low, reference in zip(names, got, rounded, exact):
        size = reference.norm()
        if "decay" in name or "logits" in name:
            size = torch.maximum(size, (exact_inputs[0] * exact[1]).norm() / (16 if "logits" in name else 1))
        size = size.clamp_min(torch.finfo(torch.float32).tiny)
        error, expected = (x.double() - reference).norm() / size, (low - reference).norm() / size
        budget = max(ALLOWANCE * float(expected), LEAST[dtype])
        assert torch.isfinite(x).all(), f"{operation} {impl} {dtype}: {name} is not finite"
        assert error <= budget, f"{operation} {impl} {dtype}: error of {name} {error:.2e}, budget {budget:.2e}"

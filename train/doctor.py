"""``scanvas doctor``: does every implementation on this machine compute what its definition says?

Each operation runs on fresh random inputs, gates that are kind and gates that are not, and is compared, output and
gradients, with its definition in float64. Speed is not its business: that is ``scanvas bench``.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels import conv, delta, dispatch, gate, gated, glu, layer, linear, local, norm, stem

# Largest error of output or gradients relative to float64, for each dtype: rounding of inputs, outputs and what lies
# between, with an ample margin. A wrong kernel is off by orders of magnitude.
_ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
_PACKAGES = ("torch", "triton", "timm", "diffusers", "transformers", "accelerate", "peft", "fla-core")
# (first bad release, first good one, compute capability, what goes wrong). From public reports on kernels of this kind.
_REPORTED = [
    ((3, 2, 0), (3, 3, 0), 9, "crashes and wrong results of chunked scans (flash-linear-attention #253, #734)"),
    ((3, 4, 0), (3, 7, 1), 9, "products with a transposed accumulator can be wrong (flash-linear-attention #640)"),
]


@dataclass
class Finding:
    """One comparison: what was computed, how far off it is, how far it may be."""

    op: str
    impl: str
    device: str
    dtype: str
    case: str
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed  # false for NaN


def environment() -> list[tuple[str, str]]:
    """Names and versions of what the kernels depend on."""
    rows = [("python", platform.python_version()), ("machine", f"{platform.system()} {platform.machine()}")]
    for name in _PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    if torch.version.cuda and torch.cuda.is_available():
        rows.append(("CUDA", torch.version.cuda))
    return rows


def notes() -> list[str]:
    """Compiler releases with reported faults on this GPU, and why kernels are not used, if they are not."""
    if not dispatch.TRITON_INSTALLED:
        return ["triton is not installed: plain PyTorch is used"]
    if not dispatch.TRITON_USABLE:
        return ["no CUDA device: the Triton kernels are not used, plain PyTorch is"]
    installed = version("triton")
    release = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    capability = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    return [
        f"triton {installed} on this GPU: {fault}. What is measured below is what our kernels do here."
        for first, fixed, major, fault in _REPORTED
        if first <= release < fixed and capability == major
    ]


def _gates(shape: tuple[int, ...], case: str) -> Tensor:
    if case == "learned":
        return F.logsigmoid(torch.randn(shape)) / 16
    if case == "spike":
        gates = torch.full(shape, -1e-3)
        gates[:, shape[1] // 2] = -1e4
        return gates
    return torch.where(torch.arange(shape[1])[:, None, None] % 2 == 0, 0.0, -20.0).expand(shape).clone()


def _delta_cases() -> Iterator[tuple[str, dict[str, Callable], str, Callable, list[Tensor]]]:
    def one_gate(q, k, v, log_decay, gate, impl):
        return delta.gated_delta_rule(q, k, v, log_decay, gate, gate, impl=impl)

    for name, decays, gates, call in (
        ("a decay and a gate per head", 1, 1, one_gate),
        ("a decay per channel, a gate per head", 32, 1, one_gate),
        ("a decay and a gate per channel", 32, 32, delta.gated_delta_rule),
    ):
        q, k = F.normalize(torch.randn(2, 2, 197, 2, 32), dim=-1)
        v, log_decay = torch.randn(2, 197, 2, 64), _gates((2, 197, 2, decays), "spike")
        inputs = [q, k, v, log_decay, torch.rand(2, 197, 2, gates)]
        implementations = dict(delta.IMPLEMENTATIONS)
        if "fla" in implementations:
            half = [x.to("cuda", torch.bfloat16) for x in inputs]
            if delta.refusal(*half, half[-1] if call is one_gate else None):
                del implementations["fla"]
        yield "gated_delta_rule", implementations, f"{name}, N=197, D=32/64", call, inputs


def _cases() -> Iterator[tuple[str, dict[str, Callable], str, Callable, list[Tensor]]]:
    """Operation, its implementations, case, how it is called, inputs in float32."""
    gates = ("learned", "spike", "alternating")
    for dims, tokens, cases in (((32, 64), 197, gates), ((36, 72), 300, gates), ((16, 192), 100, gates[:1])):
        for case in cases:
            qk, v = (2, tokens, 2, dims[0]), (2, tokens, 2, dims[1])
            inputs = [torch.randn(qk), torch.randn(qk), torch.randn(v), _gates(qk, case), _gates(qk, case)]
            name = f"{case} gates, N={tokens}, D={dims[0]}/{dims[1]}"
            yield "gated_linear_attention", gated.IMPLEMENTATIONS, name, gated.gated_linear_attention, inputs
    yield from _delta_cases()
    inputs = [torch.rand(2, 197, 3, 32), torch.rand(2, 197, 3, 32), torch.randn(2, 197, 3, 32)]
    yield "linear_attention", linear.IMPLEMENTATIONS, "N=197, D=32", linear.linear_attention, inputs
    for size in (3, 5):

        def convolve(x, weight, bias, impl):
            return conv.depthwise_conv2d(x, weight, (14, 11), bias, activation="silu", impl=impl)

        inputs = [torch.randn(2, 154, 40), torch.randn(40, 1, size, size) / size, torch.randn(40)]
        yield "depthwise_conv2d", conv.IMPLEMENTATIONS, f"{size}×{size}, 14×11, SiLU", convolve, inputs
    inputs = [
        torch.randn(2, 50, 3, 64),
        torch.randn(2, 50, 192),
        torch.randn(2, 50, 192),
        torch.rand(64),
        torch.rand(64),
    ]
    yield "gated_mix", gate.IMPLEMENTATIONS, "D=64", gate.gated_mix, inputs
    inputs = [torch.randn(2, 50, 3, 64), torch.randn(2, 50, 192), torch.rand(64)]
    yield "swish_norm", gate.SWISH_IMPLEMENTATIONS, "D=64", gate.swish_norm, inputs

    def mixer(*tensors, impl):
        return layer.gated_layer(*tensors, num_heads=2, activation="silu", impl=impl)

    inputs = [torch.randn(2, 100, 64), torch.randn(256, 64) / 8, torch.randn(128), torch.rand(32), torch.rand(32)]
    yield "gated_layer", layer.IMPLEMENTATIONS, "C=64, K=32", mixer, inputs
    for kind in norm.KINDS:

        def normalised(x, branch, gate, weight, shift, scale, impl, kind=kind):
            options = {"kind": kind, "weight": weight, "shift": shift, "scale": scale, "order": "column", "impl": impl}
            return torch.cat(norm.add_norm(x, branch, gate, grid=(5, 11), **options))

        inputs = [*torch.randn(2, 2, 55, 96), torch.randn(2, 1, 96), torch.rand(96), *torch.randn(2, 2, 1, 96)]
        yield "add_norm", norm.IMPLEMENTATIONS, f"{kind}, 5×11, C=96", normalised, inputs

    def disc(q, k, v, impl):
        return local.local_attention(q, k, v, (19, 21), 5, start=9, impl=impl)

    def hybrid(*tensors, impl):
        return local.hybrid_attention(*tensors, (19, 21), radius=5, start=9, impl=impl)

    inputs = [torch.randn(2, 408, 2, 32) for _ in range(3)]
    yield "local_attention", local.IMPLEMENTATIONS, "19×21 and 9 more, radius 5, D=32", disc, inputs
    inputs = [*inputs, torch.rand(2, 408, 2, 16), torch.rand(2, 408, 2, 16), torch.tensor([0.1, 0.9])]
    yield "hybrid_attention", local.HYBRID_IMPLEMENTATIONS, "19×21 and 9 more, radius 5, D=32", hybrid, inputs
    yield "silu_product", glu.IMPLEMENTATIONS, "D=96", glu.silu_product, [torch.randn(2, 50, 192)]
    for C in (64, 100):
        inputs = [torch.randn(2, 150, C), torch.randn(2 * 96, C) * C**-0.5]
        yield "swiglu_linear", glu.LINEAR_IMPLEMENTATIONS, f"C={C}, D=96", glu.swiglu_linear, inputs

    def start(*tensors, impl):
        return stem.stem(*tensors, stride=8, impl=impl)

    inputs = [torch.randn(2, 3, 40, 56), torch.randn(96, 3, 9, 9) / 16, *torch.randn(3, 96)]
    yield "stem", stem.IMPLEMENTATIONS, "40×56, D=96", start, inputs


def _relative(actual: Tensor, exact: Tensor) -> float:
    if not actual.isfinite().all():
        return float("nan")
    return ((actual.double() - exact).norm() / exact.norm().clamp_min(1e-9)).item()


def _compare(
    call: Callable, inputs: list[Tensor], impl: str, device: str, dtype: torch.dtype, differentiable: bool
) -> float:
    """Largest relative error of the output and of the gradients, if any, that are not all but zero."""
    low = [x.to(device, dtype).requires_grad_(differentiable) for x in inputs]
    exact = [x.detach().double().cpu().requires_grad_(differentiable) for x in low]
    out, true = call(*low, impl=impl), call(*exact, impl="torch")
    if not differentiable:
        return _relative(out.cpu(), true)
    upstream = torch.randn_like(true)
    found = torch.autograd.grad(out, low, upstream.to(device, dtype))
    wanted = torch.autograd.grad(true, exact, upstream.to(dtype).double())
    errors = [_relative(out.cpu(), true)]
    largest = max(w.norm().item() for w in wanted)
    for f, w in zip(found, wanted):
        # A gradient far below the others is all rounding; it is held against the size of its neighbours.
        scale = max(w.norm().item(), 1e-3 * largest)
        finite = bool(f.isfinite().all())
        errors.append((f.cpu().double() - w).norm().item() / scale if finite else float("nan"))
    return float("nan") if any(math.isnan(error) for error in errors) else max(errors)


def examine() -> Iterator[Finding]:
    """Compare every implementation that can run here; about a minute on a CPU."""
    torch.manual_seed(torch.seed() % 2**31)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for op, implementations, case, call, inputs in _cases():
        for device in devices:
            for impl in implementations:
                # The slow definitions are checked once; the kernels only where they run without the interpreter.
                definition = impl in ("recurrent", "quadratic", "dense")
                if (impl in ("triton", "flex", "fla") and device == "cpu") or (definition and device == "cuda"):
                    continue
                for dtype, allowed in _ALLOWED.items():
                    half = impl == "fla" or (op, impl) in (("swiglu_linear", "triton"), ("stem", "triton"))
                    if half and dtype == torch.float32:  # these kernels compute in half precision only
                        continue
                    if definition and (dtype != torch.float32 or ("gates" in case and "learned" not in case)):
                        continue
                    error = _compare(call, inputs, impl, device, dtype, differentiable=(op, impl) != ("stem", "triton"))
                    yield Finding(op, impl, device, str(dtype).removeprefix("torch."), case, error, allowed)


def doctor() -> bool:
    """Print the environment and every comparison; true if all is well."""
    from .commands import print_table

    print_table(["", ""], [list(row) for row in environment()])
    for note in notes():
        print(f"note: {note}")
    findings = []
    for finding in examine():
        findings.append(finding)
        if not finding.good:
            print(f"WRONG {finding}", flush=True)
    worst: dict[tuple[str, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.op, finding.impl, finding.device, finding.dtype)
        if key not in worst or not finding.error <= worst[key].error:
            worst[key] = finding
    rows = [
        [f.op, f.impl, f.device, f.dtype, f"{f.error:.1e}", f"{f.allowed:.0e}", "ok" if f.good else "WRONG", f.case]
        for f in worst.values()
    ]
    print_table(["operation", "impl", "device", "dtype", "worst error", "allowed", "", "case"], rows)
    return all(finding.good for finding in findings)

"""Choose the code that computes an operation.

The name of an operation means its mathematics; ``impl=`` only picks the code. ``"auto"`` takes the fused Triton kernels
for tensors on a GPU that has them and plain PyTorch everywhere else. A name given explicitly is used or refused: it
never falls back in silence.
"""

import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from importlib.util import find_spec

import torch

# Triton kernels run on a GPU or, for tests, on the CPU under Triton's interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_INSTALLED = find_spec("triton") is not None
TRITON_USABLE = TRITON_INSTALLED and (INTERPRETED or torch.cuda.is_available())

# Asked once: torch.compile cannot trace the question.
_AUTOCAST = frozenset(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))


def triton_runs_on(device: torch.device) -> bool:
    """Whether the Triton kernels can compute on ``device`` in this process."""
    return TRITON_USABLE and (device.type == "cuda" or (INTERPRETED and device.type == "cpu"))


@torch.compiler.assume_constant_result
def is_hopper(index: int | None) -> bool:
    """Whether this CUDA device is of the generation that kernels which replace cuBLAS and cuDNN were measured on."""
    return torch.cuda.get_device_capability(index)[0] == 9


def resolve(
    op: str, impl: str, device: torch.device, implementations: Mapping[str, object], dtype: torch.dtype | None = None
) -> str:
    """Name of the implementation of ``op`` to use for tensors on ``device``.

    Args:
        op: name of the operation, for messages.
        impl: ``"auto"`` or a key of ``implementations``.
        device: where the inputs live.
        implementations: those which can run in this process.
        dtype: of the inputs; for float64 ``"auto"`` leaves the kernels alone, which sum in float32.

    Raises:
        ValueError: ``impl`` is unknown.
        RuntimeError: ``impl`` is known but can not run here; the message says why.
    """
    if impl == "auto":
        kernels = "triton" in implementations and device.type == "cuda" and dtype != torch.float64
        return "triton" if kernels else "torch"
    if impl in implementations:
        if impl == "triton" and not triton_runs_on(device):
            raise RuntimeError(f"{op}: impl='triton' needs tensors on a CUDA device, got device '{device}'")
        return impl
    if impl == "triton":
        if not TRITON_INSTALLED:
            reason = "the package 'triton' is not installed"
        elif not TRITON_USABLE:
            reason = "this process sees no CUDA device (for tests, set TRITON_INTERPRET=1 before starting Python)"
        else:
            reason = "this operation has no Triton kernel"
        raise RuntimeError(f"{op}: impl='triton' is not available here: {reason}. Use impl='torch' or impl='auto'.")
    allowed = ", ".join(repr(name) for name in ["auto", *implementations])
    raise ValueError(f"{op}: impl must be one of {allowed}, got {impl!r}")


def check_tensors(op: str, *, optional: Collection[str] = (), **tensors: torch.Tensor | None) -> None:
    """Refuse arguments that are not floating-point tensors on the device of the first one; those named in ``optional``
    may be ``None``.

    Raises:
        TypeError: an argument is no tensor or has no floating dtype.
        ValueError: an argument is on another device.
    """
    (first_name, first), *_ = tensors.items()
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must have a floating dtype, got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"{op}: {name} is on {x.device}, but {first_name} is on {first.device}")


def autocasts(device: str) -> bool:
    """Whether autocast is on for tensors on this type of device."""
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def outside_autocast(function: Callable) -> Callable:
    """Let ``function``, whose first argument is a tensor, run as if there were no autocast. An operation picks the
    dtype of its sums itself; autocast would form them in half precision."""

    @wraps(function)
    def run(tensor: torch.Tensor, *args, **kwargs):
        device = tensor.device.type
        if not autocasts(device):
            return function(tensor, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(tensor, *args, **kwargs)

    return run

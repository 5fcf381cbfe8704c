"""The gated delta rule by flash-linear-attention's Triton kernels, an optional extra: ``pip install scanvas[fla]``.

Which of its three operations computes ours depends on the gates:

- one decay, and one gate for erasing and writing, per head and token: ``chunk_gated_delta_rule`` (``gdn``);
- a decay per channel and one gate: ``chunk_kda`` (``kda``);
- all else: ``chunk_gdn2``, which takes gates per channel of keys and of values (``gdn2``).

All take tensors laid out as ours, natural logarithms of decays that are applied before a token's update, gates as they
are and the same scale; none is asked to normalise or activate anything. The package is imported at the first use.
"""

import functools
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

INSTALLED = find_spec("fla") is not None

_HALF = (torch.float16, torch.bfloat16)
# Narrower than what the kernels refuse themselves (keys of more than 256 channels): other sizes have made earlier
# releases read out of bounds or compute wrongly, without an error.
_LEAST, _LARGEST, _STEP = 16, 256, 8
# On Hopper these Triton releases miscompile the backward of chunk_gated_delta_rule, which refuses them when it gets
# there unless tilelang takes its place (flash-linear-attention #640).
_FIRST_BAD, _FIRST_GOOD = (3, 4, 0), (3, 7, 1)


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.cache
def _miscompiled() -> bool:
    release = tuple(int(number) for number in re.findall(r"\d+", version("triton"))[:3])
    return _FIRST_BAD <= release < _FIRST_GOOD and find_spec("tilelang") is None


@functools.cache
def _load(operation: str) -> Callable | str:
    """The function, or why it can not be had."""
    try:
        return getattr(import_module(f"fla.ops.{operation}"), f"chunk_{operation}")
    except (ImportError, AttributeError) as error:
        return f"the installed flash-linear-attention gives no chunk_{operation} ({error})"


def _operation(log_decay: Tensor, erase_gate: Tensor, write_gate: Tensor | None) -> str:
    if write_gate is not erase_gate or erase_gate.shape[-1] > 1:
        return "gdn2"
    return "kda" if log_decay.shape[-1] > 1 else "gated_delta_rule"


def refusal(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase_gate: Tensor, write_gate: Tensor | None
) -> str | None:
    """Why the kernels can not compute this, or ``None``."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "its kernels can not be traced by torch.compile, torch.export or torch.jit"
    if not INSTALLED:
        return "the package 'flash-linear-attention' is not installed (pip install 'scanvas[fla]')"
    if not _on_gpu(q.device):
        return f"it needs tensors on a CUDA device, got device '{q.device}'"
    if v.dtype not in _HALF or any(x.dtype == torch.float64 for x in (q, k, log_decay, erase_gate)):
        return f"it computes in float16 or bfloat16, the dtype of v, got v in {v.dtype} and q in {q.dtype}"
    for name, size in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if not _LEAST <= size <= _LARGEST or size % _STEP:
            return f"head dimensions must be multiples of {_STEP} from {_LEAST} to {_LARGEST}, got {size} for {name}"
    operation = _operation(log_decay, erase_gate, write_gate)
    if operation == "gated_delta_rule" and torch.cuda.get_device_capability(q.device)[0] == 9 and _miscompiled():
        return f"Triton {version('triton')} miscompiles its backward on this GPU; 3.7.1 does not"
    function = _load(operation)
    return function if isinstance(function, str) else None


def fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase_gate: Tensor,
    write_gate: Tensor | None,
    scale: float,
) -> Tensor:
    """Arguments and result as ``gated_delta_rule``, which has asked ``refusal``. q and k are rounded to v's dtype."""
    operation = _operation(log_decay, erase_gate, write_gate)
    q, k = q.to(v.dtype), k.to(v.dtype)
    log_decay, erase_gate = log_decay.float(), erase_gate.float()
    if operation == "gdn2":
        # The write gate in v's dtype: the backward multiplies both as one operand of a matrix product.
        write = v.new_ones(1) if write_gate is None else write_gate.to(v.dtype)
        gates = {"g": log_decay.expand_as(k), "b": erase_gate.expand_as(k), "w": write.expand_as(v)}
    else:
        gates = {"g": log_decay if operation == "kda" else log_decay.squeeze(-1), "beta": erase_gate.squeeze(-1)}
    return _load(operation)(q=q, k=k, v=v, scale=scale, **gates)[0]

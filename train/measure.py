"""Time and peak memory of a callable, here or in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def times(calls: dict[Any, Callable[[], Any]], device: torch.device, *, rounds: int = 5) -> dict[Any, float]:
    """Seconds of each call: the least over rounds in which every call has its turn. What else the machine does can only
    add to a time, and the turns spread it over all calls. One round before is not counted."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            taken = _time(call, device)
            if turn:
                seconds[name].append(taken)
    return {name: min(values) for name, values in seconds.items()}


def _time(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes needed by ``call`` at its peak beyond what is held before it: of the allocator on a GPU, of the process on
    a CPU (for that, call it in a fresh process). ``call`` runs once before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    call()  # loads libraries and compiles convolutions, once and for all: not what the call needs
    _return_freed_memory()
    before = _reset_process_peak()
    call()
    return _process_peak() - before


def _return_freed_memory() -> None:
    """Give what the allocator keeps back to the system, so that what is needed again is counted (glibc only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_process_peak() -> int:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # Linux: the high-water mark starts anew from the present size
    return _process_peak()


def _process_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_fresh_process(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """``python -m module JSON``'s last line of output, read as JSON. Raises RuntimeError with its last words."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} {request} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions(device: torch.device) -> dict[str, str]:
    """What a number depends on, to be saved beside it."""
    import platform
    from importlib.metadata import version

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    found = {p: version(p) for p in ("torch", "timm", "scanvas")}
    return {"device": str(device), "name": name, "threads": str(torch.get_num_threads()), **found}


def ratio(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A measured ratio beside the one wanted."""
    met = value >= at_least if at_least is not None else value <= at_most
    wanted = f"≥ {at_least}" if at_least is not None else f"≤ {at_most}"
    return {"what": what, "ratio": value, "wanted": wanted, "met": met}

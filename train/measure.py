"""Time and peak memory of a callable, here or in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def times(calls: dict[Any, Callable[[], Any]], device: torch.device, *, rounds: int = 5) -> dict[Any, float]:
    """Seconds of each call: the least over rounds in which every call has its turn. What else the machine does can only
    add to a time, and the turns spread it over all calls. In its turn a call runs once before it is timed: after
    another one it would wait for the system to give it memory again, as it does not where it is repeated."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            seconds[name].append(seconds_of(call, device))
    return {name: min(values) for name, values in seconds.items()}


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, of which a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def peak_memory(call: Callable[[], Any], device: torch.device, *, warm_up: bool = True) -> int:
    """Bytes that PyTorch's allocator has given out at the peak of ``call``, beyond what was held before it: those of
    tensors that live at once. ``call`` runs once before, unless it has run already."""
    if warm_up:
        call()  # loads libraries and compiles convolutions, once and for all: not what the call needs
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(held, default=0)


# glibc serves what is larger than this from pages of its own and gives them back when it is freed. By default the limit
# rises as a program runs, and how much memory stays with the process depends on the order of what was freed.
DIRECT_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


def process_peak(call: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of this process rises while ``call`` runs on the CPU, buffers of libraries
    included. For a number that is the same every time, run it in a fresh process with ``DIRECT_PAGES`` in its
    environment. ``call`` runs once before."""
    call()
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


def in_fresh_process(module: str, request: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """``python -m module JSON``'s last line of output, read as JSON; ``environment`` is added to that of this process.
    Raises RuntimeError with its last words."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environment or {}),
    )
    if done.returncode:
        raise RuntimeError(f"{module} {request} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions(device: torch.device) -> dict[str, str]:
    """What a number depends on, to be saved beside it."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:  # not installed, or scanvas itself used from its checkout
            return None

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    packages = ("scanvas", "torch", "triton", "timm", "diffusers", "flash-linear-attention", "fla-core")
    installed = {package: found(package) for package in packages}
    hardware = {"device": str(device), "name": name, "threads": str(torch.get_num_threads())}
    return hardware | {package: number for package, number in installed.items() if number}


def ratio(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A measured ratio beside the one wanted."""
    met = value >= at_least if at_least is not None else value <= at_most
    wanted = f"≥ {at_least}" if at_least is not None else f"≤ {at_most}"
    return {"what": what, "ratio": value, "wanted": wanted, "met": met}

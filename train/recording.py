"""CUDA graphs of calls that may turn out not to be recordable."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


def record(call: Callable[[], Any], stream: torch.cuda.Stream, repeats: int = 1) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of ``repeats`` calls, which must have run on ``stream`` before, or None where ``call`` cannot be
    recorded: because it waits for the device, say, or compiles something."""
    device, current = stream.device, torch.cuda.current_stream(stream.device)
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            for _ in range(repeats):
                call()
    except RuntimeError:
        torch.cuda.set_stream(current)  # the context does not leave its stream if it fails itself
        torch.cuda.synchronize(device)
        _mend(device, pool, stream)
        torch.cuda.set_stream(current)
        return None
    return graph


def _mend(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """What PyTorch leaves half done when a recording fails (torch 2.11): the allocator goes on as if recording, and
    gives nothing back to the device, and the generator of random numbers refuses every number that is asked for."""
    with contextlib.suppress(RuntimeError):  # it did end
        torch._C._cuda_endAllocateToPool(device.index, pool)
    counter = torch.zeros((), device=device)
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        counter.zero_()  # a recording that succeeds ends the generator's


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Operations that wait for the device raise RuntimeError (those that PyTorch knows of)."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

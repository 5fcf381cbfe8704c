"""Two watchers of the loop: loss values that are not finite, and requests to stop."""

from __future__ import annotations

import math
import signal
from typing import Any, NamedTuple

import torch

from .errors import NonFiniteError


class _Pending(NamedTuple):
    names: tuple[str, ...]
    values: torch.Tensor
    event: Any
    where: str


class FiniteGuard:
    """Raises NonFiniteError naming the term, step and batch, and collects the means for the log.

    On an accelerator a look at a value waits for all the work queued before it. So values are copied in the
    background and looked at when the next ones are handed in; ``flush`` looks at what is left, and the loop calls it
    before it saves. On the CPU a value is looked at at once, before it can reach the parameters.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.pending: _Pending | None = None
        self.sums: dict[str, float] = {}
        self.count: dict[str, int] = {}

    def put(self, terms: dict[str, torch.Tensor], where: str) -> None:
        """Hand in scalars; ``where`` is said in the error."""
        self.flush()
        values = torch.stack([v.detach().float().reshape(()) for v in terms.values()])
        event = None
        if self.cuda:
            host = torch.empty(values.shape, pin_memory=True)
            values, _ = host.copy_(values, non_blocking=True), values
            event = torch.cuda.Event()
            event.record()
        self.pending = _Pending(tuple(terms), values, event, where)
        if not self.cuda:
            self.flush()

    def flush(self) -> None:
        """Look at what was handed in last."""
        if self.pending is None:
            return
        names, values, event, where = self.pending
        self.pending = None
        if event is not None:
            event.synchronize()
        for name, value in zip(names, values.tolist()):
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} became {value} at {where}")
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.count[name] = self.count.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Mean of each term since the last call."""
        means = {name: self.sums[name] / self.count[name] for name in self.sums}
        self.sums, self.count = {}, {}
        return means


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag, for the loop to save and leave. A second one acts as usual."""

    def __init__(self):
        self.signal: str | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread, where python allows no handlers
                break
        return self

    def _handle(self, number: int, _frame) -> None:
        self.signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def __exit__(self, *_):
        self._restore()

"""A step of training that a GPU replays: what Python does between launches would take longer than many small layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .recording import no_waiting, record

_PLAIN = 3  # steps before one is recorded: kernels are compiled and chosen, and the optimizer makes its state


class Step:
    """``call`` as it is, and on a GPU after a few calls as the replay of a CUDA graph of it; where it cannot be
    recorded (something in it waits for the device, say), as it is all the time.

    ``call`` takes no arguments, reads tensors that stay where they are, leaves gradients in the parameters of
    ``optimizer`` and calls its ``step``. Learning rates may change between calls, by whatever sets them in the groups
    of ``optimizer``.

    Args:
        call: computes one step, given parameters without gradients.
        optimizer: with ``capturable=True`` on a GPU.
        device: of the parameters.
    """

    def __init__(self, call: Callable[[], None], optimizer: torch.optim.Optimizer, device: torch.device):
        self._call, self._optimizer, self._device = call, optimizer, device
        self._left = _PLAIN
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]

    @property
    def recorded(self) -> bool:
        """Whether calls are replays by now."""
        return self._graph is not None

    def __call__(self) -> None:
        if self._stream is None:
            self._plain()
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])  # a graph reads it from where it lies
                group["lr"] = rate
        if self._left == 0 and self._graph is None:
            self._record()
        if self._graph is not None:
            self._graph.replay()
            return
        self._left -= 1
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._left == 0:
                self._rehearse()
            else:
                self._plain()
        current.wait_stream(self._stream)

    def _plain(self) -> None:
        self._optimizer.zero_grad()
        self._call()

    def _rehearse(self) -> None:
        """The last step before one is recorded. A recording that fails costs much more than a step that is begun
        twice: see recording.py."""
        try:
            with no_waiting():
                self._plain()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self._left = -1  # never recorded
            self._plain()

    def _record(self) -> None:
        self._optimizer.zero_grad()  # to None: a recorded backward pass makes them anew in every replay
        # On the stream of the calls before: autograd goes on where it has begun.
        self._graph = record(self._call, self._stream)

"""Steps of a training as replays of a CUDA graph, and those that cannot be recorded."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from scanvas.train import bench_mixers_step


class _Line(torch.nn.Module):
    """A regression whose steps may do something that cannot be recorded."""

    def __init__(self, device, extra):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, device=device))
        self.x, self.extra = torch.arange(8.0, device=device).view(2, 4), extra
        kwargs = {"fused": True, "capturable": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, **kwargs)
        self.step = bench_mixers_step.Step(self.compute, self.optimizer, device)

    def compute(self):
        loss = (self.x @ self.weight).square().mean()
        self.extra(loss)
        loss.backward()
        self.optimizer.step()

    def steps(self, count=8):
        for number in range(count):
            self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            self.step()
        return self.weight.detach().cpu()


@pytest.mark.parametrize("record", [True, False], ids=["recorded", "record fails"])
@pytest.mark.parametrize("waits", [False, True])
def test_steps_that_are_not_recorded_are_done_once(waits, record, monkeypatch):
    """Without a GPU: one that waits for the device is begun twice and done once, and never recorded."""
    device, tried, seen = torch.device("cpu"), [], []
    wanted = _Line(device, lambda _: None).steps()
    watched = []

    @contextlib.contextmanager
    def no_waiting():
        watched.append(1)
        yield
        watched.append(0)

    def wait(_):
        seen.append(1)
        if waits and len(watched) == 1:
            watched.append(0)
            raise RuntimeError("called a synchronizing CUDA operation")

    class Graph:
        def __init__(self, call):
            self.replay = lambda: (line.optimizer.zero_grad(), call())

    def recorded(call, stream):
        tried.append(stream)
        return Graph(call) if record else None

    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(bench_mixers_step, "no_waiting", no_waiting)
    monkeypatch.setattr(bench_mixers_step, "record", recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    line = _Line(device, wait)
    line.step._stream = stream
    torch.testing.assert_close(line.steps(), wanted)
    assert len(seen) == 8 + waits
    assert tried == ([] if waits else [stream])
    assert line.step.recorded == (record and not waits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_cannot_be_recorded_harms_nothing():
    """Steps that wait for the device, in a way that PyTorch knows of and in one that it does not, train as they would;
    after them there are random numbers, the memory comes back, and the next one is recorded."""
    device, stream = torch.device("cuda", 0), torch.cuda.current_stream()
    wanted = _Line(torch.device("cpu"), lambda _: None).steps()
    for extra, recorded in (
        (lambda _: None, True),
        (lambda loss: loss.item(), False),
        (lambda _: torch.cuda.synchronize(), False),
        (lambda _: torch.rand(4, device=device), True),
    ):
        line = _Line(device, extra)
        torch.testing.assert_close(line.steps(), wanted)
        assert line.step.recorded == recorded
        assert torch.cuda.current_stream() == stream
        assert torch.rand(100, device=device).unique().numel() > 50
        torch.manual_seed(0)
        big = torch.empty(2**28, device=device)
        before = torch.cuda.memory_reserved()
        del big
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before - 2**28

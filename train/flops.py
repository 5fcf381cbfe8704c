"""Counting the floating-point operations of a forward pass, the scans included and counted by their mathematics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scanvas.kernels.gated import api as gated
from scanvas.kernels.linear import api as linear


def scan_flops(batch: int, tokens: int, heads: int, key: int, value: int, directions: int = 2) -> int:
    """Operations of gated linear attention as its definition has them: per token, head and direction the state of
    ``key × value`` is decayed (1 each), given ``kᵀv`` (2) and read by q (2). How an implementation cuts the sequence
    into chunks does not change what is counted."""
    return batch * tokens * heads * directions * 5 * key * value


def linear_flops(batch: int, tokens: int, heads: int, key: int, value: int) -> int:
    """Operations of division-normalised linear attention: ``kᵀv`` and its reading by q (2 each), and the divisor."""
    return batch * tokens * heads * (4 * key * value + 3 * key + value)


def count_flops(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Operations of one image's forward pass, a multiply and an add counted as two: matrix products, convolutions,
    attention and scans. ``model`` may lie on the meta device."""
    device = next(model.parameters()).device
    # With gradients on: the counter's hooks fail on a view of a parameter that was taken without (torch 2.14).
    with _scans_counted() as scans, FlopCounterMode(display=False) as counter, torch.enable_grad():
        model(torch.empty(1, *input_size, device=device))
    return counter.get_total_flops() + sum(scans)


@contextlib.contextmanager
def _scans_counted() -> Iterator[list[int]]:
    """Inside, the scans give zeros of the right shape and put their operations into the list."""
    counts: list[int] = []

    def gated_stub(q, k, v, log_decay, reverse_log_decay=None, **_options):
        counts.append(scan_flops(*q.shape, v.shape[-1], directions=1 if reverse_log_decay is None else 2))
        return torch.zeros_like(v), None, None

    def linear_stub(q, k, v, *_rest):
        counts.append(linear_flops(*q.shape, v.shape[-1]))
        return torch.zeros_like(v)

    tables = ((gated.IMPLEMENTATIONS, gated_stub), (linear.IMPLEMENTATIONS, linear_stub))
    saved = [dict(table) for table, _ in tables]
    for table, stub in tables:
        table.update(dict.fromkeys(table, stub))
    try:
        yield counts
    finally:
        for (table, _), before in zip(tables, saved):
            table.update(before)

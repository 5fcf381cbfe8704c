"""Choose tiles and launch the kernels: tensors in, tensors out, no autograd."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward import backward_kernel
from .forward import forward_kernel
from .states import scan_kernel, totals_kernel

# With fewer (batch, head, tile of v) than FEW_PROGRAMS, sequences are cut into segments until there are about
# WANTED_PROGRAMS of them, none shorter than MIN_SEGMENT_CHUNKS. Constants, not read off the device: the same input
# gives the same bits on every GPU.
FEW_PROGRAMS = 264
WANTED_PROGRAMS = 396
MIN_SEGMENT_CHUNKS = 4
_MAX_CHUNK = 64


@dataclass(frozen=True)
class Plan:
    """Tiles and the cut into chunks and segments of one call; ``L``, ``BK``, ``BV`` as in ``blocks``."""

    L: int
    BK: int
    BV: int
    warps: int
    stages: int
    bfloat16: bool
    tiles: int
    chunks: int
    segments: int
    segment_chunks: int

    @property
    def constants(self) -> dict:
        return {
            "L": self.L,
            "BK": self.BK,
            "BV": self.BV,
            "DT": tl.bfloat16 if self.bfloat16 else tl.float32,
            "PREC": "tf32x3",  # of float32 operands
            "STAGES": self.stages,
            "num_warps": self.warps,
        }

    @property
    def stash_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bfloat16 else torch.float32


def _bfloat16_operands(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether operands of matrix products are bfloat16. All others are float32, multiplied as three tf32 products:
    the decays leave float16's range, and a single tf32 product truncates and was less precise than float16."""
    return {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}


def _tiles(bfloat16: bool, BK: int, DV: int) -> tuple[int, int, int, int]:
    """L, BV, warps and stages. The state, BV·BK, and the operands, L·BK, bound what a program keeps at hand."""
    whole_v = max(16, triton.next_power_of_2(DV))
    if bfloat16:
        L, most_v = {16: (32, 64), 32: (32, 64), 64: (32, 32), 128: (16, 32), 256: (16, 16)}[BK]
    else:
        L, most_v = {16: (32, 32), 32: (32, 32), 64: (16, 32), 128: (16, 16), 256: (16, 16)}[BK]
    # Two warps: with four, tiles of 64 rows would go to Hopper's wgmma, whose results Triton 3.6 got wrong in these
    # kernels (README.md, history).
    return L, min(whole_v, most_v), 2, 2 if bfloat16 else 1


def make_plan(q: Tensor, k: Tensor, v: Tensor) -> Plan:
    B, N, H, DK = q.shape
    DV = v.shape[-1]
    bfloat16 = _bfloat16_operands(q, k, v)
    BK = max(16, triton.next_power_of_2(DK))
    L, BV, warps, stages = _tiles(bfloat16, BK, DV)
    L = min(L, max(16, triton.next_power_of_2(N)))
    tiles, chunks = triton.cdiv(DV, BV), triton.cdiv(N, L)
    programs = B * H * tiles
    segments = 1
    if programs < FEW_PROGRAMS:
        segments = max(1, min(triton.cdiv(WANTED_PROGRAMS, programs), chunks // MIN_SEGMENT_CHUNKS))
    segment_chunks = triton.cdiv(chunks, segments)
    segments = triton.cdiv(chunks, segment_chunks)
    return Plan(L, BK, BV, warps, stages, bfloat16, tiles, chunks, segments, segment_chunks)


def _arguments(x: Tensor) -> tuple[Tensor, int, int, int]:
    return x, x.stride(0), x.stride(1), x.stride(2)


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous and the offsets within a chunk below 2³¹: all the kernels demand."""
    return x if x.stride(-1) == 1 and x.stride(1) * _MAX_CHUNK < 2**31 else x.contiguous()


def _to_internal(state: Tensor | None, like: Tensor, plan: Plan, factor: float = 1.0) -> Tensor | None:
    """``(B, H, Dk, Dv)`` → ``(B·H, Dv, BK)`` in float32, zero-padded; ``None`` stays ``None``."""
    if state is None:
        return None
    B, H, DK, DV = state.shape
    result = torch.zeros(B * H, DV, plan.BK, dtype=torch.float32, device=like.device)
    result[..., :DK] = state.flatten(0, 1).mT
    return result.mul_(factor) if factor != 1.0 else result


def _from_internal(state: Tensor, B: int, DK: int, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """``(B·H, Dv, BK)`` → contiguous ``(B, H, Dk, Dv)``."""
    state = state[..., :DK].mT.unflatten(0, (B, -1))
    return (state if factor == 1.0 else state * factor).to(dtype, memory_format=torch.contiguous_format, copy=True)


class _Workspace:
    """Allocates in the internal layouts and launches sweeps and scans."""

    def __init__(self, q: Tensor, v: Tensor, plan: Plan, normalizer: float):
        self.B, self.N, self.H, self.DK = q.shape
        self.DV, self.plan, self.device = v.shape[-1], plan, q.device
        self.heads = self.B * self.H
        self.normalizer = normalizer

    def state(self) -> Tensor:
        return torch.empty(self.heads, self.DV, self.plan.BK, dtype=torch.float32, device=self.device)

    def stash(self) -> Tensor:
        shape = (self.heads, self.plan.segments * self.plan.segment_chunks, self.DV, self.plan.BK)
        return torch.empty(shape, dtype=self.plan.stash_dtype, device=self.device)

    def per_program(self) -> Tensor:
        return torch.empty(self.plan.segments * self.plan.tiles * self.heads, dtype=torch.float32, device=self.device)

    def _per(self, count: int, *shape: int) -> Tensor:
        return torch.empty(self.heads, count, *shape, dtype=torch.float32, device=self.device)

    def between_segments(self, x, y, gates, initials, against, finals):
        """States before each segment and behind the last, walking it for the forward and for the reverse scan.

        Walking AGAINST the scan, from its end, the states are gradients. ``gates`` and ``initials``: forward, reverse;
        without reverse gates the second entries of the results are ``None``."""
        plan, BK, DV = self.plan, self.plan.BK, self.DV
        rows = min(max(16, triton.next_power_of_2(DV)), max(1, 1024 // BK))
        incoming, last = [None, None], [None, None]
        for index, (gate, initial) in enumerate(zip(gates, initials)):
            if gate is None:
                continue
            total, decay = self._per(plan.segments, DV, BK), self._per(plan.segments, BK)
            totals_kernel[(self.heads, plan.tiles, plan.segments)](
                *_arguments(x), *_arguments(y), *_arguments(gate), total, decay,
                self.N, self.H, plan.segment_chunks * plan.L,
                REVERSE=index == 1, AGAINST=against, NORMALIZER=self.normalizer, DK=self.DK, DV=DV, **plan.constants,
            )  # fmt: skip
            incoming[index] = torch.empty_like(total)
            last[index] = self.state() if finals else None
            scan_kernel[(self.heads, triton.cdiv(DV, rows))](
                total, decay, initial, incoming[index], last[index], plan.segments,
                LEFTWARD=(index == 1) != against, INITIAL=initial is not None, FINAL=finals,
                DV=DV, BK=BK, ROWS=rows, STAGES=4, num_warps=4,
            )  # fmt: skip
        return incoming, last


def _zero_if_missing(states: list[Tensor | None], workspace: _Workspace) -> list[Tensor | None]:
    """If one of two states is given, zeros for the other; both ``None`` stay so."""
    if all(s is None for s in states):
        return states
    return [workspace.state().zero_() if s is None else s for s in states]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    reverse_gate: Tensor | None,
    initial_state: Tensor | None,
    reverse_initial_state: Tensor | None,
    scale: float,
    normalizer: float,
    return_states: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output ``(B, N, H, Dv)`` and, if wanted, the final states ``(B, H, Dk, Dv)`` in float32."""
    bidirectional = reverse_gate is not None
    B, N, H, DK = q.shape
    DV = v.shape[-1]
    q, k, v, gate = _rows(q), _rows(k), _rows(v), _rows(gate)
    reverse_gate = _rows(reverse_gate) if bidirectional else None
    out = torch.empty(B, N, H, DV, dtype=v.dtype, device=q.device)
    with torch.cuda.device_of(q):
        plan = make_plan(q, k, v)
        work = _Workspace(q, v, plan, normalizer)
        states = [_to_internal(s, q, plan) for s in (initial_state, reverse_initial_state)]
        single = plan.segments == 1
        if single:
            incoming = _zero_if_missing(states, work)
            finals = [work.state() if return_states else None for _ in range(2)]
        else:
            incoming, finals = work.between_segments(k, v, (gate, reverse_gate), states, False, return_states)
        lowest = work.per_program()
        for close in (True, False):
            forward_kernel[(work.heads, plan.tiles, plan.segments)](
                *_arguments(q), *_arguments(k), *_arguments(v), *_arguments(gate),
                *_arguments(reverse_gate if bidirectional else gate), out, *incoming, *finals, lowest,
                scale / 2 if bidirectional else scale, N, H, plan.segment_chunks * plan.L,
                CLOSE=close, BIDIRECTIONAL=bidirectional, INCOMING=incoming[0] is not None,
                FINAL=return_states and single, NORMALIZER=normalizer, DK=DK, DV=DV, **plan.constants,
            )  # fmt: skip
    if not return_states:
        return out, None, None
    final = _from_internal(finals[0], B, DK, torch.float32)
    return out, final, _from_internal(finals[1], B, DK, torch.float32) if bidirectional else None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    reverse_gate: Tensor | None,
    initial_state: Tensor | None,
    reverse_initial_state: Tensor | None,
    d_out: Tensor,
    d_final: Tensor | None,
    d_reverse_final: Tensor | None,
    scale: float,
    normalizer: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``q, k, v, gate, reverse_gate, initial_state, reverse_initial_state`` in their dtypes."""
    bidirectional = reverse_gate is not None
    scale = scale / 2 if bidirectional else scale
    B, N, H, DK = q.shape
    DV = v.shape[-1]
    inputs = (q, k, v, gate, reverse_gate)
    q, k, v, gate, d_out = _rows(q), _rows(k), _rows(v), _rows(gate), _rows(d_out)
    reverse_gate = _rows(reverse_gate) if bidirectional else None
    with torch.cuda.device_of(q):
        plan = make_plan(q, k, v)
        work = _Workspace(q, v, plan, normalizer)

        # Over several tiles of v the gradients of q, k and the gates are sums over the tiles.
        def narrow(like: Tensor) -> Tensor:
            dtype = like.dtype if plan.tiles == 1 else torch.float32
            return torch.empty(plan.tiles, B, N, H, DK, dtype=dtype, device=q.device)

        dq, dk, df = narrow(q), narrow(k), narrow(gate)
        dr = narrow(reverse_gate) if bidirectional else df
        dv = torch.empty(B, N, H, DV, dtype=v.dtype, device=q.device)
        states = [_to_internal(s, q, plan) for s in (initial_state, reverse_initial_state)]
        grads = [_to_internal(s, q, plan, 1 / scale) for s in (d_final, d_reverse_final)]
        initial = initial_state is not None or reverse_initial_state is not None
        single = plan.segments == 1
        if single:
            states, grads = _zero_if_missing(states, work), _zero_if_missing(grads, work)
            d_initial = [work.state() if initial else None for _ in range(2)]
        else:
            gates = (gate, reverse_gate)
            states, _ = work.between_segments(k, v, gates, states, False, False)
            grads, d_initial = work.between_segments(q, d_out, gates, grads, True, initial)
        stash, lowest = work.stash(), work.per_program()
        for close in (True, False):
            backward_kernel[(work.heads, plan.tiles, plan.segments)](
                *_arguments(q), *_arguments(k), *_arguments(v), *_arguments(gate),
                *_arguments(reverse_gate if bidirectional else gate), *_arguments(d_out), dq, dk, df, dr, dv,
                *states, *grads, *d_initial, stash, lowest,
                scale, N, H, plan.segment_chunks * plan.L, plan.segment_chunks, dq.stride(0),
                CLOSE=close, BIDIRECTIONAL=bidirectional, STATES=states[0] is not None,
                GRADIENTS=grads[0] is not None, INITIAL_GRADIENTS=initial and single,
                NORMALIZER=normalizer, DK=DK, DV=DV, **plan.constants,
            )  # fmt: skip

    def whole(x: Tensor, like: Tensor) -> Tensor:
        return x[0] if plan.tiles == 1 else x.sum(0).to(like.dtype)

    result = [whole(x, like) for x, like in zip((dq, dk), inputs)]
    result += [dv, whole(df, inputs[3]), whole(dr, inputs[4]) if bidirectional else None]
    for state, gradient in zip((initial_state, reverse_initial_state), d_initial):
        result.append(None if state is None else _from_internal(gradient, B, DK, state.dtype, scale))
    return tuple(result)

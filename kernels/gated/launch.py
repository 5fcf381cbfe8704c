"""Launch the kernels: tensors in, tensors out, no autograd."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from scanvas.kernels.tiles import unit

from .backward import gradient_kernel
from .chunks import output_kernel
from .fused import fused_kernel
from .plan import CHUNK, Plan, fused_plan, make_plan
from .states import complete_kernel, scan_kernel, walk_kernel

_FAR_BLOCK = 8  # chunks that one program of the far way looks at
# Stashed states take up to 8 kB a token and head (of 256/256). Where they would need more bytes than this, batch or
# heads are taken in halves, which are large enough by far to fill a GPU.
WORKSPACE = 1 << 30


def _split(plan: Plan, v: Tensor, walks: int) -> int | None:
    """The dimension to be halved so that the stashes of so many walks stay small, if they are not."""
    B, _, H, DV = v.shape
    elements = B * H * plan.chunks * DV * plan.WK * walks
    if elements * plan.stash_dtype.itemsize <= WORKSPACE:
        return None
    return 0 if B > 1 else 2 if H > 1 else None


def _in_halves(function, dim: int, arguments: tuple, states: range, *rest) -> tuple[Tensor | None, ...]:
    """``function(*arguments, *rest)`` of both halves, joined. The arguments numbered in ``states`` and the last two
    results are ``(B, H, Dk, Dv)``, all others ``(B, N, H, D)``."""

    def of(position: int) -> int:
        return min(dim, 1) if position in states else dim

    halves = [(None, None) if x is None else x.tensor_split(2, of(i)) for i, x in enumerate(arguments)]
    first, second = (function(*half, *rest) for half in zip(*halves))
    dims = [dim] * (len(first) - 2) + [min(dim, 1)] * 2
    return tuple(None if x is None else torch.cat((x, y), d) for x, y, d in zip(first, second, dims))


def _arguments(x: Tensor, of: int) -> tuple[Tensor, int, int, int]:
    """x, and its strides in units ``of`` so many elements, see ``tiles.unit``."""
    return x, *(stride // of for stride in x.stride()[:3])


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous and the offsets within a chunk below 2³¹: all the kernels demand."""
    return x if x.stride(-1) == 1 and x.stride(1) * CHUNK < 2**31 else x.contiguous()


def _gates(gate: Tensor, reverse_gate: Tensor | None) -> tuple[Tensor, ...]:
    """The gates there are, in one dtype, since a walk picks one of them."""
    if reverse_gate is None:
        return (_rows(gate),)
    dtype = torch.promote_types(gate.dtype, reverse_gate.dtype)
    return _rows(gate.to(dtype)), _rows(reverse_gate.to(dtype))


def _from_internal(state: Tensor, like: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """``(B·H, DV, WK)`` → contiguous ``(B, H, Dk, Dv)``."""
    B, _, H, DK = like.shape
    state = state[..., :DK].mT.reshape(B, H, DK, -1)
    return (state if factor == 1.0 else state * factor).to(dtype, memory_format=torch.contiguous_format, copy=True)


def _to_internal(states, heads: int, DV: int, WK: int, device) -> Tensor | None:
    """``(B, H, Dk, Dv)`` or ``None`` each → ``(directions, B·H, DV, WK)`` in float32, zero-padded; ``None`` if all."""
    if all(x is None for x in states):
        return None
    result = torch.zeros(len(states), heads, DV, WK, dtype=torch.float32, device=device)
    for target, x in zip(result, states):
        if x is not None:
            target[..., : x.shape[2]] = x.flatten(0, 1).mT
    return result


def _moved(gradients: tuple[Tensor | None, ...], into: tuple[Tensor, ...] | None) -> tuple[Tensor | None, ...]:
    """The gradients, the first of them copied to where they are wanted."""
    if into is None:
        return gradients
    return *(place.copy_(x) for x, place in zip(gradients, into)), *gradients[len(into) :]


@dataclass(frozen=True)
class _States:
    """What walks leave; layouts as in ``walk_kernel``. ``stash`` and ``lowest`` are there if wanted, so is ``last``,
    ``(directions, B·H, DV, WK)``; ``incoming`` is ``(directions, B·H, segments, DV, WK)``, of several segments."""

    stash: Tensor | None
    lowest: Tensor | None
    last: Tensor | None
    incoming: Tensor | None = None


def _walk(x, y, gates, initials, last: bool, normalizer: float, plan: Plan, against: bool, stash=True) -> _States:
    """States before every chunk and behind the last, of scans over x, y = k, v or, AGAINST them, over q, dout. Without
    ``stash`` only those before every segment and behind the last."""
    B, N, H, DK = x.shape
    DV, heads, directions = y.shape[-1], B * H, len(initials)
    cut = plan.segments > 1

    def empty(*shape, dtype=torch.float32):
        return torch.empty(directions, heads, *shape, dtype=dtype, device=x.device)

    pieces = triton.cdiv(plan.WK, plan.walk_BK)
    narrow, wide = unit(x, *gates), unit(y)
    states = lowest = None
    if stash:
        states = empty(plan.chunks, DV, plan.WK, dtype=plan.stash_dtype)
        lowest = torch.empty(heads, plan.chunks, directions, pieces, dtype=torch.float32, device=x.device)
    initial = _to_internal(initials, heads, DV, plan.WK, x.device)
    behind = empty(plan.segments, DV, plan.WK) if cut or last else None
    reach = empty(plan.chunks, plan.WK) if cut and stash else None
    decay = empty(plan.segments, plan.WK) if cut else None
    walk_kernel[(heads, pieces * plan.tiles, plan.segments * directions)](
        *_arguments(x, narrow), *_arguments(y, wide), *_arguments(gates[0], narrow), *_arguments(gates[-1], narrow),
        None if cut else initial, states, lowest, behind, reach, decay,
        N, H, plan.chunks, plan.segment_chunks, directions,
        AGAINST=against, INITIAL=initial is not None and not cut, STASH=stash, LAST=behind is not None, CUT=cut,
        NORMALIZER=normalizer, UNIT_K=narrow, UNIT_V=wide, DK=DK, DV=DV,
        WK=plan.WK, BK=plan.walk_BK, BV=plan.BV, BV2=plan.BV2, STAGES=2, **plan.operands, **plan.few_registers,
    )  # fmt: skip
    if not cut:
        return _States(states, lowest, behind[:, :, 0] if last else None)
    incoming, final = empty(plan.segments, DV, plan.WK), empty(DV, plan.WK) if last else None
    rows = min(32, triton.next_power_of_2(DV))
    tiles = (directions * heads * plan.KP, triton.cdiv(DV, rows))
    shape = {"DV": DV, "WK": plan.WK, "ROWS": rows, "BK": plan.BK, "STAGES": 4}
    scan_kernel[tiles](
        behind, decay, initial, incoming, final, plan.segments, heads,
        AGAINST=against, INITIAL=initial is not None, FINAL=last, num_warps=1, **shape,
    )  # fmt: skip
    if stash:
        complete_kernel[(*tiles, plan.segments)](
            states, reach, incoming, plan.chunks, plan.segments, plan.segment_chunks, num_warps=2, **shape
        )
    return _States(states, lowest, final, incoming)


def _chunks(kernel, plan: Plan, heads: int, *arguments, **constants) -> None:
    """The close way for all chunks, then the far way for those that need it."""
    programs = heads * plan.chunks * plan.tiles
    for close in (True, False):
        grid = programs if close else triton.cdiv(programs, _FAR_BLOCK)
        kernel[(grid,)](
            *arguments, programs, CLOSE=close, NOTED=max(1, plan.walk_BK // plan.BK), KP=plan.KP, BK=plan.BK,
            BV=plan.BV, BV2=plan.BV2, FAR_BLOCK=_FAR_BLOCK, **plan.operands, **constants,
        )  # fmt: skip


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
    plan = make_plan(q, k, v, bidirectional)
    fused = fused_plan(plan, B * H)
    if fused is None and (dim := _split(plan, v, walks=1 + bidirectional)) is not None:
        arguments = (q, k, v, gate, reverse_gate, initial_state, reverse_initial_state)
        return _in_halves(forward, dim, arguments, range(5, 7), scale, normalizer, return_states)
    q, k, v, gates = _rows(q), _rows(k), _rows(v), _gates(gate, reverse_gate)
    scale = scale / 2 if bidirectional else scale
    out = torch.empty(B, N, H, DV, dtype=v.dtype, device=q.device)
    initials = (initial_state, reverse_initial_state)[: 1 + bidirectional]
    narrow, wide = unit(q, k, *gates), unit(v)
    common = {"BIDIRECTIONAL": bidirectional, "NORMALIZER": normalizer, "UNIT_K": narrow, "UNIT_V": wide}
    common |= {"DK": DK, "DV": DV}
    with torch.cuda.device_of(q):
        pairs = (q, narrow), (k, narrow), (v, wide), (gates[0], narrow), (gates[-1], narrow)
        tensors = (*(part for pair in pairs for part in _arguments(*pair)), out)
        if fused is not None:
            segments = fused.segments
            if segments > 1:
                states = _walk(k, v, gates, initials, return_states, normalizer, fused, against=False, stash=False)
                initial, last = states.incoming, states.last
            else:
                initial = _to_internal(initials, B * H, DV, plan.WK, q.device)
                shape = (len(initials), B * H, DV, plan.WK)
                last = torch.empty(shape, dtype=torch.float32, device=q.device) if return_states else None
            lowest = torch.empty(B * H, segments, dtype=torch.float32, device=q.device)
            programs = B * H * segments
            for close in (True, False):
                registers = fused.fused_registers(programs) if close else {}
                fused_kernel[(programs,)](
                    *tensors, initial, last, lowest, scale, N, H, segments, fused.segment_chunks * plan.L,
                    CLOSE=close, INITIAL=initial is not None, FINAL=return_states and segments == 1, BK=plan.BK,
                    BV=plan.BV, STAGES=2, **plan.operands, **registers, **common,
                )  # fmt: skip
        else:
            states = _walk(k, v, gates, initials, return_states, normalizer, plan, against=False)
            last = states.last
            _chunks(
                output_kernel, plan, B * H, *tensors, states.stash, states.lowest,
                scale, N, H, B * H, plan.chunks, **plan.few_registers, **common,
            )  # fmt: skip
    if not return_states:
        return out, None, None
    final, *reverse = (_from_internal(x, q, torch.float32) for x in last)
    return out, final, *(reverse or [None])


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    reverse_gate: Tensor | None,
    d_out: Tensor,
    initial_state: Tensor | None,
    reverse_initial_state: Tensor | None,
    d_final: Tensor | None,
    d_reverse_final: Tensor | None,
    scale: float,
    normalizer: float,
    into: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``q, k, v, gate, reverse_gate, initial_state, reverse_initial_state`` in their dtypes. The first
    five, if both directions are there, may be written ``into`` parts of a wider ``(B, N, …)`` tensor, in which heads
    lie side by side."""
    bidirectional = reverse_gate is not None
    plan = make_plan(q, k, v, bidirectional)
    if (dim := _split(plan, v, walks=2 * (1 + bidirectional))) is not None:
        arguments = (q, k, v, gate, reverse_gate, d_out, initial_state, reverse_initial_state, d_final, d_reverse_final)
        return _moved(_in_halves(backward, dim, arguments, range(6, 10), scale, normalizer), into)
    scale = scale / 2 if bidirectional else scale
    B, N, H, DK = q.shape
    DV = v.shape[-1]
    inputs = (q, k, v, gate, reverse_gate)
    q, k, v, d_out, gates = _rows(q), _rows(k), _rows(v), _rows(d_out), _gates(gate, reverse_gate)
    with torch.cuda.device_of(q):
        # Over several tiles of v the gradients of q, k and the gates are sums over the tiles.
        def over_tiles(like: Tensor) -> Tensor:
            dtype = like.dtype if plan.tiles == 1 else torch.float32
            return torch.empty(plan.tiles, B, N, H, DK, dtype=dtype, device=q.device)

        if into is not None and plan.tiles == 1:
            dq, dk, dv, df, dr = into
            dq, dk, df, dr = (x[None] for x in (dq, dk, df, dr))
        else:
            dq, dk, df = over_tiles(q), over_tiles(k), over_tiles(gate)
            dr = over_tiles(reverse_gate) if bidirectional else df
            dv = torch.empty(B, N, H, DV, dtype=v.dtype, device=q.device)
        initials = (initial_state, reverse_initial_state)[: 1 + bidirectional]
        grads = [None if x is None else x / scale for x in (d_final, d_reverse_final)[: 1 + bidirectional]]
        wanted = any(x is not None for x in initials)
        states = _walk(k, v, gates, initials, False, normalizer, plan, against=False)
        gradients = _walk(q, d_out, gates, grads, wanted, normalizer, plan, against=True)
        narrow, wide = unit(q, k, *gates, dq[0]), unit(v, d_out, dv)
        pairs = (q, narrow), (k, narrow), (v, wide), (gates[0], narrow), (gates[-1], narrow), (d_out, wide)
        tensors = [part for pair in pairs for part in _arguments(*pair)]
        _chunks(
            gradient_kernel, plan, B * H, *tensors, dq, dk, df, dr, dq.stride(2) // narrow, dv, dv.stride(1) // wide,
            states.stash, gradients.stash, states.lowest, scale, N, H, B * H, plan.chunks,
            BIDIRECTIONAL=bidirectional, NORMALIZER=normalizer, UNIT_K=narrow, UNIT_V=wide, DK=DK, DV=DV,
        )  # fmt: skip

    def whole(x: Tensor, like: Tensor) -> Tensor:
        return x[0] if plan.tiles == 1 else x.sum(0).to(like.dtype)

    result = [whole(x, like) for x, like in zip((dq, dk), inputs)]
    result += [dv, whole(df, inputs[3]), whole(dr, inputs[4]) if bidirectional else None]
    for direction, state in enumerate((initial_state, reverse_initial_state)):
        given = state is not None
        result.append(_from_internal(gradients.last[direction], q, state.dtype, scale) if given else None)
    return _moved(tuple(result), None if plan.tiles == 1 else into)

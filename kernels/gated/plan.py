"""Tiles, and the cut into chunks and segments."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads of one tile take the single launch of fused.py from FUSED_PROGRAMS (batch, head) pairs on. With fewer than
# ENOUGH_PROGRAMS, long sequences are first cut into segments, none shorter than MIN_FUSED_CHUNKS, to make up to
# SEGMENT_PROGRAMS of them; if not even MANY_PROGRAMS come of it, a chunk a program is done sooner.
FUSED_PROGRAMS = 132
ENOUGH_PROGRAMS = 264
SEGMENT_PROGRAMS = 792
MIN_FUSED_CHUNKS = 6
# MANY_PROGRAMS are four to each of an H200's multiprocessors, and all that fit with their registers unlimited. If there
# are more, threads of fused.py get FUSED_REGISTERS, for bfloat16: then six fit, which gains more than spills lose.
MANY_PROGRAMS = 528
FUSED_REGISTERS = 168
# With fewer walks than FEW_WALKS the sequence is cut into segments until there are about WANTED_WALKS, none shorter
# than MIN_SEGMENT_CHUNKS. Constants, not read off the device: the same input gives the same bits on every GPU.
FEW_WALKS = 528
WANTED_WALKS = 1056
MIN_SEGMENT_CHUNKS = 4
CHUNK = 32  # tokens, at most


@dataclass(frozen=True)
class Plan:
    """Tiles and the cut into chunks and segments of one call; ``L``, ``BK``, ``KP``, ``BV``, ``BV2`` as in ``blocks``,
    ``walk_BK`` the keys' width of the tile of the state that one walk keeps."""

    L: int
    BK: int
    KP: int
    BV: int
    BV2: int
    walk_BK: int
    bfloat16: bool
    tiles: int
    chunks: int
    segments: int
    segment_chunks: int

    @property
    def WK(self) -> int:
        return self.KP * self.BK

    def cut(self, segments: int) -> "Plan":
        segment_chunks = triton.cdiv(self.chunks, segments)
        return replace(self, segments=triton.cdiv(self.chunks, segment_chunks), segment_chunks=segment_chunks)

    @property
    def operands(self) -> dict:
        # Two warps: with four, tiles of 64 rows would go to Hopper's wgmma, whose results Triton 3.6 got wrong in
        # kernels like these (README.md, history).
        dtype = tl.bfloat16 if self.bfloat16 else tl.float32
        return {"L": self.L, "DT": dtype, "PREC": "tf32x3", "num_warps": 2}  # PREC: of float32 operands

    @property
    def few_registers(self) -> dict:
        """For kernels which fit into 128 registers and gain by the larger number of programs at a time."""
        return {"maxnreg": 128 if self.bfloat16 and self.KP == 1 and self.BV2 == 0 else None}

    def fused_registers(self, programs: int) -> dict:
        return {"maxnreg": FUSED_REGISTERS if self.bfloat16 and programs > MANY_PROGRAMS else None}

    @property
    def stash_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bfloat16 else torch.float32


def _bfloat16_operands(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether operands of matrix products are bfloat16. All others are float32, multiplied as three tf32 products:
    the decays leave float16's range, and a single tf32 product truncates and was less precise than float16."""
    return {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}


def _key_pieces(DK: int, widest: int) -> tuple[int, int]:
    """Width and number of the pieces of the keys' dimension: least padding first, then the fewest pieces."""
    widths = [w for w in (16, 32, 64) if w <= widest]
    BK = min(widths, key=lambda w: (triton.cdiv(DK, w) * w, triton.cdiv(DK, w)))
    return BK, triton.cdiv(DK, BK)


def _value_tiles(DV: int, widest: int) -> tuple[int, int]:
    """One tile of values, or two of which the second is narrower, so that 72 columns take 80 and not 128."""
    BV = min(widest, max(16, triton.next_power_of_2(DV)))
    if DV <= 16:
        return BV, 0
    rest = DV - BV // 2 if BV >= DV else DV - BV
    if BV >= DV:  # try half of it and what remains
        second = max(16, triton.next_power_of_2(rest))
        return (BV // 2, second) if BV // 2 + second < BV else (BV, 0)
    BV2 = min(BV, max(16, triton.next_power_of_2(rest)))
    # Kernels mask the columns of a tile only if its width does not divide DV. Otherwise no tile may lie beyond DV, as
    # one of 192 in twice 64 + 64 would.
    while BV2 and DV % (BV + BV2) and (DV % BV == 0 or DV % BV2 == 0):
        BV2 = BV2 // 2 if BV2 > 16 else 0
    return BV, BV2


def make_plan(q: Tensor, k: Tensor, v: Tensor, bidirectional: bool) -> Plan:
    B, N, H, DK = q.shape
    DV = v.shape[-1]
    bfloat16 = _bfloat16_operands(q, k, v)
    BK, KP = _key_pieces(DK, 32 if bfloat16 else 16)
    BV, BV2 = _value_tiles(DV, 64 if bfloat16 else 32)
    L = CHUNK if bfloat16 or (KP == 1 and BV2 == 0) else 16  # float32 takes twice the registers
    L = min(L, max(16, triton.next_power_of_2(N)))
    tiles, chunks = triton.cdiv(DV, BV + BV2), triton.cdiv(N, L)
    # A state of 64×32 takes 32 registers of a thread.
    widest = 64 if BV + BV2 <= (80 if bfloat16 else 32) else 32
    walk_BK = min(triton.next_power_of_2(KP * BK), widest)
    walks = B * H * triton.cdiv(KP * BK, walk_BK) * tiles * (2 if bidirectional else 1)
    segments = 1
    if 0 < walks < FEW_WALKS:
        segments = max(1, min(triton.cdiv(WANTED_WALKS, walks), chunks // MIN_SEGMENT_CHUNKS))
    return Plan(L, BK, KP, BV, BV2, walk_BK, bfloat16, tiles, chunks, 1, chunks).cut(segments)


def fused_plan(plan: Plan, heads: int) -> Plan | None:
    """The same tiles, with the segments that programs of ``fused_kernel`` take; ``None`` where it does not serve."""
    if plan.KP > 1 or plan.tiles > 1 or plan.BV2:
        return None
    if 0 < heads < ENOUGH_PROGRAMS:
        segments = min(SEGMENT_PROGRAMS // heads, plan.chunks // MIN_FUSED_CHUNKS)
        cut = plan.cut(max(1, segments))
        if cut.segments > 1 and heads * cut.segments >= MANY_PROGRAMS:
            return cut
    return plan.cut(1) if heads >= FUSED_PROGRAMS else None

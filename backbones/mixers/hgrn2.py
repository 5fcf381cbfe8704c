"""HGRN2: gated linear attention whose keys are what its forget gates leave open."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.gated import attention_rows, gated_linear_attention

from .base import TokenMixer, rms_factor
from .selective_rope import SelectiveRope, rotate


@outside_autocast
def forget_gate(logits: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """``log f`` and ``1 − f`` for ``f = b + (1 − b) σ(logits)``; float32 (float64 for float64 logits)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rest = (1 - lower_bound) * (-logits).sigmoid()
    return (F.logsigmoid(logits) if lower_bound == 0 else torch.log1p(-rest)), rest


class HGRN2Attention(TokenMixer):
    """``o_t = q_t S_t``, ``S_t = diag(f_t) S_{t-1} + (1 − f_t)ᵀ v_t`` with ``q = SiLU(W_q x)`` and
    ``f = b + (1 − b) σ(W_f x)``; then ``W_o RMSNorm(o)``, the norm over all channels. ``O(N)`` in time.

    HGRN2 (arXiv:2404.07904, section 3.2). Made bidirectional like ViG (arXiv:2405.18425): queries and values are
    shared, each direction has forget gates of its own, and the two scans are averaged. ``to_k`` gives the forward
    scan's gates. The released layer has heads of 128 channels: ``num_heads = dim // 128``.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        lower_bound: b, at least 0 and less than 1. In HGRN2's language models it grows from 0 in the first layer.
        bidirectional: scan from both sides; else only from the first token.
        selective_rope: rotate queries and keys by angles the tokens choose, see ``SelectiveRope``.
        norm_eps: of the output norm.
        proj_drop: dropout after the output projection.
        impl: implementation of the scan, see ``gated_linear_attention``.

    Raises:
        ValueError: ``lower_bound`` is out of range.
    """

    needs_scan: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.07904"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        lower_bound: float = 0.0,
        bidirectional: bool = True,
        selective_rope: bool = False,
        norm_eps: float = 1e-6,
        proj_drop: float = 0.0,
        impl: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if not 0 <= lower_bound < 1:
            raise ValueError(f"lower_bound must be at least 0 and less than 1, got {lower_bound}")
        factory = {"device": device, "dtype": dtype}
        self.lower_bound, self.impl = lower_bound, impl
        self.make_projections(dim, dim, bias=False, proj_drop=proj_drop, **factory)
        self.reverse_gate_proj = nn.Linear(dim, dim, bias=False, **factory) if bidirectional else None
        self.out_norm = nn.RMSNorm(dim, eps=norm_eps, **factory)
        width = dim // num_heads
        self.selective_rope = SelectiveRope(dim, num_heads, width, **factory) if selective_rope else None

    def _scan_inputs(
        self, x: Tensor, grid: tuple[int, int], prefix: int
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Queries, values, and log decays and keys of each direction."""
        q, gate, v = self.qkv(x)
        gates = [forget_gate(gate, self.lower_bound)]
        if self.reverse_gate_proj is not None:
            reverse = self.reverse_gate_proj(x).unflatten(-1, (self.num_heads, -1))
            gates.append(forget_gate(reverse, self.lower_bound))
        q, gates = F.silu(q), [(log_decay, key.to(v.dtype)) for log_decay, key in gates]
        if self.selective_rope is not None:
            angles = self.selective_rope(x, grid, prefix)
            q, gates = rotate(q, angles), [(log_decay, rotate(key, angles)) for log_decay, key in gates]
        return q, v, gates

    def _scans(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        """What each direction gives, ``(B, N, heads, D)`` with its factor ½."""
        q, v, gates = self._scan_inputs(x, grid, prefix)
        (log_decay, k), *reverse = gates
        if not reverse:
            return (gated_linear_attention(q, k, v, log_decay, scale=1.0, impl=self.impl),)
        # The directions have keys of their own, and run as one batch.
        q, v = (torch.cat((z, z.flip(1))) for z in (q, v))
        log_decay, k = (torch.cat((z, z_r.flip(1))) for z, z_r in zip((log_decay, k), reverse[0]))
        out, out_r = gated_linear_attention(q, k, v, log_decay, scale=0.5, impl=self.impl).chunk(2)
        return out, out_r.flip(1)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        scans = self._scans(x, grid, prefix)
        return scans[0] + scans[1] if len(scans) > 1 else scans[0]

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        scans = [scan.flatten(2) for scan in self._scans(x, grid, prefix)]
        if len(scans) == 1:
            return {}
        factor = self.out_norm.weight * rms_factor(sum(scans), self.out_norm.eps)
        return {name: scan * factor for name, scan in zip(("forward", "backward"), scans)}

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(self.out_norm(attended.flatten(2)).to(attended.dtype))

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        return sum(self.attention_map_parts(x, grid, rows, prefix=prefix).values())

    def attention_map_parts(
        self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0
    ) -> dict[str, Tensor]:
        q, _, gates = self._scan_inputs(x, grid, prefix)
        names = ("forward", "backward")[: len(gates)]
        return {
            name: attention_rows(q, k, log_decay, rows, reverse=name == "backward", scale=1 / len(gates))
            for name, (log_decay, k) in zip(names, gates)
        }

    def log_decays(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> tuple[Tensor, ...]:
        return tuple(log_decay for log_decay, _ in self._scan_inputs(x, grid, prefix)[2])

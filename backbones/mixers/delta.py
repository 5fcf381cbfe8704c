"""What mixers with a delta rule have in common."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.delta import attention_rows, gated_delta_rule
from scanvas.kernels.dispatch import outside_autocast

from .base import TokenConv, TokenMixer, rms_factor
from .selective_rope import SelectiveRope, rotate


@outside_autocast
def _unit(x: Tensor) -> Tensor:
    """Vectors of length one, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@torch.jit.ignore
@outside_autocast
def _log_decay(logits: Tensor, log_rate: Tensor, bias: Tensor, shape: tuple[int, int, int]) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rate = log_rate.to(dtype).exp().view(shape[0], shape[1], 1)
    return -rate * F.softplus((logits.to(dtype) + bias.to(dtype)).unflatten(-1, shape))


class DeltaDecay(nn.Module):
    """``g = −exp(A) · softplus(W x + b)``: natural logarithms of decays, the form of Mamba-2 (arXiv:2405.21060) that
    Gated DeltaNet took over. A has one entry per head, and per direction; ``exp(A)`` is at first uniform up to 16, and
    ``softplus(b)`` log-uniform between 0.001 and 0.1.

    Args:
        dim: channels of the tokens.
        directions, num_heads: of the scan.
        width: decays per head.
        rank: inner width of W; 0 for a plain W.
        least_rate: lower end of ``exp(A)``.
    """

    def __init__(
        self,
        dim: int,
        directions: int,
        num_heads: int,
        width: int,
        *,
        rank: int = 0,
        least_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.shape = (directions, num_heads, width)
        self.least_rate = least_rate
        layers = [nn.Linear(dim, rank, bias=False, **factory)] if rank else []
        layers.append(nn.Linear(rank or dim, math.prod(self.shape), bias=False, **factory))
        self.proj = nn.Sequential(*layers)
        self.log_rate = nn.Parameter(torch.empty(directions * num_heads, **factory))
        self.bias = nn.Parameter(torch.empty(math.prod(self.shape), **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.log_rate.copy_(torch.empty_like(self.log_rate).uniform_(self.least_rate, 16).clamp_(min=1e-3).log())
        step = torch.empty_like(self.bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.bias.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        """``(B, N, C)`` → ``(B, N, directions, heads, width)``, float32 (float64 for a float64 model), ≤ 0."""
        return _log_decay(self.proj(x), self.log_rate, self.bias, self.shape)


class DeltaMixer(TokenMixer):
    """A mixer around ``gated_delta_rule``. Queries, keys and values are projected, pass a depthwise 3×3 convolution (in
    place of a causal one) and SiLU; queries and keys get length one. Like in ViG (arXiv:2405.18425) they are shared by
    both directions, whose gates are their own, and the two scans are averaged.

    A subclass creates its gates in ``__init__`` and implements ``gates`` and ``gate``.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        expand_k, expand_v: width of the keys and of the values as a multiple of ``dim``.
        bidirectional: scan from both sides; else only from the first token.
        selective_rope: rotate queries and keys by angles the tokens choose, see ``SelectiveRope``.
        norm_eps: of the output norm.
        proj_drop: dropout after the output projection.
        impl: implementation of the scan, see ``gated_delta_rule``.

    Raises:
        ValueError: ``num_heads`` does not divide the width of keys or values.
    """

    needs_scan: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        bidirectional: bool = True,
        selective_rope: bool = False,
        norm_eps: float = 1e-6,
        proj_drop: float = 0.0,
        impl: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        key_dim, value_dim = int(dim * expand_k), int(dim * expand_v)
        for name, width in (("expand_k", key_dim), ("expand_v", value_dim)):
            if width < 1 or width % num_heads:
                raise ValueError(f"{name} gives a width of {width}, which num_heads = {num_heads} does not divide")
        factory = {"device": device, "dtype": dtype}
        self.directions = 2 if bidirectional else 1
        self.impl = impl
        self.make_projections(key_dim, value_dim, bias=False, proj_drop=proj_drop, **factory)
        self.conv = TokenConv(2 * key_dim + value_dim, 3, bias=False, **factory)
        self.out_norm = nn.RMSNorm(value_dim // num_heads, eps=norm_eps, **factory)
        width = key_dim // num_heads
        self.selective_rope = SelectiveRope(dim, num_heads, width, **factory) if selective_rope else None

    @abstractmethod
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log decays and erase gates ``(B, N, directions, heads, Dk or 1)``, and the directions' write gates
        ``(B, N, directions, heads, 1)`` if they have some: the same tensor if they are the erase gates."""

    def write(self, x: Tensor, v: Tensor) -> Tensor:
        """Values as they are written by both directions."""
        return v

    def _tokens(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, N, heads, D)``."""
        joined = torch.cat([part.flatten(2) for part in self.qkv(x)], dim=-1)
        joined = F.silu(self.convolve(self.conv, joined, grid, prefix))
        parts = joined.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        q, k = _unit(q), _unit(k)
        if self.selective_rope is not None:
            angles = self.selective_rope(x, grid, prefix)
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, self.write(x, v)

    def _together(self, parts: Sequence[Tensor]) -> Tensor:
        """One batch of what the directions scan, ``(B, N, heads, D)`` each, in the order in which they do."""
        return parts[0] if self.directions == 1 else torch.cat((parts[0], parts[1].flip(1)))

    def _scans(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        """What each direction gives, ``(B, N, heads, Dv)`` with its factor ½."""
        q, k, v = (self._together((z, z)) for z in self._tokens(x, grid, prefix))
        log_decay, erase_gate, write_gate = self.gates(x)
        erase = self._together(erase_gate.unbind(2))
        if write_gate is erase_gate:
            write_gate = erase
        elif write_gate is not None:
            write_gate = self._together(write_gate.unbind(2))
        log_decay = self._together(log_decay.unbind(2))
        scale = q.shape[-1] ** -0.5 / self.directions
        out = gated_delta_rule(q, k, v, log_decay, erase, write_gate, scale=scale, impl=self.impl)
        if self.directions == 1:
            return (out,)
        forward, backward = out.chunk(2)
        return forward, backward.flip(1)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        scans = self._scans(x, grid, prefix)
        return scans[0] + scans[1] if len(scans) > 1 else scans[0]

    @abstractmethod
    def gate(self, x: Tensor) -> Tensor:
        """What the normed scans are multiplied with before the output projection, ``(B, N, value channels)``."""

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(self.out_norm(attended).flatten(2).to(x.dtype) * self.gate(x))

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        scans = self._scans(x, grid, prefix)
        if len(scans) == 1:
            return {}
        factor = self.out_norm.weight * rms_factor(sum(scans), self.out_norm.eps)
        gate = self.gate(x)
        return {name: (scan * factor).flatten(2) * gate for name, scan in zip(("forward", "backward"), scans)}

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._tokens(x, grid, prefix)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        return sum(self.attention_map_parts(x, grid, rows, prefix=prefix).values())

    def attention_map_parts(
        self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0
    ) -> dict[str, Tensor]:
        q, k, _ = self._tokens(x, grid, prefix)
        log_decay, erase_gate, write_gate = self.gates(x)
        scale = q.shape[-1] ** -0.5 / self.directions
        parts = {}
        for direction, name in enumerate(("forward", "backward")[: self.directions]):
            gates = log_decay[:, :, direction], erase_gate[:, :, direction]
            part = attention_rows(q, k, *gates, rows, reverse=bool(direction), scale=scale)
            if write_gate is not None:
                part = part * write_gate[:, :, direction].permute(0, 2, 3, 1)
            parts[name] = part
        return parts

    def log_decays(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> tuple[Tensor, ...]:
        log_decay = self.gates(x)[0]
        width = self.key_dim // self.num_heads
        return tuple(log_decay[:, :, i].expand(-1, -1, -1, width) for i in range(self.directions))


@outside_autocast
def sigmoid(logits: Tensor) -> Tensor:
    """In at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()

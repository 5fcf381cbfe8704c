"""What the scan-free linear mixers share: features of queries and keys, sums over all tokens, a local branch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.linear import attention_matrix, linear_attention

from .base import TokenMixer, rms_factor


def full(x: Tensor) -> Tensor:
    """``x`` in the dtype of sums: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@outside_autocast
def affine_attention(q: Tensor, k: Tensor, v: Tensor, row: Tensor, offset: Tensor | None = None) -> Tensor:
    """``y_i = r_i q_i Σ_j k_jᵀ v_j + c_i Σ_j v_j``, linear in N.

    Args:
        q, k: ``(B, N, H, D)`` features.
        v: ``(B, N, H, Dv)``.
        row, offset: ``(B, N, H, 1)``, the factors r and c; no ``offset`` is c = 0.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype; sums are float32 (float64 for float64 inputs).
    """
    q_, k_, v_, row_ = (full(x).transpose(1, 2) for x in (q, k, v, row))
    out = row_ * (q_ @ (k_.mT @ v_))
    if offset is not None:
        out = out + full(offset).transpose(1, 2) * v_.sum(2, keepdim=True)
    return out.transpose(1, 2).to(v.dtype)


@outside_autocast
def affine_matrix(
    q: Tensor, k: Tensor, row: Tensor, offset: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """The matrix ``(B, H, R, N)`` that ``affine_attention`` multiplies the values with, float32 or float64."""
    if rows is not None:
        q, row = q[:, rows], row[:, rows]
        offset = None if offset is None else offset[:, rows]
    matrix = torch.einsum("brhd,bnhd->bhrn", full(q), full(k)) * full(row).transpose(1, 2)
    return matrix if offset is None else matrix + full(offset).transpose(1, 2)


def gate_normed(parts: dict[str, Tensor], norm: nn.LayerNorm, gate: Tensor) -> dict[str, Tensor]:
    """The addends of ``gate ⊙ norm(sum of parts)``: each part by the factor of the sum, and the norm's bias."""
    if not parts:
        return {}
    centred = {name: part - part.mean(-1, keepdim=True) for name, part in parts.items()}
    factor = gate * norm.weight * rms_factor(sum(centred.values()), norm.eps)
    return {name: part * factor for name, part in centred.items()} | {"bias": gate * norm.bias}


class KernelMixer(TokenMixer):
    """A mixer made of parts: ``heads`` (projections) → ``features`` → ``reduce`` (sums) + ``local`` → ``output``.

    As it is, the sums are those of ``linear_attention``, and ``features`` returns queries and keys of the numerator and
    those of the divisor. A subclass replaces what is its own. Cost: ``O(N)`` in time and memory; the map is ``O(N²)``.
    """

    eps: float = 1e-6

    def __init__(self, dim: int, num_heads: int, *, fused_projections: bool = False):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        self.conv = self.gate_proj = None

    def make_conv(self, kernel_size: int, channels: int, **factory) -> None:
        """The depthwise convolution of the values, ``conv``; ``None`` for a ``kernel_size`` of 0."""
        self.conv = self.local_conv(channels, kernel_size, **factory)

    def heads(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, N, heads, D)``."""
        return self.qkv(x)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        """What ``reduce`` and ``matrix`` take."""
        raise NotImplementedError

    def reduce(self, v: Tensor, q: Tensor, k: Tensor, normalizer_q: Tensor, normalizer_k: Tensor) -> Tensor:
        return linear_attention(q, k, v, normalizer_q=normalizer_q, normalizer_k=normalizer_k, eps=self.eps)

    def matrix(
        self, q: Tensor, k: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        return attention_matrix(q, k, normalizer_q=normalizer_q, normalizer_k=normalizer_k, eps=self.eps, rows=rows)

    def local(self, x: Tensor, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor | None:
        """The local branch, ``(B, N, C)``, zero for prefix tokens: a convolution of the values."""
        if self.conv is None:
            return None
        return F.pad(self.conv(v.flatten(2)[:, prefix:], grid), (0, 0, prefix, 0))

    def gate(self, x: Tensor) -> Tensor | None:
        """What the sum of both branches is multiplied with before the output projection, ``(B, N, C)``: ``gate_proj``
        of the input, if the mixer has it."""
        return None if self.gate_proj is None else self.gate_proj(x)

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        """The gate and the output projection."""
        gate = self.gate(x)
        return self.to_out(out if gate is None else out * gate)

    def _finish(self, x: Tensor, v: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        local = self.local(x, v, grid, prefix)
        out = attended.flatten(2)
        return self.output(x, out if local is None else out + local)

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self.heads(x, grid, prefix)
        return self._finish(x, v, self.reduce(v, *self.features(q, k, grid, prefix)), grid, prefix)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self.heads(x, grid, prefix)
        return self.reduce(v, *self.features(q, k, grid, prefix))

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._finish(x, self.heads(x, grid, prefix)[2], attended, grid, prefix)

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.heads(x, grid, prefix)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self.heads(x, grid, prefix)
        return self.matrix(*self.features(q, k, grid, prefix), rows=rows)

    def addends(self, x: Tensor, grid: tuple[int, int], prefix: int) -> dict[str, Tensor]:
        """The ``branches`` before the gate."""
        q, k, v = self.heads(x, grid, prefix)
        local = self.local(x, v, grid, prefix)
        if local is None:
            return {}
        return {"attention": self.reduce(v, *self.features(q, k, grid, prefix)).flatten(2), "local": local}

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        parts, gate = self.addends(x, grid, prefix), self.gate(x)
        return parts if gate is None else {name: part * gate for name, part in parts.items()}


class AffineMixer(KernelMixer):
    """A kernel mixer with the sums of ``affine_attention``: ``features`` returns q, k, r and c (or no c)."""

    def reduce(self, v: Tensor, q: Tensor, k: Tensor, row: Tensor, offset: Tensor | None = None) -> Tensor:
        return affine_attention(q, k, v, row, offset)

    def matrix(
        self, q: Tensor, k: Tensor, row: Tensor, offset: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        return affine_matrix(q, k, row, offset, rows)

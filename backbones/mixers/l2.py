"""L²ViT's two attentions: a softmax in windows, and linear attention that grows no sharper than its divisor allows."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast

from .base import TokenMixer


class HeadScale(nn.Module):
    """One learned factor per head."""

    def __init__(self, num_heads: int, initial: float, device=None, dtype=None):
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.initial)

    def forward(self) -> Tensor:
        return self.weight.view_as(self.weight)  # stays where it is when the parameter is sent away


def _windows(x: Tensor, size: int) -> Tensor:
    """``(B, H, W, heads, D)`` → ``(B · rows, columns · heads, size², D)``, windows filled up with zeros."""
    H, W = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, 0, 0, -W % size, 0, -H % size))
    x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # B, rows, size, columns, size, heads, D
    return x.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5).flatten(2, 3).flatten(0, 1)


def _unwindow(x: Tensor, grid: tuple[int, int], size: int, heads: int) -> Tensor:
    H, W = grid
    x = x.unflatten(0, (-1, -(-H // size))).unflatten(2, (-1, heads)).unflatten(4, (size, size))
    return x.permute(0, 1, 4, 2, 5, 3, 6).flatten(3, 4).flatten(1, 2)[:, :H, :W]


class L2Attention(TokenMixer):
    """Linear global attention ``τ · ReLU(q) Σ_j ReLU(k_j)ᵀ v_j / max(ReLU(q) · Σ_j ReLU(k_j), 100)`` with a learned τ
    per head, at first ``d^-½``; or with ``window=n`` the softmax ``softmax(d^-½ q kᵀ) v`` in windows of n × n tokens.
    Both are ``O(N)`` in time.

    L²ViT (arXiv:2501.16182) has both in turn: blocks 0, 2, … of a stage look through windows of 7 × 7, without shift
    or bias, blocks 1, 3, … are linear. ViG, ViG-H and the denoiser do so if ``window`` is left alone (see
    ``TokenMixer.in_turn``). Its convolutions between attention and feed-forward belong to the block.

    Prefix tokens are seen by all windows, and see all tokens.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        window: side of the windows in tokens; 0 for linear attention.
        least: the 100, below which the divisor does not fall.
        qkv_bias: biases in the projections, the output's too.
        proj_drop: dropout after the output projection.

    Raises:
        ValueError: ``window`` is negative or ``least`` not positive.
    """

    in_turn: ClassVar[tuple[dict, ...]] = ({"window": 7}, {"window": 0})
    reads_by_projections: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2501.16182"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        window: int = 0,
        least: float = 100.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if not isinstance(window, int) or window < 0:
            raise ValueError(f"window must be the side of a window in tokens, or 0 for none; got {window!r}")
        if not least > 0:
            raise ValueError(f"least must be positive, got {least}")
        factory = {"device": device, "dtype": dtype}
        self.window, self.least = window, least
        self.row_stochastic = bool(window)
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.scale = None if window else HeadScale(num_heads, (dim // num_heads) ** -0.5, **factory)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self.qkv(x)
        if self.scale is not None:
            return _bounded(F.relu(q), F.relu(k), v, self.scale(), self.least)
        return self._windowed(q, k, v, grid, prefix)

    def _windowed(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        size = self.window
        there = _windows(torch.ones(1, *grid, 1, 1, device=q.device, dtype=torch.int8), size)[..., 0] > 0
        q_, k_, v_ = (_windows(z[:, prefix:].unflatten(1, grid), size) for z in (q, k, v))
        mask = there.repeat_interleave(self.num_heads, dim=1).repeat(q.shape[0], 1, 1)[:, :, None]
        if prefix:
            rows = q_.shape[0] // q.shape[0]
            columns = q_.shape[1] // self.num_heads
            extra_k, extra_v = (
                z[:, :prefix].transpose(1, 2).repeat_interleave(rows, dim=0).repeat(1, columns, 1, 1) for z in (k, v)
            )
            k_, v_ = torch.cat((k_, extra_k), dim=2), torch.cat((v_, extra_v), dim=2)
            mask = F.pad(mask, (0, prefix), value=True)
        out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask)
        out = _unwindow(out, grid, size, self.num_heads).flatten(1, 2)
        if prefix:
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            rest = F.scaled_dot_product_attention(q[:, :, :prefix], k, v).transpose(1, 2)
            out = torch.cat((rest, out), dim=1)
        return out

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(attended.flatten(2))

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self.qkv(x)
        rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows.to(x.device)
        if self.scale is not None:
            return _bounded_map(F.relu(q), F.relu(k), self.scale(), self.least, rows)
        place = torch.arange(grid[0] * grid[1], device=x.device)
        columns = -(-grid[1] // self.window)
        window = place // grid[1] // self.window * columns + place % grid[1] // self.window
        window = F.pad(window, (prefix, 0), value=-1)
        seen = (window[rows, None] == window) | (window[rows, None] < 0) | (window < 0)
        return _window_map(q[:, rows], k, seen)


@outside_autocast
def _bounded(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, least: float) -> Tensor:
    dtype, result = torch.promote_types(v.dtype, torch.float32), v.dtype
    q, k, v = (z.to(dtype).transpose(1, 2) for z in (q, k, v))
    divisor = (q @ k.sum(2).unsqueeze(-1)).clamp_min(least)
    return (scale.to(dtype)[:, None, None] * (q @ (k.mT @ v)) / divisor).transpose(1, 2).to(result)


@outside_autocast
def _bounded_map(q: Tensor, k: Tensor, scale: Tensor, least: float, rows: Tensor) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("brhd,bnhd->bhrn", q[:, rows].to(dtype), k.to(dtype))
    return scale.to(dtype)[:, None, None] * scores / scores.sum(-1, keepdim=True).clamp_min(least)


@outside_autocast
def _window_map(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("brhd,bnhd->bhrn", q.to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)

"""Manhattan self-attention: a softmax along rows, then along columns, which fades with the distance."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope
from scanvas.kernels.dispatch import outside_autocast

from .base import TokenMixer


def manhattan_decay(heads: int, initial: float, spread: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``log γ`` of each head, ``γ_h = 1 − 2^(−initial − spread·h/heads)``: ``(heads,)``."""
    exponent = initial + spread * torch.arange(heads, device=device, dtype=dtype) / heads
    return torch.log1p(-torch.exp2(-exponent))


@outside_autocast
def _line_weights(q: Tensor, k: Tensor, extra: Tensor, log_decay: Tensor) -> Tensor:
    """Softmax of each token over the tokens of its line, and those of no place.

    ``q``, ``k`` ``(B, lines, L, heads, D)``, scaled; ``extra`` ``(B, P, heads, D)``, keys at no distance → ``(B,
    lines, heads, L, L + P)``.
    """
    place = torch.arange(q.shape[2], device=q.device)
    distance = (place[:, None] - place).abs().to(log_decay.dtype)
    near = torch.einsum("blihd,bljhd->blhij", q, k) + log_decay[:, None, None] * distance
    if extra.shape[1]:
        near = torch.cat((near, torch.einsum("blihd,bphd->blhip", q, extra)), dim=-1)
    return near.softmax(-1)


class RetentionAttention(TokenMixer):
    """``Σ_y a^H_{xy} Σ_x' a^W_{xx'} v``: a softmax over each row, then over each column of the result, each with scores
    ``d^-½ q·k + |distance| · log γ``; plus ``DWConv5×5(v)``. ``O(N (H + W))`` in time.

    The decomposed Manhattan attention of RMT (arXiv:2309.11523, eqs. 6 and 7, with the decay added before the softmax,
    as in the released code): a token that is far by ``|Δx| + |Δy|`` fades like ``γ^(|Δx| + |Δy|)``, with one γ per
    head, ``1 − 2^(−2 − 4h/heads)`` by default as in RMT-T's first stages. With ``gate=True`` the retention of
    Gated-SwinRMT (arXiv:2604.06014): the result is multiplied by ``σ(W x)`` before the output projection; windows
    are left out. The rotation of RMT's code by the raster index is replaced by ``rope``, which knows rows and columns.

    Prefix tokens are at no distance from any token: a row and a column of the image see them too, and they see all by
    a plain softmax.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        initial, spread: of the decays, ``γ_h = 1 − 2^(−initial − spread·h/heads)``.
        gate: sigmoid gate before the output projection.
        kernel_size: of the depthwise convolution, odd; 0 leaves it out.
        rope: rotate queries and keys by 2-D position.
        qkv_bias: biases in the projections, the output's too.
        proj_drop: dropout after the output projection.

    Raises:
        ValueError: ``initial`` is not positive, ``spread`` is negative, or ``kernel_size`` is even.
    """

    row_stochastic: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.11523"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        initial: float = 2.0,
        spread: float = 4.0,
        gate: bool = False,
        kernel_size: int = 5,
        rope: bool = False,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if not initial > 0 or spread < 0:
            raise ValueError(f"initial must be positive and spread not negative, got {initial} and {spread}")
        if rope:
            self.check_rope(dim)
        factory = {"device": device, "dtype": dtype}
        self.initial, self.spread, self.rope = initial, spread, rope
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.gate_proj = nn.Linear(dim, dim, **factory) if gate else None
        self.conv = self.local_conv(dim, kernel_size, **factory)

    def _weights(
        self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int
    ) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
        """Softmax weights of rows ``(B, H, heads, W, W + P)``, columns ``(B, W, heads, H, H + P)`` and prefix tokens
        ``(B, heads, P, N)``, and their dtype."""
        if self.rope:
            q, k = apply_rope(q, grid, prefix), apply_rope(k, grid, prefix)
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype)
        log_decay = manhattan_decay(self.num_heads, self.initial, self.spread, q.device, dtype)
        extra = k[:, :prefix]
        q_grid, k_grid = q[:, prefix:].unflatten(1, grid), k[:, prefix:].unflatten(1, grid)
        rows = _line_weights(q_grid, k_grid, extra, log_decay)
        columns = _line_weights(q_grid.transpose(1, 2), k_grid.transpose(1, 2), extra, log_decay)
        return rows, columns, _all_weights(q[:, :prefix], k), dtype

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        return _apply(v, *self._weights(q, k, grid, prefix), grid, prefix)

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self.qkv(x)
        return self._project(x, v, self._mix(q, k, v, grid, prefix), grid, prefix)

    def _local(self, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        return F.pad(self.convolve(self.conv, v.flatten(2)[:, prefix:], grid, 0), (0, 0, prefix, 0))

    def _project(self, x: Tensor, v: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        out = attended.flatten(2)
        if self.conv is not None:
            out = out + self._local(v, grid, prefix)
        if self.gate_proj is not None:
            out = out * self.gate_proj(x).sigmoid()
        return self.to_out(out)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._mix(*self.qkv(x), grid, prefix)

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._project(x, self.qkv(x)[2], attended, grid, prefix)

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self.qkv(x)
        rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows.to(x.device)
        return _map_rows(*self._weights(q, k, grid, prefix)[:3], grid, prefix, rows)

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        if self.conv is None:
            return {}
        q, k, v = self.qkv(x)
        gate = 1 if self.gate_proj is None else self.gate_proj(x).sigmoid()
        attended = self._mix(q, k, v, grid, prefix).flatten(2)
        return {"attention": gate * attended, "local": gate * self._local(v, grid, prefix)}


@outside_autocast
def _all_weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bphd,bnhd->bhpn", q, k).softmax(-1)


@outside_autocast
def _apply(
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    rest: Tensor,
    dtype: torch.dtype,
    grid: tuple[int, int],
    prefix: int,
) -> Tensor:
    """Values ``(B, N, heads, D)`` mixed by the weights of rows, then by those of columns."""
    H, W = grid
    result, v = v.dtype, v.to(dtype)
    extra, image = v[:, :prefix], v[:, prefix:].unflatten(1, grid)
    for weights, size in ((rows, W), (columns, H)):
        mixed = torch.einsum("blhij,bljhd->bilhd", weights[..., :size], image)
        if prefix:
            mixed = mixed + torch.einsum("blhip,bphd->bilhd", weights[..., size:], extra)
        image = mixed  # (B, i, l, heads, D): the lines of the other axis
    out = image.flatten(1, 2)
    if prefix:
        out = torch.cat((torch.einsum("bhpn,bnhd->bphd", rest, v), out), dim=1)
    return out.to(result)


@outside_autocast
def _map_rows(rows: Tensor, columns: Tensor, rest: Tensor, grid: tuple[int, int], prefix: int, index: Tensor) -> Tensor:
    """Rows ``index`` of the product of the two steps, ``(B, heads, R, N)``."""
    H, W = grid
    image = index >= prefix
    place = index[image] - prefix
    column = columns.transpose(1, 2)[:, :, place % W, place // W]  # (B, heads, R, H + P): the query's column
    line = rows.permute(0, 2, 3, 1, 4)[:, :, place % W]  # (B, heads, R, H, W + P): from each of its tokens, the row
    found = (column[..., :H, None] * line[..., :W]).flatten(3)
    if prefix:
        seen = torch.einsum("bhrl,bhrlp->bhrp", column[..., :H], line[..., W:]) + column[..., H:]
        found = torch.cat((seen, found), dim=-1)
    out = found.new_zeros(*found.shape[:2], len(index), found.shape[-1])
    out[:, :, image] = found
    out[:, :, ~image] = rest[:, :, index[~image]]
    return out

"""Sparse-linear attention: a softmax over the blocks that matter, linear attention over all."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.linear import linear_attention

from .softmax import SoftmaxAttention

_BLOCKS_AT_A_TIME = 1024  # of keys that are gathered for queries


class ZeroProjection(nn.Module):
    """``x W + b`` per head, with one W and b for all heads, at first zero: the layer starts as without its branch."""

    def __init__(self, width: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _blocks(x: Tensor, size: int) -> Tensor:
    """``(B, N, H, D)`` → ``(B, H, blocks, size, D)``, filled up with zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.transpose(1, 2).unflatten(2, (-1, size))


def blocks_kept(tokens: int, size: int, keep: float) -> int:
    """How many blocks are a share of those there are, one at least."""
    return max(1, int(keep * -(-tokens // size)))


@outside_autocast
@torch.no_grad()
def route(q: Tensor, k: Tensor, size: int, kept: int, weight: Tensor | None = None) -> Tensor:
    """Indices ``(B, H, blocks, kept)`` of the blocks of keys whose mean fits the mean of a block of queries best. With
    a ``weight`` of tokens ``(B or 1, N)`` so much of each is in the means, and blocks of hidden ones come last."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    there = q.new_ones(1, q.shape[1], dtype=dtype) if weight is None else weight.to(dtype)
    counts = _blocks(there[..., None, None], size).sum(3)
    q, k = (_blocks(x.to(dtype) * there[..., None, None], size).sum(3) / counts.clamp_min(1e-37) for x in (q, k))
    scores = q @ k.mT
    if weight is not None:
        scores = scores.masked_fill(counts.mT == 0, -torch.inf)
    return scores.topk(kept, dim=-1).indices


def sparse_softmax(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, size: int, bias: Tensor | None = None) -> Tensor:
    """Softmax attention of each block of queries to the blocks of keys ``chosen`` for it, ``(B, N, H, D)``; see
    ``route``. ``bias`` ``(B or 1, N)`` is added to the scores of keys."""
    N, H, D = q.shape[1:]
    blocks, kept = chosen.shape[2:]
    queries, keys, values = (_blocks(x, size).flatten(0, 1) for x in (q, k, v))
    chosen = chosen.flatten(0, 1)
    there = (torch.arange(blocks * size, device=q.device) < N).view(blocks, size)
    if bias is not None:
        bias = F.pad(bias.to(q.dtype), (0, -N % size), value=-torch.inf).unflatten(1, (-1, size))
        bias = bias[:, None].expand(q.shape[0], H, -1, -1).flatten(0, 1)
    parts = []
    for part, index in zip(*(x.split(max(1, _BLOCKS_AT_A_TIME // kept), dim=1) for x in (queries, chosen))):
        flat = index.flatten(1)[..., None]
        k_, v_ = (
            x.flatten(2).gather(1, flat.expand(-1, -1, size * D)).view(*part.shape[:2], kept * size, D)
            for x in (keys, values)
        )
        if bias is None:
            mask = there[index].flatten(2).unsqueeze(2)
        else:
            mask = bias.gather(1, flat.expand(-1, -1, size)).view(*part.shape[:2], 1, kept * size)
        parts.append(F.scaled_dot_product_attention(part, k_, v_, attn_mask=mask))
    out = torch.cat(parts, dim=1).flatten(1, 2)[:, :N]
    return out.unflatten(0, (-1, H)).transpose(1, 2)


def sparse_map(
    q: Tensor, k: Tensor, chosen: Tensor, size: int, rows: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """The map of ``sparse_softmax``, ``(B, H, R, N)`` in float32 (float64 for float64 inputs)."""
    N = q.shape[1]
    rows = torch.arange(N, device=q.device) if rows is None else rows.to(q.device)
    near = torch.zeros(*chosen.shape[:3], chosen.shape[2], dtype=torch.bool, device=q.device)
    near = near.scatter(3, chosen, True)[:, :, rows // size].repeat_interleave(size, dim=3)
    return _masked_map(q[:, rows], k, near[..., :N], bias)


class SparseLinearAttention(SoftmaxAttention):
    """``softmax over the tokens of a few blocks + Proj(LA over all tokens)`` with ``φ = softmax over channels`` in the
    linear attention LA and a projection that is zero at first.

    SLA (arXiv:2509.24006). Tokens in their order are cut into blocks; the means of a block of queries and a block of
    keys are compared (centring the keys, as released, changes no order), and of all blocks of keys the ``keep`` best
    are looked at exactly. The paper leaves to the linear branch what is neither kept nor among the worst 10 %; the
    released code, followed here, gives it all keys. ``O(N² · keep)`` in time, ``O(N)`` in memory, plus ``O(N)`` for
    the linear branch. All weights of a softmax layer fit.

    The attention map is that of the sparse softmax; ``branches`` has the linear attention beside it, whose values are
    mixed across channels by the projection and have no map of their own.

    Args:
        dim, num_heads, fused_projections, qkv_bias, qk_norm, rope, norm_eps, proj_drop: see ``SoftmaxAttention``.
        block: tokens of a block.
        keep: share of the blocks of keys that is kept; one at least.
        eps: added to the divisor of the linear attention.

    Raises:
        ValueError: ``block`` or ``keep`` is out of range.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2509.24006"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        block: int = 64,
        keep: float = 0.05,
        eps: float = 1e-5,
        device=None,
        dtype=None,
        **softmax,
    ):
        super().__init__(dim, num_heads, device=device, dtype=dtype, **softmax)
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be a whole number of tokens, at least 1; got {block!r}")
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be a share of the blocks, more than 0 and at most 1; got {keep}")
        self.block, self.keep, self.eps = block, keep, eps
        self.linear_proj = ZeroProjection(dim // num_heads, device=device, dtype=dtype)

    def _route(self, q: Tensor, k: Tensor) -> Tensor:
        return route(q, k, self.block, blocks_kept(q.shape[1], self.block, self.keep))

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_softmax(q, k, v, self._route(q, k), self.block)

    def _linear(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.linear_proj(linear_attention(spread(q), spread(k), v, eps=self.eps))

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self._qkv(x, grid, prefix)
        return self.to_out((self._sparse(q, k, v) + self._linear(q, k, v)).flatten(2))

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._sparse(*self._qkv(x, grid, prefix))

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out((attended + self._linear(*self._qkv(x, grid, prefix))).flatten(2))

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self._qkv(x, grid, prefix)
        return sparse_map(q, k, self._route(q, k), self.block, rows)

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        q, k, v = self._qkv(x, grid, prefix)
        return {"attention": self._sparse(q, k, v).flatten(2), "linear": self._linear(q, k, v).flatten(2)}


@outside_autocast
def spread(z: Tensor) -> Tensor:
    """Softmax over the channels, in at least float32."""
    return z.to(torch.promote_types(z.dtype, torch.float32)).softmax(-1)


@outside_autocast
def _masked_map(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("brhd,bnhd->bhrn", q.to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.to(dtype)[:, None, None]
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)

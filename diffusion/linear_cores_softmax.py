"""Targets of ``linearize`` that keep softmaxes, but none over all pairs of tokens."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.backbones.mixers.agent import agent_map
from scanvas.backbones.mixers.kernel import full
from scanvas.backbones.mixers.retention import manhattan_decay
from scanvas.backbones.mixers.sla import ZeroProjection, blocks_kept, route, sparse_map, sparse_softmax, spread
from scanvas.kernels.dispatch import outside_autocast
from scanvas.kernels.linear import linear_attention

from .linear_core import LinearCore, Rotate
from .linear_cores_placed import Grid, PlacedCore


def log_weight(weight: Tensor | None) -> Tensor | None:
    """What is added to the scores of keys, finite for hidden ones: a line of a grid may hold no others."""
    return None if weight is None else full(weight).clamp_min(1e-37).log()


class AgentCore(PlacedCore):
    """Agent attention (arXiv:2312.08874): a softmax from the queries of all tokens to a few agents, and one from the
    agents to all keys. Agents are the image's queries, after their rotary positions, averaged over the areas of a grid
    of ``agents`` a side; a video has as many in every frame. Its learned biases are left out; a convolution on the
    values."""

    defaults: ClassVar[dict[str, Any]] = {"agents": 7, "kernel_size": 3}
    fuses_heads: ClassVar[bool] = False

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, agents: int, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        if agents < 1:
            raise ValueError(f"agents must be the side of a grid of agents, at least 1; got {agents}")
        self.agents = agents

    def _agents(
        self, q: Tensor, weight: Tensor | None, start: int, grid: Grid
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Agents ``(B, frames · agents², heads, D)``, and what is added to the scores of keys and of agents: ``(B or 1,
        1, 1, ·)``. Hidden tokens are in no average, and an agent of such tokens alone is hidden."""
        if weight is None:
            return self._pooled(q.flatten(2), start, grid).unflatten(-1, q.shape[2:]), None, None
        there = full(weight)[..., None]
        seen = self._pooled(there, start, grid)
        agents = self._pooled(full(q).flatten(2) * there, start, grid) / seen.clamp_min(1e-37)
        bias, of_agents = (log_weight(z)[:, None, None].to(q.dtype) for z in (weight, (seen > 0)[..., 0]))
        return agents.unflatten(-1, q.shape[2:]), bias, of_agents

    def _pooled(self, z: Tensor, start: int, grid: Grid) -> Tensor:
        """``(B, N, C)`` → ``(B, frames · agents², C)``."""
        image = z[:, start : start + math.prod(grid)]
        frames = image.reshape(-1, math.prod(grid[-2:]), z.shape[-1]).mT.unflatten(-1, tuple(grid[-2:]))
        return F.adaptive_avg_pool2d(frames, self.agents).flatten(2).mT.reshape(z.shape[0], -1, z.shape[-1])

    def mix(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None, start: int, grid: Grid) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        agents, bias, of_agents = self._agents(q, weight, start, grid)
        q, k, v, agents = (z.transpose(1, 2) for z in (q, k, v, agents.to(v.dtype)))
        gathered = F.scaled_dot_product_attention(agents, k, v, attn_mask=bias)
        return F.scaled_dot_product_attention(q, agents, gathered, attn_mask=of_agents).transpose(1, 2)

    def attention_map_parts(
        self, q, k, x, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None, start: int, grid: Grid
    ) -> dict[str, Tensor]:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        agents, *biases = self._agents(q, weight, start, grid)
        none = torch.zeros(1, device=q.device)
        return {
            "map": agent_map(q if rows is None else q[:, rows], k, agents, *(none if b is None else b for b in biases))
        }


class RetentionCore(PlacedCore):
    """Manhattan attention (RMT, arXiv:2309.11523): the softmax along each row, then along each column of the result (of
    a video, then through the frames), its scores falling with the distance by ``log γ``, ``γ = 1 − 2^(−initial −
    spread·h/heads)`` for the head h. All tokens see those of no image, at no distance, and these see all by a plain
    softmax; a convolution on the values."""

    defaults: ClassVar[dict[str, Any]] = {"initial": 2.0, "spread": 4.0, "kernel_size": 5}
    fuses_heads: ClassVar[bool] = False

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, initial: float, spread: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        if not initial > 0:
            raise ValueError(f"initial must be positive, got {initial}")
        self.initial, self.spread = initial, spread

    def mix(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None, start: int, grid: Grid) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        decay = manhattan_decay(self.heads, self.initial, self.spread, q.device, full(q).dtype)
        return _along_lines(q, k, v, decay, log_weight(weight), start, tuple(grid))

    def attention_map_parts(
        self, q, k, x, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None, start: int, grid: Grid
    ) -> dict[str, Tensor]:
        B, N, heads = q.shape[:3]
        each = torch.eye(N, device=q.device, dtype=full(q).dtype)[None, :, None].expand(B, N, heads, N)
        matrix = self.mix(q, k, each, x, rotate, weight, start, grid).transpose(1, 2)  # of unit values
        return {"map": matrix if rows is None else matrix[:, :, rows]}


class SlaCore(LinearCore):
    """SLA (arXiv:2509.24006): a softmax over the tokens of the share ``keep`` of blocks of ``block`` keys that fit a
    block of queries best, and a projection, zero at first, of the linear attention over all keys; both after the rotary
    positions. The map is that of the softmax. Blocks are of the order of tokens, text and image alike."""

    defaults: ClassVar[dict[str, Any]] = {"block": 64, "keep": 0.05, "kernel_size": 0, "eps": 1e-5}
    fuses_heads: ClassVar[bool] = False

    def __init__(
        self, dim: int, value_dim: int, heads: int, streams: int, *, block: int, keep: float, eps: float, **options
    ):
        super().__init__(dim, value_dim, heads, streams, **options)
        if block < 1:
            raise ValueError(f"block must be a whole number of tokens, at least 1; got {block}")
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be a share of the blocks, more than 0 and at most 1; got {keep}")
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.block, self.keep, self.eps = block, keep, eps
        self.linear_proj = ZeroProjection(value_dim // heads, **factory)

    def _route(self, q: Tensor, k: Tensor, weight: Tensor | None) -> Tensor:
        return route(q, k, self.block, blocks_kept(q.shape[1], self.block, self.keep), weight)

    def attend(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        return sparse_softmax(q, k, v, self._route(q, k, weight), self.block, log_weight(weight))

    def mix(self, q, k, v, x, rotate: Rotate | None, weight: Tensor | None) -> Tensor:
        sparse = self.attend(q, k, v, x, rotate, weight)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        k = spread(k) if weight is None else spread(k) * full(weight)[..., None, None]
        return sparse + self.linear_proj(linear_attention(spread(q), k, v, eps=self.eps))

    def attention_map_parts(
        self, q, k, x, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        return {"map": sparse_map(q, k, self._route(q, k, weight), self.block, rows, log_weight(weight))}


@outside_autocast
def _along_lines(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bias: Tensor | None, start: int, grid: tuple[int, ...]
) -> Tensor:
    """``v`` ``(B, N, heads, D')`` mixed along the last axis of the grid, then the one before it, and so on."""
    result, end = v.dtype, start + math.prod(grid)
    q, k, v = full(q) * q.shape[-1] ** -0.5, full(k), full(v)
    bias = torch.zeros(1, q.shape[1], device=q.device, dtype=q.dtype) if bias is None else bias.to(q.dtype)

    def others(z: Tensor) -> Tensor:
        return torch.cat((z[:, :start], z[:, end:]), dim=1)

    def lines(z: Tensor, axis: int) -> Tensor:
        """``(B, H·W, …)`` → ``(B, the other axes, size of the axis, …)``."""
        return z.unflatten(1, grid).movedim(1 + axis, len(grid)).flatten(1, len(grid) - 1)

    extra_k, extra_v, extra_bias = others(k), others(v), others(bias)[:, None, None, None]
    images = [z[:, start:end] for z in (q, k, bias)]
    image = v[:, start:end]
    for axis in reversed(range(len(grid))):
        size = grid[axis]
        q_, k_, bias_ = (lines(z, axis) for z in images)
        place = torch.arange(size, device=q.device, dtype=q.dtype)
        near = torch.einsum("blihd,bljhd->blhij", q_, k_) + decay[:, None, None] * (place[:, None] - place).abs()
        near = near + bias_[:, :, None, None]
        far = torch.einsum("blihd,bphd->blhip", q_, extra_k) + extra_bias
        weights = torch.cat((near, far), dim=-1).softmax(-1)
        mixed = torch.einsum("blhij,bljhd->blihd", weights[..., :size], lines(image, axis))
        mixed = mixed + torch.einsum("blhip,bphd->blihd", weights[..., size:], extra_v)
        others_of_grid = grid[:axis] + grid[axis + 1 :]
        image = mixed.unflatten(1, others_of_grid).movedim(len(grid), 1 + axis).flatten(1, len(grid))
    if extra_k.shape[1]:
        rest = torch.einsum("bphd,bnhd->bhpn", others(q), k) + bias[:, None, None]
        rest = torch.einsum("bhpn,bnhd->bphd", rest.softmax(-1), v)
        image = torch.cat((rest[:, :start], image, rest[:, start:]), dim=1)
    return image.to(result)


SOFTMAX_TARGETS: dict[str, type[LinearCore]] = {"agent": AgentCore, "retention": RetentionCore, "sla": SlaCore}

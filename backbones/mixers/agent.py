"""Agent attention: two softmaxes, from all tokens to a few agents and from the agents back to all tokens."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast

from .kernel import KernelMixer, full
from .places import PlaceParameter


class AgentBias(nn.Module):
    """A bias for each head, agent and token: a 7×7 table, a row's and a column's, resized to the grid and added.

    Args:
        num_heads, agents: of the attention.
        grid_size: (H₀, W₀), where the rows' and columns' biases are learned.
        prefix: learn one value for each head and agent for prefix tokens, too; else theirs is 0.
        std: of the truncated normal distribution that all start from.
    """

    def __init__(
        self,
        num_heads: int,
        agents: int,
        grid_size: tuple[int, int],
        prefix: bool = False,
        std: float = 0.02,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.std = std
        channels, factory = num_heads * agents, {"initial": 0.0, "device": device, "dtype": dtype}
        self.area = PlaceParameter(channels, (7, 7), **factory)
        self.rows = PlaceParameter(channels, (grid_size[0], 1), **factory)
        self.columns = PlaceParameter(channels, (1, grid_size[1]), **factory)
        self.prefix = PlaceParameter(channels, (1, 1), **factory) if prefix else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for table in self.parameters():
            nn.init.trunc_normal_(table, std=self.std)

    def forward(self, grid: tuple[int, int], prefix: int) -> Tensor:
        """``(prefix + H·W, heads, agents)``."""
        H, W = grid
        rows, columns = self.rows((H, 1)), self.columns((1, W))
        bias = self.area(grid) + (rows[:, None] + columns).flatten(0, 1)
        if prefix > 0:
            first = torch.zeros_like(bias[:1])
            if self.prefix is not None:
                first = self.prefix((1, 1))
            bias = torch.cat((first.expand(prefix, -1), bias))
        return bias.view(bias.shape[0], self.num_heads, -1)


@outside_autocast
def agent_map(q: Tensor, k: Tensor, agents: Tensor, to_agents: Tensor, from_agents: Tensor) -> Tensor:
    """``(B, H, R, N)`` of q ``(B, R, H, D)``, k ``(B, N, H, D)`` and agents ``(B, n, H, D)``."""
    scale = q.shape[-1] ** -0.5
    gather = torch.einsum("bahd,bnhd->bhan", full(agents), full(k)) * scale + full(to_agents)
    spread = torch.einsum("brhd,bahd->bhra", full(q), full(agents)) * scale + full(from_agents)
    return spread.softmax(-1) @ gather.softmax(-1)


class AgentAttention(KernelMixer):
    """``softmax(q aᵀ/√d + B₂) softmax(a kᵀ/√d + B₁) v + DWConv3×3(v)``, ``O(N n)`` in time for n agents a.

    Agent attention (arXiv:2312.08874). Agents are the queries of the image, averaged over 7×7 areas of it; prefix
    tokens are attended to by the agents and ask them, but are none. The biases, learned for 7×7 areas and for rows and
    columns of ``grid_size``, are resized for another grid.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        agent_size: side of the square of agents, n = agent_size².
        kernel_size: of the depthwise convolution of the values, odd; 0 leaves it out.
        grid_size: rows and columns where the biases are learned; ``None`` leaves the biases out.
        prefix_bias: a learned bias for prefix tokens too, as the original's DeiT has for its class token.
        qkv_bias: biases in the projections, the output's too.
        proj_drop: dropout after the output projection.
    """

    fixed_grid: ClassVar[bool] = True
    row_stochastic: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2312.08874"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        agent_size: int = 7,
        kernel_size: int = 3,
        grid_size: tuple[int, int] | None = (14, 14),
        prefix_bias: bool = False,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if agent_size < 1:
            raise ValueError(f"agent_size must be positive, got {agent_size}")
        factory = {"device": device, "dtype": dtype}
        self.agent_size = agent_size
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.make_conv(kernel_size, dim, **factory)
        self.to_agents = self.from_agents = None
        if grid_size is not None:
            self.to_agents = AgentBias(num_heads, agent_size**2, grid_size, prefix_bias, **factory)
            self.from_agents = AgentBias(num_heads, agent_size**2, grid_size, prefix_bias, **factory)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        """Queries, keys, agents ``(B, n, heads, D)``, biases ``(heads, n, N)`` and ``(heads, N, n)``."""
        image = q[:, prefix:].flatten(2).mT.unflatten(-1, grid)
        agents = F.adaptive_avg_pool2d(image, self.agent_size).flatten(2).mT.unflatten(-1, (self.num_heads, -1))
        if self.to_agents is None:
            gather = q.new_zeros(self.num_heads, self.agent_size**2, q.shape[1])
            return q, k, agents, gather, gather.mT
        gather = self.to_agents(grid, prefix).permute(1, 2, 0)
        return q, k, agents, gather, self.from_agents(grid, prefix).transpose(0, 1)

    def reduce(self, v: Tensor, q: Tensor, k: Tensor, agents: Tensor, to_agents: Tensor, from_agents: Tensor) -> Tensor:
        q, k, v, agents = (z.transpose(1, 2) for z in (q, k, v, agents))
        gathered = F.scaled_dot_product_attention(agents, k, v, attn_mask=to_agents.to(v.dtype))
        return F.scaled_dot_product_attention(q, agents, gathered, attn_mask=from_agents.to(v.dtype)).transpose(1, 2)

    def matrix(
        self,
        q: Tensor,
        k: Tensor,
        agents: Tensor,
        to_agents: Tensor,
        from_agents: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        if rows is not None:
            q, from_agents = q[:, rows], from_agents[:, rows]
        return agent_map(q, k, agents, to_agents, from_agents)

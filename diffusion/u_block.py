"""The parts of U-DiT (arXiv:2405.02730): attention among tokens two apart, a feed-forward with a convolution inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenConv, create_mixer
from scanvas.kernels.norm import gated_add

from .attention import MixerProcessor
from .conditioning import AdaLayerNormZero, AdaptiveLayerNorm


def to_groups(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens ``(B, H·W, C)`` → four images of every other row and column, ``(4·B, H/2·W/2, C)``; H and W are even."""
    H, W = grid
    x = x.unflatten(1, (H // 2, 2, W // 2, 2))
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(0, 2)


def from_groups(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Undo ``to_groups``."""
    H, W = grid
    x = x.unflatten(0, (-1, 2, 2)).unflatten(3, (H // 2, W // 2))
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4).flatten(1, 3)


class ConvMLP(nn.Module):
    """``W₂ DWConv5×5(GELU(W₁ x))``: the feed-forward of U-DiT as it runs once trained."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.conv = TokenConv(hidden, 5)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape."""
        return self.fc2(self.conv(F.gelu(self.fc1(x)), grid))


class RepConvMLP(nn.Module):
    """``ConvMLP`` as U-DiT trains it: two linear layers for each one, with half of ``hidden`` between them, and
    ``u + DWConv5×5(u) + DWConv3×3(u) + DWConv1×1(u)`` for the convolution. ``merged`` gives the equal ``ConvMLP``."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        half = hidden // 2
        self.fc1 = nn.Sequential(nn.Linear(dim, half), nn.Linear(half, hidden))
        self.convs = nn.ModuleList([TokenConv(hidden, size) for size in (5, 3, 1)])
        self.fc2 = nn.Sequential(nn.Linear(hidden, half), nn.Linear(half, dim))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape."""
        u = F.gelu(self.fc1(x))
        return self.fc2(sum((conv(u, grid) for conv in self.convs), start=u))

    @torch.no_grad()
    def merged(self) -> ConvMLP:
        """A new layer that computes the same, up to rounding."""
        first, last = self.fc1[0], self.fc2[-1]
        mlp = ConvMLP(first.in_features, last.in_features * 2).to(first.weight.device, first.weight.dtype)
        for joint, (a, b) in ((mlp.fc1, self.fc1), (mlp.fc2, self.fc2)):
            joint.weight.copy_(b.weight.double() @ a.weight.double())
            joint.bias.copy_(b.weight.double() @ a.bias.double() + b.bias.double())
        kernel = sum(F.pad(conv.weight.double(), [2 - conv.kernel_size[0] // 2] * 4) for conv in self.convs)
        kernel[:, :, 2, 2] += 1
        mlp.conv.weight.copy_(kernel)
        mlp.conv.bias.copy_(sum(conv.bias.double() for conv in self.convs))
        return mlp.train(self.training)


U_MLPS = {"conv": ConvMLP, "rep": RepConvMLP}


class UDiTBlock(nn.Module):
    """One block of U-DiT, tokens in raster order before and after it:

    1. ``x ← x + gate₁ · mix(shift₁ + (1 + scale₁) · norm(x))``, where ``mix`` adds a depthwise 5×5 convolution to what
       it is given and lets the mixer work on four images of every other row and column each, a quarter of the tokens
       at a time (section 3.2);
    2. ``x ← x + gate₂ · mlp(shift₂ + (1 + scale₂) · norm(x))``.

    Args:
        dim, num_heads: of the mixer.
        mlp_hidden: inner width of the feed-forward.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        mlp: ``"conv"`` or ``"rep"``.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_hidden: int, *, mixer: str, mixer_kwargs: dict | None, mlp: str = "conv"
    ):
        super().__init__()
        self.norm1, self.norm2 = AdaptiveLayerNorm(dim), AdaptiveLayerNorm(dim)
        self.conv = TokenConv(dim, 5)
        self.mixer = create_mixer(mixer, dim, num_heads, **(mixer_kwargs or {}))
        self.mlp = U_MLPS[mlp](dim, mlp_hidden)
        self.modulation = AdaLayerNormZero(dim, 6)
        self.processor = MixerProcessor()

    def get_processor(self):
        return self.processor

    def set_processor(self, processor) -> None:
        self.processor = processor

    def mix(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape; H and W are even."""
        groups = to_groups(x + self.conv(x, grid), grid)
        return from_groups(self.processor(self.mixer, groups, (grid[0] // 2, grid[1] // 2)), grid)

    def forward(self, hidden_states: Tensor, condition: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` and a condition ``(B, C)`` → ``(B, H·W, C)``."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)
        x = self.mix(self.norm1(hidden_states, shift_1, scale_1), grid)
        hidden_states, x = self.norm2.after(hidden_states, x, gate_1, shift_2, scale_2)
        return gated_add(hidden_states, self.mlp(x, grid), gate_2)

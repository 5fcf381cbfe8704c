"""InLine attention: linear attention made injective and normalised by a subtraction instead of a division."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast

from .kernel import AffineMixer, full
from .sums import token_count, token_mean


@outside_autocast
def inline_factors(q: Tensor, k: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """r = s/N and c_i = (1 − s q_i · k̄) / N, each ``(B, N, H, 1)``; ``weight`` ``(B or 1, N)`` of keys in N and k̄."""
    N, scale = token_count(k, weight), q.shape[-1] ** -0.5
    similarity = (full(q) * token_mean(k, weight)).sum(-1, keepdim=True) * scale
    return torch.ones_like(similarity) * (scale / N), (1 - similarity) / N


def dynamic_conv(image: Tensor, kernels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Depthwise 3×3 convolution with kernels of each image's own, zero padding.

    Args:
        image: ``(B, H·W, C)`` in raster order.
        kernels: ``(B, C, 3, 3)``.
        grid: (H, W).
    """
    H, W = grid
    padded = F.pad(image.unflatten(1, (H, W)), (0, 0, 1, 1, 1, 1))
    # Nine products rather than a convolution in B·C groups, which no exporter takes with a dynamic batch.
    taps = [(padded[:, i : i + H, j : j + W] * kernels[:, None, None, :, i, j]) for i in range(3) for j in range(3)]
    return sum(taps).flatten(1, 2)


class InLineAttention(AffineMixer):
    """``y_i = s/N q_i Σ_j k_jᵀ v_j + (1 − s q_i · k̄) v̄``, ``s = d^-½``, plus a dynamic convolution; ``O(N)`` in time.

    InLine attention (arXiv:2412.06590) with the identity as feature map, the release's default: rows of the map sum to
    one by subtraction, so that it stays injective; entries may be negative. The local branch is a depthwise 3×3
    convolution of the values whose kernels a small network makes from the mean of all tokens: grouped by heads,
    C → C, GELU, C → 9·C.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        local: the dynamic convolution.
        qkv_bias: biases in the projections, the output's too.
        proj_drop: dropout after the output projection.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.06590"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        local: bool = True,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        factory = {"device": device, "dtype": dtype}
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.kernel_net = None
        if local:
            self.kernel_net = nn.Sequential(
                nn.Conv1d(dim, dim, 1, groups=num_heads, **factory),
                nn.GELU(),
                nn.Conv1d(dim, 9 * dim, 1, groups=num_heads, **factory),
            )

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        return q, k, *inline_factors(q, k)

    def local(self, x: Tensor, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor | None:
        if self.kernel_net is None:
            return None
        mean = full(x).mean(1).to(x.dtype)
        kernels = self.kernel_net(mean[:, :, None]).view(-1, self.dim, 3, 3)
        image = dynamic_conv(v[:, prefix:].flatten(2), kernels.to(v.dtype), grid)
        return F.pad(image, (0, 0, prefix, 0))

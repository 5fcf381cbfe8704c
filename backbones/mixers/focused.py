"""Focused linear attention: features that keep a vector's length and sharpen its direction."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast

from .kernel import KernelMixer, full
from .places import PlaceParameter


@torch.jit.ignore
@outside_autocast
def focus(z: Tensor, scale: Tensor, power: float) -> Tensor:
    """``‖u‖ u^p / ‖u^p‖`` with ``u = (ReLU(z) + 1e-6) / softplus(s)``, over the last axis; float32 or float64."""
    u = (full(z).relu() + 1e-6) / F.softplus(full(scale))
    # The map is homogeneous: dividing by the largest entry first changes nothing but keeps u^p from underflow.
    largest = u.detach().amax(-1, keepdim=True)
    u = u / largest
    sharp = u**power
    return largest * u.norm(dim=-1, keepdim=True) * sharp / sharp.norm(dim=-1, keepdim=True)


class FocusedFeatures(nn.Module):
    """``focus`` with a learned scale per channel, zero at first (FLatten, arXiv:2308.00442, eqs. 7 and 8).

    Args:
        dim: channels of all heads together.
        power: p.
    """

    def __init__(self, dim: int, power: float = 3.0, device=None, dtype=None):
        super().__init__()
        self.power = power
        self.scale = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def forward(self, z: Tensor) -> Tensor:
        """``(B, N, C)`` → the same shape, float32 (float64 for float64 inputs), positive."""
        return focus(z, self.scale, self.power)


class FocusedAttention(KernelMixer):
    """``φ(q) Σ_j φ(k_j)ᵀ v_j / (φ(q) · Σ_j φ(k_j) + ε) + DWConv(v)``, φ of ``FocusedFeatures``, ``O(N)`` in time.

    FLatten (arXiv:2308.00442). φ acts on all channels before they are split into heads, and has one scale for queries
    and keys. A learned position (zero at first) is added to the keys; it belongs to ``grid_size`` and is resized for
    another grid. The depthwise convolution has one kernel per channel of a head, the same for all heads. In the paper's
    models ("LLSS") it is the attention of stages 1 and 2; 3 and 4 keep softmax.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        power: p of the features.
        kernel_size: of the depthwise convolution, odd; 0 leaves it out.
        grid_size: rows and columns where the keys' positions are learned; ``None`` leaves them out.
        qkv_bias: biases in the projections, the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    fixed_grid: ClassVar[bool] = True
    row_stochastic: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2308.00442"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        power: float = 3.0,
        kernel_size: int = 5,
        grid_size: tuple[int, int] | None = (14, 14),
        qkv_bias: bool = True,
        eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if power < 1:
            raise ValueError(f"power must be at least 1, got {power}")
        factory = {"device": device, "dtype": dtype}
        self.eps = eps
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.make_conv(kernel_size, dim // num_heads, **factory)
        self.feature_map = FocusedFeatures(dim, power, **factory)
        self.positions = None if grid_size is None else PlaceParameter(dim, grid_size, 0.0, **factory)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        q, k = q.flatten(2), k.flatten(2)
        if self.positions is not None:
            k = k + self.positions(grid, prefix)
        q, k = (self.feature_map(z).unflatten(-1, (self.num_heads, -1)) for z in (q, k))
        return q, k, q, k

    def local(self, x: Tensor, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor | None:
        if self.conv is None:
            return None
        image = v[:, prefix:].transpose(1, 2)  # heads as if they were images
        out = self.conv(image.flatten(0, 1), grid).unflatten(0, image.shape[:2])
        return F.pad(out.transpose(1, 2).flatten(2), (0, 0, prefix, 0))

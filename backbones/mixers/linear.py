"""Linear attention with ReLU features, and a depthwise convolution for what it can not do: focus nearby."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from scanvas.kernels.linear import attention_matrix, linear_attention

from .base import TokenMixer


class LinearAttention(TokenMixer):
    """``φ(q) Σ_j φ(k_j)ᵀ v_j / (φ(q) · Σ_j φ(k_j) + ε)`` with φ = ReLU, plus ``DWConv(v)``; ``O(N)`` in time.

    The attention of LiT (arXiv:2501.12976) with few heads, of SANA (arXiv:2410.10629) without the convolution;
    the form goes back to arXiv:2006.16236. The convolution runs over the image's tokens only.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        kernel_size: of the depthwise convolution, odd; 0 leaves it out.
        qkv_bias: biases in the projections, the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    row_stochastic: ClassVar[bool] = True
    reads_by_projections: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2501.12976"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        kernel_size: int = 5,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        factory = {"device": device, "dtype": dtype}
        self.eps = eps
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.conv = self.local_conv(dim, kernel_size, **factory)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(F.relu(q), F.relu(k), v, eps=self.eps)

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self.qkv(x)
        return self._project(v, self._mix(q, k, v), grid, prefix)

    def _project(self, v: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        out = attended.flatten(2)
        if self.conv is not None:
            image = self.convolve(self.conv, v.flatten(2)[:, prefix:], grid, 0)
            out = out + F.pad(image, (0, 0, prefix, 0))
        return self.to_out(out)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._mix(*self.qkv(x))

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._project(self.qkv(x)[2], attended, grid, prefix)

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self.qkv(x)
        return attention_matrix(F.relu(q), F.relu(k), eps=self.eps, rows=rows)

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        if self.conv is None:
            return {}
        q, k, v = self.qkv(x)
        image = self.convolve(self.conv, v.flatten(2)[:, prefix:], grid, 0)
        return {"attention": self._mix(q, k, v).flatten(2), "local": F.pad(image, (0, 0, prefix, 0))}

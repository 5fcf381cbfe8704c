"""Generalised linear attention: positive features of queries and keys that a small network has changed first."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from scanvas.kernels.linear import attention_matrix, linear_attention

from .base import TokenMixer


class Modulator(nn.Sequential):
    """``x + f(x)`` with ``f = Linear → LayerNorm → LeakyReLU → Linear`` (LinFusion, arXiv:2409.02097, section 3.3).

    Args:
        dim: channels.
        hidden: inner width; ``dim`` by default, as for SD 1.5 (SDXL: ``dim // 16``).
    """

    def __init__(self, dim: int, hidden: int | None = None, device=None, dtype=None):
        factory = {"device": device, "dtype": dtype}
        hidden = dim if hidden is None else hidden
        super().__init__(
            nn.Linear(dim, hidden, **factory),
            nn.LayerNorm(hidden, **factory),
            nn.LeakyReLU(),
            nn.Linear(hidden, dim, **factory),
        )

    @torch.no_grad()
    def init_identity(self) -> None:
        """Let ``f`` be zero, so that a model that inherits its projections starts from its own queries and keys."""
        nn.init.zeros_(self[3].weight)
        nn.init.zeros_(self[3].bias)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in self:  # not super().forward(x), which TorchScript does not know
            out = layer(out)
        return x + out


def positive(z: Tensor) -> Tensor:
    """``ELU(z) + 1``, written out: traced, the backward pass of PyTorch's ELU expects other strides than it gets."""
    return torch.where(z > 0, z + 1, z.clamp(max=0).exp())


class LinFusionAttention(TokenMixer):
    """``φ(q) Σ_j φ(k_j)ᵀ v_j / (φ(q) · Σ_j φ(k_j) + ε)``, ``φ = ELU + 1``, ``q = W_q (x + f_q(x))``, likewise k.

    LinFusion (arXiv:2409.02097): a generalised linear attention, normalised and without direction. Values are taken
    from ``x`` itself. Fused projections bring no speed here, because queries, keys and values have different inputs.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        hidden: inner width of ``f_q`` and ``f_k``, ``dim`` by default.
        qkv_bias: biases in the projections, the output's too.
        eps: ε, added to the divisor.
        proj_drop: dropout after the output projection.
    """

    row_stochastic: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2409.02097"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        hidden: int | None = None,
        qkv_bias: bool = True,
        eps: float = 1e-4,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        if hidden is not None and hidden < 1:
            raise ValueError(f"hidden must be positive, or None for dim; got {hidden}")
        factory = {"device": device, "dtype": dtype}
        self.eps = eps
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.q_modulator = Modulator(dim, hidden, **factory)
        self.k_modulator = Modulator(dim, hidden, **factory)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self.q_modulator(x), self.k_modulator(x), x
        if self.fused_projections:
            sizes = (self.key_dim, self.key_dim, self.value_dim)
            parts = [self.to_qkv(part).split(sizes, dim=-1)[i] for i, part in enumerate(inputs)]
        else:
            parts = [layer(part) for layer, part in zip((self.to_q, self.to_k, self.to_v), inputs)]
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        return q, k, v

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        q, k, v = self.qkv(x)
        return linear_attention(positive(q), positive(k), v, eps=self.eps)

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(attended.flatten(2))

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        q, k, _ = self.qkv(x)
        return attention_matrix(positive(q), positive(k), eps=self.eps, rows=rows)

"""Test-time training: the state is a small network, which one step of gradient descent fits to the keys and values."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.kernels.dispatch import outside_autocast

from .base import TokenMixer


@outside_autocast
def instance_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1.0) -> Tensor:
    """``(x − mean) / √(variance + eps)`` of each channel over the tokens of ``(B, N, H, D)``; float32 or float64.

    Args:
        weight: ``(B or 1, N)`` ≥ 0, how often each token counts.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    share = _shares(x.new_ones(1, x.shape[1]) if weight is None else weight, x.dtype)
    mean = (x * share).sum(1, keepdim=True)
    variance = ((x - mean).square() * share).sum(1, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


def _shares(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of tokens that sum to one, ``(B, N, 1, 1)``."""
    weight = weight.to(dtype)
    return (weight / weight.sum(1, keepdim=True).clamp_min(1e-12))[..., None, None]


_AT_A_TIME = 8192  # tokens
_NUMBERS_AT_A_TIME = 1 << 22


@torch.jit.ignore
@outside_autocast
def train_and_apply(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, weight: Tensor | None = None
) -> Tensor:
    """``f_{W − ∇}(q)`` for ``f_W(u) = (SiLU(u W₁) ⊙ u W₂) W₃`` and the gradient ∇ at W of the inner loss
    ``−d^-½ · mean_n ⟨f_W(k_n), v_n⟩``: one step of gradient descent with rate 1 on all tokens at once.

    Args:
        q, k, v: ``(B, N, H, D)``.
        w1, w2, w3: ``(H, D, D)``.
        weight: ``(B or 1, N)`` ≥ 0, how much each token counts in the mean.

    Returns:
        ``(B, N, H, D)`` in v's dtype; computed in float32 (float64 for float64 inputs).
    """
    dtype, result = torch.promote_types(v.dtype, torch.float32), v.dtype
    D, N = q.shape[-1], q.shape[1]
    counts = q.new_full((1, N, 1, 1), 1 / N, dtype=dtype) if weight is None else _shares(weight, dtype)
    w1, w2, w3 = (w.to(dtype) for w in (w1, w2, w3))
    # In training all tokens at once; else so many that their float32 copies do not fill the memory.
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, w1, w2, w3))
    size = N if recorded else min(N, _AT_A_TIME)
    parts = [slice(i, i + size) for i in range(0, N, size)]
    step1 = step2 = step3 = 0
    for part in parts:
        k_ = k[:, part].to(dtype).transpose(1, 2)  # (B, H, N, D)
        share = (v[:, part].to(dtype) * counts[:, part] * D**-0.5).transpose(1, 2)
        a, b = k_ @ w1, k_ @ w2
        s = a.sigmoid()
        gate = a * s
        upstream = share @ w3.mT
        # Minus the gradients, by hand: a gradient of a gradient would cost more, and not export.
        step1 = step1 + k_.mT @ (upstream * b * s * (1 + a * (1 - s)))
        step2 = step2 + k_.mT @ (upstream * gate)
        step3 = step3 + (gate * b).mT @ share
    w1, w2, w3 = w1 + step1, w2 + step2, w3 + step3
    out = []
    for part in parts:
        q_ = q[:, part].to(dtype).transpose(1, 2)
        out.append(((F.silu(q_ @ w1) * (q_ @ w2)) @ w3).transpose(1, 2).to(result))
    return torch.cat(out, dim=1) if len(out) > 1 else out[0]


@outside_autocast
def dependence(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, rows: Tensor | None = None
) -> Tensor:
    """``‖∂o_i/∂v_j‖``, the Frobenius norm, for the o of ``train_and_apply``; arguments as there.

    With ``o_i = h_i W₃'``, h the hidden layer of the trained network and g that of the untrained one at the keys,
    ``∂o_i/∂v_j = d^-½/N ((h_i·g_j) I + (q_i·k_j) W₃ᵀ diag(δ_ij) W₃')``, where ``δ_ij`` is what the hidden layer at
    ``q_i`` gains when ``k_j`` pulls at W₁ and W₂.

    Args:
        rows: indices of the wanted queries, all by default.

    Returns:
        ``(B, H, R, N)`` float32 (float64 for float64 inputs).
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    N, D = q.shape[1], q.shape[-1]
    rows = torch.arange(N, device=q.device) if rows is None else rows.to(q.device)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    w1, w2, w3 = (w.to(dtype) for w in (w1, w2, w3))

    def hidden(u: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """SiLU(u W₁) ⊙ u W₂, and its derivatives by u W₁ and by u W₂."""
        a, b = u @ w1, u @ w2
        s = a.sigmoid()
        return a * s * b, b * s * (1 + a * (1 - s)), a * s

    at_keys, by_1, by_2 = hidden(k, w1, w2)
    share = v * (D**-0.5 / N)
    upstream = share @ w3.mT
    new_1, new_2, new_3 = w1 + k.mT @ (upstream * by_1), w2 + k.mT @ (upstream * by_2), w3 + at_keys.mT @ share
    trace = (w3 * new_3).sum(-1, keepdim=True)  # of W₃ᵀ diag(δ) W₃' it is δ · trace
    square = (w3 @ w3.mT) * (new_3 @ new_3.mT)  # and its squared norm δ square δ
    found = []
    for part in rows.split(max(1, _NUMBERS_AT_A_TIME // (q.shape[0] * q.shape[1] * N * D))):
        q_ = q[:, :, part]
        h, own_1, own_2 = hidden(q_, new_1, new_2)
        delta = own_1[:, :, :, None] * by_1[:, :, None] + own_2[:, :, :, None] * by_2[:, :, None]  # (B, H, R, N, D)
        identity, through = h @ at_keys.mT, q_ @ k.mT
        bent = (delta @ square[:, :, None] * delta).sum(-1)
        total = D * identity**2 + 2 * identity * through * (delta @ trace[:, :, None])[..., 0] + through**2 * bent
        found.append(total.clamp_min(0).sqrt() * (D**-0.5 / N))
    return torch.cat(found, dim=2)


class InnerNetwork(nn.Module):
    """The network that is trained at test time: three matrices per head, from a truncated normal distribution.

    Args:
        num_heads, head_dim: H and D.
        std: of the distribution.
    """

    def __init__(self, num_heads: int, head_dim: int, std: float = 0.02, device=None, dtype=None):
        super().__init__()
        for name in ("w1", "w2", "w3"):
            weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim, device=device, dtype=dtype))
            nn.init.trunc_normal_(weight, std=std)
            setattr(self, name, weight)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> Tensor:
        """See ``train_and_apply``."""
        return train_and_apply(q, k, v, self.w1, self.w2, self.w3, weight)


class TTTAttention(TokenMixer):
    """``f_{W − ∇}(q)`` with ``f_W(u) = (SiLU(u W₁) ⊙ u W₂) W₃`` and ∇ the gradient at W of ``−d^-½ mean_n ⟨f_W(k_n),
    v_n⟩``: a network per head, which one step of gradient descent fits to the keys and values. ``O(N)`` in time.

    T⁵ (arXiv:2605.02772): softmax attention read as a network whose hidden layer is made of all keys, and replaced by
    one of fixed width; see ``train_and_apply``.

    Keys are normalised over the tokens, per channel; then a depthwise 3×3 convolution is added to queries and to keys.

    There is no attention map: the values change the inner network's first two matrices, so that the result is not a
    sum of values with weights. ``dependence`` tells how much each output depends on each value.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        kernel_size: of the two convolutions, odd; 0 leaves them out.
        qkv_bias: biases in the projections, the output's too.
        proj_drop: dropout after the output projection.
    """

    has_map: ClassVar[bool] = False
    reads_by_projections: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2605.02772"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        kernel_size: int = 3,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        factory = {"device": device, "dtype": dtype}
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, **factory)
        self.inner = InnerNetwork(num_heads, dim // num_heads, **factory)
        self.q_conv = self.local_conv(dim, kernel_size, **factory)
        self.k_conv = self.local_conv(dim, kernel_size, **factory)

    def _inputs(self, x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the inner network gets them."""
        q, k, v = self.qkv(x)
        k = instance_norm(k).to(v.dtype)
        if self.q_conv is not None:
            q, k = (
                (z + F.pad(conv(z[:, prefix:].flatten(2), grid), (0, 0, prefix, 0)).view_as(z)).to(v.dtype)
                for z, conv in ((q, self.q_conv), (k, self.k_conv))
            )
        return q, k, v

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.inner(*self._inputs(x, grid, prefix))

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.to_out(attended.flatten(2))

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(x)[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        raise NotImplementedError(
            "TTTAttention has no attention map: values act on the weights of its inner network, not on the output "
            "alone. What comes nearest is how much each output depends on each value: dependence()"
        )

    def dependence(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        inner = self.inner
        return dependence(*self._inputs(x, grid, prefix), inner.w1, inner.w2, inner.w3, rows)

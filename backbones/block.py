"""The block which all models are made of: norm → mixer → norm → feed-forward; and the forms of the feed-forward."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import DropPath, register_notrace_function
from torch import Tensor, nn

from scanvas.kernels import dispatch
from scanvas.kernels.glu import silu_product, silu_product_, swiglu_is_fused, swiglu_linear

from .mixers import TokenConv, create_mixer
from .mixers.base import is_observed, is_plain
from .norm import add_and_normalise


def swiglu_hidden(dim: int, multiple: int) -> int:
    """Inner width of SwiGLU: ⌊8·dim/3⌋ rounded up to a multiple, which keeps the parameters of a plain MLP of ratio 4
    (arXiv:2002.05202, section 3)."""
    return -(-(8 * dim // 3) // multiple) * multiple


@torch.fx.wrap  # timm's register alone reaches only functions of the file that holds the model
@register_notrace_function
@torch.jit.ignore
def _silu_product(x: Tensor, overwrite: bool) -> Tensor:
    """One node for tracers: which code runs depends on the device."""
    return silu_product_(x) if overwrite else silu_product(x)


def _is_traced(x: Tensor) -> bool:
    """Whether a graph is being recorded that should hold ``fc1`` as the layer it is."""
    # PyTorch before 2.7 can not tell exporting from compiling.
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()
    return exporting or isinstance(x, torch.fx.Proxy) or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


class SwiGLU(nn.Module):
    """``W₂ (SiLU(a) ⊙ b)`` with ``(a, b) = W₁ x`` (arXiv:2002.05202, eq. 6), without biases."""

    def __init__(self, dim: int, hidden: int, device=None, dtype=None):
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, dim)`` → ``(…, dim)``."""
        return self.fc2(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """``SiLU(a) ⊙ b``."""
        overwrite = False
        if not torch.jit.is_scripting():
            alone = not _is_traced(x) and is_plain(self.fc1) and self.fc1.bias is None
            if alone and swiglu_is_fused(x, self.fc1.weight):
                return swiglu_linear(x, self.fc1.weight)
            # The output of fc1 is ours alone, unless a hook has seen it.
            overwrite = not torch.is_grad_enabled() and not self.fc1._forward_hooks
        return _silu_product(self.fc1(x), overwrite)

    def add_to_(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``, of which the first is overwritten if that spares a pass: in inference on a GPU the
        last product is summed up in its place."""
        if torch.is_grad_enabled() or _is_traced(x) or not x.is_cuda or is_observed(self) or not is_plain(self.fc2):
            return residual + self(x)
        same = residual.dtype == x.dtype == self.fc2.weight.dtype and not dispatch.autocasts("cuda")
        if not same or self.fc2.bias is not None or not residual.is_contiguous():
            return residual + self(x)
        residual.view(-1, residual.shape[-1]).addmm_(self.inner(x).flatten(0, -2), self.fc2.weight.t())
        return residual


class MixFFN(nn.Module):
    """Feed-forward with a 3×3 depthwise convolution and a gate, ``W₂ (a ⊙ SiLU(b))`` with
    ``(a, b) = DWConv(SiLU(W₁ x))`` (SANA, arXiv:2410.10629, section 2.2; its inner width is 2.5·dim)."""

    def __init__(self, dim: int, hidden: int, device=None, dtype=None):
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, device=device, dtype=dtype)
        self.conv = TokenConv(2 * hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape."""
        a, b = self.conv(F.silu(self.fc1(x)), grid).chunk(2, dim=-1)
        return self.fc2(a * F.silu(b))


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``, with stochastic depth on both.

    Args:
        dim, num_heads: of the mixer.
        mlp_hidden: inner width of the feed-forward.
        mixer: name of the mixer.
        mixer_kwargs: its keywords.
        norm_layer: called as ``norm_layer(dim, device=…, dtype=…)``.
        mlp_layer: called as ``mlp_layer(dim, mlp_hidden, device=…, dtype=…)``.
        drop_path: probability to drop a residual branch of a sample in training.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_hidden: int,
        *,
        mixer: str = "gla",
        mixer_kwargs: dict | None = None,
        norm_layer: Callable[..., nn.Module],
        mlp_layer: Callable[..., nn.Module] = SwiGLU,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.norm1 = norm_layer(dim, **factory)
        self.mixer = create_mixer(mixer, dim, num_heads, **(mixer_kwargs or {}), **factory)
        self.norm2 = norm_layer(dim, **factory)
        self.mlp = mlp_layer(dim, mlp_hidden, **factory)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(B, prefix + H·W, C)`` → the same shape."""
        branch = self.drop_path(self.mixer(self.norm1(x), grid, prefix))
        if torch.jit.is_scripting():
            x = x + branch
            y = self.norm2(x)
        else:
            x, y = add_and_normalise(self.norm2, x, branch)
            if isinstance(self.mlp, SwiGLU) and not (self.training and isinstance(self.drop_path, DropPath)):
                return self.mlp.add_to_(x, y)
        return x + self.drop_path(self.mlp(y))


@torch.no_grad()
def init_linears(module: nn.Module, std: float, truncated: bool, skip_mixers: bool) -> None:
    """(Truncated) normal weights and zero biases for every linear layer, those of mixers left alone on demand."""
    for child in module.children():
        if skip_mixers and hasattr(child, "attention_map"):
            continue
        if isinstance(child, nn.Linear):
            if truncated:
                nn.init.trunc_normal_(child.weight, std=std)
            else:
                nn.init.normal_(child.weight, std=std)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
        else:
            init_linears(child, std, truncated, skip_mixers)


def reset_parts(model: nn.Module) -> None:
    """Call ``reset_parameters`` of every module inside a model, a mixer's after those of its own parts."""
    for module in reversed(list(model.modules())[1:]):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

"""What every token mixer has in common."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from scanvas.kernels.conv import depthwise_conv2d


@torch.jit.ignore
def _convolve_tokens(
    x: Tensor, weight: Tensor, grid: tuple[int, int], bias: Tensor | None, activation: str | None
) -> Tensor:
    """``depthwise_conv2d`` with a signature that TorchScript can read."""
    return depthwise_conv2d(x, weight, grid, bias, activation=activation)


def is_observed(module: nn.Module) -> bool:
    """Whether something hooks into calls of this module: a user, a profiler, offloading, casting."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__ or nn.modules.module._has_any_global_hook()


def is_plain(*layers: nn.Module) -> bool:
    """Whether these are linear layers whose calls depend on their weights alone: no adapter, quantisation,
    parametrisation or sharding, and not observed. Only then may a kernel use their weights without calling them."""
    for layer in layers:
        if type(layer) is not nn.Linear or type(layer.weight) not in (nn.Parameter, Tensor) or is_observed(layer):
            return False
    return True


def rms_factor(x: Tensor, eps: float) -> Tensor:
    """``(mean x² + eps)^-½`` over the last axis: what an RMSNorm multiplies x with, and so each addend of x; float32,
    or float64 for float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@register_notrace_module
class TokenConv(nn.Conv2d):
    """Depthwise k×k convolution with zero padding on image tokens.

    Called as a module, so that what hooks into modules (offloading, casting, profilers) sees it.
    """

    def __init__(self, dim: int, kernel_size: int = 3, bias: bool = True, device=None, dtype=None):
        padding = kernel_size // 2
        super().__init__(dim, dim, kernel_size, padding=padding, groups=dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int], activation: str | None = None) -> Tensor:
        """``(B, H·W, C)`` in raster order, ``grid`` = (H, W) → the same shape; see ``depthwise_conv2d``."""
        return _convolve_tokens(x, self.weight, grid, self.bias, activation)

    @torch.no_grad()
    def init_identity(self) -> None:
        """Make it pass its input through: centre tap 1, all else 0 (DiG, arXiv:2405.18428, section 3.3)."""
        nn.init.zeros_(self.weight)
        centre = self.kernel_size[0] // 2
        self.weight[:, :, centre, centre] = 1
        if self.bias is not None:
            nn.init.zeros_(self.bias)


@register_notrace_module
class TokenMixer(nn.Module, ABC):
    """A layer which lets tokens exchange information: attention, or what takes its place.

    A subclass implements ``attend`` (all up to, but without, output norm and projection), ``project`` (the rest),
    ``values`` and ``attention_map``. Conditioning, residual, feed-forward, layer scale and long skips belong to the
    block, not here.

    Tokens are ``(B, prefix + H·W, C)``: ``prefix`` tokens without a place (class, registers, text), then the image in
    raster order. Prefix tokens skip convolutions and 2-D positions but are seen by, and see, all others.

    Tracers (torch.fx, torch.jit) keep a mixer as one node: what happens inside depends on the shapes. torch.compile,
    torch.export and ONNX export look inside.

    Args:
        dim: channels C.
        num_heads: heads; must divide ``dim``.
        fused_projections: one projection ``to_qkv`` instead of ``to_q``, ``to_k``, ``to_v``. Quicker, while separate
            ones are what LoRA and other tools of diffusers look for; ``fuse_projections`` changes later.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """

    needs_scan: ClassVar[bool] = False
    """The result depends on the order of the tokens, not only on their places."""
    fixed_grid: ClassVar[bool] = False
    """Parameters belong to one grid and are interpolated for another."""
    row_stochastic: ClassVar[bool] = False
    """Rows of the attention map are non-negative and sum to one."""
    fusible: ClassVar[bool] = True
    """Queries, keys and values are projections of one input; otherwise ``fused_projections`` changes nothing."""
    has_map: ClassVar[bool] = True
    """There is an attention map; otherwise ``attention_map`` raises NotImplementedError and says why."""
    in_turn: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Keywords which the layers of a model get in turn, for a mixer whose layers alternate."""
    reads_by_projections: ClassVar[bool] = False
    """The input goes into the projections of queries, keys and values and nowhere else, so that a norm before the
    mixer which is a factor and a summand per channel can be merged into them."""
    paper: ClassVar[str] = ""

    def __init__(self, dim: int, num_heads: int, *, fused_projections: bool = False):
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"{type(self).__name__}: num_heads must divide dim = {dim}, got num_heads = {num_heads}")
        self.dim = dim
        self.num_heads = num_heads
        self.fused_projections = fused_projections and self.fusible

    def make_projections(self, key_dim: int, value_dim: int, bias: bool, proj_drop: float = 0.0, **factory) -> None:
        """Create the projections of queries, keys and values and that of the output, ``to_out``."""
        self.key_dim, self.value_dim = key_dim, value_dim
        if self.fused_projections:
            self.to_qkv = nn.Linear(self.dim, 2 * key_dim + value_dim, bias=bias, **factory)
        else:
            self.to_q = nn.Linear(self.dim, key_dim, bias=bias, **factory)
            self.to_k = nn.Linear(self.dim, key_dim, bias=bias, **factory)
            self.to_v = nn.Linear(self.dim, value_dim, bias=bias, **factory)
        self.to_out = nn.Sequential(nn.Linear(value_dim, self.dim, bias=bias, **factory), nn.Dropout(proj_drop))

    @staticmethod
    def local_conv(channels: int, kernel_size: int, **factory) -> TokenConv | None:
        """A depthwise convolution for a local branch, or ``None`` for a ``kernel_size`` of 0; refuses even sizes."""
        if kernel_size and (kernel_size < 0 or kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be odd, or 0 for no convolution; got {kernel_size}")
        return TokenConv(channels, kernel_size, **factory) if kernel_size else None

    def check_rope(self, key_dim: int) -> None:
        """Refuse heads that 2-D RoPE can not rotate."""
        width = key_dim // self.num_heads
        if width % 4:
            raise ValueError(f"{type(self).__name__}: rope needs heads of a width divisible by 4, got {width}")

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, N, heads, D)``."""
        if self.fused_projections:
            parts = self.to_qkv(x).split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        else:
            parts = self.to_q(x), self.to_k(x), self.to_v(x)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        return q, k, v

    @torch.no_grad()
    def fuse_projections(self, fuse: bool = True) -> None:
        """Replace the three projections by one, or with ``fuse=False`` the one by three; the result is the same."""
        if fuse == self.fused_projections or not self.fusible:
            return
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        separate = ("to_q", "to_k", "to_v")
        old = [getattr(self, name) for name in (separate if fuse else ("to_qkv",))]
        weight = torch.cat([layer.weight for layer in old])
        bias = None if old[0].bias is None else torch.cat([layer.bias for layer in old])
        trained = old[0].weight.requires_grad
        names, parts = (("to_qkv",), (sum(sizes),)) if fuse else (separate, sizes)
        biases = [None] * len(parts) if bias is None else bias.split(parts)
        for name in separate if fuse else ("to_qkv",):
            delattr(self, name)
        for name, w, b in zip(names, weight.split(parts), biases):
            layer = nn.Linear(self.dim, len(w), bias=b is not None, device=w.device, dtype=w.dtype)
            layer.weight.copy_(w)
            if b is not None:
                layer.bias.copy_(b)
            setattr(self, name, layer.requires_grad_(trained))
        self.fused_projections = fuse

    @torch.jit.ignore
    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(B, prefix + H·W, C)`` → the same shape, output projection included.

        Raises:
            ValueError: the number of tokens is not ``prefix + H·W``.
        """
        if not isinstance(self, TokenMixer):
            self = self.unscripted(self)
        return self.mix(x, self.check_grid(x, grid, prefix), prefix)

    @classmethod
    @torch.jit.ignore
    def unscripted(cls, scripted: torch.jit.ScriptModule) -> "TokenMixer":
        """The mixer behind a scripted one. TorchScript calls ``forward`` with an object which has the attributes and
        submodules of the mixer but not its methods; here are both."""

        def attribute(_, name: str):
            value = getattr(scripted, name)
            return torch.jit._recursive.wrap_cpp_module(value) if isinstance(value, torch._C.ScriptModule) else value

        mixer = type(cls.__name__, (cls,), {"__getattr__": attribute})
        return mixer.__new__(mixer)

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """What ``forward`` does when it has checked the shapes. Override it to compute nothing twice."""
        return self.project(x, self.attend(x, grid, prefix), grid, prefix)

    @staticmethod
    def check_grid(x: Tensor, grid: tuple[int, int], prefix: int) -> tuple[int, int]:
        H, W = grid
        if x.ndim != 3 or x.shape[1] != prefix + H * W:
            raise ValueError(f"x must be (B, prefix + H·W, C) = (B, {prefix} + {H}·{W}, C), got shape {tuple(x.shape)}")
        return H, W

    @abstractmethod
    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(B, N, C)`` → ``(B, N, heads, Dv)``: the values mixed by ``attention_map``, before norm and projection."""

    @abstractmethod
    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """Output norm, local branch, gate and output projection: ``(B, N, heads, Dv)`` → ``(B, N, C)``."""

    @abstractmethod
    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """The mixer's values, ``(B, heads, N, Dv)``."""

    @abstractmethod
    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        """The matrix for which ``attention_map @ values`` is ``attend``, in float32 (float64 for a float64 model).

        Args:
            x, grid, prefix: as for ``forward``.
            rows: indices of the wanted rows (queries), prefix tokens counted; all by default.

        Returns:
            ``(B, heads, R, N)``.
        """

    def dependence(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        """For a mixer without a map what comes nearest: how much each output depends on each value, the Frobenius norm
        ``‖∂ attend_i / ∂ value_j‖``. Arguments and shape as for ``attention_map``."""
        raise NotImplementedError(f"{type(self).__name__} tells no dependence of its outputs on its values")

    def attention_map_parts(
        self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0
    ) -> dict[str, Tensor]:
        """The addends of ``attention_map``, by name: ``"forward"`` and ``"backward"`` for a mixer that scans from both
        sides, each with its factor ½. Empty for a mixer whose map is of one piece. Arguments as there."""
        return {}

    def log_decays(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> tuple[Tensor, ...]:
        """Natural logarithms of what a token leaves of the state before it, ``(B, N, heads, Dk)`` float32, one tensor
        for each direction of the scan; empty for a mixer without decay."""
        return ()

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        """What the output projection is given, as addends ``(B, N, value channels)`` by name; they sum to it exactly.

        ``"attention"``, or ``"forward"`` and ``"backward"`` where a scan runs from both sides; ``"local"`` for a
        convolution beside it, ``"linear"`` for linear attention beside a sparse one, ``"bias"`` for that of a norm
        around all. Norms and activations of the sum act on each addend by the factor they have for the sum. Empty for
        a mixer whose output is of one piece.
        """
        return {}

    def convolve(
        self, conv: TokenConv, x: Tensor, grid: tuple[int, int], prefix: int, activation: str | None = None
    ) -> Tensor:
        """Apply a depthwise convolution to the image tokens of ``x`` and pass the prefix tokens through unchanged."""
        image = conv(x[:, prefix:], grid, activation)
        return torch.cat((x[:, :prefix], image), dim=1) if prefix else image

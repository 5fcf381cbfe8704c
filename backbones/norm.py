"""The norms of blocks: RMSNorm and LayerNorm which take the residual sum before them along, and PRepBN, a LayerNorm
when training begins and a BatchNorm, which costs nothing, when it ends."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm import layers
from timm.layers import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from scanvas.kernels.norm import add_norm, token_norm

from .mixers import TokenMixer


@torch.fx.wrap  # timm's register alone reaches only functions of the file that holds the model
@register_notrace_function
@torch.jit.ignore
def _add_norm(
    x: Tensor, branch: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """One node for tracers: which code runs depends on the device. What was traced can be scripted, so that it takes
    no module."""
    return add_norm(x, branch, kind=kind, weight=weight, bias=bias, eps=eps)


@register_notrace_module
class RMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467) of tokens ``(B, N, C)``."""

    kind = "rms"

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        return token_norm(x, kind="rms", weight=self.weight, eps=self.eps)


@register_notrace_module
class LayerNorm(nn.LayerNorm):
    """LayerNorm (arXiv:1607.06450) of tokens ``(B, N, C)``."""

    kind = "layer"

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        return token_norm(x, kind="layer", weight=self.weight, bias=self.bias, eps=self.eps)


def _normalise_image(norm: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The LayerNorm over the channels of ``x``, ``(B, C, H, W)``, or of ``x + bias`` with a number for each channel."""
    image = x.permute(0, 2, 3, 1)
    tokens = image.flatten(1, 2)
    options = {"kind": "layer", "weight": norm.weight, "bias": norm.bias, "eps": norm.eps}
    if bias is None:
        tokens = token_norm(tokens, **options)
    else:
        _, tokens = add_norm(tokens, bias.expand_as(tokens), **options)
    return tokens.unflatten(1, image.shape[1:3]).permute(0, 3, 1, 2)


@register_notrace_module
class LayerNorm2d(layers.LayerNorm2d):
    """LayerNorm over the channels of an image ``(B, C, H, W)``, which is quickest channels-last."""

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        return _normalise_image(self, x)


def convolve_and_normalise(conv: nn.Conv2d, norm: LayerNorm2d, x: Tensor) -> Tensor:
    """``norm(conv(x))``, the convolution's bias added by the norm's kernel; cuDNN would take a pass of its own."""
    return _normalise_image(norm, F.conv2d(x, conv.weight, None, conv.stride, conv.padding), conv.bias)


def add_and_normalise(norm: nn.Module, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """``x + branch`` and its norm, in one pass over memory if the norm can and nothing hooks into its calls."""
    hooked = norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__
    if isinstance(norm, RMSNorm | LayerNorm) and not hooked:
        both = _add_norm(x, branch, norm.kind, norm.weight, getattr(norm, "bias", None), norm.eps)
        return both[0], both[1]
    x = x + branch
    return x, norm(x)


@torch.jit.ignore
def _affine(
    weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(alpha.dtype, torch.float32)
    weight, bias, mean, variance, alpha = (t.to(dtype) for t in (weight, bias, mean, variance, alpha))
    scale = weight * (variance + eps).rsqrt()
    return scale + alpha, bias - mean * scale


class PRepBN(nn.Module):
    """``λ LN(x) + (1 − λ) (BN(x) + α x)``; λ falls linearly from 1 to 0 over ``steps`` training steps. In evaluation
    ``BN(x) + α x``: a factor and a summand per channel (SLAB, arXiv:2405.11582, section 3.2).

    This is the one norm here whose result depends on the mode, as its paper has it: before the last of ``steps`` a
    model in evaluation is another one than in training. ``fold_norms`` takes the norms of a trained model away.

    Args:
        dim: channels.
        steps: training steps until λ is 0; the paper's are 60 000 for DeiT and Swin, the released default 300 000.
        eps: of both norms.
        momentum: of BatchNorm's statistics.

    Raises:
        ValueError: ``steps`` is not positive.
    """

    def __init__(
        self, dim: int, *, steps: int = 300_000, eps: float = 1e-5, momentum: float = 0.1, device=None, dtype=None
    ):
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        factory = {"device": device, "dtype": dtype}
        self.steps = steps
        self.layer_norm = nn.LayerNorm(dim, eps=eps, **factory)
        self.batch_norm = nn.BatchNorm1d(dim, eps=eps, momentum=momentum, **factory)
        self.alpha = nn.Parameter(torch.ones(1, **factory))
        self.register_buffer("step", torch.zeros((), dtype=torch.long, device=device))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        self.step.zero_()

    def affine(self) -> tuple[Tensor, Tensor]:
        """Factor and summand per channel in evaluation, float32 (float64 for a float64 model)."""
        norm = self.batch_norm
        return _affine(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps, self.alpha)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, N, C)`` → the same shape and dtype."""
        if not self.training:
            scale, shift = self.affine()
            return torch.addcmul(shift, x.to(shift.dtype), scale).to(x.dtype)
        share = (1 - self.step / self.steps).clamp(min=0).to(x.dtype)
        self.step += 1
        batch = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return share * self.layer_norm(x) + (1 - share) * (batch + self.alpha * x)


class ChannelAffine(nn.Module):
    """``x ⊙ scale + shift``: what is left of a norm that could not be merged into what follows it."""

    def __init__(self, scale: Tensor, shift: Tensor):
        super().__init__()
        self.scale, self.shift = nn.Parameter(scale), nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


def block_norm(name: str, default_name: str, default: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """What makes the norms of a model with ``norm=name``: ``default`` for its name, ``PRepBN`` for ``"prepbn"``."""
    if name not in (default_name, "prepbn"):
        raise ValueError(f"norm must be {default_name!r} or 'prepbn', got {name!r}")
    return PRepBN if name == "prepbn" else default


@torch.no_grad()
def _merge(layer: nn.Linear, scale: Tensor, shift: Tensor) -> nn.Linear:
    """The linear layer after ``x ⊙ scale + shift``."""
    weight = layer.weight.to(scale.dtype)
    bias = weight @ shift if layer.bias is None else layer.bias.to(scale.dtype) + weight @ shift
    merged = nn.Linear(layer.in_features, layer.out_features, device=layer.weight.device, dtype=layer.weight.dtype)
    merged.weight.copy_(weight * scale)
    merged.bias.copy_(bias)
    return merged.train(layer.training)


_PROJECTIONS = ("to_q", "to_k", "to_v", "to_qkv")


@torch.no_grad()
def fold_norms(model: nn.Module) -> nn.Module:
    """Take every ``PRepBN`` out of a trained model, in place: it computes what it did in evaluation.

    The norm before a feed-forward is merged into its first linear layer, that before a mixer into its projections if
    the mixer reads its input by them alone; elsewhere a factor and a summand per channel remain.

    Args:
        model: in evaluation mode, for folding is exact for that mode only.

    Returns:
        The same model.

    Raises:
        ValueError: the model is in training mode.
    """
    if model.training:
        raise ValueError("fold_norms needs a model in evaluation mode; call model.eval() first")
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, PRepBN):
                continue
            scale, shift = norm.affine()
            rest: nn.Module = nn.Identity()
            mixer, mlp = getattr(parent, "mixer", None), getattr(parent, "mlp", None)
            if name == "norm2" and isinstance(getattr(mlp, "fc1", None), nn.Linear):
                mlp.fc1 = _merge(mlp.fc1, scale, shift)
            elif name == "norm1" and isinstance(mixer, TokenMixer) and mixer.reads_by_projections:
                for projection in _PROJECTIONS:
                    if hasattr(mixer, projection):
                        setattr(mixer, projection, _merge(getattr(mixer, projection), scale, shift))
            else:
                dtype = norm.alpha.dtype
                rest = ChannelAffine(scale.to(dtype), shift.to(dtype))
            setattr(parent, name, rest)
    return model

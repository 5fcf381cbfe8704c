"""ViG: a plain vision backbone of bidirectional gated linear attention (arXiv:2405.18425).

Complexity is linear in the number of tokens, any rectangle divisible by the patch size goes in, and any mixer of
``scanvas.list_mixers()`` takes the place of the attention: ``timm.create_model("vig_small_patch16_224",
mixer="softmax")``.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates, register_notrace_module
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from scanvas.kernels.stem import is_fused, stem

from .block import Block, init_linears, reset_parts, swiglu_hidden
from .convert import convert_vig_checkpoint
from .mixers import layer_options
from .mixers.base import is_observed
from .norm import LayerNorm2d, RMSNorm, block_norm, convolve_and_normalise
from .plain import PatchEmbedBase, PlainBackbone, build_plain, plain_cfg

__all__ = ["Vig"]


def conv_of_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, s: int) -> Tensor:
    """``F.conv2d(x, weight, bias, stride=s, padding=1)`` for a kernel of s + 1 and sides divisible by s, as a
    convolution of 2×2 blocks of s×s pixels; the result is channels-last."""
    B, C, H, W = x.shape
    blocks = x.new_zeros(B, H // s + 1, W // s + 1, C * s * s)  # a row and a column of zeros before the image
    pixels = x.reshape(B, C, H // s, s, W // s, s).permute(0, 2, 4, 1, 3, 5)
    blocks[:, 1:, 1:].unflatten(-1, (C, s, s)).copy_(pixels)
    weight = F.pad(weight, (s - 1, 0, s - 1, 0)).unflatten(3, (2, s)).unflatten(2, (2, s))
    weight = weight.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).contiguous(memory_format=torch.channels_last)
    return F.conv2d(blocks.permute(0, 3, 1, 2), weight, bias)


@register_notrace_module
class StemConv(nn.Conv2d):
    """The convolution with stride s, kernel s + 1 (at least 3) and padding 1 that cuts an image into patches.

    cuDNN pads the few channels of an image to a multiple of eight and then multiplies mostly zeros. On a GPU it is
    therefore given blocks of s×s pixels as its channels and the kernel as one of 2×2 blocks: the window of a patch is
    the patch and a row and a column of pixels before it. For 16 images of 1024² this takes 0.35 instead of 0.85 ms of
    an H200; on a CPU it would take 40 instead of 11 ms an image.
    """

    def __init__(self, in_chans: int, dim: int, stride: int, device=None, dtype=None):
        super().__init__(in_chans, dim, max(3, stride + 1), stride=stride, padding=1, device=device, dtype=dtype)

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)``, H and W divisible by the stride → ``(B, dim, H/s, W/s)``, channels-last."""
        stride = self.stride[0]
        if x.is_cuda and self.kernel_size[0] == stride + 1:
            return conv_of_blocks(x, self.weight, self.bias, stride)
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)


@register_notrace_module
class PatchEmbed(PatchEmbedBase):
    """Two overlapping convolutions, stride p/2 and 2, each followed by LayerNorm ("v2" of the original code)."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, device=None, dtype=None):
        super().__init__()
        if patch_size < 2 or patch_size % 2:
            raise ValueError(f"patch_size must be an even number of at least 2, got {patch_size}")
        factory = {"device": device, "dtype": dtype}
        self.patch_size = patch_size
        half = patch_size // 2
        self.proj = nn.Sequential(
            StemConv(in_chans, dim // 2, half, **factory),
            LayerNorm2d(dim // 2, eps=1e-5, **factory),
            nn.SiLU(),
            nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1, **factory),
            LayerNorm2d(dim, eps=1e-5, **factory),
        )

    def embed(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, dim, H/p, W/p)``; the first convolution chooses the layout."""
        if torch.jit.is_scripting():
            return self.proj(x)
        return self._embed(x)

    @torch.jit.unused
    def _embed(self, x: Tensor) -> Tensor:
        """The same, with the first three layers as one kernel and the bias of the second convolution added by the norm
        behind it, where they are what they were made as and nothing hooks into their calls."""
        layers = list(self.proj)
        made = [StemConv, LayerNorm2d, nn.SiLU, nn.Conv2d, LayerNorm2d]
        if [type(layer) for layer in layers] != made or any(map(is_observed, (self.proj, *layers))):
            return self.proj(x)
        conv, norm, _, second, last = layers
        if not is_fused(x, conv.weight) or second.bias is None:
            return self.proj(x)
        stride = conv.stride[0]
        y = stem(x, conv.weight, conv.bias, norm.weight, norm.bias, stride=stride, eps=norm.eps)
        y = y.transpose(1, 2).unflatten(2, (x.shape[2] // stride, x.shape[3] // stride))
        return convolve_and_normalise(second, last, y)


class Vig(PlainBackbone):
    """Plain ViG.

    Args:
        img_size: size the position embeddings are made for, an int or ``(H, W)``.
        patch_size: an even number; 16 in the paper.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: ``"avg"``, ``"max"``, ``"avgmax"``, ``"token"`` (needs ``class_token``) or ``""``.
        embed_dim, depth, num_heads: width, blocks and heads.
        mlp_hidden: inner width of SwiGLU; ⌈8/3·embed_dim⌉ to a multiple of 256 by default.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        class_token: put a learned token before the image's.
        rope: 2-D rotary positions in the mixer, beside the learned ones.
        norm: ``"rms"``, or ``"prepbn"``, which training turns from LayerNorm into BatchNorm; see ``PRepBN``.
        dynamic_img_size: take any size and resample the position embeddings; else refuse another one.
        drop_rate: dropout before the classifier.
        pos_drop_rate: dropout after the position embeddings.
        proj_drop_rate: dropout after the mixers' output projections.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_hidden: int | None = None,
        mixer: str = "gla",
        mixer_kwargs: dict[str, Any] | None = None,
        class_token: bool = False,
        rope: bool = False,
        norm: str = "rms",
        dynamic_img_size: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self._make_start(
            PatchEmbed(patch_size, in_chans, embed_dim, **factory),
            img_size,
            embed_dim,
            class_token=class_token,
            class_position=False,
            dynamic_img_size=dynamic_img_size,
            pos_drop_rate=pos_drop_rate,
            **factory,
        )
        mixer_kwargs = {"fused_projections": True, "proj_drop": proj_drop_rate, **(mixer_kwargs or {})}
        if rope:
            mixer_kwargs["rope"] = True
        norm_layer = block_norm(norm, "rms", partial(RMSNorm, eps=1e-6))
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                mlp_hidden or swiglu_hidden(embed_dim, 256),
                mixer=mixer,
                mixer_kwargs=layer_options(mixer, i, mixer_kwargs),
                norm_layer=norm_layer,
                drop_path=rate,
                **factory,
            )
            for i, rate in enumerate(calculate_drop_path_rates(drop_path_rate, depth))
        )
        norm = norm_layer(embed_dim, **factory)
        self._make_end(norm, in_chans, num_classes, global_pool, drop_rate, **factory)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise as the original does: N(0, 0.02) for linear layers, mixers as they want it, the rest as PyTorch.

        Args:
            needs_reset: initialise the rest too, as after ``to_empty`` on a model built on the meta device.
        """
        if needs_reset:
            reset_parts(self)
        init_linears(self, std=0.02, truncated=False, skip_mixers=True)
        self._init_tokens()


def _create_vig(variant: str, pretrained: bool = False, gla_kwargs: dict | None = None, **kwargs) -> Vig:
    if kwargs.get("mixer", "gla") == "gla":
        kwargs["mixer_kwargs"] = {**(gla_kwargs or {}), **(kwargs.get("mixer_kwargs") or {})}
    return build_plain(Vig, variant, pretrained, convert_vig_checkpoint, **kwargs)


def _cfg(**kwargs) -> dict[str, Any]:
    return plain_cfg(first_conv="patch_embed.proj.0", **kwargs)


default_cfgs = generate_default_cfgs(
    {
        "vig_tiny_patch16_224.untrained": _cfg(),
        "vig_small_patch16_224.untrained": _cfg(),
        "vig_base_patch16_224.untrained": _cfg(),
        "test_vig.untrained": _cfg(input_size=(3, 160, 160)),
    }
)


@register_model
def vig_tiny_patch16_224(pretrained: bool = False, **kwargs) -> Vig:
    """ViG-T: 5.83 M parameters. The only size with SiLU after the convolution and after the mix."""
    args = {"embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return _create_vig("vig_tiny_patch16_224", pretrained, gla_kwargs={"conv_act": True, "out_act": True}, **args)


@register_model
def vig_small_patch16_224(pretrained: bool = False, **kwargs) -> Vig:
    """ViG-S: 22.6 M parameters."""
    return _create_vig("vig_small_patch16_224", pretrained, **{"embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs})


@register_model
def vig_base_patch16_224(pretrained: bool = False, **kwargs) -> Vig:
    """ViG-B: 89.0 M parameters."""
    return _create_vig("vig_base_patch16_224", pretrained, **{"embed_dim": 768, "depth": 12, "num_heads": 12, **kwargs})


@register_model
def test_vig(pretrained: bool = False, **kwargs) -> Vig:
    """A tiny ViG for tests and demos: 64 channels, 4 blocks, 2 heads."""
    args = {"img_size": 160, "embed_dim": 64, "depth": 4, "num_heads": 2, **kwargs}
    return _create_vig("test_vig", pretrained, **args)

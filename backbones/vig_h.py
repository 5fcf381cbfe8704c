"""ViG-H: a four-stage vision backbone of bidirectional gated linear attention (arXiv:2405.18425, section 3.4)."""

from functools import partial
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, register_notrace_module
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .block import Block, init_linears, reset_parts, swiglu_hidden
from .convert import convert_vig_h_checkpoint
from .mixers import layer_options
from .norm import LayerNorm, LayerNorm2d, block_norm
from .staged import Stage, StagedBackbone, build_staged, check_stages, staged_cfg

__all__ = ["VigH"]


@register_notrace_module
class Downsample(nn.Module):
    """3×3 convolution of stride 2 and LayerNorm; an odd side is rounded up."""

    def __init__(self, in_dim: int, dim: int, device=None, dtype=None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1, **factory)
        self.norm = LayerNorm2d(dim, eps=1e-5, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` → ``(B, C', ⌈H/2⌉, ⌈W/2⌉)``."""
        return self.norm(self.conv(x))


class VigH(StagedBackbone):
    """Hierarchical ViG, for any image of at least 32×32: there are no position embeddings.

    Args:
        img_size: recorded for timm's tools; nothing in the model depends on it.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: pooling of timm's ``ClassifierHead``.
        depths, num_heads: blocks and heads of the four stages.
        embed_dim: width of the first stage; it doubles from stage to stage.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        norm: of the blocks, ``"layer"``, or ``"prepbn"``, which training turns from LayerNorm into BatchNorm; see
            ``PRepBN``. Those of images, in the stem, between stages and at the end, are LayerNorm in either case.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after the mixers' output projections.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: tuple[int, ...] = (2, 2, 5, 2),
        embed_dim: int = 96,
        num_heads: tuple[int, ...] = (3, 6, 12, 24),
        mixer: str = "gla",
        mixer_kwargs: dict[str, Any] | None = None,
        norm: str = "layer",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_stages(depths=depths, num_heads=num_heads)
        factory = {"device": device, "dtype": dtype}
        dims = [embed_dim * 2**i for i in range(len(depths))]
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, embed_dim // 2, 3, stride=2, padding=1, **factory),
            LayerNorm2d(embed_dim // 2, eps=1e-5, **factory),
            nn.GELU(),
            nn.Conv2d(embed_dim // 2, embed_dim, 3, stride=2, padding=1, **factory),
            LayerNorm2d(embed_dim, eps=1e-5, **factory),
        )
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        norm_layer = block_norm(norm, "layer", partial(LayerNorm, eps=1e-5))
        mixer_kwargs = {"fused_projections": True, "proj_drop": proj_drop_rate, **(mixer_kwargs or {})}
        self.stages = nn.Sequential(
            *[
                Stage(
                    Downsample(dims[i - 1], dims[i], **factory) if i else nn.Identity(),
                    [
                        Block(
                            dims[i],
                            num_heads[i],
                            swiglu_hidden(dims[i], 32),
                            mixer=mixer,
                            mixer_kwargs=layer_options(mixer, j, mixer_kwargs),
                            norm_layer=norm_layer,
                            drop_path=rate,
                            **factory,
                        )
                        for j, rate in enumerate(rates[i])
                    ],
                )
                for i in range(len(depths))
            ]
        )
        self._make_head(in_chans, num_classes, dims, global_pool, drop_rate, **factory)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise as the original does: every linear layer truncated N(0, 0.02), the rest as mixers and PyTorch do.

        Args:
            needs_reset: initialise the rest too, as after ``to_empty`` on a model built on the meta device.
        """
        if needs_reset:
            reset_parts(self)
        init_linears(self, std=0.02, truncated=True, skip_mixers=False)


def _create_vig_h(variant: str, pretrained: bool = False, **kwargs) -> VigH:
    return build_staged(VigH, variant, pretrained, convert_vig_h_checkpoint, **kwargs)


default_cfgs = generate_default_cfgs(
    {
        "vig_h_tiny_224.untrained": staged_cfg(),
        "vig_h_small_224.untrained": staged_cfg(),
        "vig_h_base_224.untrained": staged_cfg(),
        "test_vig_h.untrained": staged_cfg(input_size=(3, 160, 160), pool_size=(5, 5)),
    }
)


@register_model
def vig_h_tiny_224(pretrained: bool = False, **kwargs) -> VigH:
    """ViG-H-T: 28.6 M parameters."""
    args = {"depths": (2, 2, 5, 2), "embed_dim": 96, "num_heads": (3, 6, 12, 24), **kwargs}
    return _create_vig_h("vig_h_tiny_224", pretrained, **args)


@register_model
def vig_h_small_224(pretrained: bool = False, **kwargs) -> VigH:
    """ViG-H-S: 50.1 M parameters."""
    args = {"depths": (2, 2, 17, 2), "embed_dim": 96, "num_heads": (3, 6, 12, 24), **kwargs}
    return _create_vig_h("vig_h_small_224", pretrained, **args)


@register_model
def vig_h_base_224(pretrained: bool = False, **kwargs) -> VigH:
    """ViG-H-B: 88.9 M parameters."""
    args = {"depths": (2, 2, 17, 2), "embed_dim": 128, "num_heads": (4, 8, 16, 32), **kwargs}
    return _create_vig_h("vig_h_base_224", pretrained, **args)


@register_model
def test_vig_h(pretrained: bool = False, **kwargs) -> VigH:
    """A tiny ViG-H for tests: 24 channels in the first stage, one block in most stages."""
    args = {"depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 1, 2, 4), **kwargs}
    return _create_vig_h("test_vig_h", pretrained, **args)

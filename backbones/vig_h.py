"""ViG-H: a four-stage vision backbone of bidirectional gated linear attention (arXiv:2405.18425, section 3.4)."""

from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    ClassifierHead,
    LayerNorm2d,
    calculate_drop_path_rates,
    get_device_dtype,
    register_notrace_module,
    to_2tuple,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from .block import Block, init_linears, swiglu_hidden
from .convert import convert_vig_h_checkpoint
from .mixers import layer_options
from .vig import reset_parts

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


class Stage(nn.Module):
    """Down-sampling, except in the first stage, then blocks at one resolution."""

    def __init__(self, in_dim: int, dim: int, num_heads: int, mlp_hidden: int, rates: list[float], **kwargs):
        super().__init__()
        factory = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.grad_checkpointing = False
        self.downsample = Downsample(in_dim, dim, **factory) if in_dim != dim else nn.Identity()
        mixer, options = kwargs.pop("mixer"), kwargs.pop("mixer_kwargs")
        self.blocks = nn.ModuleList(
            Block(
                dim,
                num_heads,
                mlp_hidden,
                mixer=mixer,
                mixer_kwargs=layer_options(mixer, i, options),
                drop_path=rate,
                **kwargs,
            )
            for i, rate in enumerate(rates)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` → ``(B, C', H', W')``, in memory channels-last."""
        x = self.downsample(x)
        grid = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid)
            else:
                x = block(x, grid)
        return x.transpose(1, 2).unflatten(2, grid)


class VigH(nn.Module):
    """Hierarchical ViG, for any image of at least 32×32: there are no position embeddings.

    Args:
        img_size: recorded for timm's tools; nothing in the model depends on it.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: pooling of timm's ``ClassifierHead``.
        depths, num_heads: blocks and heads of the four stages.
        embed_dim: width of the first stage; it doubles from stage to stage.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
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
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if len(depths) != len(num_heads):
            raise ValueError(f"depths and num_heads must have one entry a stage, got {depths} and {num_heads}")
        factory = {"device": device, "dtype": dtype}
        dims = [embed_dim * 2**i for i in range(len(depths))]
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.embed_dim = embed_dim
        self.num_features = self.head_hidden_size = dims[-1]
        self.num_prefix_tokens = 0

        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, embed_dim // 2, 3, stride=2, padding=1, **factory),
            LayerNorm2d(embed_dim // 2, eps=1e-5, **factory),
            nn.GELU(),
            nn.Conv2d(embed_dim // 2, embed_dim, 3, stride=2, padding=1, **factory),
            LayerNorm2d(embed_dim, eps=1e-5, **factory),
        )
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        norm_layer = partial(nn.LayerNorm, eps=1e-5)
        mixer_kwargs = {"fused_projections": True, "proj_drop": proj_drop_rate, **(mixer_kwargs or {})}
        self.stages = nn.Sequential(
            *[
                Stage(
                    dims[max(i - 1, 0)],
                    dims[i],
                    num_heads[i],
                    swiglu_hidden(dims[i], 32),
                    rates[i],
                    mixer=mixer,
                    mixer_kwargs=mixer_kwargs,
                    norm_layer=norm_layer,
                    **factory,
                )
                for i in range(len(depths))
            ]
        )
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": dim, "reduction": 4 * 2**i} for i, dim in enumerate(dims)
        ]
        self.norm = LayerNorm2d(dims[-1], eps=1e-5, **factory)
        self.head = ClassifierHead(dims[-1], num_classes, pool_type=global_pool, drop_rate=drop_rate, **factory)
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

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        blocks = (
            r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ]
        )
        return {"stem": r"^stem", "blocks": blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one, and the pooling if it is given."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **get_device_dtype(self))
        self.head_hidden_size = self.head.num_features

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Record another image size; the model takes any."""
        update_model_input_size(self, to_2tuple(img_size))

    def forward_features(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, num_features, H/32, W/32)``."""
        return self.norm(self.stages(self.stem(x.contiguous(memory_format=torch.channels_last))))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits) if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, num_classes)``."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of chosen stages, each ``(B, C, H, W)``, and the final ones.

        Args:
            x: ``(B, in_chans, H, W)``.
            indices: the last n stages if an int, all if ``None``, else those listed.
            norm: apply the final norm to the last stage's features.
            stop_early: do not compute stages after the last one wanted.
            output_fmt: ``"NCHW"``, the only one.
            intermediates_only: leave out the final features.
        """
        if output_fmt != "NCHW":
            raise ValueError("output_fmt must be 'NCHW', got '" + output_fmt + "'")
        take, last = feature_take_indices(len(self.stages), indices)
        if torch.jit.is_scripting() or not stop_early:  # noqa: SIM108 - TorchScript can not slice modules
            stages = self.stages
        else:
            stages = self.stages[: last + 1]
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        intermediates = []
        for i, stage in enumerate(stages):
            x = stage(x)
            if i in take:
                final = norm and i == len(self.stages) - 1
                intermediates.append((self.norm(x) if final else x).contiguous())
        if intermediates_only:
            return intermediates
        return self.norm(x), intermediates

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what ``forward_intermediates`` does not need for these stages; returns their indices. Norm and head
        have the width of the last stage, so they go with it."""
        take, last = feature_take_indices(len(self.stages), indices)
        shortened = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if shortened:
            self.num_features = self.feature_info[last]["num_chs"]
        if prune_norm or shortened:
            self.norm = nn.Identity()
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take


def _create_vig_h(variant: str, pretrained: bool = False, **kwargs) -> VigH:
    if kwargs.get("features_only"):
        kwargs.setdefault("num_classes", 0)
    return build_model_with_cfg(
        VigH,
        variant,
        pretrained,
        pretrained_filter_fn=convert_vig_h_checkpoint,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": False,
        "pool_size": (7, 7),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "vig_h_tiny_224.untrained": _cfg(),
        "vig_h_small_224.untrained": _cfg(),
        "vig_h_base_224.untrained": _cfg(),
        "test_vig_h.untrained": _cfg(input_size=(3, 160, 160), pool_size=(5, 5)),
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

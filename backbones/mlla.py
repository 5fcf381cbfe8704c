"""MLLA, now called MILA: a staged backbone of linear attention in Mamba's block (arXiv:2405.16605).

Any image of at least 32×32 goes in, and any mixer of ``scanvas.list_mixers()`` takes the place of the attention.
"""

import re
from functools import partial
from typing import Any

import torch
from timm.layers import ConvNormAct, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .block import Block, init_linears, reset_parts
from .convert import fit_checkpoint, rename, unwrap
from .mixers import TokenConv, layer_options
from .norm import LayerNorm
from .staged import Stage, StagedBackbone, build_staged, check_stages, staged_cfg

__all__ = ["Mlla"]


class Stem(nn.Module):
    """Five convolutions with BatchNorm to a quarter of each side: 3×3 of stride 2; two of 3×3 around which the input is
    added; 3×3 of stride 2 to 4·dim and 1×1 to dim."""

    def __init__(self, in_chans: int, dim: int, device=None, dtype=None):
        super().__init__()
        conv = partial(ConvNormAct, act_layer=nn.ReLU, device=device, dtype=dtype)
        half = dim // 2
        self.conv1 = conv(in_chans, half, 3, stride=2, padding=1)
        self.conv2 = nn.Sequential(conv(half, half, 3, padding=1), conv(half, half, 3, padding=1, apply_act=False))
        self.conv3 = nn.Sequential(
            conv(half, 4 * dim, 3, stride=2, padding=1), conv(4 * dim, dim, 1, padding=0, apply_act=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, dim, ⌈H/4⌉, ⌈W/4⌉)``."""
        x = self.conv1(x)
        return self.conv3(self.conv2(x) + x)


class Downsample(nn.Module):
    """Between stages: 1×1 to 8·C, depthwise 3×3 of stride 2, 1×1 to 2·C; an odd side is rounded up."""

    def __init__(self, dim: int, device=None, dtype=None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = 8 * dim
        self.expand = nn.Conv2d(dim, inner, 1, **factory)
        self.conv = nn.Conv2d(inner, inner, 3, stride=2, padding=1, groups=inner, **factory)
        self.act = nn.ReLU()
        self.reduce = ConvNormAct(inner, 2 * dim, 1, padding=0, bias=True, apply_act=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` → ``(B, 2·C, ⌈H/2⌉, ⌈W/2⌉)``."""
        return self.reduce(self.act(self.conv(self.act(self.expand(x)))))


class MllaBlock(Block):
    """``x + DWConv3×3(x)``, then ``x + mixer(norm(x))``, and once more with the feed-forward (fig. 3 of the paper). The
    convolutions are conditional position encodings (CPE, arXiv:2102.10882).

    The mixer ``mlla`` holds what the figure has between the two norms: both projections of the input, the convolution
    with SiLU, the attention, the gate and the output projection. Arguments as for ``Block``.
    """

    def __init__(self, dim: int, num_heads: int, mlp_hidden: int, **kwargs):
        super().__init__(dim, num_heads, mlp_hidden, **kwargs)
        factory = {key: kwargs[key] for key in ("device", "dtype") if key in kwargs}
        self.cpe1 = TokenConv(dim, **factory)
        self.cpe2 = TokenConv(dim, **factory)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape."""
        x = x + self.cpe1(x, grid)
        x = x + self.drop_path(self.mixer(self.norm1(x), grid, 0))
        x = x + self.cpe2(x, grid)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Mlla(StagedBackbone):
    """MLLA. There are no position embeddings; the stem and the down-sampling have BatchNorm, as the original has.

    Args:
        img_size: recorded for timm's tools; nothing in the model depends on it.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: pooling of timm's ``ClassifierHead``.
        depths, num_heads: blocks and heads of the stages.
        embed_dim: width of the first stage; it doubles from stage to stage.
        mlp_ratio: inner width of the feed-forward over that of the tokens.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after the mixers' output projections and in the feed-forward.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0. The paper trains with 0.2, 0.3 and
            0.5 for the three sizes.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: tuple[int, ...] = (2, 4, 8, 4),
        embed_dim: int = 64,
        num_heads: tuple[int, ...] = (2, 4, 8, 16),
        mlp_ratio: float = 4.0,
        mixer: str = "mlla",
        mixer_kwargs: dict[str, Any] | None = None,
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
        self.stem = Stem(in_chans, embed_dim, **factory)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        mixer_kwargs = {"fused_projections": True, "proj_drop": proj_drop_rate, **(mixer_kwargs or {})}
        self.stages = nn.Sequential(
            *[
                Stage(
                    Downsample(dims[i - 1], **factory) if i else nn.Identity(),
                    [
                        MllaBlock(
                            dims[i],
                            num_heads[i],
                            int(mlp_ratio * dims[i]),
                            mixer=mixer,
                            mixer_kwargs=layer_options(mixer, j, mixer_kwargs),
                            norm_layer=partial(LayerNorm, eps=1e-5),
                            mlp_layer=partial(Mlp, drop=proj_drop_rate),
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


_RULES = [
    (r"^patch_embed\.(conv\d(?:\.\d)?)\.conv\.", r"stem.\1.conv."),
    (r"^patch_embed\.(conv\d(?:\.\d)?)\.norm\.", r"stem.\1.bn."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.in_proj\.", r"stages.\1.blocks.\2.mixer.to_v."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.act_proj\.", r"stages.\1.blocks.\2.mixer.gate_proj."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.dwc\.", r"stages.\1.blocks.\2.mixer.value_conv."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.attn\.lepe\.", r"stages.\1.blocks.\2.mixer.conv."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.out_proj\.", r"stages.\1.blocks.\2.mixer.to_out.0."),
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
    (r"^head\.(?!fc\.)", "head.fc."),
]
_MERGE = {"0.conv": "expand", "1.conv": "conv", "2.conv": "reduce.conv", "2.norm": "reduce.bn"}


def convert_mlla_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of an original MLLA checkpoint, or of one of ours, under our names; ``model`` is the one to be filled.
    The original keeps the down-sampling at the end of a stage, we at the start of the next.

    Raises:
        ValueError: tensors do not fit; the message names them.
    """
    converted = {}
    for key, value in unwrap(state_dict).items():
        merge = re.match(r"^layers\.(\d+)\.downsample\.conv\.(\d\.(?:conv|norm))\.(.*)", key)
        joint = re.match(r"^layers\.(\d+)\.blocks\.(\d+)\.attn\.qk\.(weight|bias)$", key)
        if key.endswith("attn.rope.rotations"):  # a table of one grid
            continue
        if merge:
            converted[f"stages.{int(merge[1]) + 1}.downsample.{_MERGE[merge[2]]}.{merge[3]}"] = value
        elif joint:
            for part, half in zip(("to_q", "to_k"), value.chunk(2)):
                converted[f"stages.{joint[1]}.blocks.{joint[2]}.mixer.{part}.{joint[3]}"] = half
        else:
            converted[rename(key, _RULES)] = value
    return fit_checkpoint(converted, model)


def _create_mlla(variant: str, pretrained: bool = False, **kwargs) -> Mlla:
    return build_staged(Mlla, variant, pretrained, convert_mlla_checkpoint, **kwargs)


def _cfg(**kwargs) -> dict[str, Any]:
    return staged_cfg(first_conv="stem.conv1.conv", **kwargs)


default_cfgs = generate_default_cfgs(
    {
        "mlla_tiny.untrained": _cfg(),
        "mlla_small.untrained": _cfg(),
        "mlla_base.untrained": _cfg(),
        "test_mlla.untrained": _cfg(input_size=(3, 160, 160), pool_size=(5, 5)),
    }
)


@register_model
def mlla_tiny(pretrained: bool = False, **kwargs) -> Mlla:
    """MLLA-T."""
    args = {"depths": (2, 4, 8, 4), "embed_dim": 64, "num_heads": (2, 4, 8, 16), **kwargs}
    return _create_mlla("mlla_tiny", pretrained, **args)


@register_model
def mlla_small(pretrained: bool = False, **kwargs) -> Mlla:
    """MLLA-S."""
    args = {"depths": (3, 6, 21, 6), "embed_dim": 64, "num_heads": (2, 4, 8, 16), **kwargs}
    return _create_mlla("mlla_small", pretrained, **args)


@register_model
def mlla_base(pretrained: bool = False, **kwargs) -> Mlla:
    """MLLA-B."""
    args = {"depths": (3, 6, 21, 6), "embed_dim": 96, "num_heads": (3, 6, 12, 24), **kwargs}
    return _create_mlla("mlla_base", pretrained, **args)


@register_model
def test_mlla(pretrained: bool = False, **kwargs) -> Mlla:
    """A tiny MLLA for tests: 24 channels in the first stage, one block in most stages."""
    args = {"depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 1, 2, 4), **kwargs}
    return _create_mlla("test_mlla", pretrained, **args)

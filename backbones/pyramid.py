"""The pyramid that RAVLT (arXiv:2411.07635), MAViT (arXiv:2507.00698) and NaLaFormer (arXiv:2506.21137) share: four
stages of convolutional position encoding, linear attention and a feed-forward with a convolution inside."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale, calculate_drop_path_rates
from torch import Tensor, nn

from .block import reset_parts
from .mixers import TokenConv, create_mixer, layer_options
from .norm import LayerNorm
from .staged import Stage, StagedBackbone, check_stages

__all__ = ["Pyramid"]


class ConvFeedForward(nn.Module):
    """``W₂ (u + DWConv3×3(u))`` with ``u = GELU(W₁ x)``."""

    def __init__(self, dim: int, hidden: int, device=None, dtype=None):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.conv = TokenConv(hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape."""
        x = F.gelu(self.fc1(x))
        return self.fc2(x + self.conv(x, grid))


class PyramidBlock(nn.Module):
    """``x + DWConv3×3(x)``, ``x + γ₁ mixer(LN(x))``, again ``x + DWConv3×3(x)`` if asked for, ``x + γ₂ mlp(LN(x))``.

    The convolutions are conditional position encodings (CPE, arXiv:2102.10882).

    Args:
        dim, num_heads: of the mixer.
        mlp_hidden: inner width of the feed-forward.
        mixer, mixer_kwargs: name of the mixer and its keywords.
        layer_scale: γ at the start.
        second_cpe: have the second of the two convolutions, before the feed-forward.
        drop_path: probability to drop a residual branch of a sample in training.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_hidden: int,
        *,
        mixer: str,
        mixer_kwargs: dict[str, Any],
        layer_scale: float = 1.0,
        second_cpe: bool = False,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.cpe1 = TokenConv(dim, **factory)
        self.norm1 = LayerNorm(dim, eps=1e-6, **factory)
        self.mixer = create_mixer(mixer, dim, num_heads, **mixer_kwargs, **factory)
        self.ls1 = LayerScale(dim, layer_scale, **factory)
        self.cpe2 = TokenConv(dim, **factory) if second_cpe else None
        self.norm2 = LayerNorm(dim, eps=1e-6, **factory)
        self.mlp = ConvFeedForward(dim, mlp_hidden, **factory)
        self.ls2 = LayerScale(dim, layer_scale, **factory)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, H·W, C)`` → the same shape."""
        x = x + self.cpe1(x, grid)
        x = x + self.drop_path(self.ls1(self.mixer(self.norm1(x), grid, 0)))
        if self.cpe2 is not None:
            x = x + self.cpe2(x, grid)
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x), grid)))


class Downsample(nn.Module):
    """3×3 convolution of stride 2 and BatchNorm; an odd side is rounded up."""

    def __init__(self, in_dim: int, dim: int, device=None, dtype=None):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` → ``(B, C', ⌈H/2⌉, ⌈W/2⌉)``."""
        return self.norm(self.conv(x))


def make_stem(in_chans: int, dim: int, **factory) -> nn.Sequential:
    """Four 3×3 convolutions with BatchNorm, the first and the last of stride 2; GELU between them. The released codes
    have no GELU after the last."""
    widths = (in_chans, dim // 2, dim // 2, dim // 2, dim)
    layers = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layers += [
            nn.Conv2d(before, after, 3, stride=2 if i in (0, 3) else 1, padding=1, **factory),
            nn.BatchNorm2d(after, **factory),
            nn.GELU(),
        ]
    return nn.Sequential(*layers[:-1])


class Pyramid(StagedBackbone):
    """RAVLT, MAViT and NaLaFormer, for any image: there are no position embeddings, and odd sides are rounded up.

    Stages 1 and 2 have the linear attention of the paper. As released, stages 3 and 4 have softmax instead, with the
    same local branch, gate and RoPE (``gated_softmax``), so that both forms have equally many parameters;
    ``all_linear=True`` gives the linear attention to all four. With ``mixer="softmax"`` and the like for comparison, it
    is the same: the first two stages, or all.

    The classifier reads the last stage's features after a 1×1 convolution to ``head_width``, BatchNorm and SiLU; so
    does ``forward_features``, while ``forward_intermediates`` and ``features_only`` give the stages' own features.

    Args:
        img_size: recorded for timm's tools; nothing in the model depends on it.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: pooling of timm's ``ClassifierHead``.
        depths, embed_dims, num_heads: blocks, width and heads of the stages.
        mlp_ratio: inner width of the feed-forward over the stage's.
        head_width: channels that the classifier reads.
        layer_scale: γ at the start, one for each stage.
        second_cpe: a second position encoding in each block, as NaLaFormer has it.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``; of the linear stages.
        all_linear: no softmax in stages 3 and 4.
        softmax_kwargs: keywords of ``gated_softmax`` there.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after the mixers' output projections.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.

    Raises:
        ValueError: ``depths``, ``embed_dims``, ``num_heads`` and ``layer_scale`` are not of one length.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: tuple[int, ...] = (2, 2, 6, 2),
        embed_dims: tuple[int, ...] = (64, 128, 256, 512),
        num_heads: tuple[int, ...] = (1, 2, 4, 8),
        mlp_ratio: float = 3.5,
        head_width: int = 1024,
        layer_scale: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
        second_cpe: bool = False,
        mixer: str = "rala",
        mixer_kwargs: dict[str, Any] | None = None,
        all_linear: bool = False,
        softmax_kwargs: dict[str, Any] | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_stages(depths=depths, embed_dims=embed_dims, num_heads=num_heads, layer_scale=layer_scale)
        factory = {"device": device, "dtype": dtype}
        self.stem = make_stem(in_chans, embed_dims[0], **factory)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        common = {"fused_projections": True, "proj_drop": proj_drop_rate}
        linear = (mixer, {**common, **(mixer_kwargs or {})})
        softmax = ("gated_softmax", {**common, **(softmax_kwargs or {})})
        stages = []
        for i, dim in enumerate(embed_dims):
            name, options = linear if all_linear or i < 2 else softmax
            blocks = [
                PyramidBlock(
                    dim,
                    num_heads[i],
                    int(mlp_ratio * dim),
                    mixer=name,
                    mixer_kwargs=layer_options(name, j, options),
                    layer_scale=layer_scale[i],
                    second_cpe=second_cpe,
                    drop_path=rate,
                    **factory,
                )
                for j, rate in enumerate(rates[i])
            ]
            stages.append(Stage(Downsample(embed_dims[i - 1], dim, **factory) if i else nn.Identity(), blocks))
        self.stages = nn.Sequential(*stages)
        norm = nn.Sequential(
            nn.Conv2d(embed_dims[-1], head_width, 1, **factory), nn.BatchNorm2d(head_width, **factory), nn.SiLU()
        )
        self._make_head(
            in_chans, num_classes, list(embed_dims), global_pool, drop_rate, norm=norm, width=head_width, **factory
        )
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Truncated N(0, 0.02) for every convolution and linear layer, as the released codes of RAVLT and MAViT have it
        (NaLaFormer's leaves its linear layers to PyTorch), and biases of 0.

        Args:
            needs_reset: initialise norms and layer scales too, as after ``to_empty`` on a model built on meta.
        """
        if needs_reset:
            reset_parts(self)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """See ``StagedBackbone``. Without the convolution before it, the head has not the width it was made for, so it
        goes too."""
        if prune_norm:
            self.num_features = self.feature_info[-1]["num_chs"]
        return super().prune_intermediate_layers(indices, prune_norm, prune_head or prune_norm)

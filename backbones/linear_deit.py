"""DeiT (arXiv:2012.12877) with linear attention: the forms of FLatten, agent attention and InLine.

The blocks are DeiT's. timm's VisionTransformer does not tell its blocks the grid, which these mixers need, so the model
is made of the same parts as ViG. Any rectangle divisible by the patch size goes in, and any mixer of
``scanvas.list_mixers()`` takes the place of the attention.
"""

import re
from functools import partial
from inspect import signature
from typing import Any

import torch
from timm.layers import Mlp, calculate_drop_path_rates, register_notrace_module
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .block import Block, init_linears, reset_parts
from .convert import fit_checkpoint, rename, unwrap
from .mixers import MIXERS, layer_options
from .norm import LayerNorm
from .plain import PatchEmbedBase, PlainBackbone, build_plain, plain_cfg

__all__ = ["LinearDeit"]


@register_notrace_module
class PatchEmbed(PatchEmbedBase):
    """One convolution whose kernel is its stride."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, device=None, dtype=None):
        super().__init__()
        if patch_size < 1:
            raise ValueError(f"patch_size must be positive, got {patch_size}")
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size, device=device, dtype=dtype)


class LinearDeit(PlainBackbone):
    """DeiT, all or the first of whose layers have another mixer than softmax attention.

    A mixer which learns something for every place (``focused``, ``agent``) learns it for the grid of ``img_size``, and
    interpolates for others.

    Args:
        img_size: size the position embeddings are made for, an int or ``(H, W)``.
        patch_size: side of a patch.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: ``"token"`` (needs ``class_token``), ``"avg"``, ``"max"``, ``"avgmax"`` or ``""``.
        embed_dim, depth, num_heads: width, blocks and heads.
        mlp_ratio: inner width of the feed-forward over that of the tokens.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        linear_layers: so many of the first layers have the mixer, the others softmax; ``None`` is all.
        all_linear: all layers have the mixer, whatever ``linear_layers`` says: the all-linear form of a model whose
            release keeps softmax somewhere.
        class_token: put a learned token, with a position of its own, before the image's.
        dynamic_img_size: take any size and resample the position embeddings; else refuse another one.
        drop_rate: dropout before the classifier.
        pos_drop_rate: dropout after the position embeddings.
        proj_drop_rate: dropout after the mixers' output projections and in the feed-forward.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        mixer: str = "focused",
        mixer_kwargs: dict[str, Any] | None = None,
        linear_layers: int | None = None,
        all_linear: bool = False,
        class_token: bool = True,
        dynamic_img_size: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if linear_layers is None or all_linear:
            linear_layers = depth
        if linear_layers < 0:
            raise ValueError(f"linear_layers must be a number of layers or None for all, got {linear_layers}")
        factory = {"device": device, "dtype": dtype}
        self._make_start(
            PatchEmbed(patch_size, in_chans, embed_dim, **factory),
            img_size,
            embed_dim,
            class_token=class_token,
            class_position=True,
            dynamic_img_size=dynamic_img_size,
            pos_drop_rate=pos_drop_rate,
            **factory,
        )
        common = {"fused_projections": True, "proj_drop": proj_drop_rate}
        options = {**common, **(mixer_kwargs or {})}
        if mixer in MIXERS and "grid_size" in signature(MIXERS[mixer]).parameters:
            options.setdefault("grid_size", tuple(self.grid_size))
        norm_layer = partial(LayerNorm, eps=1e-6)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                int(mlp_ratio * embed_dim),
                mixer=mixer if i < linear_layers else "softmax",
                mixer_kwargs=layer_options(mixer, i, options) if i < linear_layers else common,
                norm_layer=norm_layer,
                mlp_layer=partial(Mlp, drop=proj_drop_rate),
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
        """Initialise as DeiT does: every linear layer truncated N(0, 0.02), the rest as mixers and PyTorch do.

        Args:
            needs_reset: initialise the rest too, as after ``to_empty`` on a model built on the meta device.
        """
        if needs_reset:
            reset_parts(self)
        init_linears(self, std=0.02, truncated=True, skip_mixers=False)
        self._init_tokens()


_RULES = [
    (r"^(blocks\.\d+)\.attn\.qkv\.", r"\1.mixer.to_qkv."),
    (r"^(blocks\.\d+)\.attn\.proj\.", r"\1.mixer.to_out.0."),
    (r"^(blocks\.\d+)\.attn\.dwc\.", r"\1.mixer.conv."),
    (r"^(blocks\.\d+)\.attn\.residual\.", r"\1.mixer.kernel_net."),
]
# Agent attention's biases: table and order of its axes (heads, agents, rows, columns) in the original.
_BIASES = {
    "an_bias": ("to_agents.area", None),
    "ah_bias": ("to_agents.rows", None),
    "aw_bias": ("to_agents.columns", None),
    "ac_bias": ("to_agents.prefix", None),
    "na_bias": ("from_agents.area", None),
    "ha_bias": ("from_agents.rows", (0, 1, 4, 2, 3)),
    "wa_bias": ("from_agents.columns", (0, 1, 4, 2, 3)),
    "ca_bias": ("from_agents.prefix", (0, 1, 3, 2)),
}


def convert_deit_checkpoint(state_dict: dict, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of an original DeiT (also timm's), Agent-DeiT or InLine-DeiT checkpoint, or of one of ours, under our
    names; ``model`` is the one to be filled. What belongs to places is resampled for another grid.

    Raises:
        ValueError: tensors do not fit; the message names them.
    """
    converted = {}
    for key, value in unwrap(state_dict).items():
        bias = re.match(r"^(blocks\.\d+)\.attn\.([ahnwc]{2}_bias)$", key)
        if bias and bias[2] in _BIASES:
            table, order = _BIASES[bias[2]]
            value = value if order is None or value.ndim != len(order) else value.permute(order)
            rows, columns = value.shape[-2:] if not table.endswith("prefix") else (1, 1)
            converted[f"{bias[1]}.mixer.{table}.weight"] = value.reshape(-1, rows, columns)
        else:
            converted[rename(key, _RULES)] = value
    return fit_checkpoint(converted, model)


def _create(variant: str, pretrained: bool, own: tuple[str, dict[str, Any]], **kwargs) -> LinearDeit:
    """``own`` is the model's mixer and its keywords, which another mixer does not get."""
    name, options = own
    if kwargs.setdefault("mixer", name) == name:
        kwargs["mixer_kwargs"] = {**options, **(kwargs.get("mixer_kwargs") or {})}
    return build_plain(LinearDeit, variant, pretrained, convert_deit_checkpoint, **kwargs)


_FLATTEN = ("focused", {})
_AGENT = ("agent", {"prefix_bias": True})
_INLINE = ("inline", {})
_SIZES = ["flatten_deit_tiny", "flatten_deit_small", "agent_deit_tiny", "agent_deit_small", "agent_deit_base"]
default_cfgs = generate_default_cfgs(
    {
        **{f"{name}.untrained": plain_cfg() for name in _SIZES},
        "inline_deit_tiny.untrained": plain_cfg(),
        "inline_deit_small.untrained": plain_cfg(input_size=(3, 288, 288)),
        "inline_deit_base.untrained": plain_cfg(input_size=(3, 448, 448)),
        "test_agent_deit.untrained": plain_cfg(input_size=(3, 160, 160)),
    }
)


@register_model
def flatten_deit_tiny(pretrained: bool = False, **kwargs) -> LinearDeit:
    """FLatten-DeiT-T (arXiv:2308.00442, fig. 6), linear in all layers: the softmax that FLatten's released models keep
    is in the late stages of staged ones."""
    args = {"embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return _create("flatten_deit_tiny", pretrained, _FLATTEN, **args)


@register_model
def flatten_deit_small(pretrained: bool = False, **kwargs) -> LinearDeit:
    """FLatten's attention in DeiT-S, a size that the paper does not have."""
    args = {"embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    return _create("flatten_deit_small", pretrained, _FLATTEN, **args)


@register_model
def agent_deit_tiny(pretrained: bool = False, **kwargs) -> LinearDeit:
    """Agent-DeiT-T (arXiv:2312.08874, table 1)."""
    args = {"embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return _create("agent_deit_tiny", pretrained, _AGENT, **args)


@register_model
def agent_deit_small(pretrained: bool = False, **kwargs) -> LinearDeit:
    """Agent-DeiT-S; with ``img_size=448`` the paper's model for that size."""
    args = {"embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    return _create("agent_deit_small", pretrained, _AGENT, **args)


@register_model
def agent_deit_base(pretrained: bool = False, **kwargs) -> LinearDeit:
    """Agent-DeiT-B: agent attention, of 81 agents, in the first four layers, softmax in the others; with
    ``all_linear=True`` agents everywhere."""
    args = {"embed_dim": 768, "depth": 12, "num_heads": 12, "linear_layers": 4, **kwargs}
    return _create("agent_deit_base", pretrained, ("agent", {"prefix_bias": True, "agent_size": 9}), **args)


@register_model
def inline_deit_tiny(pretrained: bool = False, **kwargs) -> LinearDeit:
    """InLine-DeiT-T (arXiv:2412.06590, table 4): 224 pixels, heads of 32."""
    args = {"embed_dim": 192, "depth": 12, "num_heads": 6, **kwargs}
    return _create("inline_deit_tiny", pretrained, _INLINE, **args)


@register_model
def inline_deit_small(pretrained: bool = False, **kwargs) -> LinearDeit:
    """InLine-DeiT-S: narrower than DeiT-S, for 288 pixels."""
    args = {"img_size": 288, "embed_dim": 320, "depth": 12, "num_heads": 10, **kwargs}
    return _create("inline_deit_small", pretrained, _INLINE, **args)


@register_model
def inline_deit_base(pretrained: bool = False, **kwargs) -> LinearDeit:
    """InLine-DeiT-B: narrower than DeiT-B, for 448 pixels."""
    args = {"img_size": 448, "embed_dim": 384, "depth": 12, "num_heads": 12, **kwargs}
    return _create("inline_deit_base", pretrained, _INLINE, **args)


@register_model
def test_agent_deit(pretrained: bool = False, **kwargs) -> LinearDeit:
    """A tiny Agent-DeiT for tests: 64 channels, 4 blocks, the last two of softmax."""
    args = {"img_size": 160, "embed_dim": 64, "depth": 4, "num_heads": 2, "linear_layers": 2, **kwargs}
    return _create("test_agent_deit", pretrained, _AGENT, **args)

"""ViG: a plain vision backbone of bidirectional gated linear attention (arXiv:2405.18425).

Complexity is linear in the number of tokens, any rectangle divisible by the patch size goes in, and any mixer of
``scanvas.list_mixers()`` takes the place of the attention: ``timm.create_model("vig_small_patch16_224",
mixer="softmax")``.
"""

from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    LayerNorm2d,
    calculate_drop_path_rates,
    get_device_dtype,
    global_pool_nlc,
    register_notrace_function,
    register_notrace_module,
    resample_abs_pos_embed,
    to_2tuple,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from .block import Block, init_linears, swiglu_hidden
from .convert import convert_vig_checkpoint
from .mixers import layer_options
from .norm import block_norm

__all__ = ["Vig"]


@register_notrace_module
class PatchEmbed(nn.Module):
    """Two overlapping convolutions, stride p/2 and 2, each followed by LayerNorm ("v2" of the original code)."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, device=None, dtype=None):
        super().__init__()
        if patch_size < 2 or patch_size % 2:
            raise ValueError(f"patch_size must be an even number of at least 2, got {patch_size}")
        factory = {"device": device, "dtype": dtype}
        self.patch_size = patch_size
        half = patch_size // 2
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, dim // 2, max(3, half + 1), stride=half, padding=1, **factory),
            LayerNorm2d(dim // 2, eps=1e-5, **factory),
            nn.SiLU(),
            nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1, **factory),
            LayerNorm2d(dim, eps=1e-5, **factory),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, H/p, W/p, dim)``.

        Raises:
            ValueError: H or W is not divisible by the patch size; the message names the nearest sizes that are.
        """
        check_divisible(x.shape[-2], x.shape[-1], self.patch_size)
        # Tokens are channels-last, and so is all the way to them: no layout changes between convolution and norm.
        return self.proj(x.contiguous(memory_format=torch.channels_last)).permute(0, 2, 3, 1)


def reset_parts(model: nn.Module) -> None:
    """Call ``reset_parameters`` of every module inside a model, a mixer's after those of its own parts."""
    for module in reversed(list(model.modules())[1:]):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@torch.jit.ignore
def check_divisible(height: int, width: int, patch_size: int) -> None:
    """Refuse an image size that is not made of whole patches."""
    for name, size in (("height", height), ("width", width)):
        if size < patch_size or size % patch_size:
            below = size // patch_size * patch_size
            near = [s for s in (below, below + patch_size) if s > 0]
            raise ValueError(
                f"image {name} must be divisible by the patch size {patch_size}, got {size} (image {height}×{width}); "
                f"the nearest {'sizes are' if len(near) > 1 else 'size is'} {' and '.join(map(str, near))}"
            )


@register_notrace_function
@torch.jit.ignore
def add_position(x: Tensor, pos_embed: Tensor, grid_size: list[int], dynamic: bool) -> Tensor:
    """Add position embeddings ``(1, H·W, C)`` learned on ``grid_size`` to tokens ``(B, H', W', C)``, resampled
    (bicubic) if the grid is another one; returns ``(B, H'·W', C)``."""
    grid = [x.shape[1], x.shape[2]]
    if grid != list(grid_size):
        if not dynamic:
            raise ValueError(
                f"with dynamic_img_size=False the image must have {grid_size[0]}×{grid_size[1]} patches, got "
                f"{grid[0]}×{grid[1]}; call set_input_size or create the model with dynamic_img_size=True"
            )
        pos_embed = resample_abs_pos_embed(
            pos_embed, new_size=grid, old_size=list(grid_size), num_prefix_tokens=0, antialias=False
        )
    return x.flatten(1, 2) + pos_embed


class Vig(nn.Module):
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
        self._check_pool(global_pool, class_token)
        factory = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1 if class_token else 0
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, **factory)
        self.grid_size = self._grid_size(img_size)
        self.pos_embed = nn.Parameter(torch.empty(1, self.grid_size[0] * self.grid_size[1], embed_dim, **factory))
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **factory)) if class_token else None
        self.pos_drop = nn.Dropout(pos_drop_rate)

        mixer_kwargs = {"fused_projections": True, "proj_drop": proj_drop_rate, **(mixer_kwargs or {})}
        if rope:
            mixer_kwargs["rope"] = True
        norm_layer = block_norm(norm, partial(nn.RMSNorm, eps=1e-6))
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
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]
        self.norm = norm_layer(embed_dim, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **factory) if num_classes > 0 else nn.Identity()

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
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    @staticmethod
    def _check_pool(global_pool: str, class_token: bool) -> None:
        allowed = ("", "avg", "max", "avgmax", "token")
        if global_pool not in allowed:
            raise ValueError(f"global_pool must be one of {allowed}, got {global_pool!r}")
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool='token' needs class_token=True")

    def _grid_size(self, img_size: int | tuple[int, int]) -> list[int]:
        height, width = to_2tuple(img_size)
        patch = self.patch_embed.patch_size
        check_divisible(height, width, patch)
        return [height // patch, width // patch]

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one, and the pooling if it is given."""
        if global_pool is not None:
            self._check_pool(global_pool, self.cls_token is not None)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = (
            nn.Linear(self.embed_dim, num_classes, **get_device_dtype(self)) if num_classes > 0 else nn.Identity()
        )
        self.head.train(self.training)

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample the position embeddings for images of another size."""
        old, self.grid_size = self.grid_size, self._grid_size(img_size)
        if self.grid_size != old:
            resampled = resample_abs_pos_embed(
                self.pos_embed, new_size=self.grid_size, old_size=old, num_prefix_tokens=0, antialias=False
            )
            self.pos_embed = nn.Parameter(resampled.detach(), requires_grad=self.pos_embed.requires_grad)
        update_model_input_size(self, to_2tuple(img_size))

    def _embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.patch_embed(x)
        grid = (x.shape[1], x.shape[2])
        x = add_position(x, self.pos_embed, self.grid_size, self.dynamic_img_size)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x), dim=1)
        return self.pos_drop(x), grid

    def forward_features(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, tokens, embed_dim)``, the class token first if there is one."""
        x, grid = self._embed(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid, self.num_prefix_tokens)
            else:
                x = block(x, grid, self.num_prefix_tokens)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, num_classes)``."""
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ):
        """Features of chosen blocks, with the signature and results of timm's VisionTransformer.

        Args:
            x: ``(B, in_chans, H, W)``.
            indices: the last n blocks if an int, all if ``None``, else those listed.
            return_prefix_tokens: return pairs of features and prefix tokens.
            norm: apply the final norm to each.
            stop_early: do not compute blocks after the last one wanted.
            output_fmt: ``"NCHW"`` or ``"NLC"``.
            intermediates_only: leave out the final features.
            output_dict: return a dictionary with ``image_features`` and ``image_intermediates``.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self._embed(x)
        intermediates = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            if self.grad_checkpointing:
                x = checkpoint(block, x, grid, self.num_prefix_tokens)
            else:
                x = block(x, grid, self.num_prefix_tokens)
            if i in take:
                intermediates.append(self.norm(x) if norm else x)
        prefix = [y[:, : self.num_prefix_tokens] for y in intermediates]
        intermediates = [y[:, self.num_prefix_tokens :] for y in intermediates]
        if output_fmt == "NCHW":
            intermediates = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in intermediates]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0

        if output_dict:
            result = {"image_intermediates": intermediates}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        if with_prefix:
            intermediates = list(zip(intermediates, prefix))
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what ``forward_intermediates`` does not need for these blocks; returns their indices."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take


def _create_vig(variant: str, pretrained: bool = False, gla_kwargs: dict | None = None, **kwargs) -> Vig:
    if kwargs.get("mixer", "gla") == "gla":
        kwargs["mixer_kwargs"] = {**(gla_kwargs or {}), **(kwargs.get("mixer_kwargs") or {})}
    if kwargs.get("features_only"):
        kwargs.setdefault("num_classes", 0)
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        Vig,
        variant,
        pretrained,
        pretrained_filter_fn=convert_vig_checkpoint,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": False,
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj.0",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


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

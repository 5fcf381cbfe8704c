"""What timm asks of a plain backbone: tokens of one size from the first block to the last."""

from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    get_device_dtype,
    global_pool_nlc,
    register_notrace_function,
    resample_abs_pos_embed,
    to_2tuple,
)
from timm.models import build_model_with_cfg
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from scanvas.kernels.norm import gated_add

__all__ = ["PatchEmbedBase", "PlainBackbone", "build_plain", "plain_cfg"]


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
    x = x.flatten(1, 2)
    return gated_add(x, pos_embed.expand_as(x), None)


class PatchEmbedBase(nn.Module):
    """Patches of ``patch_size`` to tokens by the convolution ``proj``, both set by the subclass."""

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, H/p, W/p, dim)``.

        Raises:
            ValueError: H or W is not divisible by the patch size; the message names the nearest sizes that are.
        """
        check_divisible(x.shape[-2], x.shape[-1], self.patch_size)
        return self.embed(x).permute(0, 2, 3, 1)

    def embed(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, dim, H/p, W/p)``."""
        # Tokens are channels-last, and so is all the way to them: no layout changes between convolution and norm.
        return self.proj(x.contiguous(memory_format=torch.channels_last))


class PlainBackbone(nn.Module):
    """The methods of timm's contract for a model of ``patch_embed`` (``(B, in_chans, H, W)`` → ``(B, H/p, W/p, C)``),
    learned positions, ``blocks`` (called as ``block(tokens, grid, prefix)``), ``norm`` and ``head``. A subclass calls
    ``_make_start``, makes ``blocks``, and calls ``_make_end``."""

    def _make_start(
        self,
        patch_embed: nn.Module,
        img_size: int | tuple[int, int],
        embed_dim: int,
        class_token: bool,
        class_position: bool,
        dynamic_img_size: bool,
        pos_drop_rate: float,
        **factory,
    ) -> None:
        """Everything before the blocks. ``class_position``: the class token has a position embedding too, before those
        of the image."""
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.num_prefix_tokens = 1 if class_token else 0
        self.pos_prefix = 1 if class_token and class_position else 0
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False
        self.patch_embed = patch_embed
        self.grid_size = self._grid_size(img_size)
        places = self.pos_prefix + self.grid_size[0] * self.grid_size[1]
        self.pos_embed = nn.Parameter(torch.empty(1, places, embed_dim, **factory))
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **factory)) if class_token else None
        self.pos_drop = nn.Dropout(pos_drop_rate)

    def _make_end(
        self, norm: nn.Module, in_chans: int, num_classes: int, global_pool: str, drop_rate: float, **factory
    ) -> None:
        """Everything after the blocks, and what timm reads."""
        self._check_pool(global_pool, self.cls_token is not None)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": self.embed_dim, "reduction": self.patch_embed.patch_size}
            for i in range(len(self.blocks))
        ]
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.embed_dim, num_classes, **factory) if num_classes > 0 else nn.Identity()

    def _init_tokens(self) -> None:
        """Positions and class token: truncated N(0, 0.02)."""
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
                self.pos_embed,
                new_size=self.grid_size,
                old_size=old,
                num_prefix_tokens=self.pos_prefix,
                antialias=False,
            )
            self.pos_embed = nn.Parameter(resampled.detach(), requires_grad=self.pos_embed.requires_grad)
        update_model_input_size(self, to_2tuple(img_size))

    def _embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.patch_embed(x)
        grid = (x.shape[1], x.shape[2])
        x = add_position(x, self.pos_embed[:, self.pos_prefix :], self.grid_size, self.dynamic_img_size)
        first = self.cls_token
        if first is not None:
            if self.pos_prefix > 0:
                first = first + self.pos_embed[:, : self.pos_prefix]
            x = torch.cat((first.expand(x.shape[0], -1, -1).to(x.dtype), x), dim=1)
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


def build_plain(
    cls: type[PlainBackbone], variant: str, pretrained: bool, pretrained_filter_fn: Any, **kwargs
) -> PlainBackbone:
    """timm's builder, told how to take features of blocks."""
    if kwargs.get("features_only"):
        kwargs.setdefault("num_classes", 0)
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=pretrained_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


def plain_cfg(**kwargs) -> dict[str, Any]:
    """An entry of timm's ``default_cfgs``."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": False,
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }

"""``LinearUDiTTransformer2DModel``: a U-shaped denoiser, with any mixer for its attention, as a diffusers model."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - diffusers looks for it beside its models
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenMixer, layer_options

from .checks import check_multiple, check_one_of, check_outputs, to_size
from .conditioning import AdaLayerNormZero, AdaptiveLayerNorm, TimeEmbedding
from .denoiser_base import Denoiser
from .u_block import U_MLPS, RepConvMLP, UDiTBlock

_WIDTHS = (1, 2, 4, 2, 2)
"""Widths of the five parts over that of the first: the last keeps what it is joined from, twice the first's."""
_LEVELS = (0, 1, 2, 1, 1)
"""Which embedding of time and class each is conditioned on: that of its width."""


class UDiTCondition(nn.Module):
    """Time and class as one vector ``(B, C)``."""

    def __init__(self, dim: int, num_classes: int | None):
        super().__init__()
        self.time_embed = TimeEmbedding(dim)
        self.class_embed = None if num_classes is None else nn.Embedding(num_classes + 1, dim)

    def forward(self, timestep: Tensor, class_labels: Tensor | None, dtype: torch.dtype) -> Tensor:
        condition = self.time_embed(timestep, dtype)
        return condition if self.class_embed is None else condition + self.class_embed(class_labels)


class LinearUDiTTransformer2DModel(Denoiser):
    """U-DiT (arXiv:2405.02730) with any mixer: three levels of widths C, 2C and 4C, at the full, half and quarter size
    of the image, and back with what the way down had. In each block the mixer works on a quarter of the tokens at a
    time. Height and width of images must be divisible by 8.

    There are no position embeddings; the paper's mixer is softmax with rotary positions and cosine similarity
    (``mixer_kwargs={"cosine": True, "rope": True}``, as ``scanvas.create_denoiser("udit_s")`` has it).

    Args:
        sample_size: height and width that images have in training, in pixels of the latent: an int or ``(H, W)``.
        in_channels: channels of the latent.
        out_channels: ``in_channels`` (default), or twice as many for a learned variance.
        depths: blocks on the way down, at the bottom, and on the way up. The paper counts pairs of them.
        num_attention_heads, attention_head_dim: C is heads × head dimension; deeper levels have as many, wider heads.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        mlp: ``"conv"``, or ``"rep"`` for the form that the paper trains, which ``merge_feed_forward`` turns into
            ``"conv"``.
        mlp_ratio: inner width of the feed-forward over that of the tokens.
        num_classes: classes; label ``num_classes`` means none. ``None`` for a model without classes.
        prediction_type, timestep_scale: see ``LinearDiTTransformer2DModel``.

    Raises:
        ValueError: an argument is not allowed; the message names it.
    """

    _no_split_modules = ["UDiTBlock"]  # noqa: RUF012 - diffusers declares these as lists
    _repeated_blocks = ["UDiTBlock"]  # noqa: RUF012

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        in_channels: int = 4,
        out_channels: int | None = None,
        depths: tuple[int, ...] = (4, 10, 16, 10, 4),
        num_attention_heads: int = 4,
        attention_head_dim: int = 24,
        mixer: str = "softmax",
        mixer_kwargs: dict | None = None,
        mlp: str = "conv",
        mlp_ratio: float = 2.0,
        num_classes: int | None = None,
        prediction_type: str = "epsilon",
        timestep_scale: float = 1.0,
    ):
        super().__init__()
        out_channels = check_outputs(in_channels, out_channels, prediction_type, num_classes)
        check_one_of("mlp", mlp, U_MLPS)
        if len(depths) != 5 or min(depths) < 1:
            raise ValueError(f"depths must be five positive numbers of blocks, down to the bottom and up; got {depths}")
        for name, size in zip(("height", "width"), to_size(sample_size)):
            check_multiple(f"sample_size ({name})", size, 8, "what the levels of the model halve")
        dim = num_attention_heads * attention_head_dim
        if dim % 2:
            raise ValueError(f"the width must be even, got {dim}")
        self.register_to_config(out_channels=out_channels)
        self.gradient_checkpointing = False
        widths = [dim * factor for factor in _WIDTHS]

        self.patch_embed = nn.Conv2d(in_channels, dim, 3, padding=1)
        self.condition_embed = nn.ModuleList(UDiTCondition(width, num_classes) for width in widths[:3])
        self.transformer_blocks = nn.ModuleList(
            UDiTBlock(
                width,
                num_attention_heads,
                int(mlp_ratio * width),
                mixer=mixer,
                mixer_kwargs=layer_options(mixer, i, mixer_kwargs),
                mlp=mlp,
            )
            for width, depth in zip(widths, depths)
            for i in range(depth)
        )
        # Half the channels and four times as many tokens' worth of them, or the reverse; then the sizes change.
        self.down_convs = nn.ModuleList(nn.Conv2d(c, c // 2, 3, padding=1, bias=False) for c in widths[:2])
        self.up_convs = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, padding=1, bias=False) for c in widths[2:4])
        self.join_convs = nn.ModuleList(nn.Conv2d(c, widths[3], 1) for c in (widths[2], widths[1]))
        self.conv_out = nn.Conv2d(widths[4], widths[4], 3, padding=1)
        self.norm_out = AdaptiveLayerNorm(widths[4])
        self.modulation_out = AdaLayerNormZero(widths[4], 2)
        self.proj_out = nn.Conv2d(widths[4], out_channels, 3, padding=1)
        self._init_weights()

    @classmethod
    def size_multiple(cls, config: Mapping[str, Any]) -> int:
        return 8  # two halvings between levels, one within a block

    @torch.no_grad()
    def _init_weights(self) -> None:
        """As the original: Xavier-uniform, and 0.02 for the embeddings."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():  # some mixers have weights of their own
            if isinstance(module, TokenMixer) and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.xavier_uniform_(self.patch_embed.weight.flatten(1))
        for condition in self.condition_embed:
            for layer in (condition.time_embed.linear_1, condition.time_embed.linear_2, condition.class_embed):
                if layer is not None:
                    nn.init.normal_(layer.weight, std=0.02)

    @torch.no_grad()
    def zero_init(self) -> "LinearUDiTTransformer2DModel":
        """Zero adaLN-Zero and the output layer, so that the model predicts 0 at first; see
        ``LinearDiTTransformer2DModel.zero_init``."""
        layers = [block.modulation.linear for block in self.transformer_blocks]
        for layer in (self.proj_out, self.modulation_out.linear, *layers):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        return self

    def merge_feed_forward(self) -> "LinearUDiTTransformer2DModel":
        """Turn the feed-forwards that training has into those that run after it, in place; the result is the same."""
        for block in self.transformer_blocks:
            if isinstance(block.mlp, RepConvMLP):
                block.mlp = block.mlp.merged()
        defaults = [name for name in self.config.get("_use_default_values", []) if name != "mlp"]
        self.register_to_config(mlp="conv", _use_default_values=defaults)
        return self

    def enable_cache(self, config) -> None:
        """As in diffusers, but for the caches that add to the first block's output what all others did last time: here
        they have other widths and sizes.

        Raises:
            ValueError: ``config`` is of such a cache.
        """
        kind = type(config).__name__
        if kind in ("FirstBlockCacheConfig", "MagCacheConfig", "SeaCacheConfig"):
            raise ValueError(f"{kind} skips blocks, for which all must be of one width and size; those of a U are not")
        super().enable_cache(config)

    def _denoise(self, latent, timestep, class_labels, text, text_mask) -> Tensor:
        B, dtype = latent.shape[0], latent.dtype
        timestep = torch.as_tensor(timestep, device=latent.device).reshape(-1).expand(B)
        if class_labels is None and self.config.num_classes is not None:
            class_labels = torch.full((B,), self.config.num_classes, device=latent.device)
        conditions = [embed(timestep, class_labels, dtype) for embed in self.condition_embed]

        blocks = iter(self.transformer_blocks)
        x = self.patch_embed(latent)
        kept: list[Tensor] = []
        for part, depth in enumerate(self.config.depths):
            if part in (1, 2):
                kept.append(x)
                x = nn.functional.pixel_unshuffle(self.down_convs[part - 1](x), 2)
            elif part > 2:
                x = nn.functional.pixel_shuffle(self.up_convs[part - 3](x), 2)
                x = self.join_convs[part - 3](torch.cat((x, kept.pop()), dim=1))
            grid = (x.shape[2], x.shape[3])
            x = x.flatten(2).transpose(1, 2)
            for _ in range(depth):
                block, args = next(blocks), (x, conditions[_LEVELS[part]], grid)
                if torch.is_grad_enabled() and self.gradient_checkpointing:
                    x = self._gradient_checkpointing_func(block, *args)
                else:
                    x = block(*args)
            x = x.transpose(1, 2).unflatten(2, grid)

        shift, scale = self.modulation_out(conditions[_LEVELS[-1]])
        x = self.conv_out(x).flatten(2).transpose(1, 2)
        return self.proj_out(self.norm_out(x, shift, scale).transpose(1, 2).unflatten(2, grid))

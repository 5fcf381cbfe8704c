"""The block of the denoiser: ``backbones.block`` with condition, scan order, text, long skip and convolution."""

from functools import partial

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from scanvas.backbones.block import Block, MixFFN, SwiGLU, swiglu_hidden
from scanvas.backbones.mixers import TokenConv
from scanvas.backbones.scan import check_order, from_order, ordered_grid, to_order
from scanvas.kernels.norm import gated_add

from .attention import CrossAttention, MixerProcessor
from .conditioning import AdaLayerNormSingle, AdaLayerNormZero, AdaptiveLayerNorm

NORMS = {"ada_norm_zero": AdaLayerNormZero, "ada_norm_single": AdaLayerNormSingle}
MLPS = {
    "swiglu": (SwiGLU, lambda dim: swiglu_hidden(dim, 256)),
    "mix": (MixFFN, lambda dim: int(2.5 * dim)),
    "gelu": (partial(Mlp, act_layer=partial(nn.GELU, approximate="tanh")), lambda dim: 4 * dim),
}
"""Name → (layer, its inner width for a width): DiG's, SANA's and DiT's."""


class LinearDiTBlock(Block):
    """One block, tokens in raster order before and after it:

    1. if it receives a long skip, ``x ← W [x; skip]``;
    2. ``x ← x + gate₁ · mixer(shift₁ + (1 + scale₁) · norm(x))``, with the tokens in the block's scan order;
    3. with text, ``x ← x + cross_attention(x, text)``;
    4. ``x ← x + gate₂ · mlp(shift₂ + (1 + scale₂) · norm(x))``;
    5. with ``depthwise_conv``, ``x ← DWConv3×3(x)`` without a residual (DiG's SREM), at first the identity.

    Args:
        dim, num_heads, mlp_hidden, mixer, mixer_kwargs: see ``scanvas.backbones.block.Block``.
        mlp: a name in ``MLPS``.
        norm_type: a name in ``NORMS``; both give the six vectors of one condition.
        order: the scan order, for mixers that depend on one.
        depthwise_conv, long_skip: have steps 5 and 1.
        cross_attention_heads: heads of step 3; ``None`` for a block without text.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_hidden: int | None = None,
        *,
        mixer: str = "gla",
        mixer_kwargs: dict | None = None,
        mlp: str = "swiglu",
        norm_type: str = "ada_norm_zero",
        order: str = "raster",
        depthwise_conv: bool = True,
        long_skip: bool = False,
        cross_attention_heads: int | None = None,
    ):
        mlp_layer, default_hidden = MLPS[mlp]
        super().__init__(
            dim,
            num_heads,
            mlp_hidden or default_hidden(dim),
            mixer=mixer,
            mixer_kwargs=mixer_kwargs,
            norm_layer=AdaptiveLayerNorm,
            mlp_layer=mlp_layer,
        )
        check_order(order)
        self.order = order if self.mixer.needs_scan else "raster"
        self.mlp_sees_grid = mlp == "mix"
        self.modulation = NORMS[norm_type](dim, 6)
        self.skip_linear = nn.Linear(2 * dim, dim) if long_skip else None
        self.attn2 = None if cross_attention_heads is None else CrossAttention(dim, cross_attention_heads)
        self.conv = TokenConv(dim) if depthwise_conv else None
        self.processor = MixerProcessor()

    def get_processor(self):
        return self.processor

    def set_processor(self, processor) -> None:
        self.processor = processor

    def mix(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The mixer alone, in the block's scan order, on tokens in raster order."""
        ordered, turned = to_order(x, self.order, grid)
        return from_order(self.processor(self.mixer, ordered, turned), self.order, grid)

    def forward(
        self,
        hidden_states: Tensor,
        condition: Tensor,
        grid: tuple[int, int],
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            hidden_states: ``(B, H·W, C)``.
            condition: ``(B, C)``, or ``(B, 6·C)`` for adaLN-single.
            grid: ``(H, W)``.
            encoder_hidden_states, encoder_attention_mask: text ``(B, T, C)`` and its mask, see ``key_mask``.
            skip: ``(B, H·W, C)`` for a block that receives a long skip.

        Returns:
            ``(B, H·W, C)``.
        """
        if self.skip_linear is not None:
            hidden_states = self.skip_linear(torch.cat((hidden_states, skip), dim=-1))
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)
        x = self.norm1(hidden_states, shift_1, scale_1, self.order, grid)
        x = self.processor(self.mixer, x, ordered_grid(self.order, grid))
        if self.attn2 is None:
            hidden_states, x = self.norm2.after(hidden_states, x, gate_1, shift_2, scale_2, self.order, grid)
        else:
            hidden_states = gated_add(hidden_states, x, gate_1, order=self.order, grid=grid)
            x = self.attn2(hidden_states, encoder_hidden_states, encoder_attention_mask)
            hidden_states, x = self.norm2.after(hidden_states, x, None, shift_2, scale_2)
        x = self.mlp(x, grid) if self.mlp_sees_grid else self.mlp(x)
        hidden_states = gated_add(hidden_states, x, gate_2)
        return hidden_states if self.conv is None else self.conv(hidden_states, grid)

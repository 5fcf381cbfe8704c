"""Cross-attention to text, and the processors through which diffusers reaches into attention layers."""

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenMixer


class MixerProcessor:
    """Runs the mixer of a block. A replacement, set by ``set_attn_processor``, is called with the same arguments and
    may look at or change what goes in and comes out, e.g. record ``mixer.attention_map(x, grid)``."""

    def __call__(self, mixer: TokenMixer, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return mixer(x, grid)


class CrossAttentionProcessor:
    """Softmax attention from image tokens to text through diffusers' attention backends."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: "CrossAttention",
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        # Without the text's features, as some of diffusers' tools call it, attention is to the tokens themselves.
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        k, v = attn.to_kv(text).chunk(2, dim=-1) if attn.fused_projections else (attn.to_k(text), attn.to_v(text))
        q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in (attn.to_q(hidden_states), k, v))
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        mask, empty = None, None
        if attention_mask is not None:
            mask, empty = key_mask(attention_mask, q.dtype)
        out = dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        out = out.flatten(2).to(hidden_states.dtype)
        if empty is not None:
            out = out.masked_fill(empty, 0)
        for layer in attn.to_out:
            out = layer(out)
        return out


def key_mask(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The mask for scaled dot-product attention, and where nothing is left to attend to.

    Args:
        mask: ``(B, T)``, non-zero where a text token is to be seen; or ``(B, 1, T)``, added to the scores.
        dtype: of the queries.

    Returns:
        ``(B, 1, 1, T)``, bool or ``dtype``; and ``(B, 1, 1)`` bool, true for rows without any visible token, which a
        softmax would make NaN (``None`` for the additive form, which stays finite).

    Raises:
        ValueError: the mask has another number of dimensions.
    """
    if mask.ndim == 3:
        return mask[:, None].to(dtype), None
    if mask.ndim != 2:
        raise ValueError(f"encoder_attention_mask must be (B, T) or (B, 1, T), got shape {tuple(mask.shape)}")
    keep = mask.bool()
    empty = ~keep.any(-1, keepdim=True)
    return (keep | empty)[:, None, None], empty[..., None]


class CrossAttention(nn.Module, AttentionModuleMixin):
    """Image tokens look at text tokens, with RMSNorm on the queries and keys of each head.

    Args:
        dim: channels C of both.
        heads: must divide ``dim``.
    """

    _default_processor_cls = CrossAttentionProcessor
    _available_processors = (CrossAttentionProcessor,)

    def __init__(self, dim: int, heads: int):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"num_cross_attention_heads must divide the width {dim}, got {heads}")
        self.heads = heads
        # What diffusers' tools ask an attention layer for.
        self.use_bias = True
        self.is_cross_attention = True
        self.fused_projections = False
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Identity()])
        self.norm_q = nn.RMSNorm(dim // heads, eps=1e-6)
        self.norm_k = nn.RMSNorm(dim // heads, eps=1e-6)
        self.set_processor(CrossAttentionProcessor())

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """``(B, N, C)``, text ``(B, T, C)`` and its mask, see ``key_mask`` → ``(B, N, C)``."""
        return self.processor(self, hidden_states, encoder_hidden_states, attention_mask)

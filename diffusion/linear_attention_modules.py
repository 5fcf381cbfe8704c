"""The modules that ``linearize`` puts in the place of a model's attention: same names, same calls, same answers."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from .linear_cores import TARGETS, LinearCore
from .linear_cores_placed import PlacedCore

# Keywords that diffusers hands to every attention of a model, and which softmax self-attention ignores as well.
_IGNORED = ("scale", "ip_adapter_masks", "temb")


class GridRecord:
    """The grid of the image's tokens in the forward pass that is running. Hooks write it, attention reads it."""

    def __init__(self):
        self.value: tuple[int, ...] | None = None


def key_weight(mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """A mask of keys as the factor which linear attention puts on them: ``exp`` of what is added to their scores.

    Args:
        mask: ``(B, N)``, ``(B, 1, N)`` or ``(B, 1, 1, N)``; bool (true: to be seen) or added to the scores.

    Returns:
        ``(B, N)`` float32.

    Raises:
        ValueError: the mask differs from query to query or from head to head, which linear attention can not honour.
    """
    if mask is None:
        return None
    shape = tuple(mask.shape)
    if mask.ndim < 2 or mask.shape[0] not in (1, batch) or mask.shape[-1] != tokens or math.prod(shape[1:-1]) != 1:
        raise ValueError(
            "attention_mask: linear attention can only hide keys from all queries alike, with a mask of shape "
            f"(B, N), (B, 1, N) or (B, 1, 1, N) where (B, N) = {(batch, tokens)}; got {shape}"
        )
    mask = mask.reshape(shape[0], tokens)
    if mask.dtype == torch.bool:
        return mask.float()
    if not mask.dtype.is_floating_point:
        raise ValueError(f"attention_mask must be bool, or floating to be added to the scores; got {mask.dtype}")
    return mask.float().exp()


def rotate_pairs(cos: Tensor, sin: Tensor) -> Callable[[Tensor], Tensor]:
    """Rotation of channel pairs (2i, 2i+1) of ``(B, N, heads, D)`` by angles whose cosine and sine are
    ``(N, D/2)`` or ``(B or 1, N, D/2)``."""

    def rotate(x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        even, odd = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)
        c, s = cos.unsqueeze(-2).to(x.device, dtype), sin.unsqueeze(-2).to(x.device, dtype)
        return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype)

    return rotate


def read_rotary(rotary: Any) -> Callable[[Tensor], Tensor] | None:
    """The rotation that one of diffusers' models means by its rotary embedding: a real pair of cosines and sines, each
    value twice (Flux, HunyuanDiT, Wan), a complex pair for image and text (Qwen), or one complex tensor (Lumina)."""
    if rotary is None:
        return None
    if isinstance(rotary, Tensor):
        return rotate_pairs(rotary.real, rotary.imag)
    first, second = rotary
    if first.is_complex():
        angles = torch.cat((second, first))  # text comes before the image
        return rotate_pairs(angles.real, angles.imag)
    cos, sin = first[..., 0::2], second[..., 0::2]
    if cos.ndim == 4:  # (1, N, 1, D)
        cos, sin = cos.squeeze(2), sin.squeeze(2)
    return rotate_pairs(cos, sin)


def norm_width(norm: nn.Module) -> int:
    """Channels that a norm of queries or keys normalises over."""
    return int((norm.normalized_shape if hasattr(norm, "normalized_shape") else norm.dim)[-1])


class LinearizedLayer(nn.Module):
    """What all replaced attention layers have in common: a core, the heads of the softmax, a grid."""

    core: LinearCore
    softmax_heads: int
    record: GridRecord
    parts: dict[str, tuple[str, ...]]
    """``"q"``, ``"k"``, ``"v"``, ``"o"`` → names of the submodules that are inherited with them."""
    target: str
    reads_record: ClassVar[bool] = True
    """Its calls do not tell the grid; hooks do."""

    @property
    def plain_inside(self) -> bool:
        """Nothing stands between the core and the output projection."""
        return True

    def build_core(self, target: str, heads: int, options: dict, dim: int, value_dim: int, streams: int, like: Tensor):
        self.target = target
        factory = {"device": like.device, "dtype": like.dtype}
        self.core = TARGETS[target](dim, value_dim, heads, streams, **options, **factory)

    def start_of_image(self, tokens: int, others: int | None) -> tuple[int, tuple[int, ...] | None]:
        """First image token and the grid, where the image comes last of ``tokens``, after ``others`` (``None``: an
        unknown number). A core that does not need them asks for no grid."""
        if not self.core.needs_grid:
            return 0, None
        grid = self.record.value
        if grid is None:
            raise ValueError(
                "the grid of the image's tokens is not known: the layer was called without its model, or there are "
                f"several images in one sequence, which needs {self.without_grid()}"
            )
        start = tokens - math.prod(grid)
        if start < 0 or (others is not None and start != others):
            raise ValueError(
                f"a grid of {'×'.join(map(str, grid))} does not match {tokens - (others or 0)} image tokens; dropped "
                f"patches and several images in one sequence need {self.without_grid()}"
            )
        return start, grid

    def without_grid(self) -> str:
        """How to linearise so that no grid is needed, for messages."""
        if not isinstance(self.core, PlacedCore):
            return "kernel_size=0"
        if hasattr(self.core, "q_conv"):
            return "kernel_size=0 and qk_kernel_size=0"
        return f"another target than {self.target!r}, such as 'hedgehog', with kernel_size=0"

    def _split(self, x: Tensor, heads: int, norm: nn.Module | None) -> Tensor:
        across = (
            norm is not None and not isinstance(norm, nn.Identity) and norm_width(norm) == x.shape[-1] and heads > 1
        )
        if across:
            x = norm(x)
        x = x.unflatten(-1, (heads, -1))
        return x if norm is None or across else norm(x)


class StreamAttention(LinearizedLayer):
    """Replaces diffusers' ``Attention``, ``FluxAttention`` and ``WanAttention`` as self-attention, with one stream of
    tokens or with two whose projections differ.

    Submodules keep their names (``to_q``, ``to_k``, ``to_v``, ``to_out``, ``norm_q``, ``add_q_proj``, …), which LoRA
    and other tools look for. There is no processor, so nothing that resets processors undoes the swap.

    Args:
        original: the attention to take the submodules from; it must not be used any more.
        target, heads, options: the core, see ``linear_cores``.
        record: where the grid is written.
        text_first: tokens of the text come before those of the image.
        prefix: tokens before the image in a single stream; ``None`` for any number.
    """

    _NAMES = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "add_q_proj", "add_k_proj", "add_v_proj")
    _MORE_NAMES = ("to_add_out", "norm_added_q", "norm_added_k")
    parts = {  # noqa: RUF012
        "q": ("to_q", "norm_q", "add_q_proj", "norm_added_q"),
        "k": ("to_k", "norm_k", "add_k_proj", "norm_added_k"),
        "v": ("to_v", "add_v_proj"),
        "o": ("to_out", "to_add_out"),
    }

    def __init__(
        self,
        original: nn.Module,
        target: str,
        heads: int,
        options: dict,
        record: GridRecord,
        *,
        text_first: bool = True,
        prefix: int | None = 0,
    ):
        super().__init__()
        self.prefix = prefix
        self.softmax_heads = original.heads
        self.record = record
        self.text_first = text_first
        for name in (*self._NAMES, *self._MORE_NAMES):
            setattr(self, name, getattr(original, name, None))
        streams = 1 if self.add_q_proj is None else 2
        dim, width = self.to_q.in_features, self.to_q.out_features
        self.kv_heads = self.to_k.out_features * self.softmax_heads // width
        self.build_core(target, heads, options, dim, width, streams, self.to_q.weight)

    def _project(self, x: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor]:
        if stream:
            layers = (self.add_q_proj, self.add_k_proj, self.add_v_proj, self.norm_added_q, self.norm_added_k)
        else:
            layers = (self.to_q, self.to_k, self.to_v, self.norm_q, self.norm_k)
        to_q, to_k, to_v, norm_q, norm_k = layers
        v = self._split(to_v(x), self.kv_heads, None)
        q = self._split(to_q(self.core.query_input(x, stream)), self.softmax_heads, norm_q)
        k = self._split(to_k(self.core.key_input(x, stream)), self.kv_heads, norm_k)
        if self.kv_heads != self.softmax_heads:
            k, v = (t.repeat_interleave(self.softmax_heads // self.kv_heads, dim=2) for t in (k, v))
        return q.to(v.dtype), k.to(v.dtype), v

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``(B, N, C)``, and text ``(B, T, C)`` for two streams → the same shapes, a tuple for two streams.

        Raises:
            ValueError: a mask that can not be honoured, a grid that does not fit, or a keyword that would be ignored.
        """
        for name, value in kwargs.items():
            if value is not None and name not in _IGNORED:
                raise ValueError(f"{name} is not supported by linearised attention ({type(self).__name__})")
        text = None if encoder_hidden_states is hidden_states else encoder_hidden_states
        if text is not None and self.add_q_proj is None:
            raise ValueError("encoder_hidden_states were given to a linearised self-attention of one stream")
        streams = [(hidden_states, 0)] if text is None else [(hidden_states, 0), (text, 1)]
        if self.text_first:
            streams.reverse()
        projected = [self._project(x, stream) for x, stream in streams]
        q, k, v = (torch.cat(part, dim=1) if text is not None else part[0] for part in zip(*projected))
        x = torch.cat([x for x, _ in streams], dim=1) if text is not None else hidden_states

        B, N = q.shape[:2]
        if attention_mask is not None and self.prefix is None and self.core.needs_grid:
            raise ValueError(
                "attention_mask: with captions of several lengths it is not known where each image lies; call the "
                f"model with one length at a time, or linearize to {self.without_grid()}"
            )
        weight = key_weight(attention_mask, B, N)
        if encoder_hidden_states_mask is not None:
            seen = encoder_hidden_states_mask.float()
            weight = torch.cat((seen, seen.new_ones(B, N - seen.shape[1])), dim=1)
        image = hidden_states.shape[1]
        start, grid = self.start_of_image(image, self.prefix if text is None else 0)
        if text is not None and self.text_first:
            start = N - image
        out = self.core(q, k, v, x, read_rotary(image_rotary_emb), weight, start, grid)
        if text is None:
            return self._out(out)
        parts = out.split((N - image, image) if self.text_first else (image, N - image), dim=1)
        text_out, image_out = parts if self.text_first else parts[::-1]
        return self._out(image_out), text_out if self.to_add_out is None else self.to_add_out(text_out)

    def _out(self, x: Tensor) -> Tensor:
        for layer in self.to_out if self.to_out is not None else ():
            x = layer(x)
        return x


class TimmAttention(LinearizedLayer):
    """Replaces timm's ``Attention``, ``AttentionRope`` and ``EvaAttention``. A fused ``qkv`` is split into ``q_proj``,
    ``k_proj`` and ``v_proj``; ``q_norm``, ``k_norm``, ``norm``, ``gate`` and ``proj`` keep their names.

    Args: as for ``StreamAttention``.
    """

    parts = {  # noqa: RUF012
        "q": ("q_proj", "q_norm"),
        "k": ("k_proj", "k_norm"),
        "v": ("v_proj", "gate"),
        "o": ("norm", "proj"),
    }

    def __init__(self, original: nn.Module, target: str, heads: int, options: dict, record: GridRecord, *, prefix: int):
        super().__init__()
        self.prefix = prefix
        self.softmax_heads = original.num_heads
        self.kv_heads = getattr(original, "num_kv_heads", original.num_heads)
        self.num_prefix_tokens = getattr(original, "num_prefix_tokens", 0)
        self.rotate_half = getattr(original, "rotate_half", False)
        self.record = record
        if original.qkv is not None:
            self.q_proj, self.k_proj, self.v_proj = split_qkv(original)
        else:
            self.q_proj, self.k_proj, self.v_proj = original.q_proj, original.k_proj, original.v_proj
        for name in ("q_norm", "k_norm", "norm", "gate", "proj", "proj_drop"):
            setattr(self, name, getattr(original, name))
        dim, width = self.q_proj.in_features, self.q_proj.out_features
        self.build_core(target, heads, options, dim, width, 1, self.q_proj.weight)

    @property
    def plain_inside(self) -> bool:
        return isinstance(self.norm, nn.Identity) and self.gate is None

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """``(B, prefix + H·W, C)`` → the same shape.

        Raises:
            ValueError: ``is_causal``, or a mask or a grid that can not be honoured.
        """
        if is_causal:
            raise ValueError("is_causal: linearised attention has no direction; call the model with is_causal=False")
        rotate = None
        if rope is not None:

            def rotate(z: Tensor) -> Tensor:
                z = z.transpose(1, 2)
                places = apply_rot_embed_cat(z[:, :, self.num_prefix_tokens :], rope, half=self.rotate_half)
                return torch.cat((z[:, :, : self.num_prefix_tokens], places.to(z.dtype)), dim=2).transpose(1, 2)

        v = self._split(self.v_proj(x), self.kv_heads, None)
        q = self._split(self.q_proj(self.core.query_input(x, 0)), self.softmax_heads, self.q_norm).to(v.dtype)
        k = self._split(self.k_proj(self.core.key_input(x, 0)), self.kv_heads, self.k_norm).to(v.dtype)
        if self.kv_heads != self.softmax_heads:
            k, v = (t.repeat_interleave(self.softmax_heads // self.kv_heads, dim=2) for t in (k, v))
        start, grid = self.start_of_image(x.shape[1], self.prefix)
        out = self.core(q, k, v, x, rotate, key_weight(attn_mask, *x.shape[:2]), start, grid)
        out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


@torch.no_grad()
def split_qkv(attention: nn.Module) -> list[nn.Linear]:
    """Three projections of the weights of timm's fused one, whose biases may lie beside it (EVA)."""
    fused = attention.qkv
    bias = fused.bias
    if bias is None and getattr(attention, "q_bias", None) is not None:
        bias = torch.cat((attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias))
    size = fused.out_features // 3
    layers = []
    for i in range(3):
        part = slice(i * size, (i + 1) * size)
        layer = nn.Linear(
            fused.in_features, size, bias=bias is not None, device=fused.weight.device, dtype=fused.weight.dtype
        )
        layer.weight.copy_(fused.weight[part])
        if bias is not None:
            layer.bias.copy_(bias[part])
        layers.append(layer.requires_grad_(fused.weight.requires_grad))
    return layers

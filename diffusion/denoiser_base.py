"""What all denoisers have in common: a diffusers model whose blocks have mixers."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import USE_PEFT_BACKEND, scale_lora_layers, unscale_lora_layers
from torch import Tensor

from scanvas.backbones.mixers import TokenMixer

from .checks import check_denoiser_inputs


class Denoiser(ModelMixin, ConfigMixin, AttentionMixin, PeftAdapterMixin, CacheMixin):
    """A model that predicts noise, velocity or image from a noisy image, the time and a class or text.

    A subclass makes ``transformer_blocks``, each of which has a ``mixer``, and writes ``_denoise``, ``size_multiple``
    and ``zero_init``. Its config holds at least ``in_channels``, ``out_channels``, ``num_classes``,
    ``prediction_type`` and ``timestep_scale``.
    """

    _supports_gradient_checkpointing = True
    # Embeddings and norms, and the convolutions and decays, whose weights mixers hand to kernels.
    _skip_layerwise_casting_patterns = ["patch_embed", "norm", "embed", "conv", "decay_proj"]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self._fused_mixers: list[TokenMixer] = []

    @classmethod
    @abstractmethod
    def size_multiple(cls, config: Mapping[str, Any]) -> int:
        """What height and width of an image must be divisible by, for a model of this config."""

    @abstractmethod
    def zero_init(self) -> "Denoiser":
        """Zero what is zero when training starts; returns the model."""

    @abstractmethod
    def _denoise(
        self,
        latent: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None,
        text: Tensor | None,
        text_mask: Tensor | None,
    ) -> Tensor:
        """``forward`` on checked inputs: the prediction, ``(B, out_channels, H, W)``."""

    def drop_labels(self, class_labels: Tensor, probability: float, generator: torch.Generator | None = None) -> Tensor:
        """Replace each of the labels ``(B,)`` by the null label with this probability, for training with
        classifier-free guidance (arXiv:2207.12598). The model itself drops nothing, in training or not."""
        drop = torch.rand(class_labels.shape, generator=generator, device=class_labels.device) < probability
        return class_labels.masked_fill(drop, self.config.num_classes)

    def fuse_qkv_projections(self) -> None:
        """One projection instead of three in every mixer, of two in attention to text: quicker, the same result. Not
        while LoRA layers are loaded, which it would lose."""
        if getattr(self, "_hf_peft_config_loaded", False):
            raise ValueError("fuse_qkv_projections would lose the LoRA layers; fuse_lora() and unload_lora() first")
        super().fuse_qkv_projections()
        for block in self.transformer_blocks:
            if not block.mixer.fused_projections:
                block.mixer.fuse_projections()
                self._fused_mixers.append(block.mixer)

    def unfuse_qkv_projections(self) -> None:
        """Undo ``fuse_qkv_projections``."""
        super().unfuse_qkv_projections()
        while self._fused_mixers:
            self._fused_mixers.pop().fuse_projections(False)

    def enable_cache(self, config) -> None:
        """As in diffusers, whose caches that skip blocks are told here what a block takes and returns."""
        TransformerBlockRegistry.register(
            type(self.transformer_blocks[0]), TransformerBlockMetadata(return_hidden_states_index=0)
        )
        super().enable_cache(config)

    @wraps(ModelMixin.save_pretrained)  # pipelines look at its signature
    def save_pretrained(self, *args, **kwargs) -> None:
        # Projections are saved unfused, as ``from_pretrained`` will look for them.
        fused = bool(self._fused_mixers)
        if fused:
            self.unfuse_qkv_projections()
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            if fused:
                self.fuse_qkv_projections()

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        added_cond_kwargs: dict | None = None,
        attention_kwargs: dict | None = None,
        cross_attention_kwargs: dict | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """
        Args:
            hidden_states: ``(B, in_channels, H, W)``, H and W divisible by ``size_multiple(config)``.
            timestep: ``(B,)``, ``(1,)`` or a scalar, in [0, 1000], integer or not.
            class_labels: ``(B,)`` int64 in 0…num_classes; ``None`` for no class.
            encoder_hidden_states: ``(B, T, caption_channels)``, needed by a model with text.
            encoder_attention_mask: ``(B, T)``, non-zero where a text token counts, or ``(B, 1, T)`` to be added to the
                scores. A row without any such token is as if there were no text.
            added_cond_kwargs: accepted for PixArt's pipelines as long as it holds nothing.
            attention_kwargs, cross_attention_kwargs: may hold ``scale``, that of LoRA layers.
            return_dict: return a ``Transformer2DModelOutput``, else a tuple.

        Returns:
            ``sample`` ``(B, out_channels, H, W)``.

        Raises:
            ValueError: an input is missing, superfluous or of the wrong shape.
        """
        scale = self._lora_scale(attention_kwargs, cross_attention_kwargs)
        text, text_mask = encoder_hidden_states, encoder_attention_mask
        check_denoiser_inputs(
            self.config,
            self.size_multiple(self.config),
            hidden_states,
            timestep,
            class_labels,
            text,
            text_mask,
            added_cond_kwargs,
        )
        if scale is not None:
            scale_lora_layers(self, scale)
        try:
            sample = self._denoise(hidden_states, timestep, class_labels, text, text_mask)
        finally:
            if scale is not None:
                unscale_lora_layers(self, scale)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    @staticmethod
    def _lora_scale(*kwargs: dict | None) -> float | None:
        scale = None
        for entries in kwargs:
            for key, value in (entries or {}).items():
                if key != "scale":
                    raise ValueError(f"attention_kwargs may hold 'scale', that of LoRA layers; got {key!r}")
                scale = value
        return scale if USE_PEFT_BACKEND else None

"""diffusers' denoisers as teachers: what each is told of an image, and how it is called.

To add one: a ``Family`` and a line in ``FAMILIES``. Its attention must be known to ``scanvas.linearize``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Condition = dict[str, Tensor]

_FLUX_GUIDANCE = 3.5  # that of its pipeline; the model has been distilled to take it as an input


class Family:
    """One class of denoisers.

    ``wanted`` gives the keys by which denoise_parts.py knows a denoiser; ``encode`` the conditions of captions, tensors
    with one row each, by the pipeline's own encoders; ``call`` the prediction ``(B, C or 2·C, H, W)``.
    """

    prediction = "epsilon"  # where the pipeline's scheduler does not say

    def wanted(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "in_channels": config["in_channels"],
            "out_channels": config.get("out_channels") or config["in_channels"],
            "patch_size": config.get("patch_size", 1),
            "num_classes": None,
            "caption_channels": 1,  # of any width: the pipeline's own encoders make them
            "prediction_type": self.prediction,
        }

    def prepare(self, model: nn.Module) -> nn.Module:
        """Make a loaded model fit to be trained from outside."""
        return model

    def encode(self, pipeline: Any, captions: list[str], device: torch.device) -> Condition:
        raise NotImplementedError

    def call(self, model: nn.Module, noisy: Tensor, times: Tensor, condition: Condition) -> Tensor:
        raise NotImplementedError


class DiT(Family):
    """Classes (arXiv:2212.09748)."""

    def wanted(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            **super().wanted(config),
            "num_classes": config["num_embeds_ada_norm"],
            "caption_channels": None,
        }

    def prepare(self, model: nn.Module) -> nn.Module:
        """It drops labels by itself in training, student and teacher not the same ones: conditions are dropped for both
        alike, before they are called."""
        for block in model.transformer_blocks:
            block.norm1.emb.class_embedder.dropout_prob = 0.0
        return model

    def call(self, model: nn.Module, noisy: Tensor, times: Tensor, condition: Condition) -> Tensor:
        return model(hidden_states=noisy, timestep=times, return_dict=False, **condition)[0]


class PixArt(Family):
    """PixArt-α and -Σ (arXiv:2310.00426, arXiv:2403.04692)."""

    def encode(self, pipeline: Any, captions: list[str], device: torch.device) -> Condition:
        text, mask, *_ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, device=device)
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask}

    def call(self, model: nn.Module, noisy: Tensor, times: Tensor, condition: Condition) -> Tensor:
        size: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if model.use_additional_conditions:
            height, width = noisy.shape[2:]
            pixels = noisy.new_tensor([8.0 * height, 8.0 * width]).expand(len(noisy), 2)
            size = {"resolution": pixels, "aspect_ratio": noisy.new_full((len(noisy), 1), height / width)}
        return model(
            hidden_states=noisy, timestep=times, added_cond_kwargs=size, return_dict=False, **condition
        )[0]  # fmt: skip


class UNet(Family):
    """Stable Diffusion 1.x, 2.x and XL."""

    def wanted(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().wanted(config), "patch_size": 2 ** (len(config["block_out_channels"]) - 1)}

    def encode(self, pipeline: Any, captions: list[str], device: torch.device) -> Condition:
        options = {"device": device, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
        text, *more = pipeline.encode_prompt(captions, **options)
        pooled = {"text_embeds": more[1]} if len(more) > 2 else {}
        return {"encoder_hidden_states": text, **pooled}

    def call(self, model: nn.Module, noisy: Tensor, times: Tensor, condition: Condition) -> Tensor:
        added = None
        if "text_embeds" in condition:  # SDXL is told the size, the corner of a crop, and the size asked for
            height, width = (8.0 * side for side in noisy.shape[2:])
            sizes = noisy.new_tensor([height, width, 0, 0, height, width]).expand(len(noisy), 6)
            added = {"text_embeds": condition["text_embeds"], "time_ids": sizes}
        return model(
            sample=noisy,
            timestep=times,
            encoder_hidden_states=condition["encoder_hidden_states"],
            added_cond_kwargs=added,
            return_dict=False,
        )[0]


class SD3(Family):
    """Stable Diffusion 3 and 3.5 (arXiv:2403.03206)."""

    prediction = "flow_prediction"

    def encode(self, pipeline: Any, captions: list[str], device: torch.device) -> Condition:
        text, _, pooled, _ = pipeline.encode_prompt(
            captions, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, device=device
        )
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def call(self, model: nn.Module, noisy: Tensor, times: Tensor, condition: Condition) -> Tensor:
        return model(hidden_states=noisy, timestep=times, return_dict=False, **condition)[0]


class Flux(Family):
    """FLUX.1, whose image is a sequence of 2×2 patches."""

    prediction = "flow_prediction"

    def wanted(self, config: dict[str, Any]) -> dict[str, Any]:
        channels = config["in_channels"] // 4
        return {**super().wanted(config), "in_channels": channels, "out_channels": channels, "patch_size": 2}

    def encode(self, pipeline: Any, captions: list[str], device: torch.device) -> Condition:
        text, pooled, _ = pipeline.encode_prompt(captions, prompt_2=None, device=device)
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def call(self, model: nn.Module, noisy: Tensor, times: Tensor, condition: Condition) -> Tensor:
        batch, channels, height, width = noisy.shape
        rows, columns = height // 2, width // 2
        packed = noisy.view(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2)
        places = noisy.new_zeros(rows, columns, 3)
        places[..., 1], places[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
        text = condition["encoder_hidden_states"]
        guidance = noisy.new_full((batch,), _FLUX_GUIDANCE) if model.config.guidance_embeds else None
        made = model(
            hidden_states=packed,
            timestep=times / 1000,
            img_ids=places.view(-1, 3),
            txt_ids=noisy.new_zeros(text.shape[1], 3),
            guidance=guidance,
            return_dict=False,
            **condition,
        )[0]
        made = made.view(batch, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return made.reshape(batch, channels, height, width)


FAMILIES: dict[str, Family] = {
    "DiTTransformer2DModel": DiT(),
    "PixArtTransformer2DModel": PixArt(),
    "UNet2DConditionModel": UNet(),
    "SD3Transformer2DModel": SD3(),
    "FluxTransformer2DModel": Flux(),
}
"""Class of the denoiser → its family."""

"""The text-to-image pipeline."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - diffusers looks for it beside a pipeline's class
from diffusers.utils import logging
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .denoiser import LinearDiTTransformer2DModel
from .pipeline import Callback, Generators, LinearDiTPipelineBase, Vae

logger = logging.get_logger(__name__)


def _repeat(
    embeds: Tensor | None, mask: Tensor | None, repeats: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if embeds is None:
        return None, None
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64) if mask is None else mask
    return tuple(t.to(device).repeat_interleave(repeats, dim=0) for t in (embeds, mask))


class LinearDiTTextToImagePipeline(LinearDiTPipelineBase):
    """Paints images from text.

    Args:
        tokenizer: of the text encoder; needs a padding token.
        text_encoder: any transformers model whose first output is a sequence of features as wide as the denoiser's
            ``caption_channels``: T5's or CLIP's text encoder, a language model without head, ….
        transformer: a denoiser with ``caption_channels``.
        scheduler: any of diffusers' that goes with the denoiser's ``prediction_type``.
        vae: an autoencoder with as many latent channels as the denoiser has input channels; ``None`` to paint pixels.
        max_sequence_length: tokens of a prompt, as in training; saved with the pipeline.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _callback_tensor_inputs = ["latents", "prompt_embeds", "negative_prompt_embeds"]  # noqa: RUF012

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: PreTrainedModel,
        transformer: LinearDiTTransformer2DModel,
        scheduler: SchedulerMixin,
        vae: Vae = None,
        max_sequence_length: int = 77,
    ):
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, scheduler=scheduler, vae=vae
        )
        self.register_to_config(max_sequence_length=max_sequence_length)
        self._setup()

    def _tokens(self, prompts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """Token ids and mask, ``(B, length)`` each; a prompt that is too long is cut with a warning."""
        if self.tokenizer.pad_token is None:
            raise ValueError("tokenizer has no padding token; set tokenizer.pad_token, as in training")
        length = min(length, self.tokenizer.model_max_length)
        tokens = self.tokenizer(
            prompts,
            padding="max_length",
            max_length=length,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        whole = self.tokenizer(prompts, padding=False, truncation=False)["input_ids"]
        for prompt, ids in zip(prompts, whole):
            if len(ids) > length:
                lost = self.tokenizer.decode(ids[length - 1 :], skip_special_tokens=True)
                shown = lost if len(lost) <= 80 else lost[:77] + "..."
                logger.warning(
                    f"The following part of your input was truncated because the text encoder handles sequences up to "
                    f"{length} tokens and the prompt {prompt[:40]!r} has {len(ids)}: {shown}"
                )
        return tokens.input_ids, tokens.attention_mask

    def _encode(self, prompts: list[str], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        ids, mask = self._tokens(prompts, length)
        mask = mask.to(device)
        return self.text_encoder(ids.to(device), attention_mask=mask)[0], mask

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        device: torch.device | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        max_sequence_length: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Features of prompts, each repeated ``num_images_per_prompt`` times.

        Returns:
            ``prompt_embeds`` ``(B, T, D)``, ``prompt_attention_mask`` ``(B, T)``, and the two of the negative prompts,
            by default the empty one; those are ``None`` without guidance.
        """
        device = device or self._execution_device
        length = max_sequence_length or self.config.max_sequence_length
        if prompt_embeds is None:
            prompts = [prompt] if isinstance(prompt, str) else list(prompt)
            prompt_embeds, prompt_attention_mask = self._encode(prompts, length, device)
        if do_classifier_free_guidance and negative_prompt_embeds is None:
            count = len(prompt_embeds)
            negative = [negative_prompt or ""] * count if not isinstance(negative_prompt, list) else negative_prompt
            negative_prompt_embeds, negative_prompt_attention_mask = self._encode(negative, length, device)

        if not do_classifier_free_guidance:
            negative_prompt_embeds = negative_prompt_attention_mask = None
        repeats = num_images_per_prompt
        prompt_embeds, prompt_attention_mask = _repeat(prompt_embeds, prompt_attention_mask, repeats, device)
        negative_prompt_embeds, negative_prompt_attention_mask = _repeat(
            negative_prompt_embeds, negative_prompt_attention_mask, repeats, device
        )
        return prompt_embeds, prompt_attention_mask, negative_prompt_embeds, negative_prompt_attention_mask

    def _check_prompts(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None,
        prompt_embeds: Tensor | None,
        negative_prompt_embeds: Tensor | None,
        max_sequence_length: int | None,
        guided: bool,
    ) -> int:
        """The number of prompts."""
        width = self.transformer.config.caption_channels
        if width is None:
            raise ValueError("the transformer has no text (caption_channels=None)")
        for name, text, embeds in (
            ("prompt", prompt, prompt_embeds),
            ("negative_prompt", negative_prompt, negative_prompt_embeds),
        ):
            if text is not None and embeds is not None:
                raise ValueError(f"give {name} or {name}_embeds, not both")
            if text is not None and not (
                isinstance(text, str) or (isinstance(text, list) and text and all(isinstance(t, str) for t in text))
            ):
                raise TypeError(f"{name} must be a string or a list of strings, got {text!r:.80}")
            if embeds is not None and (embeds.ndim != 3 or embeds.shape[-1] != width):
                raise ValueError(f"{name}_embeds must be (B, T, {width}), got {tuple(embeds.shape)}")
        if prompt is None and prompt_embeds is None:
            raise ValueError("prompt is missing: give prompt or prompt_embeds")
        count = len(prompt_embeds) if prompt is None else 1 if isinstance(prompt, str) else len(prompt)
        if isinstance(negative_prompt, list) and len(negative_prompt) != count:
            raise ValueError(f"negative_prompt has {len(negative_prompt)} entries for {count} prompts")
        if negative_prompt_embeds is not None and (
            len(negative_prompt_embeds) != count
            or (prompt_embeds is not None and negative_prompt_embeds.shape != prompt_embeds.shape)
        ):
            raise ValueError("negative_prompt_embeds must have the shape of prompt_embeds")
        encodes = prompt is not None or (guided and negative_prompt_embeds is None)
        if encodes and (self.text_encoder is None or self.tokenizer is None):
            raise ValueError(
                "without text_encoder and tokenizer give prompt_embeds and, for guidance, negative_prompt_embeds"
            )
        if max_sequence_length is not None and max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be at least 1, got {max_sequence_length}")
        return count

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 30,
        guidance_scale: float = 4.5,
        guidance_rescale: float = 0.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        num_images_per_prompt: int = 1,
        generator: Generators = None,
        latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        max_sequence_length: int | None = None,
        eta: float = 0.0,
        output_type: str = "pil",
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        """
        Args:
            prompt: what to paint, one or many; or ``prompt_embeds``.
            negative_prompt: what to steer away from, one or one per prompt; the empty prompt by default.
            prompt_embeds, negative_prompt_embeds: features ``(B, T, caption_channels)`` instead of text.
            prompt_attention_mask, negative_prompt_attention_mask: their masks ``(B, T)``, all ones by default.
            max_sequence_length: tokens of a prompt, by default that of training.
            num_images_per_prompt: images of each prompt, one after the other.

        The other arguments, the result and the errors are as in ``LinearDiTClassPipeline``.
        """
        if hasattr(callback_on_step_end, "tensor_inputs"):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        count = self._check_prompts(
            prompt, negative_prompt, prompt_embeds, negative_prompt_embeds, max_sequence_length, guidance_scale > 1
        )
        if num_images_per_prompt < 1:
            raise ValueError(f"num_images_per_prompt must be at least 1, got {num_images_per_prompt}")
        batch = count * num_images_per_prompt
        H, W, timesteps = self._check(
            batch,
            height,
            width,
            num_inference_steps,
            output_type,
            (guidance_scale, guidance_rescale, guidance_interval),
            generator,
            latents,
            callback_on_step_end_tensor_inputs,
        )
        embeds, mask, negative_embeds, negative_mask = self.encode_prompt(
            prompt,
            self.do_classifier_free_guidance,
            negative_prompt,
            num_images_per_prompt,
            None,
            prompt_embeds,
            negative_prompt_embeds,
            prompt_attention_mask,
            negative_prompt_attention_mask,
            max_sequence_length,
        )
        if embeds.shape[-1] != self.transformer.config.caption_channels:
            raise ValueError(
                f"text_encoder and transformer do not go together: the features are {embeds.shape[-1]} wide, the "
                f"transformer takes caption_channels = {self.transformer.config.caption_channels}"
            )
        dtype = self.transformer.dtype

        def conditions(state: dict[str, Any], guided: bool) -> dict[str, Any]:
            text, text_mask = state["prompt_embeds"], mask
            if guided:
                text = torch.cat((state["negative_prompt_embeds"], text))
                text_mask = torch.cat((negative_mask, mask))
            return {"encoder_hidden_states": text.to(dtype), "encoder_attention_mask": text_mask}

        shape = (batch, self.transformer.config.in_channels, H, W)
        latents = self._paint(
            self._initial_latents(shape, generator, latents),
            timesteps,
            {"prompt_embeds": embeds, "negative_prompt_embeds": negative_embeds},
            conditions,
            can_guide=negative_embeds is not None,
            generator=generator,
            eta=eta,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
            attention_kwargs=attention_kwargs,
        )
        return self._finish(latents, output_type, return_dict)

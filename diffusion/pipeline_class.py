"""The class-conditional pipeline."""

import difflib
from collections.abc import Sequence
from typing import Any, Union

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - diffusers looks for it beside a pipeline's class
from torch import Tensor

from .denoiser import LinearDiTTransformer2DModel
from .pipeline import Callback, Generators, LinearDiTPipelineBase, Vae
from .u_denoiser import LinearUDiTTransformer2DModel

Transformer = Union[LinearDiTTransformer2DModel, LinearUDiTTransformer2DModel]  # noqa: UP007 - see Vae
Labels = Union[dict[int, str], dict[str, str], None]  # noqa: UP007 - see Vae


class LinearDiTClassPipeline(LinearDiTPipelineBase):
    """Paints images of given classes.

    Args:
        transformer: a denoiser with ``num_classes``.
        scheduler: any of diffusers' that goes with the denoiser's ``prediction_type``.
        vae: an autoencoder with as many latent channels as the denoiser has input channels; ``None`` to paint pixels.
        id2label: names of the classes, label → name, where several names may be given with commas between them, as in
            ImageNet's; saved with the pipeline.
    """

    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self,
        transformer: Transformer,
        scheduler: SchedulerMixin,
        vae: Vae = None,
        id2label: Labels = None,
    ):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        # JSON has no integer keys.
        id2label = {int(label): str(name) for label, name in (id2label or {}).items()}
        self.register_to_config(id2label={str(label): name for label, name in sorted(id2label.items())})
        self.labels = {part.strip(): label for label, name in sorted(id2label.items()) for part in name.split(",")}
        self.labels.update({name: label for label, name in id2label.items()})
        self._setup()

    def get_label_ids(self, names: str | Sequence[str]) -> list[int]:
        """Labels of classes by name.

        Raises:
            ValueError: there is no class of that name.
        """
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self.labels:
                if not self.labels:
                    raise ValueError(f"class {name!r}: the pipeline has no names of classes (id2label); use numbers")
                close = difflib.get_close_matches(name, self.labels, n=3)
                known = close or list(self.labels)[:8]
                raise ValueError(f"no class {name!r}; {'did you mean' if close else 'there are'} {', '.join(known)}?")
        return [self.labels[name] for name in names]

    def _class_labels(self, class_labels: Any) -> list[int]:
        """Numbers and names, alone, in lists or in a tensor → checked numbers."""
        if isinstance(class_labels, Tensor):
            class_labels = class_labels.tolist()
        if isinstance(class_labels, list | tuple):
            return [label for entry in class_labels for label in self._class_labels(entry)]
        count = self.transformer.config.num_classes
        if count is None or self.transformer.config.get("caption_channels") is not None:
            raise ValueError("the transformer must have classes (num_classes) and no text (caption_channels)")
        if isinstance(class_labels, str):
            (class_labels,) = self.get_label_ids(class_labels)
        if isinstance(class_labels, bool) or not isinstance(class_labels, int):
            raise TypeError(f"class_labels must be numbers or names, got {type(class_labels).__name__}")
        if not 0 <= class_labels < count:
            raise ValueError(f"class_labels must be in 0…{count - 1}, got {class_labels}")
        return [class_labels]

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | Tensor,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 4.0,
        guidance_rescale: float = 0.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        num_images_per_prompt: int = 1,
        generator: Generators = None,
        latents: Tensor | None = None,
        eta: float = 0.0,
        output_type: str = "pil",
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        """
        Args:
            class_labels: classes by number or name, one or many.
            height, width: of the images in pixels, divisible by the pixels of a patch; by default those the denoiser
                was made for.
            num_inference_steps: steps of the scheduler.
            guidance_scale: strength of classifier-free guidance (arXiv:2207.12598); 1 or less for none.
            guidance_rescale: 0…1, see ``sampling.guide``.
            guidance_interval: guide only while the time, 1 for noise and 0 for the image, is within (arXiv:2404.07724).
            num_images_per_prompt: images of each class, one after the other.
            generator: one, or one per image; with one per image each comes out as if it were painted alone.
            latents: noise to start from, ``(images, in_channels, H, W)``.
            eta: of DDIM.
            output_type: ``"pil"``, ``"np"`` ``(B, H, W, C)`` in 0…1, ``"pt"`` ``(B, C, H, W)`` in 0…1, or ``"latent"``.
            return_dict: return an ``ImagePipelineOutput``, else a tuple.
            attention_kwargs: ``{"scale": …}`` for LoRA layers.
            callback_on_step_end: called after each step as ``f(pipe, step, timestep, tensors)``; may replace tensors in
                the dict it returns.
            callback_on_step_end_tensor_inputs: which tensors it gets.

        Returns:
            ``images``, ordered as the labels.

        Raises:
            ValueError, TypeError: an argument or component does not fit; nothing has been computed then.
        """
        if hasattr(callback_on_step_end, "tensor_inputs"):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        labels = [label for label in self._class_labels(class_labels) for _ in range(num_images_per_prompt)]
        if not labels:
            raise ValueError("class_labels and num_images_per_prompt must ask for at least one image")
        H, W, timesteps = self._check(
            len(labels),
            height,
            width,
            num_inference_steps,
            output_type,
            (guidance_scale, guidance_rescale, guidance_interval),
            generator,
            latents,
            callback_on_step_end_tensor_inputs,
        )
        conditional = torch.tensor(labels, device=self._execution_device)
        unconditional = torch.full_like(conditional, self.transformer.config.num_classes)

        def conditions(state: dict[str, Any], guided: bool) -> dict[str, Any]:
            return {"class_labels": torch.cat((unconditional, conditional)) if guided else conditional}

        shape = (len(labels), self.transformer.config.in_channels, H, W)
        latents = self._paint(
            self._initial_latents(shape, generator, latents),
            timesteps,
            {},
            conditions,
            can_guide=True,
            generator=generator,
            eta=eta,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
            attention_kwargs=attention_kwargs,
        )
        return self._finish(latents, output_type, return_dict)

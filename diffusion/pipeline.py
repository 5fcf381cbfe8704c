"""What the pipelines share: checks, the denoising loop, decoding."""

from collections.abc import Callable, Sequence
from typing import Any, Union

import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny, DiffusionPipeline, ImagePipelineOutput
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from .checks import check_multiple, to_size
from .lora import DenoiserLoraMixin
from .sampling import (
    check_generators,
    check_guidance,
    check_output,
    check_scheduler,
    guide,
    set_timesteps,
    step_keywords,
    takes_variance,
)

Callback = Callable[[DiffusionPipeline, int, Tensor, dict[str, Any]], dict[str, Any]]
# Older versions of diffusers read the types of components from annotations, but not when written with |.
Vae = Union[AutoencoderKL, AutoencoderDC, AutoencoderTiny, None]  # noqa: UP007
Generators = torch.Generator | list[torch.Generator] | None


class LinearDiTPipelineBase(DiffusionPipeline, DenoiserLoraMixin):
    """Base of the class-conditional and the text-to-image pipeline.

    A subclass registers ``transformer``, ``scheduler`` and ``vae`` (``None`` to paint pixels in [-1, 1]) and calls
    ``_paint`` with two functions that give the keywords of the denoiser with and without condition.
    """

    _optional_components = ["vae"]  # noqa: RUF012 - diffusers declares these as lists
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012

    def _setup(self) -> None:
        """To be called after the components are registered."""
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor)
        self._guidance_scale, self._guidance_rescale, self._guidance_interval = 1.0, 0.0, (0.0, 1.0)
        self._num_timesteps = 0
        self._interrupt = False

    def enable_vae_tiling(self, **options: Any) -> None:
        """Encode and decode large images in overlapping tiles, blended at their seams: the autoencoder then needs the
        memory of one tile, whatever the size of the image.

        Args:
            options: of the autoencoder's own ``enable_tiling``.

        Raises:
            ValueError: there is no autoencoder.
        """
        self._autoencoder("tiling").enable_tiling(**options)

    def disable_vae_tiling(self) -> None:
        """Encode and decode images in one piece again."""
        self._autoencoder("tiling").disable_tiling()

    def enable_vae_slicing(self) -> None:
        """Decode the images of a batch one by one."""
        self._autoencoder("slicing").enable_slicing()

    def disable_vae_slicing(self) -> None:
        """Decode the images of a batch together again."""
        self._autoencoder("slicing").disable_slicing()

    def _autoencoder(self, what: str) -> Any:
        if self.vae is None:
            raise ValueError(f"VAE {what}: this pipeline paints pixels and has no vae")
        return self.vae

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent along each axis; 1 without a VAE."""
        if getattr(self, "vae", None) is None:
            return 1
        if hasattr(self.vae, "spatial_compression_ratio"):
            return int(self.vae.spatial_compression_ratio)
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def guidance_rescale(self) -> float:
        return self._guidance_rescale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def _check(
        self,
        batch: int,
        height: int | None,
        width: int | None,
        steps: int,
        output_type: str,
        guidance: tuple[float, float, tuple[float, float]],
        generator: Generators,
        latents: Tensor | None,
        callback_inputs: Sequence[str],
    ) -> tuple[int, int, Tensor]:
        """All that can be wrong, before any work. Returns the height and width in latents, and the timesteps."""
        c = self.transformer.config
        check_scheduler(self.scheduler, c.prediction_type, c.out_channels == 2 * c.in_channels)
        channels = c.in_channels
        if self.vae is not None:
            channels = self.vae.config.get("out_channels", self.vae.config.get("in_channels", 3))
            if self.vae.config.latent_channels != c.in_channels:
                raise ValueError(
                    f"vae and transformer do not go together: the latents of {type(self.vae).__name__} have "
                    f"{self.vae.config.latent_channels} channels, the transformer takes in_channels = {c.in_channels}"
                )
        factor = self.vae_scale_factor
        sizes = []
        for name, size, default in zip(("height", "width"), (height, width), to_size(c.sample_size)):
            size = default * factor if size is None else size
            check_multiple(name, size, factor * self.transformer.size_multiple(c), "pixels of a patch")
            sizes.append(size // factor)
        check_output(output_type, channels)
        check_guidance(*guidance[1:])
        check_generators(generator, batch)
        if latents is not None and tuple(latents.shape) != (batch, c.in_channels, *sizes):
            raise ValueError(f"latents must be {(batch, c.in_channels, *sizes)}, got {tuple(latents.shape)}")
        unknown = set(callback_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs must be among {', '.join(self._callback_tensor_inputs)}; "
                f"got {', '.join(sorted(unknown))}"
            )
        self._guidance_scale, self._guidance_rescale, interval = guidance
        self._guidance_interval = (float(interval[0]), float(interval[1]))
        self._interrupt = False
        tokens = sizes[0] * sizes[1] // c.get("patch_size", 1) ** 2
        timesteps = set_timesteps(self.scheduler, steps, tokens, self._execution_device)
        self._num_timesteps = len(timesteps)
        return *sizes, timesteps

    def _initial_latents(self, shape: tuple[int, ...], generator: Generators, latents: Tensor | None) -> Tensor:
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=torch.float32)
        else:
            latents = latents.to(self._execution_device, torch.float32)
        return latents * getattr(self.scheduler, "init_noise_sigma", 1.0)

    def _guided_now(self, t: Tensor) -> bool:
        """Guidance is on at time ``t`` (arXiv:2404.07724: it helps only in a part of the noise levels)."""
        if not self.do_classifier_free_guidance or self._guidance_interval == (0.0, 1.0):
            return self.do_classifier_free_guidance
        low, high = self._guidance_interval
        return low <= float(t) / self.scheduler.config.num_train_timesteps <= high

    def _paint(
        self,
        latents: Tensor,
        timesteps: Tensor,
        state: dict[str, Any],
        conditions: Callable[[dict[str, Any], bool], dict[str, Any]],
        *,
        can_guide: bool,
        generator: Generators,
        eta: float,
        callback: Callback | PipelineCallback | MultiPipelineCallbacks | None,
        callback_inputs: Sequence[str],
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        """The denoising loop.

        Args:
            latents: ``(B, C, H, W)``, noise.
            timesteps: the scheduler's.
            state: tensors a callback may see and replace, beside the latents.
            conditions: ``conditions(state, guided)`` gives the denoiser's keywords for B inputs, or if guided for 2·B,
                the unconditional ones first.
            can_guide: there is an unconditional condition, should a callback turn guidance on.
            generator, eta: for the scheduler.
            callback, callback_inputs: called after each step with those tensors.
            attention_kwargs: for the denoiser.
        """
        config, dtype = self.transformer.config, self.transformer.dtype
        channels = config.in_channels
        extra = step_keywords(self.scheduler, generator, eta)
        with self.progress_bar(total=len(timesteps)) as bar:
            for i, t in enumerate(timesteps):
                if self.interrupt:
                    continue
                guided = can_guide and self._guided_now(t)
                keywords = conditions(state, guided)
                x = latents
                if hasattr(self.scheduler, "scale_model_input"):
                    x = self.scheduler.scale_model_input(x, t)
                x = torch.cat([x, x]) if guided else x
                # What diffusers' caches keep belongs to one batch size.
                with self.transformer.cache_context("cond_uncond" if guided else "cond"):
                    output = self.transformer(
                        x.to(dtype),
                        timestep=t.expand(len(x)) * config.timestep_scale,
                        attention_kwargs=attention_kwargs,
                        return_dict=False,
                        **keywords,
                    )[0].float()
                if guided:
                    unconditional, conditional = output.chunk(2)
                    output = guide(conditional, unconditional, self._guidance_scale, self._guidance_rescale, channels)
                if not takes_variance(self.scheduler):
                    output = output[:, :channels]
                latents = self.scheduler.step(output, t, latents, **extra, return_dict=False)[0]
                if callback is not None:
                    tensors = {"latents": latents, **state}
                    changed = callback(self, i, t, {name: tensors[name] for name in callback_inputs})
                    latents = changed.pop("latents", latents)
                    state.update({name: changed[name] for name in state if name in changed})
                bar.update()
        return latents

    def _decode(self, latents: Tensor, output_type: str) -> Any:
        """Latents → images as ``output_type``."""
        if output_type == "latent":
            return latents
        if self.vae is None:
            return self.image_processor.postprocess(latents, output_type=output_type)
        config = self.vae.config
        latents = latents / config.scaling_factor + (config.get("shift_factor") or 0.0)
        # Some autoencoders overflow in float16 and say so.
        upcast = self.vae.dtype == torch.float16 and config.get("force_upcast", False)
        if upcast:
            self.vae.to(torch.float32)
        try:
            images = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        finally:
            if upcast:
                self.vae.to(torch.float16)
        return self.image_processor.postprocess(images.float(), output_type=output_type)

    def _finish(self, latents: Tensor, output_type: str, return_dict: bool) -> ImagePipelineOutput | tuple:
        images = self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

"""The classes of linearised models: a diffusers class whose config also says which layers are linear, so that
``from_pretrained`` builds what ``save_pretrained`` wrote; and marked classes of timm's models."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    HunyuanDiT2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - diffusers looks for it in a model's module
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .linear_swap import build_all, install, records_of


def _initialiser(base: type) -> Callable:
    parameters = list(inspect.signature(base.__init__).parameters.values())
    parameters.append(inspect.Parameter("linearization", inspect.Parameter.KEYWORD_ONLY, default=None))

    @wraps(base.__init__)
    def __init__(self, *args: Any, linearization: dict[str, Any] | None = None, **kwargs: Any):
        if not linearization:
            raise ValueError(
                f"{type(self).__name__} needs linearization, which says which layers are linear: load what was saved "
                f"of a linearised model, or linearise a {base.__name__} with scanvas.linearize"
            )
        base.__init__(self, *args, **kwargs)
        install(self, build_all(self, linearization))
        self.register_to_config(linearization=linearization)

    __init__.__signature__ = inspect.Signature(parameters)
    return __init__


class LinearizedModelMixin:
    """First base of a linearised diffusers model; the second is the model's class."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.__init__ = _initialiser(cls.__bases__[1])

    @property
    def linearization(self) -> dict[str, Any]:
        """Which layers are linear, and how: ``{"layers": {path: {"mixer", "heads", "inherit", "options"}}}``."""
        return self.config["linearization"]

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = torch.utils.checkpoint.checkpoint
    ) -> None:
        # What is computed again in the backward pass must see the grid of its own forward pass, not of a later one.
        records = records_of(self)

        def checkpoint(block: Callable, *args: Any) -> Any:
            grids = [record.value for record in records]

            def run(*inputs: Any) -> Any:
                for record, grid in zip(records, grids):
                    record.value = grid
                return block(*inputs)

            return gradient_checkpointing_func(run, *args)

        super()._set_gradient_checkpointing(enable, checkpoint)


class LinearizedDiTTransformer2DModel(LinearizedModelMixin, DiTTransformer2DModel):
    """DiT with linear self-attention."""


class LinearizedPixArtTransformer2DModel(LinearizedModelMixin, PixArtTransformer2DModel):
    """PixArt-α and -Σ with linear self-attention."""


class LinearizedSanaTransformer2DModel(LinearizedModelMixin, SanaTransformer2DModel):
    """SANA with another linear self-attention than its own."""


class LinearizedSD3Transformer2DModel(LinearizedModelMixin, SD3Transformer2DModel):
    """Stable Diffusion 3 and 3.5 with linear joint attention."""


class LinearizedFluxTransformer2DModel(LinearizedModelMixin, FluxTransformer2DModel):
    """Flux with linear joint attention."""


class LinearizedHunyuanDiT2DModel(LinearizedModelMixin, HunyuanDiT2DModel):
    """HunyuanDiT with linear self-attention."""


class LinearizedAuraFlowTransformer2DModel(LinearizedModelMixin, AuraFlowTransformer2DModel):
    """AuraFlow with linear joint attention."""


class LinearizedLumina2Transformer2DModel(LinearizedModelMixin, Lumina2Transformer2DModel):
    """Lumina-Image 2 with linear attention after its refiners."""


class LinearizedQwenImageTransformer2DModel(LinearizedModelMixin, QwenImageTransformer2DModel):
    """Qwen-Image with linear joint attention."""


class LinearizedWanTransformer3DModel(LinearizedModelMixin, WanTransformer3DModel):
    """Wan with linear self-attention."""


class LinearizedUNet2DConditionModel(LinearizedModelMixin, UNet2DConditionModel):
    """The UNet of Stable Diffusion 1.x, 2.x and XL with linear self-attention."""


class LinearizedVisionTransformer(VisionTransformer):
    """timm's ViT and DeiT with linear attention; ``linearization`` says where."""


class LinearizedVisionTransformerDistilled(VisionTransformerDistilled):
    """timm's distilled DeiT with linear attention; ``linearization`` says where."""


class LinearizedEva(Eva):
    """timm's EVA family (EVA-02, DINOv3, …) with linear attention; ``linearization`` says where."""


_MADE: dict[type, type] = {}


def linearized_class(base: type[nn.Module]) -> type[nn.Module]:
    """The linearised class of a model's class; made on the spot for models that came with an adapter of their own."""
    name = f"Linearized{base.__name__}"
    known = globals().get(name)
    if known is not None and base in known.__bases__:
        return known
    if base not in _MADE:
        bases = (LinearizedModelMixin, base) if hasattr(base, "register_to_config") else (base,)
        _MADE[base] = type(name, bases, {"__doc__": f"{base.__name__} with linear attention.", "__module__": __name__})
    return _MADE[base]

"""Where the self-attention of a model lies, and how it is read: one small adapter per family.

To linearise a model that is not listed here, describe it and register it before calling ``linearize``::

    from scanvas.diffusion.adapters import Adapter, register_adapter

    register_adapter(Adapter("MyTransformer2DModel", layers=r"blocks\\.\\d+\\.attn"))

This is all if its self-attention is diffusers' ``Attention``, called with the image's tokens in raster order, and the
model is called with ``hidden_states`` of shape ``(B, C, H, W)`` and has ``config.patch_size``. The fields of
``Adapter`` cover the rest.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .linear_attention_modules import GridRecord, LinearizedLayer, StreamAttention
from .linear_cores import TARGETS

Grid = tuple[int, ...]


def _input(args: tuple, kwargs: dict, index: int = 0, name: str = "hidden_states") -> Any:
    """An argument of a call; ``None`` if it is missing, which the model itself will complain about."""
    return args[index] if len(args) > index else kwargs.get(name)


def latent_grid(model: nn.Module, args: tuple, kwargs: dict) -> Grid | None:
    """Grid of a model called with a latent ``(B, C, H, W)`` or ``(B, C, T, H, W)``."""
    latent = _input(args, kwargs)
    if latent is None:
        return None
    size, patch = latent.shape[2:], model.config.patch_size
    patches = (patch,) * len(size) if isinstance(patch, int) else patch
    return tuple(n // p for n, p in zip(size, patches))


def container_grid(container: nn.Module, args: tuple, kwargs: dict) -> Grid:
    """Grid of a module called with features ``(B, C, H, W)``."""
    return tuple(_input(args, kwargs).shape[2:])


def flux_grid(model: nn.Module, args: tuple, kwargs: dict) -> Grid | None:
    """Grid of Flux, whose image is a sequence: from its position ids. ``None`` if they are not those of one image."""
    ids, latent = _input(args, kwargs, 4, "img_ids"), _input(args, kwargs)
    if ids is None or latent is None or ids.is_meta:
        return None
    tokens = latent.shape[1]
    ids = ids[0] if ids.ndim == 3 else ids
    rows, columns = (int(ids[:, i].max() - ids[:, i].min()) + 1 for i in (1, 2))
    return (rows, columns) if rows * columns == tokens else None


def qwen_grid(model: nn.Module, args: tuple, kwargs: dict) -> Grid | None:
    """Grid of Qwen-Image: the one shape that all images of the batch have. ``None`` with several images a sample."""
    shapes = _input(args, kwargs, 4, "img_shapes")
    if shapes is None:
        return None
    shapes = {tuple(map(tuple, sample)) if isinstance(sample, list) else (tuple(sample),) for sample in shapes}
    if len(shapes) != 1:
        return None
    (sample,) = shapes
    return sample[0][1:] if len(sample) == 1 and sample[0][0] == 1 else (sample[0] if len(sample) == 1 else None)


def patch_grid(patch_embed: nn.Module, args: tuple, kwargs: dict) -> Grid:
    """Grid of timm's patch embedding, called with images ``(B, C, H, W)``."""
    return tuple(patch_embed.dynamic_feat_size(tuple(args[0].shape[-2:])))


def plain_attention(path: str, attention: nn.Module) -> None:
    """Refuse what diffusers' attention can do beyond self-attention of a sequence."""
    wrong = [
        name
        for name, default in (
            ("group_norm", None),
            ("spatial_norm", None),
            ("residual_connection", False),
            ("rescale_output_factor", 1.0),
            ("only_cross_attention", False),
            ("is_cross_attention", False),
        )
        if getattr(attention, name, default) != default
    ]
    if wrong:
        raise ValueError(f"{path}: attention with {', '.join(wrong)} can not be linearised")


@dataclass(frozen=True)
class Adapter:
    """How to linearise one class of models.

    Args:
        model: name of the class; subclasses are others.
        layers: regular expression of the paths of its self-attention modules, in full.
        grid: ``(module, args, kwargs)`` of a call → grid of the image's tokens, see ``host``.
        host: path of an attention → path of the module whose call tells the grid; by default the model itself.
        text_first: in a joint sequence, text comes before the image.
        prefix: tokens before the image where there is one stream; ``None`` for any number. An int, or a function of
            the model.
        module: the replacement, a ``LinearizedLayer``.
        module_options: keywords for it, from ``(model, path)``.
        classes: names of the attention classes it can replace.
        check: ``(path, attention)``; raises ValueError for what it can not replace.
        options: defaults of targets that differ for this family: target → options.
    """

    model: str
    layers: str
    grid: Callable[[nn.Module, tuple, dict], Grid | None] = latent_grid
    host: Callable[[str], str] = lambda path: ""
    module: type[LinearizedLayer] = StreamAttention
    module_options: Callable[[nn.Module, str], dict[str, Any]] = lambda model, path: {}
    classes: tuple[str, ...] = ("Attention",)
    check: Callable[[str, nn.Module], None] = plain_attention
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def attentions(self, model: nn.Module) -> dict[str, nn.Module]:
        """Path → self-attention, in the order of the model; linearised ones too."""
        return {path: m for path, m in model.named_modules() if re.fullmatch(self.layers, path) and m is not None}

    def heads(self, attention: nn.Module) -> int:
        """Heads of a softmax attention."""
        return attention.heads if hasattr(attention, "heads") else attention.num_heads

    def replace(
        self, model: nn.Module, path: str, original: nn.Module, spec: dict[str, Any], record: GridRecord
    ) -> LinearizedLayer:
        """The replacement, which takes over the submodules of ``original``."""
        return self.module(
            original, spec["mixer"], spec["heads"], spec["options"], record, **self.module_options(model, path)
        )

    def scan_order(self, model: nn.Module, path: str, layer: nn.Module) -> str:
        """The order of the image's tokens, see ``backbones.scan``, in which the model will call a replacement."""
        return "raster"

    def verify(self, path: str, attention: nn.Module) -> None:
        """Raise ValueError if it can not be replaced."""
        if type(attention).__name__ not in self.classes:
            raise ValueError(
                f"{path} is {type(attention).__name__}, but for {self.model} only {', '.join(self.classes)} can be "
                "linearised"
            )
        self.check(path, attention)


def _text_last(model: nn.Module, path: str) -> dict[str, Any]:
    return {"text_first": False}


def _any_prefix(model: nn.Module, path: str) -> dict[str, Any]:
    return {"prefix": None}


_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter) -> Adapter:
    """Make ``linearize`` know a class of models; replaces an adapter of the same name."""
    re.compile(adapter.layers)
    _ADAPTERS[adapter.model] = adapter
    return adapter


def known_models() -> list[str]:
    """Names of the classes that ``linearize`` knows."""
    from . import adapters_backbones, adapters_timm, linear_denoiser  # noqa: F401 - register their adapters

    return sorted(_ADAPTERS)


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter of a model, linearised or not.

    Raises:
        ValueError: the class is not known; the message lists those that are.
    """
    known = known_models()
    name = type(model).__name__.removeprefix("Linearized")
    for inside in ("_orig_mod", "module"):  # torch.compile; data parallel wrappers
        if name not in _ADAPTERS and isinstance(getattr(model, inside, None), nn.Module):
            raise ValueError(
                f"{type(model).__name__} wraps a {type(getattr(model, inside)).__name__}: linearize what is inside, "
                f"model.{inside}, and wrap it again"
            )
    if name not in _ADAPTERS:
        raise ValueError(
            f"linearize does not know {type(model).__name__}; it knows {', '.join(known)}. "
            "docs/linearize.md shows how to add a model with scanvas.diffusion.adapters.register_adapter"
        )
    return _ADAPTERS[name]


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``"; did you mean …?"`` with up to three names, or nothing."""
    close = difflib.get_close_matches(word, list(allowed), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


for _adapter in (
    Adapter("DiTTransformer2DModel", r"transformer_blocks\.\d+\.attn1"),
    Adapter("PixArtTransformer2DModel", r"transformer_blocks\.\d+\.attn1"),
    Adapter("SanaTransformer2DModel", r"transformer_blocks\.\d+\.attn1"),
    Adapter("SD3Transformer2DModel", r"transformer_blocks\.\d+\.attn2?", module_options=_text_last),
    Adapter("HunyuanDiT2DModel", r"blocks\.\d+\.attn1"),
    # Captions of several lengths in a batch put the images at several places: no convolutions unless asked for.
    Adapter(
        "Lumina2Transformer2DModel",
        r"layers\.\d+\.attn",
        module_options=_any_prefix,
        options={
            name: {key: 0 for key in ("kernel_size", "qk_kernel_size") if core.defaults.get(key)}
            for name, core in TARGETS.items()
        },
    ),
    Adapter(
        "AuraFlowTransformer2DModel",
        r"(joint|single)_transformer_blocks\.\d+\.attn",
        module_options=_any_prefix,
    ),
    Adapter(
        "FluxTransformer2DModel",
        r"(single_)?transformer_blocks\.\d+\.attn",
        grid=flux_grid,
        module_options=_any_prefix,
        classes=("FluxAttention",),
    ),
    Adapter("QwenImageTransformer2DModel", r"transformer_blocks\.\d+\.attn", grid=qwen_grid),
    Adapter("WanTransformer3DModel", r"blocks\.\d+\.attn1", classes=("WanAttention",)),
    Adapter(
        "UNet2DConditionModel",
        r"(down_blocks\.\d+|up_blocks\.\d+|mid_block)\.attentions\.\d+\.transformer_blocks\.\d+\.attn1",
        grid=container_grid,
        host=lambda path: path.partition(".transformer_blocks.")[0],
    ),
):
    register_adapter(_adapter)

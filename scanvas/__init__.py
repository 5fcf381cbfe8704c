"""scanvas: linear-attention backbones for seeing (timm) and painting (diffusers).

``import scanvas`` registers the ViG models with timm. Everything heavier (diffusers, triton, transformers) is imported
when it is first asked for, so that the import works and stays quick on a machine that has none of them.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# In a source tree the sub-packages lie beside this folder. setuptools' editable finder leads to all of them but
# `kernels`, which has no __init__.py (CONTRIBUTING.md, "Layout"). This leads there, and makes a checkout importable
# without being installed.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "kernels" / "gated").is_dir():
    __path__.append(str(_ROOT))

from scanvas import backbones as _backbones  # noqa: E402, F401 - registers the timm models
from scanvas._diffusers import register as _register_with_diffusers  # noqa: E402
from scanvas.backbones.mixers import create_mixer, list_mixers  # noqa: E402

try:
    __version__ = version("scanvas")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

# public name -> the module that defines it, imported at first use
_LAZY: dict[str, str] = {
    "LinearDiTTransformer2DModel": "scanvas.diffusion.denoiser",
    "LinearUDiTTransformer2DModel": "scanvas.diffusion.u_denoiser",
    "LinearDiTClassPipeline": "scanvas.diffusion.pipeline_class",
    "LinearDiTTextToImagePipeline": "scanvas.diffusion.pipeline_text",
    "create_denoiser": "scanvas.diffusion.presets",
    "convert_dig_checkpoint": "scanvas.diffusion.convert",
    "attention_maps": "scanvas.train.maps",
    "attention_over_steps": "scanvas.train.maps",
    "linearize": "scanvas.diffusion.linearize",
    "delinearize": "scanvas.diffusion.linearize",
    "Budget": "scanvas.diffusion.linear_budget",
    "save_linearized": "scanvas.diffusion.linear_timm",
    "load_linearized": "scanvas.diffusion.linear_timm",
    "LinearizedDiTTransformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedPixArtTransformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedSanaTransformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedSD3Transformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedFluxTransformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedHunyuanDiT2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedAuraFlowTransformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedLumina2Transformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedQwenImageTransformer2DModel": "scanvas.diffusion.linear_classes",
    "LinearizedWanTransformer3DModel": "scanvas.diffusion.linear_classes",
    "LinearizedUNet2DConditionModel": "scanvas.diffusion.linear_classes",
    "LinearizedVisionTransformer": "scanvas.diffusion.linear_classes",
    "LinearizedVisionTransformerDistilled": "scanvas.diffusion.linear_classes",
    "LinearizedEva": "scanvas.diffusion.linear_classes",
}
# diffusers looks for the base class of a library's models beside them.
_HIDDEN = {"ModelMixin": "diffusers"}

__all__ = ["__version__", "create_mixer", "list_mixers", *_LAZY]


_register_with_diffusers(name for name in _LAZY if name[0].isupper() and name != "Budget")  # classes to save and load


def __getattr__(name: str):
    module = _LAZY.get(name) or _HIDDEN.get(name)
    if module:
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'scanvas' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}")


def __dir__():
    return sorted({*globals(), *_LAZY})

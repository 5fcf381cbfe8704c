"""Adapters of our own backbones whose mixers are softmax, all of them or some; see adapters.py."""

from typing import Any

from torch import Tensor, nn

from scanvas.backbones.mixers.softmax import SoftmaxAttention
from scanvas.backbones.rope import apply_rope

from .adapters import Adapter, register_adapter
from .linear_attention_modules import GridRecord, LinearizedLayer


class MixerAttention(LinearizedLayer):
    """Replaces ``SoftmaxAttention``, whose call tells the grid. Submodules keep their names; fused projections are
    split.

    Args: as for ``StreamAttention``.
    """

    parts = {"q": ("to_q", "q_norm"), "k": ("to_k", "k_norm"), "v": ("to_v",), "o": ("to_out",)}  # noqa: RUF012
    reads_record = False

    def __init__(self, original: SoftmaxAttention, target: str, heads: int, options: dict, record: GridRecord):
        super().__init__()
        original.fuse_projections(False)
        self.softmax_heads, self.rope, self.record = original.num_heads, original.rope, record
        for name in (name for names in self.parts.values() for name in names):
            setattr(self, name, getattr(original, name))
        self.build_core(target, heads, options, original.dim, original.dim, 1, self.to_q.weight)

    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(B, prefix + H·W, C)`` → the same shape."""
        v = self.to_v(x).unflatten(-1, (self.softmax_heads, -1))
        q = self.q_norm(self.to_q(self.core.query_input(x, 0)).unflatten(-1, (self.softmax_heads, -1)))
        k = self.k_norm(self.to_k(self.core.key_input(x, 0)).unflatten(-1, (self.softmax_heads, -1)))

        def rotate(z: Tensor) -> Tensor:
            return apply_rope(z, grid, prefix)

        out = self.core(q.to(v.dtype), k.to(v.dtype), v, x, rotate if self.rope else None, None, prefix, tuple(grid))
        return self.to_out(out)


class BackboneAdapter(Adapter):
    """Finds what is softmax; the other mixers of a model are no mistake."""

    def attentions(self, model: nn.Module) -> dict[str, nn.Module]:
        return {
            path: module
            for path, module in super().attentions(model).items()
            if type(module) is SoftmaxAttention or isinstance(module, LinearizedLayer)
        }

    def image_grid(self, model: nn.Module, path: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """Grid of the image's tokens in a layer for images of ``size`` pixels."""
        reduction = model.feature_info[int(path.split(".")[1])]["reduction"]
        return tuple(-(-n // reduction) for n in size)


def _called_with(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return tuple(map(int, args[1] if len(args) > 1 else kwargs["grid"]))


for _name in ("LinearDeit", "Mlla", "Pyramid", "Vig", "VigH"):
    register_adapter(
        BackboneAdapter(
            _name,
            r"(stages\.\d+\.)?blocks\.\d+\.mixer",
            grid=_called_with,
            host=lambda path: path,
            module=MixerAttention,
            classes=("SoftmaxAttention",),
            check=lambda path, attention: None,
        )
    )

"""Adapters of our own backbones whose mixers are softmax, all of them or some; see adapters.py."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.mixers.gated_softmax import GatedSoftmaxAttention
from scanvas.backbones.mixers.softmax import SoftmaxAttention
from scanvas.backbones.rope import apply_rope

from .adapters import Adapter, register_adapter
from .linear_attention_modules import GridRecord, LinearizedLayer


class MixerAttention(LinearizedLayer):
    """Replaces ``SoftmaxAttention`` and ``GatedSoftmaxAttention``, whose local branch, norm and gate stay. Their calls
    tell the grid. Submodules keep their names; fused projections are split.

    Args: as for ``StreamAttention``.
    """

    parts = {  # noqa: RUF012
        "q": ("to_q", "q_norm"),
        "k": ("to_k", "k_norm"),
        "v": ("to_v", "conv", "gate_proj"),
        "o": ("to_out", "out_norm"),
    }
    reads_record = False

    def __init__(self, original: nn.Module, target: str, heads: int, options: dict, record: GridRecord):
        super().__init__()
        original.fuse_projections(False)
        self.softmax_heads, self.rope, self.record = original.num_heads, original.rope, record
        self.endpoint = isinstance(original, GatedSoftmaxAttention)  # of its rotary frequencies
        for name in (name for names in self.parts.values() for name in names):
            setattr(self, name, getattr(original, name, None))
        self.build_core(target, heads, options, original.dim, original.dim, 1, self.to_q.weight)

    @property
    def plain_inside(self) -> bool:
        return self.gate_proj is None

    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        """``(B, prefix + H·W, C)`` → the same shape."""
        v = self._split(self.to_v(x), self.softmax_heads, None)
        q = self._split(self.to_q(self.core.query_input(x, 0)), self.softmax_heads, self.q_norm).to(v.dtype)
        k = self._split(self.to_k(self.core.key_input(x, 0)), self.softmax_heads, self.k_norm).to(v.dtype)

        def rotate(z: Tensor) -> Tensor:
            return apply_rope(z, grid, prefix, endpoint=self.endpoint)

        out = self.core(q, k, v, x, rotate if self.rope else None, None, prefix, tuple(grid))
        if self.conv is not None:
            out = out + F.pad(self.conv(v.flatten(2)[:, prefix:], grid), (0, 0, prefix, 0))
        if self.out_norm is not None:
            out = self.out_norm(out) * F.silu(self.gate_proj(x))
        elif self.gate_proj is not None:
            out = out * self.gate_proj(x)
        return self.to_out(out)


class BackboneAdapter(Adapter):
    """Finds what is softmax; the other mixers of a model are no mistake."""

    def attentions(self, model: nn.Module) -> dict[str, nn.Module]:
        return {
            path: module
            for path, module in super().attentions(model).items()
            if type(module) in (SoftmaxAttention, GatedSoftmaxAttention) or isinstance(module, LinearizedLayer)
        }

    def heads(self, attention: nn.Module) -> int:
        return attention.num_heads

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
            classes=("SoftmaxAttention", "GatedSoftmaxAttention"),
            check=lambda path, attention: None,
        )
    )

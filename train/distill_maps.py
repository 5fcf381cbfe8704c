"""Attention maps of a softmax layer and of the linear layer in its place, for the loss ``attention_map``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenMixer
from scanvas.diffusion.adapters import find_adapter
from scanvas.diffusion.linear_attention_modules import GridRecord, LinearizedLayer

from .errors import ConfigError

_TARGETS = ("hedgehog", "linfusion")  # whose maps are positive, as a cross-entropy needs


class MapProbe:
    """Gives the maps of one pair of layers for the same arguments.

    Args:
        teacher: the softmax model.
        path: of the layer.
        student: the linear layer.

    Raises:
        ConfigError: the linear layer's map can be negative or zero.
    """

    def __init__(self, teacher: nn.Module, path: str, student: nn.Module):
        adapter, self.softmax = find_adapter(teacher), teacher.get_submodule(path)
        own = isinstance(student, TokenMixer)
        target = type(student).__name__ if own else student.target
        if not (student.row_stochastic and not hasattr(student, "conv") if own else target in _TARGETS):
            raise ConfigError(
                f"stages: attention_map is a cross-entropy of maps whose entries are positive and rows sum to one, as "
                f"those of {' and '.join(_TARGETS)}; {path} is {target}"
            )
        self.probe = None
        if not own:
            # The softmax layer's own projections before a core that stands for any: its arguments are looked at only.
            spec = {"mixer": "lit", "heads": adapter.heads(self.softmax), "options": {"kernel_size": 0, "eps": 1e-6}}
            self.probe = adapter.replace(teacher, path, self.softmax, spec, GridRecord())

    def __call__(self, student: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
        """(student's, teacher's) map ``(B, heads, N, N)``; the teacher's is the mean over heads that were fused."""
        if self.probe is None:
            with torch.no_grad():
                wanted = self.softmax.attention_map(*args, **kwargs)
            got = student.attention_map(*args, **kwargs)
        else:
            with torch.no_grad():
                q, k, _, _, rotate, weight, *_ = _core_arguments(self.probe, args, kwargs)
                wanted = softmax_map(q, k, rotate, weight)
            q, k, _, x, rotate, weight, *_ = _core_arguments(student, args, kwargs)
            got = sum(student.core.attention_map_parts(q, k, x, rotate, weight).values())
        return got, wanted.unflatten(1, (got.shape[1], -1)).mean(2)


def softmax_map(q: Tensor, k: Tensor, rotate: Any, weight: Tensor | None) -> Tensor:
    """``(B, N, heads, D)`` → ``(B, heads, N, N)``, keys weighted."""
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    scores = torch.einsum("bnhd,bmhd->bhnm", q.float(), k.float()) * q.shape[-1] ** -0.5
    if weight is not None:
        scores = scores + weight.log()[:, None, None]
    return scores.softmax(-1)


def _core_arguments(layer: LinearizedLayer, args: tuple, kwargs: dict) -> tuple:
    """What a layer hands to its core."""
    seen: list[tuple] = []
    handle = layer.core.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    try:
        layer(*args, **kwargs)
    finally:
        handle.remove()
    return seen[0]

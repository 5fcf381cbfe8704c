"""What stands in for the map of a layer that has none."""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import MixerLayer, Part


class DependenceLayer(MixerLayer):
    """A ``TokenMixer`` without an attention map: rows are how much an output depends on each value, the norms of
    ``∂ output / ∂ value`` (``TokenMixer.dependence``). They are not weights: their product with the values is nothing
    the layer computes."""

    exact = False

    @torch.no_grad()
    def rows(self, index: Tensor | None = None, part: Part = "both") -> Tensor:
        self.check_part(part)
        index = self.place if index is None else self.place[index.to(self.place.device)]
        return self.mixer.dependence(self.x, self.scan_grid, index, prefix=self.prefix)[..., self.place]

    def error(self, samples: int = 64) -> float:
        raise ValueError(f"{self.name}: {type(self.mixer).__name__} has no attention map that could be exact")

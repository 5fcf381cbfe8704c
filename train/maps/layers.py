"""One attention layer as it was in one forward pass: rows of its map, what it looks at, how far and how sharply."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from scanvas.backbones.mixers import MIXERS, TokenMixer
from scanvas.backbones.scan import permutation
from scanvas.diffusion.linear_cores import TARGETS, GlaCore, LinearCore
from scanvas.kernels.linear import attention_matrix

Part = Literal["both", "forward", "backward"]
Query = tuple[int, int] | str | int
PARTS = ("both", "forward", "backward")
_BLOCK_BYTES = 1 << 23
"""Rows are formed in blocks of about this size."""


class LayerMap(ABC):
    """The attention of one layer for the inputs it was given.

    Nothing quadratic is kept: rows are formed when they are asked for. Layers hold on to the model's modules, so ask
    before you train the model further.

    Attributes:
        name: path of the module in the model; ``index``: its number among the layers that were recorded.
        kind: ``"self"``, or ``"cross"`` for attention to text alone.
        heads: number of heads; ``tokens``: of queries; ``keys``: of keys.
        grid: ``(H, W)`` of the image's tokens, ``None`` where it is not known.
        prefix: tokens before the image among the queries: class and register tokens, or text.
        text: where text is among the keys, as a slice; ``None`` without text.
        signed: entries may be negative and rows need not sum to one.
        exact: rows times values are what the layer computes; not so for a layer without a map (``DependenceLayer``).
    """

    signed: bool = False
    exact: ClassVar[bool] = True
    directions: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, grid: tuple[int, int] | None, batch: int, heads: int, tokens: int, keys: int):
        self.name, self.index, self.kind = name, 0, "self"
        self.grid, self.batch, self.heads, self.tokens, self.keys = grid, batch, heads, tokens, keys
        self.prefix = 0
        self.text: slice | None = None
        self._means: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        place = "unknown grid" if self.grid is None else "×".join(map(str, self.grid))
        return f"{type(self).__name__}({self.name!r}, {self.kind}, {self.heads} heads, {place}, prefix {self.prefix})"

    @property
    def what(self) -> str:
        """The attention by its name."""
        return "softmax"

    @abstractmethod
    def rows(self, index: Tensor | None = None, part: Part = "both") -> Tensor:
        """Rows of the map.

        Args:
            index: ``(R,)`` queries, prefix tokens counted; all by default, which takes ``N²`` memory.
            part: one direction of a bidirectional scan, or both; the two add up to both.

        Returns:
            ``(B, heads, R, keys)`` float32 (float64 for a float64 model).

        Raises:
            ValueError: the layer has no such direction.
        """

    @abstractmethod
    def values(self) -> Tensor:
        """The values, ``(B, heads, keys, Dv)``."""

    @abstractmethod
    def attended(self) -> Tensor:
        """What the layer makes of them, ``(B, heads, tokens, Dv)``: the product of map and values, as the model
        computes it, before norm, gate and output projection."""

    def blocks(self, part: Part = "both", index: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """``(queries, rows)`` for blocks of queries, so that no ``N²`` memory is needed."""
        index = torch.arange(self.tokens) if index is None else index
        size = max(1, _BLOCK_BYTES // (4 * self.batch * self.heads * self.keys))
        for queries in index.split(size):
            yield queries, self.rows(queries, part)

    def check_part(self, part: str) -> None:
        allowed = ("both", *self.directions)
        if part not in allowed:
            raise ValueError(f"part must be one of {', '.join(allowed)} for {self.name}, got {part!r}")

    @property
    def image_queries(self) -> Tensor:
        """Indices of the image's tokens among the queries."""
        return torch.arange(self.prefix, self.prefix + math.prod(self._grid()))

    def _grid(self) -> tuple[int, int]:
        if self.grid is None:
            raise ValueError(f"{self.name}: the grid of its tokens is not known; ask for rows(index) instead")
        return self.grid

    def row(self, query: Query, part: Part = "both") -> Tensor:
        """One row: ``(B, heads, keys)``.

        Args:
            query: ``(row, column)`` of a patch of this layer's grid; ``"mean"`` for the mean over the image's queries;
                ``"class"`` for the first prefix token; or the number of a token, prefix tokens counted.
            part: see ``rows``.
        """
        self.check_part(part)
        if query == "mean":
            if part not in self._means:
                sums = sum(rows.sum(2) for _, rows in self.blocks(part, self.image_queries))
                self._means[part] = sums / len(self.image_queries)
            return self._means[part]
        return self.rows(torch.tensor([self.token(query)]), part)[:, :, 0]

    def token(self, query: Query) -> int:
        """The number of the token that ``query`` means (not for ``"mean"``)."""
        if isinstance(query, str):
            if query != "class":
                raise ValueError(f"query must be (row, column), 'mean', 'class' or a token's number; got {query!r}")
            if not self.prefix or self.text is not None:
                raise ValueError(f"query='class': {self.name} has no class token; 'mean' is what pooling looks at")
            return 0
        if isinstance(query, int):
            if not 0 <= query < self.tokens:
                raise ValueError(f"query: {self.name} has tokens 0 to {self.tokens - 1}, got {query}")
            return query
        H, W = self._grid()
        row, column = query
        if not (0 <= row < H and 0 <= column < W):
            raise ValueError(f"query must be (row, column) within {H}×{W} patches for {self.name}, got {tuple(query)}")
        return self.prefix + row * W + column

    def map(self, query: Query = "mean", part: Part = "both") -> Tensor:
        """What the query looks at in the image: ``(B, heads, H, W)``. Arguments as for ``row``."""
        if self.kind == "cross":
            raise ValueError(f"{self.name} looks at text only; word_maps() shows it")
        return self.on_image(self.row(query, part))

    def on_image(self, row: Tensor) -> Tensor:
        """The image's part of ``(…, keys)``, as ``(…, H, W)``."""
        H, W = self._grid()
        return row[..., self.prefix : self.prefix + H * W].unflatten(-1, (H, W))

    def word_maps(self) -> Tensor:
        """How strongly each place looks at each token of the text: ``(B, heads, T, H, W)``.

        Raises:
            ValueError: no text takes part in this layer.
        """
        if self.text is None:
            raise ValueError(f"{self.name} sees no text")
        columns = [rows[..., self.text] for _, rows in self.blocks(index=self.image_queries)]
        return torch.cat(columns, dim=2).mT.unflatten(-1, self._grid())

    def log_decays(self) -> tuple[Tensor, ...]:
        """Log decays ``(B, tokens, heads, Dk)``, one for each direction, in scan order; empty without decay."""
        return ()

    def branches(self) -> dict[str, Tensor]:
        """What the output projection gets, as addends ``(B, tokens, channels)`` by name (``TokenMixer.branches``);
        empty where it is of one piece."""
        return {}

    def attended_gradient(self, gradient: Tensor) -> Tensor:
        """Gradient with respect to ``attended``, ``(B, heads, tokens, Dv)``, from that of what was recorded."""
        raise ValueError(f"{self.name}: gradients with respect to its map are not known")

    def error(self, samples: int = 64) -> float:
        """Largest difference between map × values and what the model computed, over the largest output, for up to so
        many queries spread over all: how exact this map is."""
        index = torch.linspace(0, self.tokens - 1, min(samples, self.tokens)).round().long()
        got = self.rows(index).double() @ self.values().double()
        expected = self.attended()[:, :, index].double()
        return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


class SoftmaxLayer(LayerMap):
    """``softmax(q kᵀ · scale + mask)``: a call of ``scaled_dot_product_attention``, recorded as it was made."""

    def __init__(self, name, grid, q, k, v, out, mask=None, causal=False, scale=None):
        super().__init__(name, grid, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        groups = q.shape[1] // k.shape[1]
        self.q, self.k, self.v = q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        self.out, self.mask, self.causal = out, mask, causal
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale

    def rows(self, index: Tensor | None = None, part: Part = "both") -> Tensor:
        self.check_part(part)
        index = torch.arange(self.tokens) if index is None else index
        index = index.to(self.q.device)
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        scores = (self.q[:, :, index].to(dtype) * self.scale) @ self.k.to(dtype).mT
        if self.mask is not None:
            mask = self.mask if self.mask.ndim < 2 or self.mask.shape[-2] == 1 else self.mask[..., index, :]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(dtype)
        if self.causal:
            later = torch.arange(self.keys, device=index.device) > index[:, None]
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1)

    def values(self) -> Tensor:
        return self.v

    def attended(self) -> Tensor:
        return self.out

    def attended_gradient(self, gradient: Tensor) -> Tensor:
        return gradient


class FeatureLayer(LayerMap):
    """``φ(q) φ(k)ᵀ / (φ(q) · Σ φ(k))``: linear attention outside scanvas, whose features were recorded."""

    def __init__(self, name, grid, q, k, v, eps: float):
        super().__init__(name, grid, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        self.q, self.k, self.v, self.eps = q, k, v, eps

    @property
    def what(self) -> str:
        return "linear"

    def rows(self, index: Tensor | None = None, part: Part = "both") -> Tensor:
        self.check_part(part)
        return attention_matrix(self.q, self.k, eps=self.eps, rows=index)

    def values(self) -> Tensor:
        return self.v.transpose(1, 2)

    def attended(self) -> Tensor:
        v = F.pad(self.v.float(), (0, 1), value=1.0)  # as diffusers computes it
        out = torch.einsum("bnhd,bhdv->bhnv", self.q, torch.einsum("bnhd,bnhv->bhdv", self.k, v))
        return out[..., :-1] / (out[..., -1:] + self.eps)


class MixerLayer(LayerMap):
    """A ``TokenMixer``, for the tokens it was called with."""

    def __init__(self, name: str, mixer: TokenMixer, x: Tensor, grid: tuple[int, int], prefix: int, order: str):
        N = x.shape[1]
        raster = (grid[1], grid[0]) if "column" in order else grid
        super().__init__(name, raster, x.shape[0], mixer.num_heads, N, N)
        self.mixer, self.x, self.scan_grid, self.prefix, self.order = mixer, x, grid, prefix, order
        self.signed = self.exact and not mixer.row_stochastic
        # place[i]: where raster token i was when the mixer saw it
        inverse = permutation(order, raster, x.device)[1] + prefix
        self.place = torch.cat((torch.arange(prefix, device=x.device), inverse))
        with torch.no_grad():
            parts = mixer.attention_map_parts(x[:1, :], grid, torch.tensor([0], device=x.device), prefix=prefix)
        self.directions = tuple(parts)

    @property
    def what(self) -> str:
        return next((name for name, cls in MIXERS.items() if cls is type(self.mixer)), type(self.mixer).__name__)

    @torch.no_grad()
    def rows(self, index: Tensor | None = None, part: Part = "both") -> Tensor:
        self.check_part(part)
        index = self.place if index is None else self.place[index.to(self.place.device)]
        args = (self.x, self.scan_grid, index)
        if part == "both":
            rows = self.mixer.attention_map(*args, prefix=self.prefix)
        else:
            rows = self.mixer.attention_map_parts(*args, prefix=self.prefix)[part]
        return rows[..., self.place]

    @torch.no_grad()
    def values(self) -> Tensor:
        return self.mixer.values(self.x, self.scan_grid, self.prefix)[:, :, self.place]

    @torch.no_grad()
    def attended(self) -> Tensor:
        return self.mixer.attend(self.x, self.scan_grid, self.prefix).transpose(1, 2)[:, :, self.place]

    def attended_gradient(self, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            attended = self.mixer.attend(self.x, self.scan_grid, self.prefix).detach().requires_grad_()
            out = self.mixer.project(self.x, attended, self.scan_grid, self.prefix)
            (found,) = torch.autograd.grad(out, attended, gradient)
        return found.transpose(1, 2)[:, :, self.place]

    @torch.no_grad()
    def log_decays(self) -> tuple[Tensor, ...]:
        return self.mixer.log_decays(self.x, self.scan_grid, prefix=self.prefix)

    @torch.no_grad()
    def branches(self) -> dict[str, Tensor]:
        found = self.mixer.branches(self.x, self.scan_grid, prefix=self.prefix)
        return {name: part[:, self.place] for name, part in found.items()}


class CoreLayer(LayerMap):
    """A layer that ``linearize`` made, for the queries and keys its core was called with."""

    def __init__(self, name: str, core: LinearCore, args: tuple, grid: tuple[int, int] | None):
        self.core = core
        self.q, self.k, self.v, self.x, self.rotate, self.weight, self.start, self.image_grid = args
        N = self.q.shape[1]
        super().__init__(name, grid, self.q.shape[0], core.heads, N, N)
        self.signed = core.signed or self.rotate is not None
        self.directions = ("forward", "backward") if isinstance(core, GlaCore) else ()

    @property
    def what(self) -> str:
        return next((name for name, cls in TARGETS.items() if cls is type(self.core)), type(self.core).__name__)

    @torch.no_grad()
    def rows(self, index: Tensor | None = None, part: Part = "both") -> Tensor:
        self.check_part(part)
        index = None if index is None else index.to(self.q.device)
        place = self.core.place(self.start, self.image_grid)
        parts = self.core.attention_map_parts(self.q, self.k, self.x, self.rotate, self.weight, index, *place)
        return sum(parts.values()) if part == "both" else parts[part]

    @torch.no_grad()
    def values(self) -> Tensor:
        return self.core.fuse(self.v).transpose(1, 2)

    @torch.no_grad()
    def attended(self) -> Tensor:
        place = self.core.place(self.start, self.image_grid)
        return self.core.attend(self.q, self.k, self.v, self.x, self.rotate, self.weight, *place).transpose(1, 2)

    def attended_gradient(self, gradient: Tensor) -> Tensor:
        if isinstance(self.core, GlaCore) and not self.core.normalize:
            raise ValueError(f"{self.name}: there is a norm behind its map (normalize=False)")
        if hasattr(self.core, "scale"):
            gradient = gradient * self.core.scale.detach()
        return gradient.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    @torch.no_grad()
    def log_decays(self) -> tuple[Tensor, ...]:
        return self.core.log_decays(self.x) if isinstance(self.core, GlaCore) else ()

    @torch.no_grad()
    def branches(self) -> dict[str, Tensor]:
        if self.core.conv is None:
            return {}
        args = (self.q, self.k, self.v, self.x, self.rotate, self.weight)
        attended = self.core.mix(*args, *self.core.place(self.start, self.image_grid)).flatten(2)
        return {"attention": attended, "local": self.core(*args, self.start, self.image_grid) - attended}

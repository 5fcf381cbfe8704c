"""Which patches a classifier's decision rests on, and a test of whether that is true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inputs import first_image, open_image, prepare
from .layers import LayerMap
from .recording import Recorder

METHODS = ("gradient", "token_gradient", "rollout")
_FIRST_LAYER = 15 / 24  # of the depth, where the relevance of Vision Mamba's explanation starts


def relevance(
    model: nn.Module,
    image: Any,
    target: int | Tensor | None = None,
    *,
    method: str = "gradient",
    first_layer: int | None = None,
    size: int | None = None,
) -> Tensor:
    """Relevance of each patch for the decision of a classifier, with ``O(N)`` memory.

    All three multiply one matrix ``Ã + I`` for each layer, from the last to the first, into the row of the class token,
    or into the mean row for a model that averages its patches:

    - ``"gradient"``: ``Ã_ij = mean over heads of max(A_ij · ∂logit/∂A_ij, 0)`` (Chefer et al., arXiv:2103.15679, for
      softmax). ``∂logit/∂A_ij`` is the product of the gradient at the layer's output i and the value j, so no matrix is
      needed, and linear attention has it as well.
    - ``"token_gradient"``: ``Ã_ij = mean over heads of max(A_ij, 0) · s_j``, where ``s_j`` is the largest positive
      gradient over the channels of token j behind the layer, scaled to [0, 1] over the tokens, and ``Ã`` likewise over
      the map; rows of ``Ã + I`` sum to one (after Ali et al., arXiv:2403.01590, and their code for Vision Mamba).
    - ``"rollout"``: ``|A|`` with rows that sum to one (Abnar & Zuidema, arXiv:2005.00928). It knows no class.

    Args:
        model: a timm classifier whose attention ``attention_maps`` can record.
        image: as for ``attention_maps``.
        target: class, or ``(B,)`` classes; by default the one predicted.
        method: see above.
        first_layer: the first layer of the product; by default 0, and 5/8 of the depth for
            ``"token_gradient"``.
        size: see ``attention_maps``.

    Returns:
        ``(B, H, W)`` float32, H × W the patches of the first layer of the product; each map sums to one.

    Raises:
        ValueError: unknown method, or a layer whose grid is not known.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    given = open_image(image)
    if not isinstance(given, Tensor):
        given, _ = prepare(model, given, size)
    if first_image(given) is None:
        raise ValueError("image must be an image, its path or a tensor (B, C, H, W)")
    training = model.training
    model.eval()
    try:
        with torch.enable_grad(), Recorder(model, gradients=method != "rollout") as recorder:
            x = given.detach().clone().requires_grad_()
            logits = model(x)
        layers = recorder.layers
        without = [f"{name}: {why}" for name, why in recorder.skipped.items()]
        without += [f"{x.name}: {type(x.mixer).__name__} has no attention map" for x in layers if not x.exact]
        unfit = (x for x in layers if x.grid is None or x.kind != "self")
        without += [f"{x.name}: {x.kind}-attention, grid {x.grid}" for x in unfit]
        if without or not layers:
            raise ValueError(
                f"relevance needs the map of self-attention, on a known grid, of all layers of {type(model).__name__}; "
                f"{'; '.join(without) or 'it has no attention'}"
            )
        start = int(len(layers) * _FIRST_LAYER) * (method == "token_gradient") if first_layer is None else first_layer
        if not -len(layers) <= start < len(layers):
            raise ValueError(f"first_layer must be from {-len(layers)} to {len(layers) - 1}, got {start}")
        layers = layers[start:]
        matrices: list[Matrix] = [Rollout(layer) for layer in layers]
        if method != "rollout":
            tensors = recorder.mixed if method == "gradient" else recorder.outputs
            wanted = logits.argmax(-1) if target is None else torch.as_tensor(target, device=logits.device)
            chosen = logits.gather(1, wanted.expand(len(logits)).view(-1, 1)).sum()
            gradients = torch.autograd.grad(chosen, [tensors[layer.name] for layer in layers])
            kind = Gradient if method == "gradient" else TokenGradient
            matrices = [kind(layer, gradient.detach()) for layer, gradient in zip(layers, gradients)]
    finally:
        model.train(training)
    return _product(matrices, class_token=_starts_at_class(model, layers[-1]))


def _starts_at_class(model: nn.Module, layer: LayerMap) -> bool:
    return layer.prefix > 0 and getattr(model, "global_pool", "token") == "token"


class Matrix:
    """A layer's ``Ã``, by blocks of rows ``(queries, (B, R, N))``."""

    normalize = True
    """Rows of ``Ã + I`` are made to sum to one."""

    def __init__(self, layer: LayerMap):
        self.layer = layer

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def after(self, row: Tensor) -> Tensor:
        """``row · (Ã + I)`` for ``(B, N)``."""
        out = torch.zeros_like(row)
        for queries, a in self.blocks():
            weight = row[:, queries]
            if self.normalize:
                weight = weight / (a.sum(-1) + 1)
            out += torch.einsum("br,brn->bn", weight, a)
            out[:, queries] += weight
        return out


class Rollout(Matrix):
    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for queries, rows in self.layer.blocks():
            a = rows.float().cpu().abs().mean(1)
            yield queries, a / a.sum(-1, keepdim=True).clamp(min=1e-30)


class Gradient(Matrix):
    normalize = False

    def __init__(self, layer: LayerMap, gradient: Tensor):
        super().__init__(layer)
        self.gradient = layer.attended_gradient(gradient).float().cpu()
        self.values = layer.values().detach().float().cpu()

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for queries, rows in self.layer.blocks():
            slope = self.gradient[:, :, queries] @ self.values.mT
            yield queries, (rows.float().cpu() * slope).clamp(min=0).mean(1)


class TokenGradient(Matrix):
    def __init__(self, layer: LayerMap, gradient: Tensor):
        super().__init__(layer)
        s = gradient.float().cpu().amax(-1).clamp(min=0)
        self.score = (s - s.amin(-1, keepdim=True)) / (s.amax(-1, keepdim=True) - s.amin(-1, keepdim=True) + 1e-30)
        edges = [(a.amin((1, 2)), a.amax((1, 2))) for _, a in self._raw()]
        self.low = torch.stack([low for low, _ in edges]).amin(0).view(-1, 1, 1)
        self.high = torch.stack([high for _, high in edges]).amax(0).view(-1, 1, 1)

    def _raw(self) -> Iterator[tuple[Tensor, Tensor]]:
        for queries, rows in self.layer.blocks():
            yield queries, rows.float().cpu().clamp(min=0).mean(1) * self.score[:, None]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for queries, a in self._raw():
            yield queries, (a - self.low) / (self.high - self.low).clamp(min=1e-30)


@torch.no_grad()
def _product(matrices: list[Matrix], class_token: bool) -> Tensor:
    """The row that the head looks at, times the layers' matrices from the last to the first."""
    last = matrices[-1].layer
    start = torch.zeros(last.batch, last.tokens)
    if class_token:
        start[:, 0] = 1.0
    else:
        start[:, last.image_queries] = 1 / len(last.image_queries)
    row, grid = start, last.grid
    for matrix in reversed(matrices):
        if matrix.layer.grid != grid:  # behind this layer the image was made smaller: share the weight out again
            row, start = (_spread(x, grid, matrix.layer.grid) for x in (row, start))
            grid = matrix.layer.grid
        row = matrix.after(row)
    if not matrices[-1].normalize:
        row = (row - start).clamp(min=0)  # what the query brought along says nothing about the others
    image = matrices[0].layer.on_image(row)
    return image / image.sum((-2, -1), keepdim=True).clamp(min=1e-30)


def _spread(row: Tensor, coarse: tuple[int, int], fine: tuple[int, int]) -> Tensor:
    total = row.sum(-1, keepdim=True)
    row = F.interpolate(row.unflatten(-1, (1, *coarse)), size=fine, mode="nearest").flatten(1)
    return row / row.sum(-1, keepdim=True).clamp(min=1e-30) * total


@torch.no_grad()
def deletion_insertion(
    model: nn.Module, image: Tensor, importance: Tensor, target: int, *, steps: int = 16, baseline: float | Tensor = 0.0
) -> dict[str, Tensor]:
    """Does the class's probability fall when the most important patches go, and rise when they come first? (RISE,
    Petsiuk et al., arXiv:1806.07421.)

    Args:
        model: classifier.
        image: ``(1, C, H, W)``, as the model takes it.
        importance: ``(h, w)`` of its patches; H and W must be multiples of h and w.
        target: class whose probability is followed.
        steps: so many times patches are taken away or put in.
        baseline: what stands in place of a patch, a number or a tensor that broadcasts to the image.

    Returns:
        ``deletion`` and ``insertion``, the probabilities ``(steps + 1,)``, and the areas under them,
        ``deletion_area`` (low is good) and ``insertion_area`` (high is good).
    """
    if image.ndim != 4 or len(image) != 1 or any(n % m for n, m in zip(image.shape[-2:], importance.shape)):
        raise ValueError(
            f"image must be (1, C, H, W) with H, W multiples of those of importance; got {tuple(image.shape)} and "
            f"{tuple(importance.shape)}"
        )
    h, w = importance.shape
    order = importance.flatten().argsort(descending=True)
    rank = torch.empty(h * w).scatter_(0, order.cpu(), torch.arange(h * w, dtype=torch.float32))
    counts = torch.linspace(0, h * w, steps + 1).round()
    gone = (rank < counts[:, None]).view(-1, 1, h, w)
    gone = gone.repeat_interleave(image.shape[-2] // h, 2).repeat_interleave(image.shape[-1] // w, 3).to(image.device)
    blank = torch.as_tensor(baseline, dtype=image.dtype, device=image.device).expand_as(image)
    training = model.training
    model.eval()
    curves = []
    for batch in (torch.where(gone, blank, image), torch.where(gone, image, blank)):
        curves.append(model(batch).float().softmax(-1)[:, target].cpu())
    model.train(training)
    deletion, insertion = curves
    return {
        "deletion": deletion,
        "insertion": insertion,
        "deletion_area": torch.trapezoid(deletion) / steps,
        "insertion_area": torch.trapezoid(insertion) / steps,
    }

"""Why a classifier decided as it did: the patches that speak for a class, and a test of whether they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from .attribution import deletion_insertion, relevance
from .inputs import first_image, open_image, prepare, to_picture
from .overlay import overlay

_STEPS, _RANDOM_ORDERS = 12, 3
_NOTE = (
    "Yellow: the patches that the decision rests on. Right: the probability of the class when patches are taken away, "
    "or put in, in that order (lines) and in random orders (dotted)."
)


@dataclass
class Explanation:
    """What ``explain`` returns.

    Attributes:
        target: the class, by number; ``name``: its name; ``probability``: the model's.
        predicted: the class that the model finds most probable.
        relevance: ``(H, W)``, sums to one: the patches that speak for the class (``relevance``, ``"gradient"``).
        rollout: ``(H, W)``, sums to one: what reaches the head at all, whatever the class.
        curves: what ``deletion_insertion`` finds for the order of ``relevance``; ``chance``: for each of some random
            orders.
        picture: the image.
    """

    target: int
    name: str
    probability: float
    predicted: int
    relevance: Tensor
    rollout: Tensor
    curves: dict[str, Tensor]
    chance: list[dict[str, Tensor]]
    picture: Image.Image

    @property
    def random(self) -> dict[str, Tensor]:
        """The mean of ``chance``."""
        return {key: torch.stack([c[key] for c in self.chance]).mean(0) for key in self.curves}

    @property
    def gain(self) -> float:
        """Area between insertion and deletion, less that of random orders: above 0 the map knows more than chance."""
        return (_between(self.curves) - _between(self.random)).item()

    @property
    def beaten(self) -> int:
        """How many of the random orders do worse."""
        return sum(bool(_between(self.curves) > _between(c)) for c in self.chance)

    def __str__(self) -> str:
        random = self.random
        row, column = divmod(int(self.relevance.argmax()), self.relevance.shape[1])
        lines = [
            f"{self.name}: probability {self.probability:.3f}"
            + ("" if self.target == self.predicted else ", not the class that the model predicts"),
            f"rests most on the patch in row {row}, column {column}",
            *(
                f"{what}: area {self.curves[key].item():.3f}, in random order {random[key].item():.3f}"
                for what, key in (("patches taken away", "deletion_area"), ("patches put in", "insertion_area"))
            ),
            f"the map does better than {self.beaten} of {len(self.chance)} random orders ({self.gain:+.3f})",
        ]
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None):
        """A figure: the image, the map of the class, rollout, and the test. Returns a matplotlib figure."""
        from .figure import caption, new_figure, text_below

        ratio = self.picture.height / self.picture.width
        width, panel = 12.0, 2.85
        figure = new_figure(width, panel * ratio + 1.25)
        height = figure.get_figheight()
        edges = {"left": 0.012, "right": 0.988, "top": 1 - 0.72 / height, "bottom": 0.5 / height, "wspace": 0.04}
        grid = figure.add_gridspec(1, 5, width_ratios=[1, 1, 1, 0.12, 0.9], **edges)
        percent = 100 * self.probability
        title = f"Why {self.name}? Its probability is {percent:{'.0f' if percent >= 1 else '.1g'}} %"
        figure.suptitle(title, x=0.012, ha="left", y=1 - 0.12 / height, fontsize=13)
        text_below(figure, _NOTE)
        pictures = [
            ("the image", self.picture),
            (f"speaks for {self.name}", overlay(self.picture, self.relevance)),
            ("reaches the head, for any class", overlay(self.picture, self.rollout)),
        ]
        for i, (name, picture) in enumerate(pictures):
            axes = figure.add_subplot(grid[0, i])
            axes.imshow(picture)
            caption(axes, name, "")
        axes, random = figure.add_subplot(grid[0, 4]), self.random
        for key, name, colour in (("deletion", "taken away", "#d64e0c"), ("insertion", "put in", "#1454c8")):
            share = torch.linspace(0, 100, len(self.curves[key]))
            axes.plot(share, self.curves[key], color=colour, lw=2, label=name)
            axes.plot(share, random[key], color=colour, lw=1, ls=":")
        title = f"better than {self.beaten} of {len(self.chance)} random orders"
        axes.set_title(title, fontsize=8.5, pad=3, loc="left")
        axes.set_xlabel("% of the patches", fontsize=7)
        axes.set_ylim(0, None)
        axes.tick_params(labelsize=7)
        axes.legend(frameon=False, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        return figure


def _between(curves: dict[str, Tensor]) -> Tensor:
    return curves["insertion_area"] - curves["deletion_area"]


def explain(
    model: nn.Module,
    image: Any,
    target: int | str | None = None,
    *,
    size: int | None = None,
    baseline: float = 0.0,
    seed: int = 0,
) -> Explanation:
    """Which patches a classifier's decision rests on (``relevance``), tested by taking them away and putting them in
    (``deletion_insertion``) against random orders.

    Args:
        model: a timm classifier all of whose attention ``attention_maps`` can record.
        image: as for ``attention_maps``; one image.
        target: class, by number or by the name that the model's configuration has for it; by default the one predicted.
        size: see ``attention_maps``.
        baseline: what stands in place of a patch that is away, in normalised pixels.
        seed: of the random orders.

    Returns:
        ``Explanation``.

    Raises:
        ValueError: there is no such class, the input is more than one image, or ``relevance`` has a reason.
    """
    given, picture = open_image(image), None
    if not isinstance(given, Tensor):
        given, picture = prepare(model, given, size)
    if first_image(given) is None or len(given) != 1:
        raise ValueError("image must be one image, its path or a tensor (1, C, H, W)")
    picture = to_picture(given[0]) if picture is None else picture
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            probabilities = model(given)[0].float().softmax(-1).cpu()
    finally:
        model.train(training)
    predicted = int(probabilities.argmax())
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    chosen = predicted if target is None else _class(target, len(probabilities), names)
    found = relevance(model, given, chosen)[0]
    generator = torch.Generator().manual_seed(seed)
    orders = [found, *(torch.rand(found.shape, generator=generator) for _ in range(_RANDOM_ORDERS))]
    curves, *chance = (
        deletion_insertion(model, given, order, chosen, steps=_STEPS, baseline=baseline) for order in orders
    )
    return Explanation(
        target=chosen,
        name=names[chosen] if names else f"class {chosen}",
        probability=probabilities[chosen].item(),
        predicted=predicted,
        relevance=found,
        rollout=relevance(model, given, method="rollout")[0],
        curves=curves,
        chance=chance,
        picture=picture,
    )


def _class(target: int | str, count: int, names: Any) -> int:
    if isinstance(target, str) and names and target in names:
        return list(names).index(target)
    if isinstance(target, int) or target.isdigit():
        if 0 <= int(target) < count:
            return int(target)
        raise ValueError(f"target must be a class from 0 to {count - 1}, got {target}")
    known = f"; it knows {', '.join(map(str, list(names)[:8]))}{', …' if len(names) > 8 else ''}" if names else ""
    raise ValueError(f"target: the model has no class named {target!r}{known or ', nor any names'}")

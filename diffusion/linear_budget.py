"""Which layers to linearise so that attention costs no more than so much, and the model changes least."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from .adapters import Adapter
from .linear_report import default_sizes, layer_costs


@dataclass(frozen=True)
class Budget:
    """For ``layers=`` of ``linearize``: of all sets of layers whose linearisation brings the FLOPs of attention down to
    the budget, the one with the least sum of measured sensitivities.

    The set is exact, by dynamic programming over what is saved and what it costs (a knapsack problem); that errors of
    layers add up is an assumption. If all layers cost the same, these are the least sensitive ones.

    Args:
        flops: what the attention of one image may cost, without its projections: a fraction of the softmax model's
            (float in (0, 1]), or a number of FLOPs (int).
        size: input size at which costs are counted, as in ``sizes`` of ``linearize``; by default the first of those.

    Raises:
        ValueError: ``flops`` is out of range.
    """

    flops: float
    size: tuple[int, ...] | None = None

    def __post_init__(self):
        fraction = isinstance(self.flops, float)
        if isinstance(self.flops, bool) or not isinstance(self.flops, (int, float)):
            raise TypeError(f"Budget: flops must be a fraction (float) or a number of FLOPs (int), got {self.flops!r}")
        if self.flops <= 0 or (fraction and self.flops > 1):
            raise ValueError(
                "Budget: flops must be a fraction in (0, 1] of the softmax's (float) or a positive number of FLOPs "
                f"(int), got {self.flops!r}"
            )


@dataclass(frozen=True)
class Plan:
    """A budget applied to a model: FLOPs of its softmax attention and those allowed; path → FLOPs that linearising the
    layer saves; the size."""

    before: int
    allowed: int
    saved: dict[str, int]
    size: tuple[int, ...]

    def choose(self, ranking: list[dict[str, Any]]) -> list[str]:
        """Paths of the best set for ``path`` and ``error`` of every layer, see ``Budget``."""
        errors = {row["path"]: row["error"] for row in ranking}
        return least_error(errors, self.saved, self.before - self.allowed)

    def to_dict(self, chosen: list[str], ranking: list[dict[str, Any]]) -> dict[str, Any]:
        """For the report."""
        return {
            "size": list(self.size),
            "flops_before": self.before,
            "flops_allowed": self.allowed,
            "flops_after": self.before - sum(self.saved[path] for path in chosen),
            "sum_of_errors": sum(row["error"] for row in ranking if row["path"] in chosen),
        }


def plan_budget(
    budget: Budget,
    adapter: Adapter,
    model: nn.Module,
    specs: dict[str, dict],
    originals: dict[str, nn.Module],
    sizes: list[tuple[int, ...]] | None,
    batches: list | None,
) -> Plan:
    """Count costs, before anything is measured.

    Raises:
        ValueError: no calibration, no size to count at, or a budget that no set of layers meets or that the softmax
            model meets already.
    """
    if batches is None:
        raise ValueError("layers=Budget(…) chooses by measured sensitivity, which needs calibration")
    sizes = [budget.size] if budget.size else default_sizes(model) if sizes is None else sizes
    if not sizes:
        raise ValueError(
            f"layers=Budget(…): {type(model).__name__} tells no size of its own to count FLOPs at; give Budget(size=…)"
        )
    costs = {p: layer_costs(adapter, model, p, m, specs.get(p), sizes[0]) for p, m in originals.items()}
    before = sum(cost["before"][0] for cost in costs.values())
    allowed = int(before * budget.flops) if isinstance(budget.flops, float) else budget.flops
    saved = {path: cost["before"][0] - cost["after"][0] for path, cost in costs.items() if path in specs}
    least = before - sum(max(s, 0) for s in saved.values())
    where = f"at {'×'.join(map(str, sizes[0]))}"
    given = f"layers=Budget(flops={budget.flops})"
    if allowed < least:
        raise ValueError(
            f"{given}: even with all layers linearised attention costs {least:,} FLOPs {where} "
            f"({least / before:.3g} of the softmax's {before:,}); {allowed:,} are allowed"
        )
    if allowed >= before:
        raise ValueError(
            f"{given}: the softmax model's attention costs {before:,} FLOPs {where}, no more "
            f"than the {allowed:,} allowed; there is nothing to linearise"
        )
    return Plan(before, allowed, saved, tuple(sizes[0]))


def least_error(errors: dict[str, float], saved: dict[str, int], wanted: int) -> list[str]:
    """The keys, in their order, whose ``saved`` sum to ``wanted`` at least and whose ``errors`` sum to the least."""
    # What is saved so far, at most `wanted` → (sum of errors, keys); only sets that no other one beats in both.
    states: list[tuple[int, float, tuple[str, ...]]] = [(0, 0.0, ())]
    for key, error in errors.items():
        if saved[key] <= 0:
            continue
        with_it = [(min(total + saved[key], wanted), sum_ + error, (*keys, key)) for total, sum_, keys in states]
        every = sorted(states + with_it, key=lambda state: (-state[0], state[1], len(state[2])))
        states, best = [], float("inf")
        for state in every:
            if state[1] < best:
                states.append(state)
                best = state[1]
    return list(states[0][2])

"""Means over tokens of which some may be hidden."""

from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast

from .kernel import full


def token_count(z: Tensor, weight: Tensor | None) -> int | Tensor:
    """How many tokens ``z`` ``(B, N, H, D)`` has, or the sum of their weights ``(B or 1, N)``: ``(B or 1,
    1, 1, 1)``."""
    return z.shape[1] if weight is None else full(weight).sum(1)[:, None, None, None]


@outside_autocast
def token_mean(z: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of ``z`` ``(B, N, H, D)`` over its tokens, weighted if ``weight`` ``(B or 1, N)`` is given, ``(B, 1, H, D)``
    in float32 (float64 for float64 inputs)."""
    if weight is None:
        return full(z).mean(1, keepdim=True)
    return (full(z) * full(weight)[..., None, None]).sum(1, keepdim=True) / token_count(z, weight)


@outside_autocast
def mean_one(scores: Tensor, weight: Tensor | None) -> Tensor:
    """``N softmax`` of ``scores`` ``(B, N, H, 1)`` over the tokens: factors whose mean, weighted if ``weight`` ``(B or
    1, N)`` is given, is one. The same shape in float32 (float64 for float64 inputs)."""
    scores = full(scores)
    if weight is None:
        return scores.softmax(1) * scores.shape[1]
    each = (scores - scores.amax(1, keepdim=True)).exp()
    return each / token_mean(each, weight)

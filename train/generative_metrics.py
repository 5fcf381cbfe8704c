"""How alike two sets of images are, from their features ``(N, D)``: Fréchet distance, precision and recall, KID.

All sums are float64 on the CPU or, where the features are on one, the accelerator.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 2048  # rows of a distance matrix at a time


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``(D,)`` and unbiased covariance ``(D, D)`` of features ``(N, D)``, float64."""
    x = features.double()
    mean = x.mean(0)
    centred = x - mean
    return mean, centred.T @ centred / (len(x) - 1)


def frechet_distance(mean_1: Tensor, covariance_1: Tensor, mean_2: Tensor, covariance_2: Tensor) -> float:
    """Squared Wasserstein-2 distance of two Gaussians,
    ``|m₁ − m₂|² + tr(C₁ + C₂ − 2 (C₁^½ C₂ C₁^½)^½)`` (arXiv:1706.08500, eq. 6).

    The symmetric product has the eigenvalues of C₁C₂, so no root of a matrix that is not symmetric is needed, and
    singular covariances (fewer images than features) are no special case. Means ``(D,)``, covariances ``(D, D)``.
    """
    mean_1, covariance_1, mean_2, covariance_2 = (t.double() for t in (mean_1, covariance_1, mean_2, covariance_2))
    values, vectors = torch.linalg.eigh(covariance_1)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ covariance_2 @ root).clamp_min(0).sqrt().sum()
    shift = (mean_1 - mean_2).square().sum()
    return float(shift + covariance_1.trace() + covariance_2.trace() - 2 * cross)


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> tuple[float, float]:
    """Share of fakes within the reach of a real image, and of real images within the reach of a fake
    (arXiv:1904.06991). An image reaches as far as its k-th nearest neighbour in its own set.

    Raises ValueError where a set has no k neighbours to an image.
    """
    for name, features in (("real", real), ("fake", fake)):
        if len(features) <= k:
            raise ValueError(f"{name} must have more than k = {k} images, got {len(features)}")
    reach_real, reach_fake = _reach(real, k), _reach(fake, k)
    return _covered(fake, real, reach_real), _covered(real, fake, reach_fake)


def _reach(features: Tensor, k: int) -> Tensor:
    """Distance of each row to its k-th nearest other row ``(N,)``."""
    found = []
    for first in range(0, len(features), _CHUNK):
        distance = _distances(features[first : first + _CHUNK], features)
        own = torch.arange(len(distance), device=distance.device)
        distance[own, first + own] = torch.inf  # duplicates of an image count as neighbours, the image itself not
        found.append(distance.kthvalue(k, dim=1).values)
    return torch.cat(found)


def _covered(points: Tensor, centres: Tensor, reach: Tensor) -> float:
    parts = points.split(_CHUNK)
    inside = [(_distances(part, centres) <= reach[None]).any(1) for part in parts]
    return float(torch.cat(inside).double().mean())


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # Not through the inner product, which would lose small distances of large features.
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def kernel_distance(
    real: Tensor, fake: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """KID (arXiv:1801.01401): the unbiased squared maximum mean discrepancy under the kernel (xᵀy/D + 1)³, mean and
    standard deviation over ``subsets`` draws of ``size`` images of each set without replacement; all images at once
    where a set has no more than ``size``.

    Raises ValueError for sets of fewer than two images.
    """
    size = min(size, len(real), len(fake))
    if size < 2:
        raise ValueError(f"real and fake must have at least 2 images, got {len(real)} and {len(fake)}")
    if size == len(real) == len(fake):
        subsets = 1
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x, y = (set_[torch.randperm(len(set_), generator=generator)[:size]].double() for set_ in (real, fake))
        values.append(_mmd(x, y))
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std(correction=0))


def _mmd(x: Tensor, y: Tensor) -> float:
    n, dim = x.shape

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / dim + 1) ** 3

    xx, yy, xy = kernel(x, x), kernel(y, y), kernel(x, y)
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return float(within - 2 * xy.mean())

"""Fréchet distance, precision, recall and KID against closed forms and against definitions written out as loops."""

import pytest
import torch

from scanvas.train.generative_metrics import frechet_distance, kernel_distance, moments, precision_recall


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_frechet_distance_of_commuting_gaussians():
    """Where the covariances share their axes it is |Δm|² + Σ (√a − √b)²."""
    axes = torch.linalg.qr(normal(12, 12, seed=0)).Q
    a, b = normal(12, seed=1).square() * 100, normal(12, seed=2).square()
    a[3] = 0.0  # singular
    mean = normal(12, seed=3)
    got = frechet_distance(torch.zeros(12), (axes * a) @ axes.T, mean, (axes * b) @ axes.T)
    assert got == pytest.approx(float(mean.square().sum() + (a.sqrt() - b.sqrt()).square().sum()), rel=1e-7)


def test_frechet_distance_of_others_agrees_with_the_root_of_the_product():
    """tr (C₁C₂)^½ from the eigenvalues of the product itself, which is not symmetric."""
    one, two = normal(9, 20, seed=0), normal(9, 30, seed=1) * 3
    one, two = one @ one.T, two @ two.T
    root = torch.linalg.eigvals(one @ two).sqrt().real.sum()
    wanted = one.trace() + two.trace() - 2 * root
    zero = torch.zeros(9)
    assert frechet_distance(zero, one, zero, two) == pytest.approx(float(wanted), rel=1e-9)
    assert frechet_distance(zero, two, zero, one) == pytest.approx(float(wanted), rel=1e-9)
    assert frechet_distance(zero, one, zero, one) == pytest.approx(0, abs=1e-9 * float(one.trace()))


def test_frechet_distance_of_samples():
    """Features of fewer images than dimensions; an affine image of the same samples has a known distance."""
    x = normal(40, 64, seed=0).float()
    mean, covariance = moments(x)
    shifted, scaled = moments(3 * x + 1)
    trace = float(x.double().var(0).sum())
    wanted = float((2 * x.double().mean(0) + 1).square().sum()) + 4 * trace  # (3 − 1)² tr C
    assert frechet_distance(mean, covariance, shifted, scaled) == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(covariance, torch.cov(x.double().T))


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_by_brute_force(k):
    real, fake = normal(70, 3, seed=0), normal(50, 3, seed=1) * 0.7 + 0.5
    real[1] = real[0]  # a duplicate is a neighbour at distance 0

    def inside(points, centres):
        found = 0
        for point in points:
            for i, centre in enumerate(centres):
                others = sorted(float((centre - other).norm()) for j, other in enumerate(centres) if j != i)
                if float((point - centre).norm()) <= others[k - 1]:
                    found += 1
                    break
        return found / len(points)

    got = precision_recall(real, fake, k)
    assert got == pytest.approx((inside(fake, real), inside(real, fake)))
    assert 0 < got[1] < got[0] <= 1  # the fakes are the narrower set: likely, but not all there is


def test_precision_and_recall_do_not_depend_on_chunks(monkeypatch):
    from scanvas.train import generative_metrics

    real, fake = normal(70, 3, seed=0), normal(50, 3, seed=1) * 0.7
    whole = precision_recall(real, fake)
    monkeypatch.setattr(generative_metrics, "_CHUNK", 16)
    assert precision_recall(real, fake) == whole
    with pytest.raises(ValueError, match="fake must have more than k = 3 images, got 3"):
        precision_recall(real, fake[:3])


def test_kid_by_brute_force_and_in_expectation():
    real, fake = normal(12, 5, seed=0), normal(12, 5, seed=1) + 1

    def kernel(a, b):
        return float(a @ b / 5 + 1) ** 3

    n = range(12)
    within = [sum(kernel(s[i], s[j]) for i in n for j in n if i != j) / (12 * 11) for s in (real, fake)]
    wanted = sum(within) - 2 * sum(kernel(x, y) for x in real for y in fake) / 144
    assert kernel_distance(real, fake) == (pytest.approx(wanted, rel=1e-9), 0.0)
    # unbiased: subsets of two halves of one distribution scatter around 0, those of another do not
    same = kernel_distance(normal(2000, 5, seed=2), normal(2000, 5, seed=3), subsets=200, size=50)
    other = kernel_distance(normal(2000, 5, seed=2), normal(2000, 5, seed=3) + 0.3, subsets=200, size=50)
    assert abs(same[0]) < 4 * same[1] / 200**0.5 + 0.01 < other[0]

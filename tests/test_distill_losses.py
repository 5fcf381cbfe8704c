"""Losses of distillation against their formulas, written out by hand."""

import math

import pytest
import torch

from scanvas.train import distill_losses
from scanvas.train.denoise_config import LossConfig, NoiseConfig
from scanvas.train.distill_losses import LOSSES, Seen
from scanvas.train.losses import Step
from scanvas.train.process import Process, create_scheduler


def rand(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen_by_hand():
    """A batch with everything in it, float64."""
    process = Process(create_scheduler(NoiseConfig(), "epsilon", True), "epsilon", NoiseConfig())
    images = [rand(2, 3, 4, 4, seed=i) for i in range(6)]
    clean, noise, noisy, student, teacher, variance = images
    place = torch.tensor([3, 700])
    step = Step(process, clean, noise, noisy, place, student, variance)
    return Seen(
        attention=[
            (rand(2, 5, 3, seed=10), rand(2, 5, 3, seed=11)),
            (rand(2, 4, 3, seed=12), 5 * rand(2, 4, 3, seed=13)),
        ],
        block=[(rand(2, 5, 3, seed=14), rand(2, 5, 3, seed=15)), (rand(2, 5, 3, seed=16), rand(2, 5, 3, seed=17))],
        attention_map=[tuple(rand(2, 2, 3, 3, seed=i).softmax(-1) for i in (20, 21))],
        step=step,
        teacher_step=Step(process, clean, noise, noisy, place, teacher, 2 * variance),
        loss_config=LossConfig(),
        logits=rand(3, 4, seed=30),
        teacher_logits=rand(3, 4, seed=31),
        target=torch.tensor([0, 3, 1]),
        cross_entropy=torch.nn.functional.cross_entropy,
        temperature=2.0,
    )


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def squares(a, b):
    return mean((x - y) ** 2 for x, y in zip(a.flatten().tolist(), b.flatten().tolist()))


def probabilities(row, temperature=1.0):
    weights = [math.exp(z / temperature) for z in row]
    return [w / sum(weights) for w in weights]


def kl(seen, T):
    rows = zip(seen.teacher_logits.tolist(), seen.logits.tolist())
    pairs = [(probabilities(t, T), probabilities(s, T)) for t, s in rows]
    return T * T * mean(sum(p * math.log(p / q) for p, q in zip(*pair)) for pair in pairs)


def entropy(seen, targets):
    return mean(-math.log(probabilities(row)[c]) for row, c in zip(seen.logits.tolist(), targets))


def map_entropy(seen):
    ((got, wanted),) = seen.attention_map
    rows = zip(got.flatten(0, 2).tolist(), wanted.flatten(0, 2).tolist())
    return mean(-sum(w * math.log(g) for g, w in zip(*row)) for row in rows)


BY_HAND = {
    "attention": lambda s: mean(squares(*pair) for pair in s.attention),
    "attention_relative": lambda s: mean(squares(g, w) / squares(w, 0 * w) for g, w in s.attention),
    "attention_map": map_entropy,
    "block": lambda s: mean(squares(*pair) for pair in s.block),
    "block_relative": lambda s: mean(squares(g, w) / squares(w, 0 * w) for g, w in s.block),
    "prediction": lambda s: squares(s.step.prediction, s.teacher_step.prediction),
    "variance": lambda s: squares(s.step.variance, s.teacher_step.variance),
    "cross_entropy": lambda s: entropy(s, [0, 3, 1]),
    "logits": lambda s: kl(s, 2.0),
    "hard": lambda s: entropy(s, [max(range(4), key=row.__getitem__) for row in s.teacher_logits.tolist()]),
    "mse": lambda s: squares(s.step.prediction, s.step.noise),
    # computed by hand in test_denoise_losses.py; here only that it is the recipe's function, averaged
    "min_snr": lambda s: mean(distill_losses.DENOISE_LOSSES["min_snr"](s.step, s.loss_config).tolist()),
    "vlb": lambda s: mean(distill_losses.DENOISE_LOSSES["vlb"](s.step, s.loss_config).tolist()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_what_their_formulas_say(name):
    seen = seen_by_hand()
    assert float(LOSSES[name].function(seen)) == pytest.approx(BY_HAND[name](seen), rel=1e-9, abs=1e-12)
    assert float(distill_losses.loss_terms(seen, {name: 0.5})[name]) == pytest.approx(BY_HAND[name](seen) / 2, rel=1e-9)

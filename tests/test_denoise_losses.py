"""The forward process against diffusers' schedulers, the losses against their definitions worked out another way."""

import diffusers
import pytest
import torch
from diffusers.training_utils import compute_snr
from torch.distributions import Normal, kl_divergence

from scanvas.train.denoise_config import LossConfig, NoiseConfig
from scanvas.train.errors import ConfigError
from scanvas.train.losses import LOSSES, Step, check_terms, loss_terms
from scanvas.train.process import Process, create_scheduler

PREDICTIONS = ("epsilon", "sample", "v_prediction", "flow_prediction")


def process(prediction="epsilon", learned=False, **noise):
    if prediction == "flow_prediction":
        noise.setdefault("scheduler", "FlowMatchEulerDiscreteScheduler")
    config = NoiseConfig(**noise)
    return Process(create_scheduler(config, prediction, learned), prediction, config)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


PLACES = torch.tensor([0, 1, 400, 998, 999])
CLEAN, NOISE = draw(5, 3, 4, 4), draw(5, 3, 4, 4, seed=1)


def test_diffusion_is_that_of_diffusers():
    p = process("v_prediction", kwargs={"beta_schedule": "squaredcos_cap_v2"})
    torch.testing.assert_close(p.noisy(CLEAN, NOISE, PLACES), p.scheduler.add_noise(CLEAN, NOISE, PLACES))
    torch.testing.assert_close(p.target(CLEAN, NOISE, PLACES), p.scheduler.get_velocity(CLEAN, NOISE, PLACES))
    assert p.times(PLACES).tolist() == PLACES.tolist()


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_is_that_of_diffusers(shift):
    p = process("flow_prediction", kwargs={"shift": shift})
    times = p.times(PLACES)
    torch.testing.assert_close(p.noisy(CLEAN, NOISE, PLACES), p.scheduler.scale_noise(CLEAN, times, NOISE))
    # from pure noise one Euler step with the true velocity is the image: the sign and scale the sampler expects
    p.scheduler.set_timesteps(1)
    noisy = p.noisy(CLEAN, NOISE, torch.zeros(5, dtype=torch.long))
    velocity = p.target(CLEAN, NOISE, torch.zeros(5, dtype=torch.long))
    painted = p.scheduler.step(velocity, p.scheduler.timesteps[0], noisy).prev_sample
    torch.testing.assert_close(painted, CLEAN, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_perfect_prediction_gives_back_the_image(prediction):
    p = process(prediction)
    k = torch.tensor([5, 100, 500, 700, 900])
    made = p.clean(p.noisy(CLEAN, NOISE, k), p.target(CLEAN, NOISE, k), k)
    torch.testing.assert_close(made, CLEAN, atol=2e-4, rtol=1e-4)


def test_times_are_distributed_as_asked():
    u = (torch.arange(10_000) + 0.5) / 10_000
    uniform = process().place(u)
    assert torch.equal(uniform.bincount(minlength=1000), torch.full((1000,), 10))
    p = process("flow_prediction", times="logit_normal", logit_mean=0.5, logit_std=0.8)
    sigma = p.sigma[p.place(u)]
    logit = (sigma / (1 - sigma)).log()[(sigma < 1)]
    assert logit.median().item() == pytest.approx(0.5, abs=0.01)
    assert logit.std().item() == pytest.approx(0.8, rel=0.01)
    assert process("flow_prediction").place(torch.tensor([0.0, 1.0])).tolist() == [999, 0]  # u = 1 is noise


@pytest.mark.parametrize("prediction", PREDICTIONS[:3])
def test_min_snr_weights_as_published(prediction):
    p = process(prediction)
    k = torch.tensor([3, 100, 300, 600, 990])
    snr, config = compute_snr(p.scheduler, k), LossConfig(min_snr_gamma=5.0)
    step = Step(p, CLEAN, NOISE, p.noisy(CLEAN, NOISE, k), k, draw(5, 3, 4, 4, seed=2))
    weight = snr.clamp(max=5.0) / {"epsilon": snr, "sample": 1.0, "v_prediction": snr + 1}[prediction]
    torch.testing.assert_close(LOSSES["min_snr"](step, config), weight * LOSSES["mse"](step, config), rtol=1e-4, atol=0)
    assert (weight < weight.max()).any(), "the clamp must matter in this test"


def vlb_step(v_seed=3, k=PLACES):
    p = process(learned=True)
    clean = (CLEAN.clamp(-1, 1) * 127.5).round() / 127.5
    clean[0, 0, 0, :2] = torch.tensor([-1.0, 1.0])
    prediction = (NOISE + 0.1 * draw(5, 3, 4, 4, seed=2)).requires_grad_()
    variance = draw(5, 3, 4, 4, seed=v_seed).clamp(-1, 1).requires_grad_()
    return p, Step(p, clean, NOISE, p.noisy(clean, NOISE, k), k, prediction, variance)


def test_variational_bound_from_bayes_rule():
    p, step = vlb_step()
    got = LOSSES["vlb"](step, LossConfig())
    bars = p.scheduler.alphas_cumprod.double()
    for i, k in enumerate(PLACES.tolist()):
        beta = p.scheduler.betas[k].double()
        x, x_t = step.clean[i].double(), step.noisy[i].double()
        guess = (x_t - (1 - bars[k]).sqrt() * step.prediction[i].double()) / bars[k].sqrt()

        def posterior(x0, k=k, beta=beta, x_t=x_t):
            """Prior N(√ᾱ₋ x₀, 1 − ᾱ₋) times likelihood N(x_t; √(1−β) x₋, β), by adding precisions."""
            before = bars[k - 1] if k else torch.tensor(1.0 - 1e-12, dtype=torch.float64)
            precision = 1 / (1 - before) + (1 - beta) / beta
            mean = (before.sqrt() * x0 / (1 - before) + (1 - beta).sqrt() * x_t / beta) / precision
            return mean, precision.reciprocal()

        mean, _ = posterior(guess)
        _, small = posterior(guess, k=max(k, 1), beta=p.scheduler.betas[max(k, 1)].double())
        share = (step.variance[i].double() + 1) / 2
        scale = (share * beta.log() + (1 - share) * small.log()).exp().sqrt()
        model = Normal(mean, scale)
        if k:
            true_mean, true_variance = posterior(x)
            bits = kl_divergence(Normal(true_mean, true_variance.sqrt()), model)
        else:
            upper = torch.where(x > 0.999, 1.0, model.cdf(x + 1 / 255))
            bits = -(upper - torch.where(x < -0.999, 0.0, model.cdf(x - 1 / 255))).clamp_min(1e-12).log()
        wanted = (bits / torch.tensor(2.0).log()).mean()
        assert got[i].item() == pytest.approx(wanted.item(), rel=2e-2 if k == 0 else 2e-3), k


def test_the_bound_teaches_the_variance_alone():
    _, step = vlb_step()
    LOSSES["vlb"](step, LossConfig()).sum().backward()
    assert step.prediction.grad is None
    assert step.variance.grad.abs().sum() > 0


def test_the_variance_is_what_the_sampler_will_use():
    """Where the image is known exactly, the best variance is the sampler's smallest, v = −1; diffusers agrees on it."""
    k = torch.tensor([1, 10, 50, 100, 200])
    p, step = vlb_step(k=k)
    step.prediction = NOISE
    values = []
    for v in (-1.0, 0.0, 1.0):
        step.variance = torch.full_like(NOISE, v)
        values.append(LOSSES["vlb"](step, LossConfig()))
    assert (values[0] < values[1]).all()
    assert (values[1] < values[2]).all()
    assert values[0].abs().max() < 1e-3
    variance = p.scheduler._get_variance(400, predicted_variance=torch.tensor(0.0))
    bars = p.scheduler.alphas_cumprod.double()
    posterior = (1 - bars[399]) / (1 - bars[400]) * (1 - bars[400] / bars[399])
    middle = 0.5 * ((1 - bars[400] / bars[399]).log() + posterior.log())
    assert variance.item() == pytest.approx(middle.item(), rel=1e-4)


def test_terms_are_weighted_and_summed_by_name():
    _, step = vlb_step()
    terms = loss_terms(step, LossConfig(terms={"mse": 2.0, "vlb": 0.5}))
    assert torch.equal(terms["mse"], 2 * LOSSES["mse"](step, LossConfig()))
    assert torch.equal(terms["vlb"], 0.5 * LOSSES["vlb"](step, LossConfig()))


@pytest.mark.parametrize(
    ("config", "learned", "said"),
    [
        ({"terms": {}}, False, "loss.terms is empty"),
        ({"terms": {"msee": 1.0}}, False, "unknown loss 'msee'; did you mean 'mse'"),
        ({"terms": {"mse": -1}}, False, "loss.terms.mse must be a weight"),
        ({"terms": {"mse": 1.0, "vlb": 1.0}}, False, "vlb needs a model with a learned variance"),
        ({"terms": {"mse": 1.0}}, True, "nothing would train: add vlb"),
        ({"drop_condition": 1.0}, False, "drop_condition must lie in"),
        ({"min_snr_gamma": 0.0}, False, "min_snr_gamma must be positive"),
    ],
)
def test_wrong_losses_are_refused(config, learned, said):
    with pytest.raises(ConfigError, match=said):
        check_terms(LossConfig(**config), "epsilon", learned)


@pytest.mark.parametrize(
    ("prediction", "noise", "said"),
    [
        ("epsilon", {"scheduler": "DDPMSchedular"}, "did you mean 'DDPMScheduler'"),
        ("epsilon", {"kwargs": {"beta_strt": 1}}, "no keyword 'beta_strt'; did you mean 'beta_start'"),
        ("epsilon", {"scheduler": "FlowMatchEulerDiscreteScheduler"}, "do not go together"),
        ("flow_prediction", {"scheduler": "DDPMScheduler"}, "DDPMScheduler"),
        ("epsilon", {"kwargs": {"prediction_type": "v_prediction"}}, "do not go together"),
        ("epsilon", {"kwargs": {"rescale_betas_zero_snr": True}}, "ends in pure noise"),
        ("epsilon", {"times": "logit_normal"}, "logit_normal is for flow matching"),
        ("epsilon", {"kwargs": {"variance_type": "learned_range"}}, "predicts no variance"),
    ],
)
def test_schedulers_that_do_not_go_with_the_model_are_refused(prediction, noise, said):
    with pytest.raises(ConfigError, match=said):
        process(prediction, **noise)


def test_a_learned_variance_is_told_to_the_scheduler():
    assert process(learned=True).scheduler.config.variance_type == "learned_range"
    assert isinstance(process(scheduler="DDIMScheduler").scheduler, diffusers.DDIMScheduler)

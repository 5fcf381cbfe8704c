"""The loop on a GPU: mixed precision with and without a loss scaler, compilation, and the watch over losses."""

import json
import math

import pytest
import torch
from accelerate.state import AcceleratorState

from scanvas.train import classify, config, loop
from scanvas.train.errors import NonFiniteError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate keeps device and precision of the first run of a process; here every test has its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "options",
    [
        ["train.mixed_precision=bf16", "optim.ema_decay=0.9"],
        ["train.mixed_precision=fp16", "augment.mixup=0.8", "augment.cutmix=1.0", "optim.clip_grad=5"],
        ["train.mixed_precision=bf16", "train.torch_compile=true", "optim.ema_decay=0.9"],
        ["train.gradient_checkpointing=true", "train.grad_accum_steps=2"],
    ],
)
def test_a_run_learns_and_resumes(recipe, tmp_path, options):
    overrides = [*recipe, "train.cpu=false", "train.epochs=6", "data.workers=2", *options]
    result = classify.train_classifier(config.load(classify.ClassifyConfig, None, overrides))
    assert result.metrics["loss"] < 1.0, "chance is 1.1"
    state = json.loads(next(iter(sorted((tmp_path / "run/checkpoints").iterdir()))).joinpath("state.json").read_text())
    assert (state["scaler"] is not None) == ("train.mixed_precision=fp16" in options)
    assert len(state["rng"][0]["cuda"]) > 0
    again = classify.train_classifier(config.load(classify.ClassifyConfig, None, overrides))
    assert again.metrics == result.metrics


def test_a_late_look_at_the_loss_still_keeps_nan_out_of_checkpoints(recipe, tmp_path):
    class Exploding(classify.ClassifyTask):
        calls = 0

        def losses(self, model, batch):
            self.calls += 1
            terms = super().losses(model, batch)
            return {"cross_entropy": terms["cross_entropy"] * (math.nan if self.calls == 8 else 1.0)}

    cfg = config.load(classify.ClassifyConfig, None, [*recipe, "train.cpu=false", "run.save_every=4"])
    with pytest.raises(NonFiniteError, match=r"cross_entropy became nan at step 8 .* checkpoint is .*step-00000006"):
        loop.Loop(cfg, lambda accelerator: Exploding(cfg, accelerator)).run()

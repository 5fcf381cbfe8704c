"""A distillation that is stopped, by a signal or a loss that is not finite, and gone on with."""

import math

import distill_parts
import pytest
import torch
from distill_parts import STAGES, classifying, painting, run
from safetensors.torch import load_file

from scanvas.train import distill_losses, loop
from scanvas.train.distill_losses import LOSSES
from scanvas.train.errors import NonFiniteError

home = distill_parts.home


def kill_at(monkeypatch, stage, step):
    class Killed(BaseException):
        pass

    update = loop.Loop._update

    def dying(self, group):
        if self.step == step and stage in str(self.out):
            raise Killed
        update(self, group)

    monkeypatch.setattr(loop.Loop, "_update", dying)
    return Killed


INTERRUPTED = {
    "denoiser": (painting, [STAGES, "optim.ema_decay=0.9", "student.mixer=gla"], "stage-2-block", 2),
    "classifier": (
        classifying,
        ["stages=[{kind: attention, train: lora, steps: 2}, {steps: 9, train: lora, terms: {logits: 1, hard: 0.1}}]",
         "augment.mixup=0.5"],
        "run", 7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_killed_run_resumes_to_the_same_bits(home, tmp_path, monkeypatch, name):
    recipe, options, stage, step = INTERRUPTED[name]
    options = [*options, "run.save_every=3", "student.layers=1"]
    _, measured = run(recipe(home, tmp_path / "whole" / "run", *options))
    with monkeypatch.context() as patch:
        killed = kill_at(patch, stage, step)
        with pytest.raises(killed):
            run(recipe(home, tmp_path / "broken" / "run", *options))
    torch.rand(7)  # what comes in between must not matter
    _, again = run(recipe(home, tmp_path / "broken" / "run", *options))
    assert again == measured
    compared = 0
    for file in sorted((tmp_path / "whole").rglob("*.safetensors")):
        one, two = load_file(file), load_file(tmp_path / "broken" / file.relative_to(tmp_path / "whole"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), file
        compared += 1
    assert compared >= 6


def test_a_loss_that_is_not_finite_stops_and_is_named(home, tmp_path, monkeypatch):
    calls = []

    def broken(seen):
        calls.append(1)
        return distill_losses.prediction(seen) + (math.nan if len(calls) == 4 else 0)

    monkeypatch.setitem(LOSSES, "prediction", distill_losses.Loss(broken, tasks=("denoise",)))
    said = r"prediction became nan at step 4 \(epoch 1, batch 4: images .*last good checkpoint is .*step-00000002"
    with pytest.raises(NonFiniteError, match=said):
        run(painting(home, tmp_path, "stages=[{}]", "run.save_every=2"))


def test_ctrl_c_saves_and_the_same_command_goes_on(home, tmp_path, command, monkeypatch):
    update = loop.Loop._update

    def stopping(self, group):
        update(self, group)
        if self.step == 2:
            self.stop.signal = "SIGINT"

    options = classifying(home, tmp_path, "stages=[{kind: attention, steps: 4}, {steps: 3}]")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_update", stopping)
        code, _, err = command("train", "distill", *options)
    assert code == 130
    assert "stopped by SIGINT at step 3" in err
    code, out, err = command("train", "distill", *options)
    assert code == 0, err
    assert "resuming from" in err
    assert "2-end_to_end" in out

"""The loop in this process: what it writes, what others can load, and how it stops."""

import csv
import itertools
import json
import math
import os
import resource
import signal

import pytest
import timm
import torch
from safetensors.torch import load_file

from scanvas.train import classify, config, loop, optim
from scanvas.train.errors import ConfigError, NonFiniteError
from scanvas.train.guard import FiniteGuard
from scanvas.train.logs import Table, read_table


@pytest.fixture
def run(recipe):
    """``run(*overrides)`` trains the small recipe → Result."""

    def train(*overrides):
        return classify.train_classifier(config.load(classify.ClassifyConfig, None, [*recipe, *overrides]))

    return train


def test_a_run_leaves_logs_checkpoints_and_weights_for_timm(run, tmp_path):
    result = run("run.plot=true", "run.tensorboard=true", "run.keep=1", "optim.ema_decay=0.5", "train.epochs=2")
    out = tmp_path / "run"
    assert {p.name for p in out.iterdir()} >= {
        "best", "final", "checkpoints", "train.csv", "eval.csv", "curves.png", "tensorboard",
    }  # fmt: skip
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000012"]
    rows = read_table(out / "train.csv")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert set(rows[0]) == {"step", "epoch", "lr", "cross_entropy", "loss", "images_per_second"}
    assert [row["step"] for row in read_table(out / "eval.csv")] == [6, 12]
    assert (out / "curves.png").read_bytes()[1:4] == b"PNG"
    assert list((out / "tensorboard").iterdir())

    model = timm.create_model(f"local-dir:{out / 'final'}", pretrained=True)
    assert model.pretrained_cfg["label_names"] == ["apple", "boat", "cup"]
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 32, 32)
    ema = load_file(out / "checkpoints/step-00000012/ema.safetensors")
    raw = load_file(out / "checkpoints/step-00000012/model.safetensors")
    assert all(torch.equal(value, ema[name]) for name, value in model.state_dict().items()), "EMA is what is exported"
    assert any(not torch.equal(ema[name], raw[name]) for name in raw)
    best = json.loads((out / "best/training.json").read_text())["metrics"]
    assert best == result.best
    assert best["top1"] == max(row["top1"] for row in read_table(out / "eval.csv"))


def test_accumulation_is_the_same_as_a_larger_batch(run, tmp_path):
    options = ["data.workers=0", "train.epochs=1", "optim.warmup_epochs=0", "optim.name=sgd", "optim.lr=0.1"]
    run(*options, f"run.out={tmp_path / 'one'}", "train.batch_size=16")
    run(*options, f"run.out={tmp_path / 'two'}", "train.batch_size=4", "train.grad_accum_steps=4")
    one, two = (load_file(tmp_path / n / "checkpoints/step-00000003/model.safetensors") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_nothing(run, tmp_path):
    options = ["train.epochs=1", "optim.warmup_epochs=0"]
    run(*options, f"run.out={tmp_path / 'plain'}")
    run(*options, f"run.out={tmp_path / 'checkpointed'}", "train.gradient_checkpointing=true")
    weights = [load_file(tmp_path / n / "final/model.safetensors") for n in ("plain", "checkpointed")]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-5, rtol=1e-4)


def test_learning_rate_scales_warms_up_and_decays_by_layer(run, tmp_path):
    run("optim.lr=1e-2", "optim.lr_reference_batch=16", "optim.layer_decay=0.5", "optim.min_lr=1e-5")
    rates = [row["lr"] for row in read_table(tmp_path / "run/train.csv")]
    assert max(rates) == pytest.approx(1e-2 * 8 / 16, rel=1e-6)
    assert rates.index(max(rates)) == 5, "the peak is where the warm-up ends: one epoch of six steps"
    drops = [a - b for a, b in itertools.pairwise(rates[5:])]
    assert all(0 < drop < max(rates) / 6 for drop in drops), "and there is no jump behind it"
    state = json.loads((tmp_path / "run/checkpoints/step-00000018/state.json").read_text())
    groups = state["optimizer"]["param_groups"]
    scales = {group["lr_scale"] for group in groups}
    assert len(scales) > 2
    assert max(scales) == 1.0


class Exploding(classify.ClassifyTask):
    """One of two loss terms becomes NaN in the tenth step."""

    def losses(self, model, batch):
        terms = super().losses(model, batch)
        self.calls = getattr(self, "calls", 0) + 1
        extra = torch.tensor(math.nan if self.calls == 10 else 0.5)
        return {**terms, "consistency": extra + 0 * terms["cross_entropy"]}


def test_a_loss_that_is_not_finite_stops_and_is_named(recipe, tmp_path):
    cfg = config.load(classify.ClassifyConfig, None, [*recipe, "run.save_every=4"])
    said = r"consistency became nan at step 10 \(epoch 2, batch 4: samples \d+, .*\)\. .*checkpoint is .*step-00000008"
    with pytest.raises(NonFiniteError, match=said):
        loop.Loop(cfg, lambda accelerator: Exploding(cfg, accelerator)).run()
    kept = load_file(tmp_path / "run/checkpoints/step-00000008/model.safetensors")
    assert all(value.isfinite().all() for value in kept.values())
    assert [row["step"] for row in csv.DictReader((tmp_path / "run/train.csv").open())][-1] == "9"


def test_the_guard_names_the_term_before_the_sum():
    guard = FiniteGuard(torch.device("cpu"))
    guard.put({"a": torch.tensor(1.0), "loss": torch.tensor(3.0)}, "here")
    guard.put({"a": torch.tensor(2.0), "loss": torch.tensor(5.0)}, "here")
    assert guard.means() == {"a": 1.5, "loss": 4.0}
    with pytest.raises(NonFiniteError, match="b became inf at there"):
        guard.put({"a": torch.tensor(1.0), "b": torch.tensor(math.inf), "loss": torch.tensor(math.inf)}, "there")


def test_a_run_that_ended_is_not_trained_again_and_other_settings_are_refused(run, tmp_path):
    first = run("train.epochs=1", "optim.warmup_epochs=0")
    saved = (tmp_path / "run/checkpoints/step-00000006/model.safetensors").stat().st_mtime_ns
    again = run("train.epochs=1", "optim.warmup_epochs=0")
    assert again.metrics == first.metrics
    assert (tmp_path / "run/checkpoints/step-00000006/model.safetensors").stat().st_mtime_ns == saved
    with pytest.raises(ConfigError, match=r"other settings: optim\.lr \(0\.001 there, 0\.5 now\)"):
        run("train.epochs=1", "optim.warmup_epochs=0", "optim.lr=0.5")
    with pytest.raises(ConfigError, match=r"run\.resume=never"):
        run("train.epochs=1", "optim.warmup_epochs=0", "run.resume=never")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.mixed_precision=fp16"], "fp16 needs a GPU"),
        (["train.batch_size=0"], "train.batch_size must be at least 1, and is 0"),
        (["train.grad_accum_steps=9"], "more than the 6 batches of an epoch"),
        (["augment.mixup=0.8", "train.batch_size=7"], "train.batch_size=7 must be even"),
        (["optim.name=adamx"], "optim.name='adamx' is no optimiser of timm"),
        (["optim.kwargs={betaz: [0.9, 0.99]}"], "does not fit adamw"),
        (["optim.warmup_epochs=3"], "must be below train.epochs=3"),
        (["model.name=vig_tinny_patch16_224"], "did you mean 'vig_tiny_patch16_224'"),
        (["model.kwargs={patch_size: 8, depht: 3}"], "cannot be built .*depht"),
        (["model.checkpoint=/nowhere"], "neither a file nor a directory"),
        (["model.num_classes=5"], "model.num_classes=5, but the training data has 3 classes"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_training(run, tmp_path, overrides, said):
    with pytest.raises(Exception, match=said) as caught:
        run(*overrides)
    assert type(caught.value).__module__ == "scanvas.train.errors"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_fine_tuning_starts_from_a_checkpoint_with_another_head(run, tmp_path, write_images):
    run("train.epochs=1", "optim.warmup_epochs=0")
    images = write_images(tmp_path / "two", {"train": 8, "val": 2}, classes=("x", "y"))
    tuned = [f"data.root={images}", f"run.out={tmp_path / 'tuned'}", "train.epochs=1", "optim.warmup_epochs=0"]
    run(*tuned, "optim.lr=0", "optim.min_lr=0", f"model.checkpoint={tmp_path / 'run/final'}")
    before, after = (load_file(tmp_path / n / "final/model.safetensors") for n in ("run", "tuned"))
    shared = [name for name in before if before[name].shape == after[name].shape]
    assert len(before) - len(shared) == 2, "weight and bias of the head"
    assert all(torch.equal(before[name], after[name]) for name in shared)


def test_scheduler_state_is_a_function_of_the_step():
    model = torch.nn.Linear(2, 2)
    cfg = config.OptimConfig(lr=1.0, warmup_epochs=2, warmup_lr=0.0, min_lr=0.0)
    optimizer = optim.create_optimizer(model, cfg, 1)
    scheduler = optim.create_scheduler(optimizer, cfg, epochs=4, steps_per_epoch=5)
    rates = []
    for step in range(1, 21):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    expected = [s / 10 if s < 10 else 0.5 * (1 + math.cos(math.pi * (s - 10) / 10)) for s in range(1, 21)]
    assert rates == pytest.approx(expected, abs=1e-12)


def test_a_resumed_table_drops_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step,loss\n1,0.5\n2,0.25\n3,0.1\n4,0.0")
    path.write_text(path.read_text()[:-2] + "x")
    table = Table(path, resume_step=2)
    table.add({"step": 3, "loss": 9.5})
    assert read_table(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}, {"step": 3, "loss": 9.5}]


def test_a_full_disk_stops_the_run_and_leaves_what_was_saved(recipe, command, tmp_path, monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = loop.Loop._save

    def save_on_a_full_disk(self):
        if self.step > 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        return save(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_save", save_on_a_full_disk)
        try:
            code, _, err = command("train", "classify", *recipe)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert code == 1
    assert "could not write" in err
    assert "older checkpoints are intact" in err
    assert "Traceback" not in err
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000006"]
    code, _, err = command("train", "classify", *recipe)
    assert code == 0, err
    assert "resuming from" in err


def test_ctrl_c_while_evaluating_loses_nothing(recipe, command, tmp_path, monkeypatch):
    evaluate = classify.ClassifyTask.evaluate

    def interrupted(self, model, poll, step):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, model, poll, step)

    with monkeypatch.context() as patch:
        patch.setattr(classify.ClassifyTask, "evaluate", interrupted)
        code, _, err = command("train", "classify", *recipe)
    assert code == 130, err
    assert "while evaluating" in err
    code, _, err = command("train", "classify", *recipe)
    assert code == 0, err
    assert [row["step"] for row in read_table(tmp_path / "run/eval.csv")] == [6, 12, 18], "the epoch is measured later"


def test_skipped_images_are_listed_at_the_end(recipe, command, images, tmp_path):
    (images / "train/boat/003.png").write_bytes(b"no image")
    code, _, err = command("train", "classify", *recipe, "train.epochs=1", "optim.warmup_epochs=0")
    assert code == 0, err
    assert "1 image(s) could not be read and were skipped" in err
    assert str(images / "train/boat/003.png") in (tmp_path / "run/skipped.txt").read_text()
    code, _, err = command("train", "classify", *recipe, "data.on_error=stop", f"run.out={tmp_path / 'two'}")
    assert code == 1
    assert "cannot read image" in err

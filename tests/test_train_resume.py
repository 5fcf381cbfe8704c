"""Killed, interrupted and exploding runs, for real: own processes, own signals."""

import csv
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from scanvas.train.checkpoint import load_json

# Dies by the given signal while the given step is being computed, so at a place no checkpoint knows of.
CHILD = """
import os, signal, sys
from scanvas.train import cli, loop
update = loop.Loop._update
def dying(self, group):
    update(self, group)
    if self.step + 1 == int(sys.argv[2]):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
loop.Loop._update = dying
cli.main(sys.argv[3:])
"""

# Every source of randomness there is: drop path, mixup and cutmix, RandAugment, erasing, repeated augmentation.
RANDOM = [
    "model.drop_path_rate=0.3",
    "augment.mixup=0.8",
    "augment.cutmix=1.0",
    "augment.auto_augment=rand-m9-mstd0.5-inc1",
    "augment.random_erasing=0.5",
    "optim.ema_decay=0.9",
    "optim.clip_grad=1.0",
    "run.save_every=4",
]


def dying_run(signal, step, overrides):
    """The command in a process of its own, which gets ``signal`` while it computes ``step``."""
    command = [sys.executable, "-c", CHILD, signal, str(step), "train", "classify", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def assert_same_run(one, two, step):
    name = f"checkpoints/step-{step:08d}"
    for file in ("model", "ema", "optimizer"):
        a, b = load_file(one / name / f"{file}.safetensors"), load_file(two / name / f"{file}.safetensors")
        assert set(a) == set(b)
        different = [key for key in a if not torch.equal(a[key], b[key])]
        assert not different, f"{file}: {different[:5]}"


@pytest.mark.parametrize("variant", ["mixup", "repeats and accumulation"])
def test_a_killed_run_resumes_to_the_same_bits(recipe, tmp_path, command, variant):
    options = [*recipe, *RANDOM]
    if variant != "mixup":
        options += ["augment.repeats=3", "train.grad_accum_steps=2", "train.epochs=5", "optim.layer_decay=0.8"]
    per_epoch, epochs, kill_at = (6, 3, 11) if variant == "mixup" else (3, 5, 11)
    last = per_epoch * epochs
    unbroken = [*options, f"run.out={tmp_path / 'unbroken'}"]
    broken = [*options, f"run.out={tmp_path / 'broken'}"]
    code, _, err = command("train", "classify", *unbroken)
    assert code == 0, err
    killed = dying_run("SIGKILL", kill_at, broken)
    assert killed.returncode == -9, killed.stderr
    saved = sorted(p.name for p in (tmp_path / "broken" / "checkpoints").iterdir())
    assert saved[-1] < f"step-{kill_at - 1:08d}", "the kill must fall between two checkpoints"
    # how many processes read the data must not matter either
    code, _, err = command("train", "classify", *broken, "data.workers=2")
    assert code == 0, err
    assert "resuming from" in err
    assert_same_run(tmp_path / "unbroken", tmp_path / "broken", last)
    with (tmp_path / "broken" / "train.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, last + 1))


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_ctrl_c_saves_and_exits_130(recipe, tmp_path, signal):
    stopped = dying_run(signal, 8, recipe)
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert f"stopped by {signal} at step 8" in stopped.stderr
    assert load_json(tmp_path / "run" / "checkpoints" / "step-00000008" / "state.json")["place"] == 2


def test_two_processes_train_as_one_with_the_batch_of_both(recipe, tmp_path, command):
    """DDP over gloo; on GPUs it is `accelerate launch`, which on a CPU would need MPI for what torchrun does."""
    options = [*recipe, "train.epochs=1", "optim.warmup_epochs=0", "optim.name=sgd", "optim.lr=0.1"]
    options += ["augment.scale=[1.0, 1.0]", "augment.ratio=[1.0, 1.0]", "augment.hflip=0", "optim.clip_grad=1.0"]
    code, _, err = command("train", "classify", *options, f"run.out={tmp_path / 'one'}")
    assert code == 0, err
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = ["train", "classify", *options, "train.batch_size=4", f"run.out={tmp_path / 'two'}"]
    done = subprocess.run(
        [*launch, "-m", "scanvas.train.cli", *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best:") == 1, "one process speaks"
    one, two = (load_file(tmp_path / n / "checkpoints/step-00000006/model.safetensors") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], atol=2e-5, rtol=1e-4)
    metrics = [load_json(tmp_path / n / "final/training.json")["metrics"] for n in ("one", "two")]
    assert metrics[0]["top1"] == metrics[1]["top1"]
    states = [load_json(tmp_path / n / "checkpoints/step-00000006/state.json")["rng"] for n in ("one", "two")]
    assert [len(state) for state in states] == [1, 2]
    assert states[1][0] != states[1][1], "each process draws its own random numbers"

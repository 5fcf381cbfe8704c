"""Shared by all tests: no network, few threads, small folders of images."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

CLASSES = ("apple", "boat", "cup")


def write_images(folder, counts, *, classes=CLASSES, side=32, seed=0):
    """``folder/<split>/<class>/<number>.png``: noise around one colour per class. ``counts``: split → images a class."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (side, side, 3))
                pixels[..., label % 3] += 100
                Image.fromarray(pixels.astype("uint8")).save(folder / split / name / f"{number:03d}.png")
    return folder


@pytest.fixture
def images(tmp_path):
    """A folder with three classes, 16 images each to train on and 4 to validate on, 32×32."""
    return write_images(tmp_path / "images", {"train": 16, "val": 4})


@pytest.fixture
def recipe(images, tmp_path):
    """Overrides of a classification recipe that takes seconds: 3 epochs of 6 steps on ``images``."""
    return [
        "model.name=test_vig",
        "model.img_size=32",
        "model.kwargs={patch_size: 8}",
        f"data.root={images}",
        "data.workers=0",
        "train.epochs=3",
        "train.batch_size=8",
        "train.cpu=true",
        "optim.warmup_epochs=1",
        f"run.out={tmp_path / 'run'}",
        "run.log_every=1",
        "run.tensorboard=false",
        "run.plot=false",
    ]


@pytest.fixture
def command(capsys):
    """``command("train", "classify", …)`` runs the command line in this process → (exit code, stdout, stderr)."""
    from scanvas.train import cli

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return run

"""Shared by all tests: no network, one thread, small folders of images.

One thread, because the models here are tiny: with two, where other processes use the cores too, every small operation
waits for a thread that is not running (measured on 2 busy cores: 12 times slower).
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(1)

CLASSES = ("apple", "boat", "cup")


def _write_images(folder, counts, *, classes=CLASSES, side=32, seed=0):
    """``folder/<split>/<class>/<number>.png``: noise around one colour per class. ``counts``: images a class."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (side, side, 3))
                pixels[..., label % 3] += 100
                Image.fromarray(pixels.astype("uint8")).save(folder / split / name / f"{number:03d}.png")
    return folder


def pytest_collection_modifyitems(items):
    """The longest tests first. At the end, one process would run them while the others have nothing left to do."""
    items.sort(key=lambda item: not item.name.startswith("test_kernels_under_the_interpreter"))


@pytest.fixture
def write_images():
    """``write_images(folder, {split: images a class}, classes=…, side=32)`` writes an image folder."""
    return _write_images


@pytest.fixture
def images(tmp_path):
    """A folder with three classes (apple, boat, cup), 16 images each to train on and 4 to validate on, 32×32."""
    return _write_images(tmp_path / "images", {"train": 16, "val": 4})


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

"""``scanvas demo``: what the library does, on real images, on a laptop's CPU, in minutes.

A list of steps, each a function of the output directory that returns what to say, or raises DemoError. The data are
scikit-learn's 1,797 handwritten digits (8×8 pixels, scanned), written as an image folder so that training goes the way
that any folder of images goes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .demo_linear import compare, distill, train_teacher
from .demo_paint import paint_and_judge, train_painter, write_captions
from .errors import DemoError, UserError

WANTED = 97.0  # percent of held-out digits
_SIDE = 32  # pixels the 8×8 scans are enlarged to


def demo(out: str) -> None:
    """Run every step under ``out``. Raises DemoError where a model is not as good as promised."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (title, step) in enumerate(STEPS, 1):
        print(f"[{number}/{len(STEPS)}] {title}", flush=True)
        began = time.monotonic()
        said = step(folder)
        print(f"      {said}  ({time.monotonic() - began:.0f} s)", flush=True)


def write_digits(folder: Path) -> str:
    """``digits/{train,val}/{0…9}/*.png``, every fifth scan of a class held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("the demo needs scikit-learn and matplotlib: pip install 'scanvas[demo]'") from error
    from PIL import Image

    digits = load_digits()
    counts = {"train": 0, "val": 0}
    seen = [0] * 10
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target)):
        seen[label] += 1
        split = "val" if seen[label] % 5 == 0 else "train"
        path = folder / "digits" / split / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        scan = Image.fromarray((pixels * (255 / 16)).round().astype("uint8"))
        scan.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC).save(path)
        counts[split] += 1
    return f"{counts['train']} to learn from, {counts['val']} held out: {folder / 'digits'}"


def train(folder: Path) -> str:
    """The recipe ``classify/digits`` into ``classifier/``."""
    from .classify import ClassifyConfig, train_classifier
    from .config import load

    overrides = [f"data.root={folder / 'digits'}", f"run.out={folder / 'classifier'}"]
    result = train_classifier(load(ClassifyConfig, "digits", overrides, task="classify"))
    return f"{result.metrics['top1']:.2f} % of held-out digits right; curves: {folder / 'classifier' / 'curves.png'}"


def reload(folder: Path) -> str:
    """A fresh process loads ``classifier/final`` through timm, reads the held-out digits and draws its predictions.

    Not ``best``, which those digits chose: they would no longer be held out.
    """
    done = subprocess.run(
        [sys.executable, "-m", "scanvas.train.demo", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DemoError(f"the fresh process could not use the checkpoint: {done.stderr.strip()[-800:]}")
    judged = json.loads(done.stdout.splitlines()[-1])
    if judged["top1"] < WANTED:
        raise DemoError(f"{judged['top1']:.2f} % of the held-out digits are right, and {WANTED} % were promised")
    saved = folder / "classifier" / "final"
    return f"timm.create_model('local-dir:{saved}') gets {judged['top1']:.2f} % right; picture: {judged['picture']}"


STEPS: list[tuple[str, Callable[[Path], str]]] = [
    ("handwritten digits from scikit-learn as an image folder", write_digits),
    ("train a ViG classifier (scanvas train classify --config digits)", train),
    ("reload it in a fresh process through timm and judge it", reload),
    ("captions for the same digits, in words and numerals", write_captions),
    ("train a text-to-image DiG (scanvas train denoise --config digits)", train_painter),
    ("reload it in a fresh process through diffusers, paint, and let the classifier judge", paint_and_judge),
    ("train the same model with softmax attention", train_teacher),
    ("make that linear and distil it (scanvas train distill --config digits)", distill),
    ("paint with both in a fresh process, and let the classifier judge", compare),
]


def judge(folder: Path) -> dict[str, object]:
    """Accuracy on the held-out digits with nothing but timm, PIL and the saved directory; predictions.png beside it."""
    import timm
    import torch
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    import scanvas  # noqa: F401 - registers the models with timm

    model = timm.create_model(f"local-dir:{folder / 'classifier' / 'final'}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    names = model.pretrained_cfg["label_names"]
    paths = sorted((folder / "digits" / "val").glob("*/*.png"), key=lambda path: path.name)
    scans = [Image.open(path).convert("RGB") for path in paths]
    with torch.inference_mode():
        inputs = torch.stack([transform(scan) for scan in scans])
        probability = torch.cat([model(chunk) for chunk in inputs.split(128)]).softmax(1)
    said = [names[i] for i in probability.argmax(1).tolist()]
    right = [name == path.parent.name for name, path in zip(said, paths)]
    picture = folder / "predictions.png"
    _draw(picture, scans, said, right, probability.amax(1).tolist())
    return {"top1": 100 * sum(right) / len(right), "picture": str(picture)}


def _draw(path: Path, scans: list, said: list[str], right: list[bool], sure: list[float]) -> None:
    """All mistakes first, then others, up to forty digits with what the model says of them."""
    from matplotlib.figure import Figure

    order = sorted(range(len(scans)), key=lambda i: right[i])[:40]
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    wrong = right.count(False)
    figure.suptitle(f"{sum(right)} of {len(right)} held-out digits right; the {wrong} wrong ones first, in red")
    for axis, i in zip(figure.subplots(5, 8).ravel(), order):
        axis.imshow(scans[i])
        axis.set_title(f"{said[i]}  ({100 * sure[i]:.0f} %)", fontsize=9, color="black" if right[i] else "red")
        axis.axis("off")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print(json.dumps(judge(Path(sys.argv[1]))))

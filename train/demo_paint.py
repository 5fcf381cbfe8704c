"""The painting half of ``scanvas demo``: a text-to-image model of handwritten digits, judged by the classifier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .errors import DemoError, UserError

WANTED = 85.0  # percent of painted digits that the classifier takes for the one asked for
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PHRASES = ("a handwritten {}", "the digit {}", "{}")
_EACH = 10  # images of each digit to judge


def captions(digit: int) -> list[str]:
    """All ways the captions name a digit, with its word and with its numeral."""
    return [phrase.format(name) for phrase in _PHRASES for name in (_WORDS[digit], str(digit))]


def write_captions(folder: Path) -> str:
    """``metadata.jsonl`` beside the class folders of both splits, as in Hugging Face's imagefolder."""
    count = 0
    for split in ("train", "val"):
        root = folder / "digits" / split
        lines = [
            json.dumps({"file_name": f"{path.parent.name}/{path.name}", "text": captions(int(path.parent.name))})
            for path in sorted(root.glob("*/*.png"))
        ]
        count += len(lines)
        (root / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{count} images with captions such as {', '.join(map(repr, captions(7)[:3]))}"


def train_painter(folder: Path, name: str = "painter", more: tuple[str, ...] = ()) -> str:
    """The recipe ``denoise/digits``, with overrides, into ``painter/`` or another name."""
    try:
        import transformers  # noqa: F401 - an optional dependency
    except ImportError as error:
        raise UserError("painting from text needs the package transformers: pip install 'scanvas[text]'") from error
    from .config import load
    from .denoise import DenoiseConfig, train_denoiser

    overrides = [f"data.root={folder / 'digits'}", f"run.out={folder / name}", *more]
    result = train_denoiser(load(DenoiseConfig, "digits", overrides, task="denoise"))
    return f"loss on held-out digits {result.metrics['loss']:.3f}; pictures: {folder / name / 'samples'}"


def paint_and_judge(folder: Path) -> str:
    """A fresh process loads the pipeline through diffusers, paints ten prompts and a hundred digits to be judged."""
    done = subprocess.run(
        [sys.executable, "-m", "scanvas.train.demo_paint", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DemoError(f"the fresh process could not use the pipeline: {done.stderr.strip()[-800:]}")
    judged = json.loads(done.stdout.splitlines()[-1])
    if judged["right"] < WANTED:
        raise DemoError(
            f"the classifier takes {judged['right']:.0f} % of the painted digits for the one asked for, and "
            f"{WANTED:.0f} % were promised; look at {judged['picture']}"
        )
    pipeline = folder / "painter" / "final"
    return (
        f"{judged['right']:.0f} of 100 painted digits are the one asked for, says the classifier; picture: "
        f"{judged['picture']}; now try: scanvas sample --pipeline {pipeline} "
        "--prompt 'a handwritten seven' --enlarge 32 --out seven.png"
    )


def judge(folder: Path) -> dict[str, object]:
    """With diffusers, timm and the saved directories alone: painted.png, and the percentage of a hundred painted digits
    in which the classifier sees the one asked for."""
    from diffusers import DiffusionPipeline

    import scanvas  # noqa: F401 - makes the models known to timm and diffusers

    pipeline = DiffusionPipeline.from_pretrained(folder / "painter" / "final")
    shown = [captions(digit)[digit % 6] for digit in range(10)]
    picture = folder / "painted.png"
    _draw(picture, shown, paint(pipeline, folder, shown, 0))
    return {"right": right_digits(pipeline, folder), "picture": str(picture)}


def paint(pipeline, folder: Path, prompts: list[str], seed: int) -> list:
    """An image for each prompt, as the painter's recipe paints."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    grid = json.loads((folder / "painter" / "final" / "training.json").read_text(encoding="utf-8"))["config"]["grid"]
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    options = {"num_inference_steps": grid["steps"], "guidance_scale": grid["guidance"]}
    return pipeline(prompts, generator=generators, **options).images


def right_digits(pipeline, folder: Path) -> float:
    """The percentage of a hundred painted digits in which the classifier sees the one asked for."""
    import timm
    import torch
    from timm.data import create_transform, resolve_model_data_config

    asked = [digit for digit in range(10) for _ in range(_EACH)]
    images = paint(pipeline, folder, [captions(digit)[i % 6] for i, digit in enumerate(asked)], 1000)
    model = timm.create_model(f"local-dir:{folder / 'classifier' / 'final'}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    names = model.pretrained_cfg["label_names"]
    with torch.inference_mode():
        said = model(torch.stack([transform(image.convert("RGB")) for image in images])).argmax(1).tolist()
    return 100 * sum(names[i] == str(digit) for i, digit in zip(said, asked)) / len(asked)


def _draw(path: Path, prompts: list[str], images: list) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    for axis, prompt, image in zip(figure.subplots(2, 5).ravel(), prompts, images):
        axis.imshow(image, cmap="gray", interpolation="bicubic")
        axis.set_title(prompt, fontsize=9)
        axis.axis("off")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print(json.dumps(judge(Path(sys.argv[1]))))

"""The last part of ``scanvas demo``: a softmax text-to-image model made linear, before and after distillation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .checkpoint import load_json
from .demo_paint import WANTED, right_digits, train_painter
from .errors import DemoError

_LOST = 5.0  # percent of painted digits that may be lost to the teacher after distillation


def train_teacher(folder: Path) -> str:
    """The painter's recipe with softmax attention into ``teacher/``."""
    return train_painter(folder, "teacher", ("model.kwargs.mixer=softmax", "model.kwargs.mixer_kwargs=null"))


def distill(folder: Path) -> str:
    """The recipe ``distill/digits`` into ``linear/``."""
    from .distill import train_distill
    from .distill_config import load_distill

    overrides = [
        f"teacher.checkpoint={folder / 'teacher' / 'final'}",
        f"data.root={folder / 'digits'}",
        f"run.out={folder / 'linear'}",
    ]
    train_distill(load_distill("digits", overrides))
    return f"what linearize did: {folder / 'linear' / 'linearize.json'}; pictures: {folder / 'linear' / 'samples'}"


def compare(folder: Path) -> str:
    """A fresh process paints a hundred digits with the teacher, the linearised teacher, and what was distilled."""
    done = subprocess.run(
        [sys.executable, "-m", "scanvas.train.demo_linear", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DemoError(f"the fresh process could not use the pipelines: {done.stderr.strip()[-800:]}")
    right = json.loads(done.stdout.splitlines()[-1])
    measured = load_json(folder / "linear" / "distill.json")
    first, last = (measured[stage] for stage in ("1-attention", "2-end_to_end"))
    rows = [
        ("softmax teacher", right["teacher"], "", measured["teacher"]["loss"]),
        ("linearised", right["linearised"], f"{measured['linearized']['error']:.3f}", measured["linearized"]["loss"]),
        ("distilled", right["distilled"], f"{first['error']:.3f}", last["loss"]),
    ]
    lines = [f"{'':17}{'right of 100':>14}{'error of attention':>20}{'loss on held-out digits':>25}"]
    lines += [f"{name:17}{count:14.0f}{error:>20}{loss:25.4f}" for name, count, error, loss in rows]
    table = "\n".join(f"      {line}" for line in lines)
    wanted = min(WANTED, right["teacher"] - _LOST)
    if right["distilled"] < wanted:
        raise DemoError(f"the distilled model was to paint {wanted:.0f} of 100 digits right at least:\n{table}")
    return f"prompt accuracy before and after\n{table}\n     "


def judge(folder: Path) -> dict[str, float]:
    """How many of a hundred digits are the one asked for."""
    from diffusers import DiffusionPipeline

    import scanvas

    teacher = DiffusionPipeline.from_pretrained(folder / "teacher" / "final")
    linearised, _ = scanvas.linearize(teacher, "lit")
    distilled = DiffusionPipeline.from_pretrained(folder / "linear" / "final")
    painters = {"teacher": teacher, "linearised": linearised, "distilled": distilled}
    return {name: right_digits(pipeline, folder) for name, pipeline in painters.items()}


if __name__ == "__main__":
    print(json.dumps(judge(Path(sys.argv[1]))))

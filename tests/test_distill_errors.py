"""What ``scanvas train distill`` refuses, before any training."""

import distill_parts
import pytest
from distill_parts import PLAIN, classifying, painting, run

from scanvas.train.errors import ConfigError, UserError

home = distill_parts.home


REFUSED = {
    "unknown loss": (
        painting,
        ["stages=[{terms: {predicton: 1}}]"],
        "unknown loss 'predicton'; did you mean 'prediction'",
    ),
    "negative weight": (
        painting,
        ["stages=[{terms: {mse: -1}}]"],
        r"stages.0.terms.mse must be a weight of at least 0",
    ),
    "unknown stage": (painting, ["stages=[{kind: atention}]"], "no kind of stage; did you mean 'attention'"),
    "unknown choice": (painting, ["stages=[{train: lorra}]"], "nothing to train; did you mean 'lora'"),
    "all of attention": (painting, ["stages=[{kind: attention, train: all}]"], "reaches nothing but attention"),
    "loss in the wrong stage": (
        painting,
        ["stages=[{kind: block, terms: {mse: 1}}]"],
        "'mse' is not for the stage 'block'",
    ),
    "classifier's loss": (
        painting,
        ["stages=[{terms: {logits: 1}}]"],
        "'logits' is a loss of classifiers, and task is den",
    ),
    "denoiser's loss": (
        classifying,
        ["stages=[{terms: {mse: 1}}]"],
        "'mse' is a loss of denoisers, and task is classify",
    ),
    "length twice": (painting, ["stages=[{epochs: 1, steps: 3}]"], "both epochs and steps"),
    "no length": (painting, ["stages=[{steps: 0}]"], "stages.0.steps must be positive, and is 0"),
    "no stage": (painting, ["stages=[]"], "stages is empty"),
    "no such stage": (painting, ["stages.5.lr=1"], "'5' is no entry of the 2 there"),
    "unknown key": (painting, ["stages=[{lrr: 1}]"], r"unknown key 'stages\[0\]\.lrr'; did you mean 'lr'"),
    "unknown task": (painting, ["task=denoising"], "task='denoising' is no task; did you mean 'denoise'"),
    "other task's key": (classifying, ["noise.times=uniform"], "unknown key 'noise'"),
    "unknown mixer": (painting, ["student.mixer=litt"], "student: mixer must be one of .*did you mean 'lit'"),
    "unknown option": (painting, ["student.options={kernel: 3}"], "student: .*'kernel' is no option of 'lit'"),
    "no such layer": (painting, ["student.layers=nowhere.*"], "matches no attention layer"),
    "heads": (painting, ["student.heads=3"], "heads must divide the 4 heads"),
    "sensitivity without data": (painting, ["student.layers=1", "student.calibration=0"], "needs calibration"),
    "no teacher": (painting, ["teacher.checkpoint=null"], "teacher.checkpoint is not set"),
    "teacher is nothing": (painting, ["teacher.checkpoint=/nowhere"], "neither the directory of a denoiser"),
    "a classifier to paint": (
        painting,
        ["teacher.checkpoint={home}/classifier"],
        "neither the directory of a denoiser",
    ),
    "a painter to classify": (classifying, ["teacher.checkpoint={home}/painter"], "holds no config.json"),
    "classes": (classifying, ["data.root={home}/two"], "the teacher has 3 classes, and the data 2"),
    "channels": (painting, ["vae.path={home}/painter"], "vae.path=.* cannot be loaded"),
    "no data": (painting, ["data.root=/nowhere"], "/nowhere"),
    "variance": (
        painting,
        ["teacher.checkpoint={home}/flow", "stages=[{terms: {mse: 1, variance: 1}}]"],
        "variance needs a teacher that predicts one",
    ),
    "map of ReLU": (
        painting,
        ["stages=[{kind: attention, terms: {attention_map: 1}}]"],
        "attention_map is a cross-entropy",
    ),
    "nothing new": (painting, ["student.options={kernel_size: 0}", "stages=[{train: new}]"], "no tensor that is new"),
    "augmented cache": (
        classifying,
        ["teacher.cache=true"],
        r"without augmentation, and there is augment.scale=\[0.08",
    ),
    "cache of a denoiser": (painting, ["teacher.cache=true"], "teacher.cache is for classifiers"),
    "cache of attention": (
        classifying,
        ["teacher.cache=true", *PLAIN, "stages=[{kind: attention}]"],
        "no stage could do with them alone",
    ),
    "quantised": (painting, ["teacher.quantize=int8"], "needs the package torchao"),
    "half on a CPU": (painting, ["train.mixed_precision=fp16"], "fp16 needs a GPU"),
    "student that is not there": (classifying, ["student.checkpoint=/nowhere"], "cannot be loaded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_training(home, tmp_path, name):
    recipe, options, said = REFUSED[name]
    if name == "classes" and not (home / "two").exists():
        from conftest import _write_images

        _write_images(home / "two", {"train": 8, "val": 2}, classes=("x", "y"), side=8)
    with pytest.raises(UserError, match=said):
        run(recipe(home, tmp_path / "run", *(option.replace("{home}", str(home)) for option in options)))
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_teacher_that_is_not_softmax_is_refused(home, tmp_path):
    run(painting(home, tmp_path / "a", "stages=[{steps: 1}]"))
    with pytest.raises(ConfigError, match="is linearised already"):
        run([*painting(home, tmp_path / "b"), f"teacher.checkpoint={tmp_path / 'a' / 'final'}"])
    run(classifying(home, tmp_path / "c", "stages=[{steps: 1}]"))
    with pytest.raises(ConfigError, match="linearised already"):
        run([*classifying(home, tmp_path / "d"), f"teacher.checkpoint={tmp_path / 'c' / 'final'}"])
    options = [*classifying(home, tmp_path / "e"), "teacher.checkpoint=null", "teacher.kwargs={num_classes: 3}"]
    with pytest.raises(ConfigError, match=r"linearize does not know .*; it knows"):
        run([*options, "teacher.name=test_resnet"])
    with pytest.raises(ConfigError, match="Vig has no softmax self-attention"):
        run([*options, "teacher.name=test_vig"])

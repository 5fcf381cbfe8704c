"""``scanvas train distill``: its losses, what its stages train, that it resumes to the same bits, what it refuses."""

import copy
import json
import math

import pytest
import timm
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from linear_parts import SoftmaxCore
from safetensors.torch import load_file

import scanvas
from scanvas.diffusion.linear_cores import TARGETS
from scanvas.train import distill, distill_config, distill_losses, distill_models, loop
from scanvas.train.denoise_config import LossConfig, NoiseConfig
from scanvas.train.distill_losses import LOSSES, Seen
from scanvas.train.errors import CheckpointError, ConfigError, NonFiniteError, UserError
from scanvas.train.losses import Step
from scanvas.train.process import Process, create_scheduler

QUICK = ["data.workers=0", "train.batch_size=8", "train.cpu=true", "run.tensorboard=false", "run.plot=false"]
QUICK += ["run.log_every=1", "train.epochs=1", "optim.weight_decay=0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Images in class folders, and teachers: a pipeline with a learned variance and a classifier."""
    from conftest import _write_images

    root = tmp_path_factory.mktemp("distill")
    _write_images(root / "images", {"train": 16, "val": 4}, side=8)
    torch.manual_seed(0)
    denoiser = scanvas.create_denoiser(
        "dit_s_2", sample_size=8, patch_size=2, in_channels=3, out_channels=6, num_classes=3, num_layers=2,
        num_attention_heads=4, attention_head_dim=8, mlp_hidden=32,
    )  # fmt: skip
    shake(denoiser)
    scheduler = create_scheduler(NoiseConfig(), "epsilon", True)
    pipeline = scanvas.LinearDiTClassPipeline(
        transformer=denoiser, scheduler=scheduler, vae=None, id2label=dict(enumerate(("apple", "boat", "cup")))
    )
    pipeline.save_pretrained(root / "painter")
    flow = scanvas.create_denoiser(
        "dit_s_2", sample_size=8, in_channels=3, out_channels=None, num_classes=3, num_layers=1, num_attention_heads=2,
        attention_head_dim=8, mlp_hidden=32, prediction_type="flow_prediction",
    )  # fmt: skip
    scanvas.LinearDiTClassPipeline(
        transformer=flow, scheduler=FlowMatchEulerDiscreteScheduler(), vae=None
    ).save_pretrained(root / "flow")
    vit = {"img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 16, "num_heads": 4, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **vit)
    shake(model)
    timm.models.save_for_hf(model, root / "classifier", model_args=vit, safe_serialization=True)
    return root


def shake(model):
    """Weights that are nowhere zero, and attention that is not flat."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if "qkv" in name or "to_q" in name or "to_k" in name:
                parameter.mul_(3)


def painting(home, out, *more):
    return [f"teacher.checkpoint={home / 'painter'}", f"data.root={home / 'images'}", "data.size=8", "grid.images=0",
            f"run.out={out}", *QUICK, *more]  # fmt: skip


def classifying(home, out, *more):
    return ["task=classify", f"teacher.checkpoint={home / 'classifier'}", f"data.root={home / 'images'}",
            f"run.out={out}", *QUICK, *more]  # fmt: skip


def run(overrides):
    return distill.train_distill(distill_config.load_distill(None, overrides))


def setup(overrides):
    """A distillation before its first stage."""
    config = distill_config.load_distill(None, overrides)
    return distill.Distillation(config, distill._SOURCES[config.task][0])


def read(path):
    return json.loads(path.read_text())


# ---- losses


def rand(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen_by_hand():
    """A batch with everything in it, float64."""
    process = Process(create_scheduler(NoiseConfig(), "epsilon", True), "epsilon", NoiseConfig())
    images = [rand(2, 3, 4, 4, seed=i) for i in range(6)]
    clean, noise, noisy, student, teacher, variance = images
    place = torch.tensor([3, 700])
    step = Step(process, clean, noise, noisy, place, student, variance)
    return Seen(
        attention=[
            (rand(2, 5, 3, seed=10), rand(2, 5, 3, seed=11)),
            (rand(2, 4, 3, seed=12), 5 * rand(2, 4, 3, seed=13)),
        ],
        block=[(rand(2, 5, 3, seed=14), rand(2, 5, 3, seed=15)), (rand(2, 5, 3, seed=16), rand(2, 5, 3, seed=17))],
        attention_map=[tuple(rand(2, 2, 3, 3, seed=i).softmax(-1) for i in (20, 21))],
        step=step,
        teacher_step=Step(process, clean, noise, noisy, place, teacher, 2 * variance),
        loss_config=LossConfig(),
        logits=rand(3, 4, seed=30),
        teacher_logits=rand(3, 4, seed=31),
        target=torch.tensor([0, 3, 1]),
        cross_entropy=torch.nn.functional.cross_entropy,
        temperature=2.0,
    )


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def squares(a, b):
    return mean((x - y) ** 2 for x, y in zip(a.flatten().tolist(), b.flatten().tolist()))


def probabilities(row, temperature=1.0):
    weights = [math.exp(z / temperature) for z in row]
    return [w / sum(weights) for w in weights]


def kl(seen, T):
    rows = zip(seen.teacher_logits.tolist(), seen.logits.tolist())
    pairs = [(probabilities(t, T), probabilities(s, T)) for t, s in rows]
    return T * T * mean(sum(p * math.log(p / q) for p, q in zip(*pair)) for pair in pairs)


def entropy(seen, targets):
    return mean(-math.log(probabilities(row)[c]) for row, c in zip(seen.logits.tolist(), targets))


def map_entropy(seen):
    ((got, wanted),) = seen.attention_map
    rows = zip(got.flatten(0, 2).tolist(), wanted.flatten(0, 2).tolist())
    return mean(-sum(w * math.log(g) for g, w in zip(*row)) for row in rows)


BY_HAND = {
    "attention": lambda s: mean(squares(*pair) for pair in s.attention),
    "attention_relative": lambda s: mean(squares(g, w) / squares(w, 0 * w) for g, w in s.attention),
    "attention_map": map_entropy,
    "block": lambda s: mean(squares(*pair) for pair in s.block),
    "block_relative": lambda s: mean(squares(g, w) / squares(w, 0 * w) for g, w in s.block),
    "prediction": lambda s: squares(s.step.prediction, s.teacher_step.prediction),
    "variance": lambda s: squares(s.step.variance, s.teacher_step.variance),
    "cross_entropy": lambda s: entropy(s, [0, 3, 1]),
    "logits": lambda s: kl(s, 2.0),
    "hard": lambda s: entropy(s, [max(range(4), key=row.__getitem__) for row in s.teacher_logits.tolist()]),
    "mse": lambda s: squares(s.step.prediction, s.step.noise),
    # computed by hand in test_denoise_losses.py; here only that it is the recipe's function, averaged
    "min_snr": lambda s: mean(distill_losses.DENOISE_LOSSES["min_snr"](s.step, s.loss_config).tolist()),
    "vlb": lambda s: mean(distill_losses.DENOISE_LOSSES["vlb"](s.step, s.loss_config).tolist()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_what_their_formulas_say(name):
    seen = seen_by_hand()
    assert float(LOSSES[name].function(seen)) == pytest.approx(BY_HAND[name](seen), rel=1e-9, abs=1e-12)
    assert float(distill_losses.loss_terms(seen, {name: 0.5})[name]) == pytest.approx(BY_HAND[name](seen) / 2, rel=1e-9)


# ---- what stages do


def test_layers_and_blocks_are_called_as_the_teachers_are(home, tmp_path, monkeypatch):
    """With a core that is a softmax itself nothing is lost: every layer, block and output is the teacher's."""
    monkeypatch.setitem(TARGETS, "softmax", SoftmaxCore)
    run = setup(classifying(home, tmp_path, "student.mixer=softmax", "student.calibration=0"))
    student, (drawn, *_) = run.student(), run.source.measured(lambda: None)
    for kind in ("attention", "block"):
        paths = distill_models.reach(student, kind)
        assert paths == [f"blocks.{i}{'.attn' if kind == 'attention' else ''}" for i in range(2)]
        error, each = run.errors(student, paths, lambda: None)
        assert error < 1e-9
        assert list(each) == paths
    output, made = student(drawn.inputs, paths)
    wanted, calls = run.teacher(drawn.inputs, paths)
    torch.testing.assert_close(output, wanted)
    for path in paths:
        torch.testing.assert_close(made[path], calls[path][2])
    with torch.no_grad():
        student.root.blocks[1].attn.v_proj.weight.mul_(1.1)
    assert run.errors(student, ["blocks.0.attn", "blocks.1.attn"], lambda: None)[1]["blocks.1.attn"] > 1e-3
    assert run.errors(student, ["blocks.0.attn"], lambda: None)[0] < 1e-9, "the teacher's inputs, not the student's"


def test_a_copy_of_the_student_is_told_the_grids(home, tmp_path):
    """EMA measures a copy, whose layers hold grids of their own."""
    run = setup(classifying(home, tmp_path))
    copied = copy.deepcopy(run.student())
    for path in copied.layers:
        copied.root.get_submodule(path).record.value = None
    with torch.no_grad():
        assert run.errors(copied, copied.layers, lambda: None) == run.errors(run.student(), copied.layers, lambda: None)


def test_a_stage_goes_on_where_the_one_before_ended(home, tmp_path):
    """With the average of its weights; and a stage that counts steps goes through the data in their order."""
    stages = "stages=[{kind: attention, lr: 0.01, steps: 8}, {kind: end_to_end, steps: 1, lr: 1e-12}]"
    more = [stages, "optim.ema_decay=0.5", "optim.min_lr=0", "optim.name=sgd"]
    made = setup(painting(home, tmp_path, *more))
    made.stage(0)
    task = distill.DistillTask(made, made.stages[0], made.stages[0].stages[-1], made.accelerator)
    batches = task.batches(0, 4)
    order = [next(batches)["index"] for _ in range(4)]
    wanted = [batch["index"] for epoch, start in ((0, 4), (1, 0)) for batch in made.source.batches(epoch, start)]
    assert order == wanted[:4]
    made.stage(1)
    first, last = (
        load_file(tmp_path / place / "transformer/diffusion_pytorch_model.safetensors")
        for place in ("stage-1-attention/final", "final")
    )
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, last[name], atol=1e-6, rtol=0)
    assert made.linear.layers == ["transformer_blocks.0.mixer", "transformer_blocks.1.mixer"]
    report = read(tmp_path / "linearize.json")
    report["layers"] = report["layers"][1:]
    (tmp_path / "linearize.json").write_text(json.dumps(report))
    again = setup(painting(home, tmp_path, *more))
    assert again.linear.layers == ["transformer_blocks.1.mixer"], "a run that goes on has the layers it began with"


def test_layers_that_scan_are_compared_in_raster_order(home, tmp_path):
    run = setup(painting(home, tmp_path, "student.mixer=gla"))
    student = run.student()
    assert [block.order for block in student.root.transformer_blocks] == ["raster", "reversed"]
    path = "transformer_blocks.1.mixer"
    x = torch.randn(2, 24, 32)
    block = student.root.transformer_blocks[1]
    for order in ("reversed", "column", "reversed_column"):
        block.order = order
        with distill_models.Recorder(student.root, [path]) as record:
            wanted = block.mix(x, (4, 6))
        assert torch.equal(record.calls[path][2], wanted)
        assert torch.equal(student.call(path, (x, (4, 6)), {}), wanted)


ATTENTION = "stages=[{kind: attention, terms: {attention: 1}, lr: 0.01}]"
TRANSFER = {
    "lit": (painting, ["student.mixer=lit", "stages=[{kind: attention, lr: 0.01}]"]),
    "gla": (painting, ["student.mixer=gla", "stages=[{kind: attention, lr: 0.01}]"]),
    "maps": (
        classifying,
        ["student.mixer=hedgehog", "stages=[{kind: attention, terms: {attention_map: 1}, lr: 0.01, train: new}]"],
    ),
    "LinFusion's": (classifying, ["student.mixer=linfusion", ATTENTION]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFER)
def test_attention_transfer_brings_every_layer_nearer(home, tmp_path, name):
    recipe, options = TRANSFER[name]
    _, measured = run(recipe(home, tmp_path, *options, "train.epochs=6", "run.eval_every=6"))
    before, after = read(tmp_path / "linearized.json"), read(tmp_path / "layers.json")
    assert before.keys() == after.keys()
    assert len(before) == 2
    assert all(after[path] < 0.9 * before[path] for path in before), (before, after)
    assert list(measured) == ["teacher", "linearized", "1-attention"]
    assert measured["1-attention"]["error"] == pytest.approx(sum(after.values()) / 2)


STAGES = (
    "stages=[{kind: attention, epochs: 1}, {kind: block, steps: 4, train: all}, "
    "{kind: end_to_end, lr: 1e-3, terms: {mse: 1, vlb: 1, prediction: 0.5, variance: 0.05, attention: 0.5}}]"
)


def test_a_run_in_three_stages_leaves_a_pipeline_and_the_teacher_as_it_was(home, tmp_path, command):
    files = {p: p.read_bytes() for p in (home / "painter").rglob("*") if p.is_file()}
    options = painting(home, tmp_path / "run", STAGES, "optim.ema_decay=0.5", "grid.images=2", "grid.steps=2")
    code, out, err = command("train", "distill", *options)
    assert code == 0, err
    assert all(path.read_bytes() == content for path, content in files.items())
    assert "3-end_to_end" in out
    table = read(tmp_path / "run" / "distill.json")
    assert table["3-end_to_end"]["loss"] < table["linearized"]["loss"]
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "final")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.transformer.config.layer_mixers["1"]["mixer"] == "linear"
    assert pipeline.config.id2label == {"0": "apple", "1": "boat", "2": "cup"}
    assert pipeline(["boat"], num_inference_steps=2).images[0].size == (8, 8)
    assert (tmp_path / "run" / "samples" / "step-00000006.png").is_file()
    rows = (tmp_path / "run" / "stage-2-block" / "train.csv").read_text().splitlines()
    assert len(rows) == 5, "a stage may have a length of its own in steps"
    # the second stage began where the first ended
    first = load_file(tmp_path / "run/stage-1-attention/final/transformer/diffusion_pytorch_model.safetensors")
    second = load_file(tmp_path / "run/stage-2-block/final/transformer/diffusion_pytorch_model.safetensors")
    outside = [key for key in first if "transformer_blocks" not in key]
    assert outside
    assert all(torch.equal(first[key], second[key]) for key in outside)


@pytest.mark.parametrize("kind", ["plain", "bf16", "offload"])
def test_the_teacher_in_memory_stays_as_it_was(home, tmp_path, kind):
    extra = {"plain": [], "bf16": ["teacher.dtype=bf16"], "offload": ["teacher.offload=true"]}[kind]
    run = setup(classifying(home, tmp_path, *extra, "student.mixer=lit"))
    state = {name: tensor.clone() for name, tensor in run.teacher.net.state_dict().items()}
    if kind == "plain":
        saved = load_file(home / "classifier" / "model.safetensors")
        assert all(torch.equal(state[name], saved[name]) for name in saved)
    run.stages = [run.stages[1]]
    run.stage(0)
    for name, tensor in run.teacher.net.state_dict().items():
        assert tensor.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
        if tensor.device.type != "meta":
            assert torch.equal(tensor, state[name])
    assert not any(module.training for module in run.teacher.net.modules())


@pytest.mark.parametrize("train", distill_config.TRAINABLE)
def test_only_what_a_stage_trains_changes(home, tmp_path, train):
    options = classifying(home, tmp_path, "student.mixer=lit", f"stages=[{{kind: end_to_end, train: {train}}}]")
    run = setup(options)
    before = {name: tensor.clone() for name, tensor in run.net.state_dict().items()}
    run.stage(0)
    changed = {name for name, tensor in run.net.state_dict().items() if not torch.equal(tensor, before[name])}
    parameters = {name for name, _ in run.net.named_parameters()}
    core = {name for name in parameters if ".core." in name}
    wanted = {
        "new": core,
        "attention": {name for name in parameters if ".attn." in name},
        "lora": core | {name for name in parameters if ".attn." in name and name.endswith("weight")},
        "all": parameters,
    }[train]
    # what the last block's convolution adds to the image does not reach the class token
    assert changed == {name for name in wanted if "blocks.1.attn.core" not in name}
    saved = scanvas.load_linearized(tmp_path / "final")
    assert all(torch.equal(tensor, run.net.state_dict()[name]) for name, tensor in saved.state_dict().items())


def test_a_linearised_classifier_is_evaluated_like_any_other(home, tmp_path, command):
    more = ["student.layers=0.5", "stages=[{kind: attention}, {}]", "optim.ema_decay=0.5"]
    result, measured = run(classifying(home, tmp_path, *more))
    code, out, err = command(
        "evaluate", "--checkpoint", tmp_path / "final", "--device", "cpu", "--json", "--workers", 0
    )
    assert code == 0, err
    assert json.loads(out)["loss"] == pytest.approx(measured["2-end_to_end"]["loss"], rel=1e-5)
    report = read(tmp_path / "linearize.json")
    assert [row["path"] for row in report["layers"]] == [report["sensitivity"][0]["path"]]
    assert result.metrics["top1"] == measured["2-end_to_end"]["top1"]


def test_a_linearised_model_is_gone_on_with(home, tmp_path):
    run(painting(home, tmp_path / "a", "stages=[{steps: 1}]"))
    more = ["stages=[{steps: 1, lr: 1e-12}]", "optim.min_lr=0", f"student.checkpoint={tmp_path / 'a' / 'final'}"]
    _, measured = run(painting(home, tmp_path / "b", *more))
    known = read(tmp_path / "a" / "distill.json")["1-end_to_end"]["loss"]
    assert measured["linearized"]["loss"] == pytest.approx(known)
    with pytest.raises(ConfigError, match=r"does not fit the teacher: patch_embed.weight has shape \(32, .* in the "):
        run([*painting(home, tmp_path / "c", *more), f"teacher.checkpoint={home / 'flow'}"])


PLAIN = ["augment.scale=[1,1]", "augment.ratio=[1,1]", "augment.hflip=0"]


def test_the_teachers_logits_can_be_worked_out_once(home, tmp_path, monkeypatch):
    options = [*PLAIN, "stages=[{terms: {logits: 1, cross_entropy: 1}}]", "student.calibration=0"]
    _, wanted = run(classifying(home, tmp_path / "a", *options))
    counted = []
    call = distill_models.Teacher.__call__
    monkeypatch.setattr(distill_models.Teacher, "__call__", lambda *args: counted.append(1) or call(*args))
    _, got = run(classifying(home, tmp_path / "b", *options, "teacher.cache=true"))
    assert got["1-end_to_end"]["loss"] == pytest.approx(wanted["1-end_to_end"]["loss"], rel=1e-4)
    assert len(counted) == 6 + 2 + 2, "the training images once, the held-out ones for the two measurements before"
    logits = load_file(tmp_path / "b" / "teacher" / "logits.safetensors")["logits"]
    assert logits.shape == (48, 3)


def test_what_is_new_may_learn_faster(home, tmp_path):
    options = ["stages=[{kind: attention, steps: 3, lr: 0.01, new_lr: 20, warmup: 0.5}]", "optim.weight_decay=0.1"]
    run(classifying(home, tmp_path, *options, "optim.warmup_lr=0.001"))
    state = read(tmp_path / "checkpoints" / "step-00000003" / "state.json")
    groups = state["optimizer"]["param_groups"]
    assert sorted((g["lr_scale"], g["weight_decay"], len(g["params"])) for g in groups) == [
        (1.0, 0.0, 8), (1.0, 0.1, 8), (20.0, 0.0, 2), (20.0, 0.1, 2),
    ]  # fmt: skip
    rates = {g["lr_scale"]: g["lr"] for g in groups}
    assert rates[20.0] == pytest.approx(20 * rates[1.0])


# ---- stopping and going on


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


# ---- what is refused


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
    options = [*classifying(home, tmp_path / "e"), "teacher.checkpoint=null", "teacher.name=test_vig"]
    with pytest.raises(ConfigError, match=r"linearize does not know .*; it knows"):
        run([*options, "teacher.kwargs={num_classes: 3}"])


def test_weights_of_a_classifier_come_from_a_file_too(home, tmp_path):
    weights = home / "classifier" / "model.safetensors"
    vit = "{img_size: 8, patch_size: 2, depth: 2, embed_dim: 16, num_heads: 4}"
    options = ["stages=[{steps: 1}]", f"teacher.checkpoint={weights}", "teacher.name=vit_tiny_patch16_224"]
    _, measured = run(classifying(home, tmp_path / "a", *options, f"teacher.kwargs={vit}"))
    _, wanted = run(classifying(home, tmp_path / "b", "stages=[{steps: 1}]"))
    assert measured["teacher"] == pytest.approx(wanted["teacher"], rel=1e-5)
    with pytest.raises((ConfigError, CheckpointError), match="cannot be built"):
        run(classifying(home, tmp_path / "c", *options, "teacher.kwargs={img_size: 8, patch_size: 2}"))

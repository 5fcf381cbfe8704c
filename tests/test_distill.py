"""``scanvas train distill``: how layers are called, what stages train, and what is left behind."""

import copy
import functools
import json

import distill_parts
import pytest
import torch
from diffusers import DiffusionPipeline
from distill_parts import PLAIN, STAGES, classifying, painting, run
from linear_parts import SoftmaxCore
from safetensors.torch import load_file

import scanvas
from scanvas.diffusion.linear_cores import TARGETS
from scanvas.train import distill, distill_config, distill_models
from scanvas.train.errors import CheckpointError, ConfigError

home = distill_parts.home


def setup(overrides):
    """A distillation before its first stage."""
    config = distill_config.load_distill(None, overrides)
    return distill.Distillation(config, distill._SOURCES[config.task][0])


def read(path):
    return json.loads(path.read_text())


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
    drawn, draw = [], made.source.draw
    made.source.draw = lambda batch: drawn.append(draw(batch)) or drawn[-1]
    made.stage(0)
    task = distill.DistillTask(made, made.stages[0], made.stages[0].stages[-1], made.accelerator)
    batches = task.batches(0, 4)
    order = [next(batches)["index"] for _ in range(4)]
    wanted = [batch["index"] for epoch, start in ((0, 4), (1, 0)) for batch in made.source.batches(epoch, start)]
    assert order == wanted[:4]
    made.stage(1)
    assert len(drawn) == 9
    assert not torch.equal(drawn[0].noise, drawn[8].noise), "a stage has noise of its own"
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


def test_weights_of_a_classifier_come_from_a_file_too(home, tmp_path):
    weights = home / "classifier" / "model.safetensors"
    vit = "{img_size: 8, patch_size: 2, depth: 2, embed_dim: 16, num_heads: 4}"
    options = ["stages=[{steps: 1}]", f"teacher.checkpoint={weights}", "teacher.name=vit_tiny_patch16_224"]
    _, measured = run(classifying(home, tmp_path / "a", *options, f"teacher.kwargs={vit}"))
    _, wanted = run(classifying(home, tmp_path / "b", "stages=[{steps: 1}]"))
    assert measured["teacher"] == pytest.approx(wanted["teacher"], rel=1e-5)
    with pytest.raises((ConfigError, CheckpointError), match="cannot be built"):
        run(classifying(home, tmp_path / "c", *options, "teacher.kwargs={img_size: 8, patch_size: 2}"))


def test_a_compiled_run_is_the_same(home, tmp_path, monkeypatch):
    """Whole networks are compiled, the teacher's as well; calls that look inside are not, and see all the same."""
    graphs = []

    def backend(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    measured = []
    for compiled in (False, True):
        torch._dynamo.reset()
        stages = "{kind: attention, steps: 1}, {steps: 2, lr: 1e-2}, {steps: 2, terms: {prediction: 1, block: 1}}"
        options = [f"stages=[{stages}]", f"train.torch_compile={compiled}", "optim.ema_decay=0.5"]
        measured.append(run(painting(home, tmp_path / str(compiled), *options))[1])
        assert bool(graphs) == compiled
    for stage, numbers in measured[0].items():
        assert measured[1][stage] == pytest.approx(numbers, rel=1e-4), stage
    softmax = [any("scaled_dot_product" in name for name in names) for names in graphs]
    assert sum(softmax) == 1, "the teacher's, and only where nothing inside it is asked for"

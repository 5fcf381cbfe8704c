"""Closed-form calibration, choice of layers by sensitivity, and the command line."""

import itertools
import json

import pytest
import torch
from diffusers import DiffusionPipeline
from linear_parts import MORE_TARGETS, SMALL_OPTIONS, build, run
from linearize_parts import paint, pipeline, same, snapshot

import scanvas
from scanvas.diffusion import calibrate
from scanvas.diffusion.linear_budget import least_error
from scanvas.diffusion.linear_cores import TARGETS


def batches_of(inputs):
    return [inputs["x"]] if set(inputs) == {"x"} else [inputs]


@pytest.mark.parametrize(
    ("name", "mixer", "inherit"),
    [
        (name, mixer, inherit)
        for name in ("pixart", "sd35", "flux", "vit_reg_qk_norm", "denoiser", "wan")
        for mixer in TARGETS
        if mixer not in MORE_TARGETS  # which have tests/test_linearize_kernel.py
        for inherit in ("qkvo", "vo", "none")
        # What is new beside the core is new for any core; of two streams, of one joint projection, of none at the end.
        if inherit == "qkvo"
        or (name in ("sd35", "vit_reg_qk_norm") and mixer not in ("local", "t5", "hybrid"))
        or (name, inherit) == ("sd35", "none")
        or (name, mixer, inherit) in (("flux", "gla", "none"), ("denoiser", "lit", "none"))
    ],
)
def test_errors_go_down(name, mixer, inherit):
    model, inputs = build(name)
    before, expected = snapshot(model), run(model, inputs)
    options = SMALL_OPTIONS.get(mixer, {})
    student, report = scanvas.linearize(model, mixer, inherit=inherit, calibration=batches_of(inputs), **options)
    assert same(model, before)
    assert torch.equal(run(model, inputs), expected)
    assert list(report.calibration) == [row["path"] for row in report.layers]
    told = {row["name"]: row for row in report.tensors}
    for path, fit in report.calibration.items():
        assert fit["error_after"] <= fit["error_before"] * 1.001 + 1e-9, (path, fit)
        if fit["fitted"] and "core.scale" not in fit["fitted"]:
            assert fit["error_after"] < fit["error_before"]
        for key in fit["fitted"]:
            assert "fitted" in told[f"{path}.{key}"]["init"]
    if inherit == "none" and name != "flux":  # all output projections are new, and fitted
        assert all(any("out" in key or "proj" in key for key in fit["fitted"]) for fit in report.calibration.values())
    # What is reported is what the layer does.
    again = calibrate.relative_errors(
        model, {r["path"]: student.get_submodule(r["path"]) for r in report.layers}, batches_of(inputs)
    )
    for path, error in again.items():
        assert error == pytest.approx(report.calibration[path]["error_after"], rel=1e-4, abs=1e-9)

    """Any other kernel gives a larger error before the output projection, which is orthogonal here."""
    model, inputs = build("pixart")
    for block in model.transformer_blocks:
        torch.nn.init.orthogonal_(block.attn1.to_out[0].weight)
    student, report = scanvas.linearize(model, "lit", [0], calibration=[inputs])
    path = report.layers[0]["path"]
    layer = student.get_submodule(path)
    best = calibrate.relative_errors(model, {path: layer}, [inputs])[path]
    assert best == pytest.approx(report.calibration[path]["error_after"])
    torch.manual_seed(0)
    for parameter in (layer.core.conv.weight, layer.core.conv.bias):
        kept = parameter.detach().clone()
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                parameter.copy_(kept + step * torch.randn_like(kept))
            assert calibrate.relative_errors(model, {path: layer}, [inputs])[path] > best
        with torch.no_grad():
            parameter.copy_(kept)


def test_what_convolution_alone_can_do_is_recovered():
    """If the softmax layer were the linear one with some kernel, calibration would find that kernel."""
    model, inputs = build("wan")
    teacher, report = scanvas.linearize(model, "lit")
    path = report.layers[0]["path"]
    conv = teacher.get_submodule(path).core.conv
    with torch.no_grad():
        torch.nn.init.normal_(conv.weight), torch.nn.init.normal_(conv.bias)
    student, _ = scanvas.linearize(model, "lit")
    other = student.get_submodule(path)
    other.record = teacher.get_submodule(path).record
    calibrate.calibrate(teacher, {path: other}, [inputs], "qkvo")
    torch.testing.assert_close(other.core.conv.weight, conv.weight, atol=2e-2, rtol=2e-2)


def test_layers_are_fitted_in_the_order_they_will_scan_in():
    """Our denoiser's blocks walk rows, columns, and both from the end, on an image that is no square."""
    model, inputs = build("denoiser")
    student, report = scanvas.linearize(model, "gla", inherit="none", calibration=[inputs])
    assert len({block.order for block in student.transformer_blocks}) == 3
    errors = {}

    def compare(i):
        def hook(_, args, output):
            error = (student.transformer_blocks[i].mix(*args) - output).square().sum() / output.square().sum()
            errors[f"transformer_blocks.{i}.mixer"] = error.item()

        return hook

    for i, block in enumerate(model.transformer_blocks):
        block.mixer.register_forward_hook(compare(i))
    run(model, inputs)
    assert errors == pytest.approx({path: fit["error_after"] for path, fit in report.calibration.items()}, rel=1e-3)
    for i, block in enumerate(student.transformer_blocks):  # the projection is the best there is: any other is worse
        path, kept = f"transformer_blocks.{i}.mixer", block.mixer.to_out[0].weight.detach().clone()
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                block.mixer.to_out[0].weight.copy_(kept + step * torch.randn_like(kept))
            run(model, inputs)
            assert errors[path] > report.calibration[path]["error_after"]
        with torch.no_grad():
            block.mixer.to_out[0].weight.copy_(kept)


def test_our_gated_mixer_starts_as_its_scan_and_is_fitted_in_size():
    """Its RMSNorm gives vectors of one size, where a softmax gives averages of values. Fitted, the layer is nearer to
    the softmax's than no output at all, and no other weights of its norms are better."""
    model, inputs = build("denoiser")
    student, report = scanvas.linearize(model, "gla")
    start = "transformer_blocks.1.mixer."
    told = {row["name"].removeprefix(start): row["init"] for row in report.tensors if row["status"] == "new"}
    mixer, x = student.transformer_blocks[1].mixer, torch.randn(2, 24, model.transformer_blocks[1].mixer.dim)
    inits = {"gate_proj.weight": "zero", "gate_proj.bias": "zero: the gate is a half", "local_norm.weight": "zero"}
    inits["out_norm.weight"] = "two, for the gate is a half"
    assert inits.items() <= told.items()
    scanned = mixer.attend(x, (4, 6))
    normal = torch.nn.functional.rms_norm(scanned, scanned.shape[-1:], eps=1e-6).flatten(2)
    torch.testing.assert_close(mixer(x, (4, 6)), mixer.to_out(normal))
    assert mixer.gate_proj.weight.count_nonzero() == mixer.gate_proj.bias.count_nonzero() == 0

    student, report = scanvas.linearize(model, "gla", calibration=[inputs])
    layers = {row["path"]: student.get_submodule(row["path"]) for row in report.layers}
    for fit in report.calibration.values():
        assert fit["error_after"] < min(fit["error_before"], 1), fit
        assert {"out_norm.weight", "local_norm.weight"} <= set(fit["fitted"])
        assert len(fit["fitted"]) == len(set(fit["fitted"]))
    torch.manual_seed(0)
    for name in ("out_norm", "local_norm"):
        for step in (1e-2, -1e-2):
            kept = {path: getattr(layer, name).weight.detach().clone() for path, layer in layers.items()}
            with torch.no_grad():
                for path, layer in layers.items():
                    getattr(layer, name).weight.add_(step * torch.randn_like(kept[path]))
                errors = calibrate.relative_errors(model, layers, [inputs])
                for path, layer in layers.items():
                    getattr(layer, name).weight.copy_(kept[path])
            assert all(errors[path] > fit["error_after"] for path, fit in report.calibration.items())


@pytest.mark.parametrize("mixer", ["lit", "linfusion", "gla"])
def test_a_fitted_output_projection_holds_for_other_inputs(mixer):
    """One small batch says little of most directions of a whole projection; weights must stay small along those."""
    model, inputs = build("pixart")
    student, report = scanvas.linearize(model, mixer, inherit="none", calibration=[inputs])
    layers = {row["path"]: student.get_submodule(row["path"]) for row in report.layers}
    torch.manual_seed(7)
    others = {**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])}
    errors = calibrate.relative_errors(model, layers, [others])
    assert all(error < 0.75 for error in errors.values()), errors  # an attention that puts out nothing has 1


def test_least_sensitive_layers(tmp_path):
    model, inputs = build("pixart")
    with torch.no_grad():
        model.transformer_blocks[1].attn1.to_out[0].weight.zero_()  # nothing depends on this layer …
        model.transformer_blocks[0].attn1.to_q.weight.mul_(30)  # … and much on this one
    expected, before = run(model, inputs), snapshot(model)
    for layers, count in ((1, 1), (0.34, 1), (2, 2), (1.0, 3)):
        student, report = scanvas.linearize(model, "lit", layers, calibration=[inputs, inputs])
        assert len(report.layers) == count
        assert len(report.sensitivity) == 3
        assert len({row["layer"] for row in report.tensors if row["status"] == "softmax"}) == 3 - count
    ranking = report.sensitivity
    assert ranking[0] == {"path": "transformer_blocks.1.attn1", "error": pytest.approx(0, abs=1e-3)}
    assert ranking[-1]["path"] == "transformer_blocks.0.attn1"
    assert same(model, before)
    student, report = scanvas.linearize(model, "lit", ["transformer_blocks.0.attn1"], calibration=[inputs])
    error = ((run(student, inputs) - expected).square().sum() / expected.square().sum()).item()
    assert error == pytest.approx(ranking[-1]["error"], rel=1e-3)  # measured with that layer alone replaced
    _, report = scanvas.linearize(model, "lit", 1, calibration=[inputs])
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["sensitivity"] == report.sensitivity
    pytest.importorskip("matplotlib")
    assert (tmp_path / "report.png").stat().st_size > 0


def test_the_set_under_a_budget_is_the_best():
    """Against all subsets, with costs and errors that make the least sensitive layers, one by one, a bad choice."""
    random = torch.Generator().manual_seed(0)
    for _ in range(30):
        names = [f"layer {i}" for i in range(8)]
        errors = dict(zip(names, torch.rand(8, generator=random).tolist()))
        saved = dict(zip(names, torch.randint(-3, 12, (8,), generator=random).tolist()))
        total = sum(max(s, 0) for s in saved.values())
        wanted = int(torch.randint(1, total + 1, (1,), generator=random))
        subsets = [s for n in range(9) for s in itertools.combinations(names, n) if sum(saved[k] for k in s) >= wanted]
        best = min(sum(errors[k] for k in s) for s in subsets)
        chosen = least_error(errors, saved, wanted)
        assert sum(saved[k] for k in chosen) >= wanted
        assert sum(errors[k] for k in chosen) == pytest.approx(best)


def test_budget(tmp_path):
    """Of a UNet, whose layers cost unlike much: the fraction is met, and it is the cheapest set that meets it."""
    model, inputs = build("unet")
    before = snapshot(model)
    arguments = {"calibration": [inputs], "sizes": [(16, 24)], "kernel_size": 0}
    _, everything = scanvas.linearize(model, "lit", "all", **arguments)
    softmax, least = (everything.costs[0][f"flops_{when}"] for when in ("before", "after"))
    _, report = scanvas.linearize(model, "lit", scanvas.Budget(0.5), **arguments)
    budget = report.budget
    assert report.costs[0]["flops_after"] == budget["flops_after"] <= 0.5 * softmax
    assert budget["flops_before"] == softmax
    chosen = {row["path"] for row in report.layers}
    assert 0 < len(chosen) < len(report.sensitivity) == len(everything.layers)
    assert budget["sum_of_errors"] == pytest.approx(sum(r["error"] for r in report.sensitivity if r["path"] in chosen))
    saved = {row["path"]: row["flops_saved"] for row in report.sensitivity}
    assert softmax - sum(saved[path] for path in chosen) == budget["flops_after"]
    assert sum(saved.values()) == softmax - least
    assert f"budget at 16×24: {budget['flops_after'] / 1e9:,.1f} of" in str(report)
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["budget"] == budget
    _, absolute = scanvas.linearize(model, "lit", scanvas.Budget(budget["flops_allowed"], (16, 24)), **arguments)
    assert absolute.layers == report.layers
    for wrong, message in (
        (
            scanvas.Budget(0.001),
            r"even with all layers linearised attention costs .* FLOPs at 16×24 \(0.* of the softmax",
        ),
        (scanvas.Budget(softmax), "no more than the .* allowed; there is nothing to linearise"),
    ):
        with pytest.raises(ValueError, match=message):
            scanvas.linearize(model, "lit", wrong, **arguments)
    with pytest.raises(ValueError, match="needs calibration"):
        scanvas.linearize(model, "lit", scanvas.Budget(0.5))
    with pytest.raises(ValueError, match="tells no size of its own"):
        scanvas.linearize(model, "lit", scanvas.Budget(0.5), calibration=[inputs], sizes=[])
    for flops, error in (
        (0.0, ValueError),
        (1.5, ValueError),
        (-3, ValueError),
        (True, TypeError),
        ("half", TypeError),
    ):
        with pytest.raises(error, match="Budget: flops must be"):
            scanvas.Budget(flops)
    assert same(model, before)


def test_command_line(tmp_path, command):
    pipe = pipeline()
    pipe.save_pretrained(tmp_path / "teacher")
    expected, _ = scanvas.linearize(pipe, "lit", [0], heads=2, kernel_size=3)
    code, out, err = command(
        "linearize", tmp_path / "teacher", "--out", tmp_path / "student",
        "--layers", "transformer_blocks.0.*", "--heads", 2, "--set", "kernel_size=3",
    )  # fmt: skip
    assert code == 0, err
    assert "1 attention layers to 'lit', 1 left softmax" in out
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "student")
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(paint(loaded), paint(expected))
    report = json.loads((tmp_path / "student" / "linearize.json").read_text())
    assert report["layers"] == [{"path": "transformer_blocks.0.attn1", "heads_before": 4, "heads": 2}]

    model = tmp_path / "teacher" / "transformer"
    code, out, _ = command("linearize", model, "--out", tmp_path / "model", "--mixer", "gla", "--layers", 1, "--json")
    assert code == 0
    assert json.loads(out)["model"] == ["DiTTransformer2DModel", "LinearizedDiTTransformer2DModel"]
    assert type(scanvas.LinearizedDiTTransformer2DModel.from_pretrained(tmp_path / "model").linearization) is dict
    for arguments, message in (
        ((tmp_path / "nowhere", "--out", tmp_path / "x"), "holds neither model_index.json nor config.json"),
        ((model, "--out", model), "--out must be another directory"),
        ((model, "--out", tmp_path / "x", "--mixer", "lits"), "did you mean 'lit'"),
        ((model, "--out", tmp_path / "x", "--set", "eps"), "--set takes key=value, got 'eps'"),
        ((model, "--out", tmp_path / "x", "--layers", "9"), "index 9 is out of range"),
        ((tmp_path / "student", "--out", tmp_path / "x"), "linearised already"),
    ):
        code, _, err = command("linearize", *arguments)
        assert code == 1
        assert message in err
    assert not (tmp_path / "x").exists()

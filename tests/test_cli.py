"""The command line: what it prints, its exit codes, and one paragraph instead of a traceback."""

import json
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from scanvas.train import classify, cli, config, flops
from scanvas.train.errors import ConfigError, Interrupted


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint directory of a classifier that was trained for one epoch, and its images."""
    root = tmp_path_factory.mktemp("trained")
    images = _images(root / "images")
    overrides = [
        "model.name=test_vig",
        "model.img_size=32",
        "model.kwargs={patch_size: 8}",
        f"data.root={images}",
        "data.workers=0",
        "train.epochs=1",
        "train.batch_size=8",
        "train.cpu=true",
        f"run.out={root / 'run'}",
        "run.tensorboard=false",
        "run.plot=false",
    ]
    classify.train_classifier(config.load(classify.ClassifyConfig, None, overrides))
    return root / "run" / "best", images


def _images(folder):
    from PIL import Image

    for split, count in (("train", 8), ("val", 5)):
        for name, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), colour).save(folder / split / name / f"{number}.png")
    return folder


def one_paragraph(text):
    return "Traceback" not in text and "\n\n" not in text.strip()


def test_evaluate(trained, command):
    checkpoint, images = trained
    code, out, err = command("evaluate", "--checkpoint", checkpoint, "--device", "cpu", "--json")
    assert code == 0, err
    result = json.loads(out)
    model = timm.create_model(f"local-dir:{checkpoint}", pretrained=True).eval()
    saved = json.loads((checkpoint / "training.json").read_text())["metrics"]
    assert result["images"] == 10
    assert result["top1"] == saved["top1"]
    assert result["loss"] == pytest.approx(saved["loss"], rel=1e-4)
    assert result["top5"] == 100
    assert result["images_per_second"] > 0
    assert model.num_classes == 2
    code, out, _ = command("evaluate", "classify", "--checkpoint", checkpoint, "--data", images, "--split", "train")
    assert code == 0
    assert "images per second" in out


def test_evaluate_skips_and_counts_or_stops(trained, command, tmp_path):
    checkpoint, _ = trained
    images = _images(tmp_path / "images")
    (images / "val/red/3.png").write_bytes(b"")
    arguments = ["evaluate", "--checkpoint", checkpoint, "--data", images, "--workers", "0", "--device", "cpu"]
    code, out, err = command(*arguments, "--json")
    assert code == 0, err
    assert json.loads(out)["images"] == 9
    assert json.loads(out)["skipped"] == 1
    assert "1 image(s) could not be read and were skipped" in err
    code, _, err = command(*arguments, "--on-error", "stop")
    assert code == 1
    assert "cannot read image" in err
    assert one_paragraph(err)


def test_predict(trained, command, tmp_path):
    checkpoint, images = trained
    paths = [images / "val/red/0.png", images / "val/blue/0.png"]
    code, out, err = command("predict", *paths, "--checkpoint", checkpoint, "--json", "--device", "cpu")
    assert code == 0, err
    results = json.loads(out)["images"]
    assert [r["image"] for r in results] == [str(path) for path in paths]
    for result in results:
        assert sorted(top["class"] for top in result["top"]) == ["blue", "red"]
        assert sum(top["probability"] for top in result["top"]) == pytest.approx(1)
        assert result["top"][0]["probability"] >= result["top"][1]["probability"]
        assert all(("blue", "red")[top["index"]] == top["class"] for top in result["top"])
    code, out, _ = command("predict", paths[0], "--checkpoint", checkpoint, "--top-k", 1)
    assert code == 0
    assert len(out.splitlines()) == 2

    broken = tmp_path / "broken.png"
    broken.write_bytes(b"nothing")
    code, out, err = command("predict", paths[0], broken, "--checkpoint", checkpoint)
    assert code == 1
    assert "cannot read image" in err
    assert one_paragraph(err)
    code, out, err = command("predict", paths[0], broken, "--checkpoint", checkpoint, "--on-error", "skip", "--json")
    assert code == 0
    assert len(json.loads(out)["skipped"]) == 1
    assert "1 image(s) skipped" in err


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _other_shape(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "head.weight": torch.zeros(2, 7)}, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read checkpoint"),
        (_truncate, "cannot read checkpoint"),
        (_other_shape, "cannot read checkpoint .*head.weight"),
    ],
)
def test_a_damaged_checkpoint(trained, command, tmp_path, damage, said):
    import re
    import shutil

    checkpoint, images = trained
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    damage(copy)
    code, _, err = command("predict", images / "val/red/0.png", "--checkpoint", copy)
    assert code == 1
    assert re.search(said, err), err
    assert one_paragraph(err)


def test_evaluate_on_data_with_other_classes(trained, command, write_images, tmp_path):
    checkpoint, _ = trained
    images = write_images(tmp_path / "three", {"val": 2})
    code, _, err = command("evaluate", "--checkpoint", checkpoint, "--data", images)
    assert code == 1
    assert "num_classes mismatch: the checkpoint has 2 classes" in err
    assert one_paragraph(err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.lrr=1"], "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        (["lr=1"], "unknown key 'lr'; did you mean 'optim.lr'?"),
        (["optm.lr=1"], "unknown key 'optm'; did you mean 'optim.lr'?"),
        (["optim=3"], "'optim' is a section; set one of its keys: name, lr,"),
        (["optim.lr.x=1"], "'lr' is a single value and has no keys below it"),
        (["train.epochs=many"], "train.epochs must be of type int, and is 'many' (str)"),
        (["train.epochs=1.5"], "train.epochs must be of type int, and is 1.5 (float)"),
        (["run.tensorboard=3"], "run.tensorboard must be of type bool"),
        (["data.format=tar"], "data.format must be one of folder, hfds, wds, and is 'tar'"),
        (["epochs"], "override 'epochs' must look like key=value"),
        (["--config", "digit"], "--config 'digit' is neither a file nor a shipped recipe; did you mean 'digits'?"),
        ([], "data.root is not set"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_one_paragraph(command, arguments, said):
    code, _, err = command("train", "classify", *arguments)
    assert code == 1
    assert said in err
    assert one_paragraph(err)


def test_recipes_in_files_are_checked_too(tmp_path):
    path = tmp_path / "r.yaml"
    for text, said in (
        ("optim: {lr: 1e-3}\ntrain: {mixed_precision: no}", None),
        ("optim: {learning_rate: 1}", "unknown key 'optim.learning_rate'"),
        ("optim: 3", "'optim' is a section with keys of its own"),
        ("- a", "must hold key: value pairs"),
        ("a: [", "is not valid YAML"),
    ):
        path.write_text(text)
        if said is None:
            read = config.load(classify.ClassifyConfig, str(path))
            assert read.optim.lr == 1e-3, "YAML 1.1 reads 1e-3 as text"
            assert read.train.mixed_precision == "no", "and no as false"
        else:
            with pytest.raises(ConfigError, match=said):
                config.load(classify.ClassifyConfig, str(path))


@pytest.mark.parametrize("name", sorted(config.recipes("classify")))
def test_every_shipped_recipe_loads_and_says_what_it_is(name):
    text = config.recipes()[name].read_text()
    for word in ("# Paper:", "# Cost:", "# Expected:", "# Command:"):
        assert word in text
    read = config.load(classify.ClassifyConfig, name.split("/")[1], ["data.root=x"], task="classify")
    assert timm.is_model(read.model.name)
    assert f"--config {name.split('/')[1]}" in text
    published = {  # ALGORITHMS.md A2, A3: lr per 512 images, weight decay, drop path, AMP
        "vig_tiny": (1e-3, 0.05, 0.0, "no"),
        "vig_small": (5e-4, 0.1, 0.2, "no"),
        "vig_base": (1e-3, 0.05, 0.5, "no"),
        "vig_h_tiny": (8e-4, 0.05, 0.2, "fp16"),
        "vig_h_small": (5e-4, 0.05, 0.3, "fp16"),
        "vig_h_base": (5e-4, 0.05, 0.6, "fp16"),
    }
    if name.endswith("_imagenet"):
        key = name.split("/")[1].removesuffix("_imagenet")
        optim, train = read.optim, read.train
        assert (optim.lr, optim.weight_decay, read.model.drop_path_rate, train.mixed_precision) == published[key]
        assert (train.epochs, train.batch_size, optim.warmup_epochs, optim.clip_grad) == (300, 128, 20, 5)
        assert optim.lr_reference_batch == 512
        assert read.model.name.startswith(key)


def test_models(command):
    code, out, err = command("models", "vig_*", "--json")
    assert code == 0, err
    rows = {row["name"]: row for row in json.loads(out)}
    millions = {name: round(row["parameters"] / 1e6, 1) for name, row in rows.items()}
    assert millions == {
        "vig_tiny_patch16_224": 5.8,
        "vig_small_patch16_224": 22.6,
        "vig_base_patch16_224": 89.0,
        "vig_h_tiny_224": 28.6,
        "vig_h_small_224": 50.1,
        "vig_h_base_224": 88.9,
    }
    assert all(row["input_size"] == [3, 224, 224] for row in rows.values())
    code, out, _ = command("models", "vig_tiny*")
    assert code == 0
    assert "5.83" in out
    code, _, err = command("models", "nothing_like_it")
    assert code == 1
    assert one_paragraph(err)


def test_flops_count_the_scan_and_do_not_depend_on_device_or_chunks():
    options = {"img_size": 64, "patch_size": 8, "num_classes": 10}
    model = timm.create_model("test_vig", **options).eval()
    total = flops.count_flops(model, (3, 64, 64))
    with torch.device("meta"):
        assert flops.count_flops(timm.create_model("test_vig", **options).eval(), (3, 64, 64)) == total
    mixers = [m for m in model.modules() if type(m).__name__ == "GatedLinearAttention"]
    assert mixers
    heads = mixers[0].num_heads
    width = mixers[0].dim // heads
    scans = len(mixers) * 64 * heads * 2 * 5 * (width // 2) * width
    without = _count_without_scans(model)
    assert total == without + scans
    image = torch.randn(1, 3, 64, 64)
    assert model(image).abs().sum() > 0, "the real scan is back in its place"


def _count_without_scans(model):
    """All products and convolutions by their shapes, with hooks."""
    counted = []

    def hook(module, args, out):
        if isinstance(module, torch.nn.Linear):
            counted.append(2 * out.numel() * module.in_features)
        else:
            kernel = module.kernel_size[0] * module.kernel_size[1]
            counted.append(2 * out.numel() * kernel * module.in_channels // module.groups)

    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    for handle in handles:
        handle.remove()
    return sum(counted)


def test_unexpected_errors_and_interrupts_have_their_codes(capsys):
    def raising(error):
        def work():
            raise error

        return work

    assert cli.run(lambda: None) == 0
    assert cli.run(raising(RuntimeError("broken\n\nby a bug"))) == 1
    assert capsys.readouterr().err.startswith("error: RuntimeError: broken by a bug (scanvas --traceback")
    assert cli.run(raising(Interrupted("saved"))) == 130
    assert cli.run(raising(KeyboardInterrupt())) == 130
    with pytest.raises(ConfigError):
        cli.run(raising(ConfigError("x")), traceback=True)


def test_wrong_usage_exits_2_and_help_needs_no_torch(command):
    assert command("predict")[0] == 2
    assert command("no-such-command")[0] == 2
    code, out, _ = command("--help")
    assert code == 0
    assert all(word in out for word in ("models", "train", "evaluate", "predict", "bench", "demo"))
    root = cli.__file__.rsplit("/train/", 1)[0]
    script = f"""
import sys, types
sys.modules["scanvas"] = types.ModuleType("scanvas")  # in place of the real one, which brings timm
sys.modules["scanvas"].__path__ = [{root!r}]
import scanvas.train.cli
assert "predict" in scanvas.train.cli._parser().format_help()
assert not {{"torch", "timm", "accelerate", "rich"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

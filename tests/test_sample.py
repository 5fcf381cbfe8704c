"""``scanvas sample`` and ``scanvas evaluate denoise`` on saved pipelines, and the recipes and captions they rest on."""

import json
import multiprocessing

import numpy as np
import pytest
import timm
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from timm.models import save_for_hf

from scanvas.diffusion.denoiser import LinearDiTTransformer2DModel
from scanvas.diffusion.pipeline_class import LinearDiTClassPipeline
from scanvas.diffusion.pipeline_text import LinearDiTTextToImagePipeline
from scanvas.train import evaluate_denoise, sample
from scanvas.train.config import load, recipes
from scanvas.train.demo_paint import captions, write_captions
from scanvas.train.denoise_config import DenoiseConfig, TextConfig
from scanvas.train.pictures import grid
from scanvas.train.text import Tokens, create_text, word_tokenizer

SMALL = {"sample_size": 8, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "mlp_hidden": 16}


@pytest.fixture(scope="module")
def by_class(tmp_path_factory):
    torch.manual_seed(0)
    model = LinearDiTTransformer2DModel(**SMALL, in_channels=3, out_channels=6, num_classes=2)
    scheduler = DDPMScheduler(variance_type="learned_range")
    folder = tmp_path_factory.mktemp("class") / "pipeline"
    LinearDiTClassPipeline(model, scheduler, id2label={0: "blue", 1: "red"}).save_pretrained(folder)
    told = {"config": {"grid": {"steps": 3, "guidance": 1.5, "images": 4}, "data": {}}}
    (folder / "training.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def by_text(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer, encoder, _ = create_text(TextConfig(max_length=8, layers=1, heads=2), 16, ["a red 7", "blue"])
    model = LinearDiTTransformer2DModel(
        **SMALL, in_channels=1, caption_channels=16, prediction_type="flow_prediction", norm_type="ada_norm_single"
    )
    folder = tmp_path_factory.mktemp("text") / "pipeline"
    scheduler = FlowMatchEulerDiscreteScheduler()
    LinearDiTTextToImagePipeline(tokenizer, encoder, model, scheduler, max_sequence_length=8).save_pretrained(folder)
    return folder


def pixels(path):
    return np.array(Image.open(path))


def test_one_image_of_a_prompt(by_text, tmp_path, command):
    out = tmp_path / "new" / "seven.png"
    code, said, err = command("sample", "--pipeline", by_text, "--prompt", "a red 7", "--steps", 2, "--out", out)
    assert code == 0, err
    assert said.splitlines() == [str(out)]
    assert Image.open(out).size == (8, 8)
    larger = ["--enlarge", 4, "--out", tmp_path / "large.png"]
    code, _, err = command("sample", "--pipeline", by_text, "--prompt", "a red 7", "--steps", 2, *larger)
    assert code == 0, err
    small = Image.open(out).resize((32, 32), Image.Resampling.BICUBIC)
    assert np.array_equal(pixels(tmp_path / "large.png"), np.array(small))


def test_many_images_are_numbered_and_do_not_depend_on_the_batch(by_text, tmp_path, command):
    common = ["--pipeline", by_text, "--steps", 2, "--width", 12, "--prompt", "red", "--prompt", "blue", "--num", 2]
    code, said, err = command("sample", *common, "--out", tmp_path / "x.png", "--seed", 5)
    assert code == 0, err
    files = said.splitlines()
    assert [file[-9:] for file in files] == ["x-000.png", "x-001.png", "x-002.png", "x-003.png"]
    images = [pixels(file).astype(int) for file in files]
    assert images[0].shape == (8, 12)
    assert np.abs(images[0] - images[1]).max() > 3, "another seed"
    code, said, _ = command("sample", *common, "--out", tmp_path / "y.png", "--seed", 5, "--batch-size", 1)
    assert all(np.abs(pixels(file) - image).max() <= 1 for file, image in zip(said.splitlines(), images))
    code, said, _ = command("sample", *common, "--out", tmp_path / "z.png", "--grid")
    assert Image.open(tmp_path / "z.png").size == (2 * 74 + 2, 2 * 50 + 2)  # 12 wide, six times as large


def test_labels_by_number_and_name_with_another_scheduler(by_class, tmp_path, command, monkeypatch):
    seen = {}
    call = LinearDiTClassPipeline.__call__

    def spy(self, *args, **kwargs):
        seen.update(kwargs, scheduler=self.scheduler)
        return call(self, *args, **kwargs)

    spy.__signature__ = __import__("inspect").signature(call)
    monkeypatch.setattr(LinearDiTClassPipeline, "__call__", spy)
    args = ["--pipeline", by_class, "--label", "red", "--label", 0, "--out", tmp_path / "x.png"]
    code, _, err = command("sample", *args, "--scheduler", "DPMSolverMultistepScheduler")
    assert code == 0, err
    assert seen["class_labels"] == ["red", 0]
    assert (seen["num_inference_steps"], seen["guidance_scale"]) == (3, 1.5), "as in training, unless told otherwise"
    assert isinstance(seen["scheduler"], DPMSolverMultistepScheduler)
    code, _, err = command("sample", *args, "--guidance", 3, "--steps", 2)
    assert code == 0, err
    assert (seen["num_inference_steps"], seen["guidance_scale"]) == (2, 3.0)
    assert isinstance(seen["scheduler"], DDPMScheduler)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "either --prompt or --label"),
        (["--prompt", "a", "--label", "1"], "either --prompt or --label"),
        (["--prompt", "a"], "paints by class: give --label"),
        (["--label", "green"], "no class 'green'"),
        (["--label", "2"], "class_labels must be in 0…1, got 2"),
        (["--label", "1", "--steps", "0"], "num_inference_steps must be an integer of at least 1, got 0"),
        (["--label", "1", "--height", "9"], "height must be divisible by .* = 2, got 9"),
        (["--label", "1", "--num", "0"], "--num must be at least 1"),
        (["--label", "1", "--out", "x.abc"], "--out 'x.abc' must end in the name of an image format"),
        (["--label", "1", "--scheduler", "DDIMShceduler"], "did you mean 'DDIMScheduler'"),
        (
            ["--label", "1", "--scheduler", "FlowMatchEulerDiscreteScheduler"],
            "FlowMatchEulerDiscreteScheduler has variance_type",
        ),
        (["--label", "1", "--negative-prompt", "x"], "--negative-prompt is for pipelines that paint by text"),
        (["--label", "1", "--pipeline", "nowhere"], "'nowhere' holds no model_index.json"),
    ],
)
def test_what_cannot_be_painted_is_said(by_class, tmp_path, command, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = command("sample", "--pipeline", by_class, "--out", "x.png", *args)
    assert code == 1
    with pytest.raises(sample.UserError, match=said):
        raise sample.UserError(err)
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_demos_pipeline_is_the_default(by_text, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = command("sample", "--prompt", "red", "--out", "x.png")
    assert code == 1
    assert "scanvas demo" in err
    (tmp_path / "runs" / "demo" / "painter").mkdir(parents=True)
    (tmp_path / sample.DEFAULT).symlink_to(by_text)
    code, _, err = command("sample", "--prompt", "red", "--out", "x.png", "--steps", 1)
    assert code == 0, err


# ---- evaluation


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("real"), np.random.default_rng(0)
    for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (root / "train" / name).mkdir(parents=True)
        for i in range(12):
            noisy = np.clip(np.array(colour) + rng.normal(0, 60, (8, 8, 3)), 0, 255).astype("uint8")
            Image.fromarray(noisy).save(root / "train" / name / f"{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("classifier") / "best"
    model = timm.create_model("test_vig", num_classes=2, img_size=16, patch_size=4)
    model.pretrained_cfg = model.pretrained_cfg | {"input_size": (3, 16, 16)}
    save_for_hf(model, str(folder), model_args={"img_size": 16, "patch_size": 4}, safe_serialization=True)
    return folder


def evaluated(command, by_class, classifier, real, tmp_path):
    picture = tmp_path / "grid.png"
    options = ["--num", 24, "--steps", 2, "--workers", 1, "--batch-size", 10, "--grid", picture, "--json"]
    options += ["--real-cache", tmp_path / "cache"]
    args = ["--pipeline", by_class, "--features", classifier, "--data", real, *options]
    code, out, err = command("evaluate", "denoise", *args)
    assert code == 0, err
    assert picture.is_file()
    return json.loads(out.splitlines()[-1])


def test_real_images_are_at_no_distance_from_themselves(by_class, classifier, real, tmp_path, command, monkeypatch):
    painted = evaluated(command, by_class, classifier, real, tmp_path)
    assert painted["images"] == painted["real_images"] == 24
    assert str(classifier) in painted["features"]
    assert "test_vig" in painted["features"]
    assert not multiprocessing.active_children(), "or the process would wait for them at its end"
    assert painted["scheduler"] == "DDPMScheduler"
    assert painted["guidance"] == 1.5

    asked = []

    def copy(pipeline, wanted, *, batch_size, **options):
        asked.extend(wanted)
        files = sorted((real / "train").glob("*/*.png"))
        yield [Image.open(file) for file in files]

    monkeypatch.setattr(evaluate_denoise, "paint", copy)
    monkeypatch.setattr(evaluate_denoise, "PixelItems", None)  # nothing real is read again
    same = evaluated(command, by_class, classifier, real, tmp_path)
    assert asked == [0] * 12 + [1] * 12, "painted with the labels of the data"
    assert same["frechet_distance"] == pytest.approx(0, abs=1e-6 * painted["frechet_distance"])
    assert same["precision"] == same["recall"] == 1
    assert painted["frechet_distance"] > 0.01
    assert painted["precision"] < 1
    assert same["kid"] < 0 < painted["kid"], "unbiased: copies are more alike than new draws would be"


def test_an_extractor_that_is_not_there_is_named(by_class, real, command):
    args = ["--pipeline", by_class, "--data", real]
    code, _, err = command("evaluate", "denoise", *args, "--features", "resnet5O")
    assert code == 1
    assert "neither a directory nor a timm model; did you mean 'resnet50'" in err


# ---- parts


def test_words_become_tokens_and_come_back(tmp_path):
    from transformers import AutoTokenizer

    made = word_tokenizer(["A handwritten 7", "the digit seven."], 8)
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a HANDWRITTEN seven", "77.", "unheard of", ""):
        assert again(text).input_ids == made(text).input_ids
    assert made.convert_ids_to_tokens(made("77.").input_ids) == ["[start]", "7", "7", ".", "[end]"]
    assert made("zebra").input_ids[1] == made.unk_token_id
    ids, mask = Tokens(made, 77)(["seven", "a handwritten 7", "seven"])
    assert ids.shape == (3, 8)
    assert mask.sum(1).tolist() == [3, 5, 3]


def test_a_grid_shows_every_image_in_its_place():
    images = [Image.new("RGB", (8, 4), (i, 0, 0)) for i in range(5)]
    sheet = np.array(grid(images, 3))
    assert sheet.shape[:2] == (2 * (32 + 2) + 2, 3 * (64 + 2) + 2)
    assert [sheet[2 + i // 3 * 34 + 5, 2 + i % 3 * 66 + 5, 0] for i in range(5)] == [0, 1, 2, 3, 4]


def test_demo_captions_name_each_digit_in_words_and_numerals(tmp_path):
    for split in ("train", "val"):
        for digit in (3, 7):
            (tmp_path / "digits" / split / str(digit)).mkdir(parents=True)
            Image.new("L", (4, 4)).save(tmp_path / "digits" / split / str(digit) / "1.png")
    write_captions(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "digits" / "val" / "metadata.jsonl").read_text().splitlines()]
    assert [row["file_name"] for row in rows] == ["3/1.png", "7/1.png"]
    assert {"a handwritten seven", "a handwritten 7"} <= set(rows[1]["text"]) == set(captions(7))


@pytest.mark.parametrize("name", sorted(recipes("denoise")))
def test_shipped_recipes_build(name):
    """Everything of a recipe but data, VAE and text fits together, and its header says how to run it."""
    from scanvas.train.denoise_parts import denoiser_config
    from scanvas.train.losses import check_terms
    from scanvas.train.process import Process, create_scheduler

    text = recipes("denoise")[name].read_text(encoding="utf-8")
    assert f"--config {name.split('/')[1]}" in text
    assert all(f"# {word}:" in text for word in ("Paper", "Cost", "Expected", "Command"))
    config = load(DenoiseConfig, name, task="denoise")
    wanted = denoiser_config(config.model)
    learned = wanted.get("out_channels") not in (None, wanted["in_channels"])
    predicts = wanted.get("prediction_type", "epsilon")
    check_terms(config.loss, predicts, learned)
    Process(create_scheduler(config.noise, predicts, learned), predicts, config.noise)
    with torch.device("meta"):
        LinearDiTTransformer2DModel(**wanted)

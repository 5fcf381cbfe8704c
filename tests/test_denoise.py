"""``scanvas train denoise``: what it learns, what it saves, that it resumes to the same bits, what it refuses."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

import scanvas  # noqa: F401 - as a user would
from scanvas.train import denoise, loop
from scanvas.train.config import load
from scanvas.train.denoise_config import DenoiseConfig
from scanvas.train.denoise_parts import Parts
from scanvas.train.errors import UserError
from scanvas.train.latents import to_latents, vae_factor

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}
TINY = (
    "{sample_size: 8, patch_size: 2, in_channels: %d, out_channels: null, num_layers: 2, num_attention_heads: 2, "
    "attention_head_dim: 16, mlp_hidden: 32%s}"
)


def paint_folder(root, *, side=8, each=8, noise=40, captions=True):
    """Noisy red and blue images in class folders, with captions beside them."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        lines = []
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for i in range(each):
                width = side if i % 2 else 2 * side
                pixels = np.clip(np.array(colour) + rng.normal(0, noise, (side, width, 3)), 0, 255).astype("uint8")
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
                text = [f"a {name} image", name]
                lines.append(json.dumps({"file_name": f"{name}/{i}.png", "text": text}))
        if captions:
            (root / split / "metadata.jsonl").write_text("\n".join(lines))
    return root


def by_class(root, out, **model):
    extra = "".join(f", {k}: {v}" for k, v in model.items())
    return [
        "model.name=dig_s_2",
        f"model.kwargs={TINY % (3, extra)}",
        f"data.root={root}",
        *COMMON,
        f"run.out={out}",
    ]


def by_text(root, out):
    extra = ", num_cross_attention_heads: 2, caption_channels: 16"
    return [
        "model.name=dig_t2i_s_2",
        f"model.kwargs={TINY % (3, extra)}",
        "noise.scheduler=FlowMatchEulerDiscreteScheduler",
        "noise.times=logit_normal",
        "text.layers=1",
        "text.heads=2",
        "text.max_length=8",
        f"data.root={root}",
        *COMMON,
        f"run.out={out}",
    ]


COMMON = [
    "data.size=8",
    "data.workers=0",
    "train.batch_size=8",
    "train.epochs=2",
    "train.cpu=true",
    "grid.images=0",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.plot=false",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return paint_folder(tmp_path_factory.mktemp("data") / "paint")


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    """A small autoencoder that halves height and width."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=8,
        shift_factor=0.1,
    )
    path = tmp_path_factory.mktemp("vae") / "vae"
    vae.save_pretrained(path)
    return path


def train(overrides):
    return denoise.train_denoiser(load(DenoiseConfig, None, overrides))


def parts(overrides):
    return Parts(load(DenoiseConfig, None, overrides), torch.device("cpu"))


def test_text_training_learns_what_words_mean(folder, tmp_path, command):
    """Red and blue, asked for by a pipeline that was loaded again; the command, its pictures and its tables."""
    overrides = [*by_text(folder, tmp_path / "run"), "optim.lr=5e-3", "optim.weight_decay=0", "optim.min_lr=1e-3"]
    overrides += ["train.epochs=50", "run.eval_every=50", "optim.ema_decay=0.9", "grid.images=4", "grid.steps=3"]
    code, out, err = command("train", "denoise", *overrides)
    assert code == 0, err
    assert "pipelines:" in out
    assert Image.open(tmp_path / "run" / "samples" / "step-00000100.png").size == (2 * 66 + 2, 2 * 66 + 2)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "final")
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(i) for i in range(6)]
    prompts = ["a red image", "red", "a red image", "a blue image", "blue", "A Blue Image"]
    images = pipeline(prompts, num_inference_steps=8, guidance_scale=1.0, generator=generators, output_type="pt").images
    mean = images.float().mean((2, 3))
    assert (mean[:3, 0] > mean[:3, 2] + 0.3).all(), mean
    assert (mean[3:, 2] > mean[3:, 0] + 0.3).all(), mean
    assert pipeline.config.max_sequence_length == 8


KILLED = {
    "classes, learned variance, workers": lambda root, out: [
        *by_class(root, out, num_classes=2),
        "model.kwargs.out_channels=6",
        "loss.terms={min_snr: 1.0, vlb: 1.0}",
        "data.workers=1",
        "train.grad_accum_steps=2",
    ],
    "text, in memory": lambda root, out: [*by_text(root, out), "data.in_memory=true", f"data.decoded={out}-kept"],
    "buckets": lambda root, out: [*by_class(root, out, prediction_type="v_prediction"), "data.buckets=3"],
}


@pytest.mark.parametrize("variant", KILLED)
def test_a_killed_run_resumes_to_the_same_bits(folder, tmp_path, monkeypatch, variant):
    class Killed(BaseException):
        pass

    def options(name):
        made = KILLED[variant](folder, tmp_path / name)
        return [*made, "optim.ema_decay=0.9", "train.epochs=4", "run.save_every=3", "loss.drop_condition=0.3"]

    result = train(options("whole"))
    update = loop.Loop._update

    def dying(self, group):
        if self.step == 5 - self.config.train.grad_accum_steps:
            raise Killed
        update(self, group)

    monkeypatch.setattr(loop.Loop, "_update", dying)
    with pytest.raises(Killed):
        train(options("broken"))
    monkeypatch.setattr(loop.Loop, "_update", update)
    torch.rand(7)  # what comes in between must not matter
    again = train([*options("broken"), "grid.images=2", "grid.steps=2"])
    assert again.metrics == result.metrics
    last = sorted((tmp_path / "whole" / "checkpoints").iterdir())[-1].name
    for file in ("model", "ema", "optimizer"):
        one, two = (load_file(tmp_path / n / "checkpoints" / last / f"{file}.safetensors") for n in ("whole", "broken"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), file


def test_a_compiled_run_is_the_same(folder, tmp_path, monkeypatch):
    graphs = []
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    )
    rows = []
    for compiled in (False, True):
        options = [f"train.torch_compile={compiled}", "optim.ema_decay=0.5", "optim.lr=1e-2"]
        train([*by_class(folder, tmp_path / str(compiled)), *options])
        rows.append(np.genfromtxt(tmp_path / str(compiled) / "train.csv", delimiter=",", names=True)["loss"])
        assert bool(graphs) == compiled
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4)
    assert rows[0][-1] != rows[0][0]


def test_classes_are_saved_with_the_pipeline(folder, tmp_path):
    train([*by_class(folder, tmp_path / "run"), "train.epochs=1"])
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "best")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.config.id2label == {"0": "blue", "1": "red"}
    assert pipeline.transformer.config.num_classes == 2
    assert pipeline(["red", 0], num_inference_steps=2).images[0].size == (8, 8)


def test_a_run_starts_from_a_saved_pipeline(folder, tmp_path):
    first = train([*by_class(folder, tmp_path / "a"), "train.epochs=1"])
    overrides = [o for o in by_class(folder, tmp_path / "b") if not o.startswith("model.")]
    again = train(
        [*overrides, f"model.checkpoint={tmp_path / 'a' / 'final'}", "train.epochs=1", "optim.lr=0", "optim.min_lr=0"]
    )
    assert again.metrics == pytest.approx(first.metrics, rel=1e-5)


# ---- latents


def latent_recipe(folder, vae_folder, out, cache, **kwargs):
    extra = "".join(f", {k}: {v}" for k, v in kwargs.items())
    return [
        "model.name=dig_s_2",
        f"model.kwargs={TINY % (4, extra)}",
        f"vae.path={vae_folder}",
        f"data.root={folder}",
        *COMMON,
        "data.size=16",
        f"data.latents={cache}",
        f"run.out={out}",
    ]


def test_cached_latents_are_what_the_vae_gives(folder, vae_folder, tmp_path):
    """Both views of every image, the shift and the scale; and training reads them without the images."""
    cached = parts([*latent_recipe(folder, vae_folder, "unused", tmp_path / "cache"), "data.buckets=3", "data.hflip=1"])
    plain = parts([*latent_recipe(folder, vae_folder, "unused", "null"), "data.buckets=3", "data.hflip=1"])
    assert vae_factor(cached.vae) == 2
    assert len(np.unique(cached.train.shape_of)) == 2
    for epoch in (-1, 0):
        where = {name: i for i, name in enumerate(cached.train.source.names)}
        for i, name in enumerate(plain.train.source.names):
            (from_cache,) = cached.train.reader.read([[(epoch, 0, where[name])]])
            (pixels,) = plain.train.reader.read([[(epoch, 0, i)]])
            image = pixels["pixels"].float() / 127.5 - 1
            wanted = cached.vae.encode(image).latent_dist.mean
            got = to_latents(cached.vae, from_cache["moments"], draw=False)
            scaled = (wanted - 0.1) * cached.vae.config.scaling_factor
            torch.testing.assert_close(got, scaled, atol=2e-3, rtol=2e-3)
            assert from_cache["label"].tolist() == pixels["label"].tolist()
    drawn = torch.stack([to_latents(cached.vae, from_cache["moments"], draw=True) for _ in range(300)])
    deviation = (0.5 * from_cache["moments"].chunk(2, 1)[1]).exp() * cached.vae.config.scaling_factor
    torch.testing.assert_close(drawn.std(0), deviation, rtol=0.35, atol=0)


def test_training_from_a_cache_needs_no_images(folder, vae_folder, tmp_path, command):
    root = tmp_path / "moved"
    shutil.copytree(folder, root)
    overrides = latent_recipe(root, vae_folder, tmp_path / "run", tmp_path / "cache")
    code, out, err = command("latents", *overrides)
    assert code == 0, err
    assert "16 images to train on, 16 held out" in out
    shutil.rmtree(root)
    result = train(overrides)
    assert np.isfinite(result.metrics["loss"])
    assert DiffusionPipeline.from_pretrained(result.out / "final").vae.config.latent_channels == 4


def test_a_cache_of_another_vae_or_size_is_refused(folder, vae_folder, tmp_path):
    overrides = latent_recipe(folder, vae_folder, "unused", tmp_path / "cache")
    parts(overrides)
    other = AutoencoderKL.from_pretrained(vae_folder)
    with torch.no_grad():
        other.encoder.conv_in.bias += 0.01
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"written with vae_sha256=.*made with .*vae, and this run has .*other"):
        parts([*overrides, f"vae.path={tmp_path / 'other'}"])
    with pytest.raises(UserError, match=r"written with size=16, and this run has 32"):
        parts([*overrides, "data.size=32"])


def test_cached_text_features_are_what_the_encoder_gives(folder, vae_folder, tmp_path):
    trained = train([*by_text(folder, tmp_path / "t"), "train.epochs=1"])
    recipe = latent_recipe(
        folder, vae_folder, tmp_path / "run", tmp_path / "cache", caption_channels=16, num_cross_attention_heads=2
    )
    recipe += [f"text.pretrained={trained.out / 'final'}", "text.max_length=8", "model.name=dig_t2i_s_2"]
    recipe += ["noise.scheduler=FlowMatchEulerDiscreteScheduler"]
    made = parts(recipe)
    captions = ["red", "", "a blue image"]
    features, mask = made.text_cache[0](captions)
    wanted, wanted_mask = made.frozen_text(captions)
    torch.testing.assert_close(features, wanted, atol=1e-2, rtol=1e-2)
    assert torch.equal(mask, wanted_mask)
    assert (features[0] - features[2]).abs().max() > 0.05
    result = train(recipe)
    saved = load_file(result.out / "checkpoints" / "step-00000004" / "model.safetensors")
    assert not any(key.startswith("text_encoder") for key in saved), "a frozen encoder is not trained"


# ---- what is refused

DDPM, FLOW = "DDPMScheduler", "FlowMatchEulerDiscreteScheduler"
WRONG = {
    "size": (["data.size=9"], "data.size=9 must be divisible by 2.*8 and 10"),
    "prediction": ([f"noise.scheduler={FLOW}"], "do not go together"),
    "variance": (["model.kwargs.out_channels=6"], "nothing would train: add vlb"),
    "no variance": (["loss.terms={vlb: 1}"], "vlb needs a model with a learned variance"),
    "channels": (["model.kwargs.in_channels=4"], "in_channels=4: set vae.path"),
    "vae channels": (["vae.path=VAE"], "has 4 latent channels, and the denoiser takes in_channels=3"),
    "not a vae": (["vae.path=nowhere"], "vae.path='nowhere' cannot be loaded"),
    "classes": (["model.kwargs.num_classes=1"], "label 1, and num_classes=1 allows 0 to 0"),
    "no captions": (
        [*by_text("BARE", "RUN")[:2], f"noise.scheduler={FLOW}", "data.root=BARE"],
        "the denoiser needs captions, and .* has no metadata.jsonl",
    ),
    "both conditions": (["model.kwargs.caption_channels=16"], "either on classes .* or on text .*has both"),
    "model": (["model.name=dig_s2"], "is no denoiser; did you mean 'dig_s_2'"),
    "keyword": (["model.kwargs.patchsize=2"], "no keyword 'patchsize'; did you mean 'patch_size'"),
    "mixer": (["model.kwargs.mixer=glaa"], "cannot be built .*glaa"),
    "latents without vae": (["data.latents=somewhere"], "data.latents needs vae.path"),
    "decoded, not in memory": (["data.decoded=somewhere"], "data.decoded='somewhere' goes with data.in_memory=true"),
    "memory and buckets": (["data.in_memory=true", "data.buckets=3"], "needs data.buckets=0"),
    "no such checkpoint": (["model.kwargs={}", "model.checkpoint=nowhere"], "neither the directory of a denoiser"),
    "no images to validate on": (["data.val_images=0"], "data.val_images must be at least 1"),
    "drop": (["loss.drop_condition=1"], "drop_condition must lie in"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_before_any_work(folder, vae_folder, tmp_path, command, case):
    overrides, said = WRONG[case]
    bare = paint_folder(tmp_path / "bare", captions=False, each=1)
    recipe = [*by_class(folder, tmp_path / "run", num_classes=2), *overrides]
    recipe = [o.replace("VAE", str(vae_folder)).replace("BARE", str(bare)) for o in recipe]
    code, _, err = command("train", "denoise", *recipe)
    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1, "one paragraph"
    with pytest.raises(UserError, match=said):
        raise UserError(err)
    assert not (tmp_path / "run").exists()

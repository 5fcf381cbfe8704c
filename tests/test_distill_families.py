"""diffusers' own pipelines as teachers of ``scanvas train distill``, small and with random weights."""

import json

import diffusers
import pytest
import torch
from linear_parts import pixart
from teacher_parts import CAPTIONS, PIPELINES

import scanvas
from scanvas.diffusion.presets import PRESETS
from scanvas.train import distill, distill_config, distill_denoise
from scanvas.train.config import recipes
from scanvas.train.distill_families import FAMILIES
from scanvas.train.errors import ConfigError
from scanvas.train.process import Process, create_scheduler


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    from conftest import _write_images

    root = _write_images(tmp_path_factory.mktemp("families") / "images", {"train": 3, "val": 1}, side=16)
    for split in ("train", "val"):
        lines = [
            json.dumps({"file_name": f"{path.parent.name}/{path.name}", "text": CAPTIONS[path.parent.name]})
            for path in sorted((root / split).glob("*/*.png"))
        ]
        (root / split / "metadata.jsonl").write_text("\n".join(lines))
    return root


STAGES = "stages=[{kind: attention, steps: 2, lr: 2e-4}, {steps: 1, terms: {mse: 1, prediction: 0.5, attention: 0.5}}]"


def options(teacher, images, out, *more):
    return [f"teacher.checkpoint={teacher}", f"data.root={images}", "data.size=16", "data.workers=0", "grid.images=0",
            f"run.out={out}", "train.batch_size=4", "train.cpu=true", "run.tensorboard=false", "run.plot=false",
            STAGES, *more]  # fmt: skip


@pytest.mark.parametrize("name", ["dit_pipeline", "sdxl_pipeline", "flux_pipeline"])
def test_pipelines_teach(name, images, tmp_path):
    torch.manual_seed(0)
    pipeline = PIPELINES[name]()
    pipeline.save_pretrained(tmp_path / "teacher")
    component = "unet" if hasattr(pipeline, "unet") else "transformer"
    teacher = getattr(pipeline, component)
    assert type(teacher).__name__ in FAMILIES
    _, measured = distill.train_distill(
        distill_config.load_distill(None, options(tmp_path / "teacher", images, tmp_path / "run"))
    )
    assert measured["1-attention"]["error"] < measured["linearized"]["error"]
    assert measured["linearized"]["loss"] != measured["teacher"]["loss"]
    cls = getattr(scanvas, f"Linearized{type(teacher).__name__}")
    student = cls.from_pretrained(tmp_path / "run" / "final" / component)
    assert student.config.linearization["layers"]
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "teacher", **{component: student})
    assert type(getattr(again, component)) is cls


class Call:
    """The arguments of a module's call."""

    def __init__(self, module):
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _, args, kwargs):
        self.arguments = args, kwargs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


@pytest.mark.parametrize("name", PIPELINES)
def test_the_prediction_is_the_pipelines(name):
    """What is trained is what the pipeline calls: text encoded alike, latents packed alike, sizes told alike."""
    torch.manual_seed(0)
    pipeline = PIPELINES[name]()
    pipeline.set_progress_bar_config(disable=True)
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    model.eval()
    more = {"output_type": "latent", "height": 16, "width": 24}
    more = {"dit_pipeline": {}, "pixart_pipeline": {**more, "use_resolution_binning": False}}.get(name, more)
    with Call(model) as call:
        prompt = [1] if name == "dit_pipeline" else "a boat"
        pipeline(prompt, num_inference_steps=2, guidance_scale=1.0, **more)
    args, wanted = call.arguments
    latent = args[0] if args else wanted["hidden_states"]
    times = wanted["timestep"] if len(args) < 2 else args[1]
    times = torch.as_tensor(times).reshape(-1)
    if name == "sdxl_pipeline":  # told in pixels; those of its VAE are eight for a latent, here two
        wanted["added_cond_kwargs"]["time_ids"][:, [0, 1, 4, 5]] *= 4
    family = FAMILIES[type(model).__name__]
    condition = {"class_labels": wanted.get("class_labels")}
    if name != "dit_pipeline":
        condition = family.encode(pipeline, ["a boat"], torch.device("cpu"))
    with torch.no_grad():
        expected = model(*args, **{**wanted, "return_dict": False})[0]
        if name == "flux_pipeline":
            unpack = (16, 24, pipeline.vae_scale_factor)
            latent, expected, times = pipeline._unpack_latents(latent, *unpack), expected, 1000 * times
            expected = pipeline._unpack_latents(expected, *unpack)
        made = family.call(model, latent, times, condition)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


def test_teachers_that_do_not_fit_are_refused(images, tmp_path):
    def refuse(said, *more):
        with pytest.raises(ConfigError, match=said):
            distill.train_distill(
                distill_config.load_distill(None, options(tmp_path / "t", images, tmp_path / "run", *more))
            )

    pixart()[0].save_pretrained(tmp_path / "t")
    refuse("PixArtTransformer2DModel alone: give the directory of its pipeline")
    refuse("matches no attention layer", "student.layers=blocks.*")
    from linear_parts import wan

    wan()[0].save_pretrained(tmp_path / "t")
    refuse("WanTransformer3DModel, which distillation does not know how to call; it knows Lin")


SMALL = {"in_channels": 3, "out_channels": 6, "num_classes": 10}
NANO = {**PRESETS["dig_t2i_nano"], "patch_size": 2, "mixer": "softmax", "mixer_kwargs": None}
UNET = {"in_channels": 4, "out_channels": 4, "layers_per_block": 2}
SD15 = {
    **UNET, "sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
}  # fmt: skip
SDXL = {
    **UNET, "sample_size": 128, "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280], "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}  # fmt: skip
FLUX = {
    "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
}  # fmt: skip
SD35 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536, "out_channels": 16,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 384, "qk_norm": "rms_norm",
    "dual_attention_layers": list(range(13)),
}  # fmt: skip


def xl(size):
    return {
        "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "num_layers": 28,
        "sample_size": size, "patch_size": 2, "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_zero",
    }  # fmt: skip


TEACHERS = {
    "cifar10_dit": ("LinearDiTTransformer2DModel", {**PRESETS["dit_s_2"], **SMALL}, "DDPMScheduler", 12),
    "digits": (
        "LinearDiTTransformer2DModel",
        {**PRESETS["dig_t2i_nano"], **NANO},
        "FlowMatchEulerDiscreteScheduler",
        4,
    ),
    "lit_dit_xl_2_256": ("DiTTransformer2DModel", xl(32), "DDIMScheduler", 28),
    "lit_dit_xl_2_512": ("DiTTransformer2DModel", xl(64), "DDIMScheduler", 28),
    "linfusion_sd15": ("UNet2DConditionModel", SD15, "PNDMScheduler", 16),
    "linfusion_sdxl": ("UNet2DConditionModel", SDXL, "EulerDiscreteScheduler", 70),
    "clear_flux": ("FluxTransformer2DModel", FLUX, "FlowMatchEulerDiscreteScheduler", 57),
    "sd35_t5": ("SD3Transformer2DModel", SD35, "FlowMatchEulerDiscreteScheduler", 18),
    "cifar10_deit": ("deit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}, None, 12),
    "deit_linear": ("deit_tiny_patch16_224", None, None, 12),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_shipped_recipes_fit_their_teachers(name, tmp_path):
    """Everything of a recipe but data and weights fits together, and its header says how to run it."""
    cls, settings, scheduler, layers = TEACHERS[name]
    text = recipes("distill")[f"distill/{name}"].read_text(encoding="utf-8")
    assert f"--config {name}" in text
    assert all(f"# {word}:" in text for word in ("Paper", "Cost", "Expected", "Command"))
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    if scheduler:
        (teacher / "scheduler").mkdir()
        (teacher / "config.json").write_text(json.dumps({"_class_name": cls, **settings}))
        told = {"_class_name": scheduler}
        (teacher / "scheduler" / "scheduler_config.json").write_text(json.dumps(told))
    elif settings:
        told = {"architecture": cls, "num_classes": 10, "model_args": settings}
        (teacher / "config.json").write_text(json.dumps(told))
    overrides = [f"teacher.checkpoint={teacher}"] if settings else []
    config = distill_config.load_distill(name, [*overrides, "data.root=x"])
    distill_config.check_config(config)
    source = "classify" if scheduler is None else "denoise"
    assert config.task == source
    linear = distill._SOURCES[source][1](config)
    assert len(linear.layers) == layers
    stages = [distill_config.stage_config(config, i, True).stages[-1] for i in range(len(config.stages))]
    assert stages[-1].kind == "end_to_end"
    if scheduler:
        folder = distill_denoise.Folder(str(teacher))
        family = FAMILIES.get(cls)
        wanted = family.wanted(settings) if family else settings
        learned = wanted.get("out_channels") not in (None, wanted["in_channels"])
        predicts = folder.prediction(family)
        derived = distill_denoise.derived_config(config, folder, learned, predicts)
        Process(create_scheduler(derived.noise, predicts, learned), predicts, derived.noise)
        assert learned == bool({"vlb", "variance"} & set(stages[-1].terms))


def test_no_recipe_is_left_out():
    assert {f"distill/{name}" for name in TEACHERS} == set(recipes("distill"))

"""A linearised model stays linear: saving, fresh processes, pipelines, LoRA, casting, compilation; and comes back."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from linear_parts import TIMM, build, run
from linearize_parts import linear_layers, paint, pipeline, same, snapshot

import scanvas

FRESH = """
import sys, torch
torch.set_num_threads(1)
import scanvas
from diffusers import DiffusionPipeline
folder = sys.argv[1]
inputs = torch.load(folder + "/inputs.pt", weights_only=True)
out = {}
for name, cls in (("unet", "LinearizedUNet2DConditionModel"), ("flux", "LinearizedFluxTransformer2DModel"),
                  ("denoiser", "LinearDiTTransformer2DModel")):
    model = getattr(scanvas, cls).from_pretrained(folder + "/" + name)
    with torch.no_grad():
        out[name] = model(**inputs[name]).sample
model = scanvas.load_linearized(folder + "/vit")
out["vit"] = model(inputs["vit"]["x"]).detach()
pipe = DiffusionPipeline.from_pretrained(folder + "/pipe")
pipe.set_progress_bar_config(disable=True)
g = torch.Generator().manual_seed(0)
images = pipe([1, 2], guidance_scale=1.0, num_inference_steps=2, generator=g, output_type="np").images
out["pipe"] = torch.from_numpy(images)
assert type(pipe.transformer) is scanvas.LinearizedDiTTransformer2DModel
torch.save(out, folder + "/out.pt")
"""


def test_a_fresh_process_loads_the_same(tmp_path):
    inputs, expected = {}, {}
    for name, mixer in (("unet", "linfusion"), ("flux", "local"), ("vit", "gla"), ("denoiser", "hybrid")):
        model, inputs[name] = build(name)
        student, _ = scanvas.linearize(
            model, mixer, calibration=None if name == "flux" else [inputs[name] if name != "vit" else inputs[name]["x"]]
        )
        expected[name] = run(student, inputs[name])
        if name == "vit":
            scanvas.save_linearized(student, tmp_path / name, **TIMM[name][1])
        else:
            student.save_pretrained(tmp_path / name)
    pipe, _ = scanvas.linearize(pipeline(), "lit")
    expected["pipe"] = paint(pipe)
    pipe.save_pretrained(tmp_path / "pipe")
    assert json.loads((tmp_path / "pipe" / "model_index.json").read_text())["transformer"] == [
        "scanvas",
        "LinearizedDiTTransformer2DModel",
    ]
    torch.save(inputs, tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True)
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_pipeline_in_place_and_back():
    pipe = pipeline()
    transformer, expected, before = pipe.transformer, paint(pipe), snapshot(pipe.transformer)
    student, report = scanvas.linearize(pipe, "lit")
    assert pipe.transformer is transformer
    assert same(transformer, before)
    assert student.vae is pipe.vae
    assert torch.equal(paint(pipe), expected)
    assert (paint(student) - expected).abs().max() > 0
    assert report.model == ("DiTTransformer2DModel", "LinearizedDiTTransformer2DModel")
    changed, _ = scanvas.linearize(pipe, "lit", inplace=True)
    assert changed is pipe
    assert pipe.transformer is transformer
    assert torch.equal(paint(pipe), paint(student))
    scanvas.delinearize(pipe)
    assert pipe.config["transformer"] == ("diffusers", "DiTTransformer2DModel")
    assert torch.equal(paint(pipe), expected)


@pytest.mark.parametrize("name", ["pixart", "unet", "flux", "eva02", "denoiser"])
def test_back_to_softmax(name, tmp_path):
    model, inputs = build(name)
    before, expected, config = snapshot(model), run(model, inputs), dict(getattr(model, "config", {}))
    config.pop("_use_default_values", None)
    student, report = scanvas.linearize(model, "lit", inplace=True)
    assert student is model
    with torch.no_grad():  # training the student does not reach the layers that were kept
        for parameter in student.get_submodule(report.layers[0]["path"]).parameters():
            parameter.add_(1.0)
    assert scanvas.delinearize(student) is student
    assert type(student).__name__ == report.model[0]
    assert same(student, before)
    assert torch.equal(run(student, inputs), expected)
    now = dict(getattr(student, "config", {}))
    now.pop("_use_default_values", None)
    assert now == config
    assert not any(m._forward_pre_hooks for m in student.modules())
    with pytest.raises(ValueError, match="is not linearised"):
        scanvas.delinearize(student)

    alone, _ = scanvas.linearize(model, "lit", keep_original=False)
    with pytest.raises(ValueError, match=r"softmax layers are not there any more.*teacher="):
        scanvas.delinearize(alone)
    scanvas.delinearize(alone, teacher=model)
    assert torch.equal(run(alone, inputs), expected)
    assert scanvas.linearize(alone, "lit")  # and again


def test_deepcopies_do_not_share_grids():
    model, inputs = build("pixart")
    student, _ = scanvas.linearize(model, "lit")
    run(student, inputs)
    twin = copy.deepcopy(student)
    run(twin, {**inputs, "hidden_states": inputs["hidden_states"].mT.contiguous()})
    assert linear_layers(student)[0].record.value == (4, 6)
    assert linear_layers(twin)[0].record.value == (6, 4)
    assert len({id(layer.record) for layer in linear_layers(twin)}) == 1


FULL_SIZE = {
    # name: (class, what differs from its defaults, attention layers, sizes for the costs)
    "PixArt-Sigma-XL": (PixArtTransformer2DModel, {"sample_size": 128}, 28, [(128, 128)]),
    "SD3.5-medium": (
        SD3Transformer2DModel,
        {"num_layers": 24, "attention_head_dim": 64, "num_attention_heads": 24, "caption_projection_dim": 1536,
         "qk_norm": "rms_norm", "dual_attention_layers": tuple(range(13)), "sample_size": 128,
         "pos_embed_max_size": 384},
        37, [(128, 128)],
    ),
    "FLUX.1-dev": (FluxTransformer2DModel, {"guidance_embeds": True}, 57, [(128, 128), (512, 512)]),
    "Qwen-Image": (QwenImageTransformer2DModel, {"guidance_embeds": False}, 60, [(128, 128)]),
    "Wan2.1-14B": (WanTransformer3DModel, {}, 40, [(21, 60, 104)]),
    "SD1.5": (
        UNet2DConditionModel, {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}, 16, [(64, 64)],
    ),
    "SDXL": (
        UNet2DConditionModel,
        {"sample_size": 128, "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
         "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
         "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
         "projection_class_embeddings_input_dim": 2816},
        70, [(128, 128)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL_SIZE)
def test_published_sizes(name):
    cls, config, layers, sizes = FULL_SIZE[name]
    with torch.device("meta"):
        model = cls(**config).to(torch.bfloat16)
        student, report = scanvas.linearize(model, "lit", sizes=sizes, inplace=True, keep_original=False)
        rebuilt = type(student).from_config(student.config).to(torch.bfloat16)
    assert len(report.layers) == layers == len(linear_layers(student))
    assert {k: v.shape for k, v in rebuilt.state_dict().items()} == {
        k: v.shape for k, v in student.state_dict().items()
    }
    for cost in report.costs:
        assert cost["flops_after"] < cost["flops_before"] / (2 if "SD" not in name else 1)
        assert cost["bytes_after"] < cost["bytes_before"] / 20

"""A linearised model stays linear: saving, fresh processes, pipelines, LoRA, casting, compilation; and comes back."""

import copy
import json
import subprocess
import sys

import accelerate
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import Attention
from linear_parts import SMALL_OPTIONS, TIMM, build, run
from test_linearize import same, snapshot

import scanvas
from scanvas.diffusion.linear_attention_modules import LinearizedLayer
from scanvas.diffusion.linear_cores import TARGETS


def linear_layers(model):
    return [m for m in model.modules() if isinstance(m, LinearizedLayer)]


def pipeline():
    model, _ = build("dit")
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",), sample_size=8,
    )  # fmt: skip
    pipe = DiTPipeline(transformer=model, vae=vae.eval(), scheduler=DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def paint(pipe):
    g = torch.Generator().manual_seed(0)
    return torch.from_numpy(
        pipe([1, 2], guidance_scale=1.0, num_inference_steps=2, generator=g, output_type="np").images
    )


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


@pytest.mark.parametrize("name", ["pixart", "unet", "flux"])
def test_tools_that_reset_processors(name):
    model, inputs = build(name)
    student, _ = scanvas.linearize(model, "lit")
    expected, count = run(student, inputs), len(linear_layers(student))
    if hasattr(student, "set_attention_slice"):
        student.set_attention_slice("auto")
    for module in student.modules():
        if isinstance(module, Attention):
            module.set_attention_slice(1)
    student.fuse_qkv_projections()
    torch.testing.assert_close(run(student, inputs), expected, atol=1e-5, rtol=1e-5)
    student.unfuse_qkv_projections()
    for module in student.modules():
        if isinstance(module, Attention):
            module.set_attention_slice(None)
    torch.testing.assert_close(run(student, inputs), expected, atol=1e-5, rtol=1e-5)
    assert len(linear_layers(student)) == count


def test_fused_projections_of_the_teacher():
    model, inputs = build("pixart")
    expected = run(scanvas.linearize(model, "lit")[0], inputs)
    model.fuse_qkv_projections()
    student, _ = scanvas.linearize(model, "lit")
    torch.testing.assert_close(run(student, inputs), expected, atol=1e-6, rtol=1e-6)
    own, inputs = build("denoiser")
    expected = run(scanvas.linearize(own, "lit")[0], inputs)
    own.fuse_qkv_projections()
    student, _ = scanvas.linearize(own, "lit")
    assert own.transformer_blocks[0].mixer.fused_projections
    torch.testing.assert_close(run(student, inputs), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["flux", "unet", "denoiser"])
def test_lora(name, tmp_path):
    peft = pytest.importorskip("peft")
    model, inputs = build(name)
    student, report = scanvas.linearize(model, "lit")
    expected = run(student, inputs)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    student.add_adapter(config)
    path = report.layers[0]["path"]
    assert hasattr(student.get_submodule(path).to_q, "lora_A")
    adapted = run(student, inputs)
    assert (adapted - expected).abs().max() > 1e-5
    with pytest.raises(ValueError, match=r"LoRA layers|linearised already|no softmax"):
        scanvas.linearize(student, "lit")
    student.save_lora_adapter(tmp_path, adapter_name="default")
    student.unload_lora()
    assert torch.equal(run(student, inputs), expected)
    weights = "pytorch_lora_weights.safetensors"
    student.load_lora_adapter(tmp_path, weight_name=weights, prefix=None, adapter_name="again")
    torch.testing.assert_close(run(student, inputs), adapted)
    student.unload_lora()
    # What was trained on the softmax model finds its layers, too.
    model.load_lora_adapter(tmp_path, weight_name=weights, prefix=None)
    with pytest.raises(ValueError, match="the model has LoRA layers"):
        scanvas.linearize(model, "lit")


@pytest.mark.parametrize("mixer", TARGETS)
def test_layerwise_casting(mixer):
    model, inputs = build("pixart")
    student, _ = scanvas.linearize(model, mixer, **SMALL_OPTIONS.get(mixer, {}))
    expected = run(student, inputs)
    student.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert student.transformer_blocks[0].attn1.to_q.weight.dtype == torch.float16
    torch.testing.assert_close(run(student, inputs), expected, atol=2e-2, rtol=2e-2)


def test_offloading_comes_after():
    model, inputs = build("pixart")
    student, _ = scanvas.linearize(model, "lit")
    expected = run(student, inputs)
    accelerate.cpu_offload(student, execution_device="cpu")
    assert torch.equal(run(student, inputs), expected)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match=r"hooks of offloading.*linearize first"):
        scanvas.linearize(model, "lit")
    model, _ = build("pixart")
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"hooks of offloading.*linearize first"):
        scanvas.linearize(model, "lit")


@pytest.mark.parametrize("mixer", TARGETS)
@pytest.mark.parametrize("name", ["pixart", "sd35", "vit_reg_qk_norm"])
def test_half_precision(name, mixer):
    model, inputs = build(name)
    student, _ = scanvas.linearize(model, mixer, **SMALL_OPTIONS.get(mixer, {}))
    expected = run(student, inputs)
    cast = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    got = run(student.bfloat16(), cast)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=0.15 * expected.abs().max().item(), rtol=0)
    half, _ = scanvas.linearize(model.bfloat16(), mixer)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["pixart", "flux", "unet"])
def test_gradient_checkpointing_sees_its_own_grid(name):
    model, inputs = build(name)
    turned = dict(inputs)
    key = "sample" if name == "unet" else "hidden_states"
    if name == "flux":
        turned["img_ids"] = inputs["img_ids"][:, [0, 2, 1]]
    else:
        turned[key] = inputs[key].mT.contiguous()

    def gradients(student):
        student.train().zero_grad()
        out = student(**inputs).sample
        student(**turned)  # another grid, before the first is computed again
        out.square().mean().backward()
        return {n: p.grad for n, p in student.named_parameters() if p.grad is not None}

    student, _ = scanvas.linearize(model, "lit")
    with torch.no_grad():
        for layer in linear_layers(student):
            torch.nn.init.normal_(layer.core.conv.weight, generator=torch.Generator().manual_seed(0))
    expected = gradients(copy.deepcopy(student))
    student.enable_gradient_checkpointing()
    for name_, grad in gradients(student).items():
        torch.testing.assert_close(grad, expected[name_], atol=1e-5, rtol=1e-3)
    model.enable_gradient_checkpointing()
    later, _ = scanvas.linearize(model, "lit")
    assert later.is_gradient_checkpointing
    later.load_state_dict(student.state_dict())
    for name_, grad in gradients(later).items():
        torch.testing.assert_close(grad, expected[name_], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "mixer"),
    [("pixart", "lit"), ("vit", "gla"), ("vit", "hedgehog"), ("vit", "linfusion")],
)
def test_compiled(name, mixer):
    model, inputs = build(name)
    student, _ = scanvas.linearize(model, mixer, **SMALL_OPTIONS.get(mixer, {}))
    expected = run(student, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(student, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, inputs), expected, atol=1e-4, rtol=1e-4)


def test_compiled_blocks_take_another_grid():
    model, inputs = build("flux")
    student, _ = scanvas.linearize(model, "lit")
    turned = {**inputs, "img_ids": inputs["img_ids"][:, [0, 2, 1]]}
    with torch.no_grad():
        for layer in linear_layers(student):
            torch.nn.init.normal_(layer.core.conv.weight, generator=torch.Generator().manual_seed(0))
    expected = run(student, inputs), run(student, turned)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    torch._dynamo.reset()
    student.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(student, inputs), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(student, turned), expected[1], atol=1e-4, rtol=1e-4)


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

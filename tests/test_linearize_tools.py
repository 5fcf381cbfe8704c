"""The swap holds against what diffusers, peft, accelerate and torch do to a model."""

import copy

import accelerate
import pytest
import torch
from diffusers.models.attention_processor import Attention
from linear_parts import MORE_TARGETS, SMALL_OPTIONS, build, run
from linearize_parts import linear_layers

import scanvas
from scanvas.diffusion.linear_cores import TARGETS


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


@pytest.mark.parametrize(
    ("name", "mixer"),
    [(n, m) for n in ("pixart", "sd35", "vit_reg_qk_norm") for m in TARGETS if m not in MORE_TARGETS or n == "sd35"],
)
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

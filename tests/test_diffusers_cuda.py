"""The points of diffusers' model and pipeline tests that need an accelerator: offloading, casting, device maps, half
precision, mixed-precision training."""

import pytest
import torch
from diffusion_parts import VARIANTS, build, denoiser, inputs
from mixer_cases import TYPICAL
from pipeline_parts import KINDS, close, paint, pipeline

from scanvas import LinearDiTTransformer2DModel, list_mixers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.fixture(params=[(m, v) for m in TYPICAL for v in VARIANTS], ids=lambda p: "-".join(p))
def model(request):
    mixer, variant = request.param
    return build(mixer, **VARIANTS[variant])


def on_gpu(model):
    return {key: value.to(CUDA) for key, value in inputs(model).items()}


@torch.no_grad()
def run(model):
    return model(**on_gpu(model)).sample.float()


@pytest.fixture(autouse=True)
def exact_matmul():
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


@pytest.mark.parametrize("mixer", [mixer for mixer in list_mixers() if mixer not in TYPICAL])
@torch.no_grad()
def test_every_mixer_same_as_on_the_cpu(mixer):
    model = build(mixer, num_layers=2)
    expected = model(**inputs(model)).sample
    torch.testing.assert_close(run(model.to(CUDA)).cpu(), expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_same_as_on_the_cpu(model):
    expected = model(**inputs(model)).sample
    torch.testing.assert_close(run(model.to(CUDA)).cpu(), expected, atol=1e-4, rtol=1e-3)


def test_group_offload(model, tmp_path):
    model.save_pretrained(tmp_path)
    expected = run(model.to(CUDA))
    for options in (
        {"offload_type": "block_level", "num_blocks_per_group": 1},
        {"offload_type": "block_level", "num_blocks_per_group": 1, "non_blocking": True},
        {"offload_type": "leaf_level"},
        {"offload_type": "leaf_level", "use_stream": True},
        {"offload_type": "leaf_level", "use_stream": True, "record_stream": True},
        {"offload_type": "block_level", "num_blocks_per_group": 1, "offload_to_disk_path": str(tmp_path / "disk")},
    ):
        offloaded = LinearDiTTransformer2DModel.from_pretrained(tmp_path)
        offloaded.enable_group_offload(CUDA, **options)
        close(run(offloaded), expected, atol=1e-5)
        close(run(offloaded), expected, atol=1e-5)
    cast = LinearDiTTransformer2DModel.from_pretrained(tmp_path)
    cast.enable_group_offload(CUDA, offload_type="leaf_level", use_stream=True)
    cast.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    close(run(cast), expected, atol=2e-2)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_device_map(model, tmp_path, where):
    expected = run(model.to(CUDA))
    model.cpu().save_pretrained(tmp_path)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    memory = {0: size // 2, "cpu": 2 * size if where == "cpu" else size // 10}
    split = LinearDiTTransformer2DModel.from_pretrained(
        tmp_path, device_map="auto", max_memory=memory, offload_folder=str(tmp_path / "offload")
    )
    assert {0, where} <= set(split.hf_device_map.values())
    close(run(split), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(model, tmp_path, dtype):
    expected = run(model.to(CUDA))
    model.to(dtype).save_pretrained(tmp_path)
    loaded = LinearDiTTransformer2DModel.from_pretrained(tmp_path, torch_dtype=dtype).to(CUDA)
    kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in on_gpu(model).items()}
    with torch.no_grad():
        out = loaded(**kwargs).sample.float()
        torch.testing.assert_close(model(**kwargs).sample.float(), out, atol=1e-4, rtol=0)
    assert ((out - expected).square().mean() / expected.square().mean()).sqrt() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_mixed_precision_training(model, dtype):
    model.to(CUDA).train().enable_gradient_checkpointing()
    with torch.autocast("cuda", dtype):
        loss = model(**on_gpu(model)).sample.float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_layerwise_casting_saves_memory():
    big = {"num_attention_heads": 8, "attention_head_dim": 64, "mlp_hidden": 2048, "num_classes": 5}
    sizes = {}
    for storage in (torch.float32, torch.float8_e4m3fn):
        model = build(**big).to(CUDA)
        if storage != torch.float32:
            model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
        run(model)
        sizes[storage] = model.get_memory_footprint()
    assert sizes[torch.float8_e4m3fn] < 0.4 * sizes[torch.float32]


@pytest.mark.parametrize("mixer", TYPICAL)
@torch.no_grad()
def test_compiled_blocks(mixer):
    model = build(mixer, num_classes=5).to(CUDA)
    expected = run(model)
    model.compile_repeated_blocks(fullgraph=True)
    close(run(model), expected, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_pipelines(kind):
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    close(paint(pipe.to("cuda"), kind).cpu(), expected, atol=1e-2)
    for offload in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        pipe = pipeline(kind)
        getattr(pipe, offload)()
        close(paint(pipe, kind).cpu(), expected, atol=1e-2)
        if offload == "enable_model_cpu_offload":
            assert pipe.transformer.device.type == "cpu"
    for dtype in (torch.float16, torch.bfloat16):
        half = pipeline(kind).to("cuda", dtype)
        assert (paint(half, kind).cpu() - expected).abs().max() < 0.25
    grouped = pipeline(kind)
    grouped.transformer.enable_group_offload(CUDA, offload_type="leaf_level", use_stream=True)
    for name, part in grouped.components.items():
        if isinstance(part, torch.nn.Module) and name != "transformer":
            part.to(CUDA)
    close(paint(grouped, kind).cpu(), expected, atol=1e-2)


@torch.no_grad()
def test_large_image_in_half_precision():
    model = denoiser(num_layers=4, num_attention_heads=4, attention_head_dim=64, mlp_hidden=512).to(
        CUDA, torch.bfloat16
    )
    x = torch.randn(1, 4, 256, 256, device=CUDA, dtype=torch.bfloat16)
    assert model(x, torch.tensor([999], device=CUDA)).sample.isfinite().all()

"""The denoiser as a guest of diffusers: the points of its ModelTesterMixin, AttentionTesterMixin, TrainingTesterMixin,
LoraTesterMixin and memory and cache tests which need no accelerator; and the pipelines it is dropped into."""

import subprocess
import sys

import pytest
import torch
from diffusers import (
    AutoencoderDC,
    DDIMScheduler,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    PixArtSigmaPipeline,
    SanaPipeline,
)
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import AttnProcessor
from diffusers.training_utils import EMAModel
from diffusion_parts import VARIANTS, build, inputs, vae
from mixer_cases import TYPICAL

from scanvas import LinearDiTClassPipeline, LinearDiTTransformer2DModel


@pytest.fixture(params=list(VARIANTS))
def model(request):
    return build(**VARIANTS[request.param])


@torch.no_grad()
def run(model, **changes):
    return model(**{**inputs(model), **changes}, return_dict=False)[0]


@pytest.mark.parametrize("how", ["plain", "variant", "sharded", "bin"])
def test_save_and_load(model, tmp_path, how):
    options = {
        "plain": {},
        "variant": {"variant": "fp16"},
        "sharded": {"max_shard_size": "40KB"},
        "bin": {"safe_serialization": False},
    }[how]
    model.save_pretrained(tmp_path, **options)
    if how == "variant":
        with pytest.raises(OSError, match=r"no file named diffusion_pytorch_model.bin found in directory"):
            LinearDiTTransformer2DModel.from_pretrained(tmp_path)
    if how == "sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = LinearDiTTransformer2DModel.from_pretrained(tmp_path, variant=options.get("variant"))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(run(loaded), run(model))
    assert {k: v for k, v in loaded.config.items() if k[0] != "_"}.keys() == {k for k in model.config if k[0] != "_"}
    slow = LinearDiTTransformer2DModel.from_pretrained(
        tmp_path, variant=options.get("variant"), low_cpu_mem_usage=False, torch_dtype=torch.bfloat16
    )
    assert slow.dtype == torch.bfloat16


def test_outputs(model):
    """Tuple and dict agree, runs agree, and attributes and config are told apart as in every diffusers model."""
    kwargs = inputs(model)
    torch.testing.assert_close(model(**kwargs).sample, model(**kwargs, return_dict=False)[0])
    model.register_to_config(test_attribute=5)
    with pytest.warns(FutureWarning):
        assert model.test_attribute == 5
    with pytest.raises(AttributeError, match="object has no attribute 'does_not_exist'"):
        model.does_not_exist  # noqa: B018


def test_training(model):
    kwargs = inputs(model)
    model.train()
    ema = EMAModel(model.parameters())
    assert not model.is_gradient_checkpointing
    model(**kwargs).sample.square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
    model(**kwargs).sample.square().mean().backward()
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], msg=name)
    ema.step(model.parameters())
    model.disable_gradient_checkpointing()
    assert not model.is_gradient_checkpointing


def test_processors(model):
    processors = model.attn_processors
    depth = model.config.num_layers
    assert len(processors) == depth * (2 if model.config.caption_channels else 1)
    with pytest.raises(ValueError, match="number of processors"):
        model.set_attn_processor({next(iter(processors)): AttnProcessor()})
    expected, seen = run(model), []

    class Recorder:
        """Keeps the attention map of each block."""

        def __call__(self, mixer, x, grid):
            seen.append(mixer.attention_map(x, grid))
            return mixer(x, grid)

    model.set_attn_processor({k: v if "attn2" in k else Recorder() for k, v in processors.items()})
    torch.testing.assert_close(run(model), expected)
    assert len(seen) == depth
    model.set_attn_processor({key: AttnProcessor() for key in processors})
    assert all(type(p) is AttnProcessor for p in model.attn_processors.values())


def test_fused_projections(model, tmp_path):
    expected, keys = run(model), list(model.state_dict())
    model.fuse_qkv_projections()
    assert all(block.mixer.fused_projections for block in model.transformer_blocks)
    for module in model.modules():
        if isinstance(module, AttentionModuleMixin):
            assert module.fused_projections
            assert hasattr(module, "to_kv")
    torch.testing.assert_close(run(model), expected)
    model.save_pretrained(tmp_path)
    assert model.transformer_blocks[0].mixer.fused_projections
    torch.testing.assert_close(run(LinearDiTTransformer2DModel.from_pretrained(tmp_path)), expected)
    model.unfuse_qkv_projections()
    assert sorted(model.state_dict()) == sorted(keys)
    torch.testing.assert_close(run(model), expected)


def test_lora(model, tmp_path):
    peft = pytest.importorskip("peft")
    expected = run(model)
    config = peft.LoraConfig(
        r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model.add_adapter(config)
    with_lora = run(model)
    assert not torch.allclose(expected, with_lora, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(model, attention_kwargs={"scale": 0.0}), expected)
    torch.testing.assert_close(run(model, cross_attention_kwargs={"scale": 1.0}), with_lora)
    with pytest.raises(ValueError, match="would lose the LoRA layers"):
        model.fuse_qkv_projections()
    with pytest.raises(ValueError, match="Adapter name foo not found"):
        model.save_lora_adapter(tmp_path, adapter_name="foo")
    model.save_lora_adapter(tmp_path)
    model.unload_lora()
    torch.testing.assert_close(run(model), expected)
    name = "pytorch_lora_weights.safetensors"
    model.load_lora_adapter(str(tmp_path), prefix=None, use_safetensors=True, weight_name=name)
    torch.testing.assert_close(run(model), with_lora)
    model.fuse_lora()
    model.unload_lora()
    torch.testing.assert_close(run(model), with_lora, atol=1e-4, rtol=1e-4)


def test_layerwise_casting_and_group_offload(model, tmp_path):
    expected = run(model)
    cpu = torch.device("cpu")
    for level, options in (("block_level", {"num_blocks_per_group": 1}), ("leaf_level", {})):
        model.save_pretrained(tmp_path)
        offloaded = LinearDiTTransformer2DModel.from_pretrained(tmp_path)
        offloaded.enable_group_offload(cpu, offload_type=level, **options)
        torch.testing.assert_close(run(offloaded), expected)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    out = run(model)
    stored = {m.weight.dtype for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert torch.float8_e4m3fn in stored
    assert model.patch_embed.weight.dtype == torch.float32
    assert ((out - expected).square().mean() / expected.square().mean()).sqrt() < 0.2


@pytest.mark.parametrize("mixer", TYPICAL)
def test_sequential_offload(mixer):
    """Weights are on the meta device but while their own module is called: nothing may read them from outside."""
    accelerate = pytest.importorskip("accelerate")
    for mixer_kwargs in (None, {"bidirectional": False, "local": False, "output": "swish"}):
        model = build(mixer, mixer_kwargs=mixer_kwargs if mixer == "gla" else None, **VARIANTS["text"])
        expected = run(model)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(run(model), expected)
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_first_block_cache(model):
    kwargs = inputs(model)
    expected = run(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    calls = []
    model.transformer_blocks[1].mixer.register_forward_hook(lambda *_: calls.append(1))
    with model.cache_context("cond"), torch.no_grad():
        torch.testing.assert_close(model(**kwargs).sample, expected)
        near = {**kwargs, "hidden_states": kwargs["hidden_states"] + 1e-4}
        torch.testing.assert_close(model(**near).sample, expected, atol=0.05, rtol=0.05)
    assert len(calls) == 1  # the second run used the cache
    model.disable_cache()


@torch.no_grad()
def test_regional_compile():
    model = build(**VARIANTS["classes"])
    expected = run(model)
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(model), expected)
    torch._dynamo.reset()


def test_in_dit_pipeline():
    """DiTPipeline hard-codes the null label 1000."""
    transformer = build(num_classes=1000, out_channels=8)
    scheduler = DDIMScheduler(num_train_timesteps=1000)
    pipe = DiTPipeline(transformer, vae(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    images = pipe([3, 7], num_inference_steps=2, output_type="np", generator=torch.manual_seed(0)).images
    assert images.shape == (2, 16, 16, 3)
    # our own pipeline paints the same
    own = LinearDiTClassPipeline(transformer, scheduler, pipe.vae)
    own.set_progress_bar_config(disable=True)
    ours = own([3, 7], num_inference_steps=2, output_type="np", generator=torch.manual_seed(0)).images
    assert abs(ours - images).max() < 1e-3


@pytest.mark.parametrize("host", [PixArtSigmaPipeline, SanaPipeline])
def test_in_text_pipelines(host):
    flow = host is SanaPipeline
    transformer = build(caption_channels=12, prediction_type="flow_prediction" if flow else "epsilon", sample_size=32)
    if flow:
        autoencoder = AutoencoderDC(
            latent_channels=4,
            encoder_block_types=("ResBlock",) * 2,
            decoder_block_types=("ResBlock",) * 2,
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), ()),
        )
        scheduler = FlowMatchEulerDiscreteScheduler()
    else:
        autoencoder, scheduler = vae(), DPMSolverMultistepScheduler()
    pipe = host(tokenizer=None, text_encoder=None, transformer=transformer, vae=autoencoder, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    embeds, mask = torch.randn(1, 5, 12), torch.ones(1, 5)
    images = pipe(
        prompt_embeds=embeds,
        prompt_attention_mask=mask,
        negative_prompt_embeds=-embeds,
        negative_prompt_attention_mask=mask,
        negative_prompt=None,
        height=32,
        width=64,
        num_inference_steps=2,
        output_type="pt",
        use_resolution_binning=False,
    ).images
    assert images.shape == (1, 3, 32, 64)
    assert images.isfinite().all()


_FRONT_DOOR = """
import sys
import scanvas, importlib.util; importlib.util.find_spec('diffusers')
assert "diffusers" not in sys.modules
import diffusers, scanvas
assert diffusers.LinearDiTTransformer2DModel is scanvas.LinearDiTTransformer2DModel
assert not hasattr(diffusers, "NoSuchClass") and diffusers.DDIMScheduler
from diffusers.pipelines.pipeline_loading_utils import ALL_IMPORTABLE_CLASSES, LOADABLE_CLASSES
assert issubclass(scanvas.LinearDiTTransformer2DModel, getattr(scanvas, next(iter(LOADABLE_CLASSES["scanvas"]))))
"""


def test_front_door():
    """diffusers, imported after scanvas, knows our classes, and scanvas alone does not import it. (The other order of
    imports: ``test_fresh_process`` of test_pipelines_saving.py.)"""
    done = subprocess.run([sys.executable, "-c", _FRONT_DOOR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_class_attributes(model):
    names = {type(m).__name__ for m in model.modules()}
    assert set(model._no_split_modules) | set(model._repeated_blocks) <= names

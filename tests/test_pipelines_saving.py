"""Pipelines saved, loaded in another process, with LoRA, in other dtypes and without a part of theirs."""

import json
import subprocess
import sys

import pipeline_parts
import pytest
import torch
from diffusers.utils.source_code_parsing_utils import ReturnNameVisitor
from pipeline_parts import close, components, paint, pipeline

from scanvas import LinearDiTTextToImagePipeline

kind = pipeline_parts.kind


def test_without_the_vae(kind, tmp_path):
    """An optional component set to None later, as diffusers' own test does: latents are then the image."""
    pipe = pipeline(kind)
    pipe.vae = None
    out = paint(pipe, kind)
    assert out.shape == (1, pipe.transformer.config.in_channels, 8, 8)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.vae is None
    close(paint(loaded, kind), out)


def test_dtypes(kind, tmp_path):
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path, torch_dtype={"transformer": torch.bfloat16, "default": torch.float32})
    assert loaded.transformer.dtype == torch.bfloat16
    loaded.set_progress_bar_config(disable=True)
    assert (paint(loaded, kind) - expected).abs().max() < 0.1
    pipe.to(dtype=torch.bfloat16)
    images = paint(pipe, kind)
    assert images.dtype == torch.float32
    assert (images - expected).abs().max() < 0.1


def test_saving(kind, tmp_path):
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    for folder, options in (("plain", {}), ("variant", {"variant": "fp16", "safe_serialization": False})):
        pipe.save_pretrained(tmp_path / folder, **options)
        loaded = type(pipe).from_pretrained(tmp_path / folder, variant=options.get("variant"))
        loaded.set_progress_bar_config(disable=True)
        close(paint(loaded, kind), expected)
        assert set(loaded.components) == set(pipe.components)
        files = {file.name for file in (tmp_path / folder / "transformer").iterdir()}
        weights = "diffusion_pytorch_model." + ("fp16.bin" if options else "safetensors")
        assert files == {"config.json", weights}
    with pytest.raises(ValueError, match="variant=fp16"):
        type(pipe).from_pretrained(tmp_path / "plain", variant="fp16")
    index = json.loads((tmp_path / "plain" / "model_index.json").read_text())
    assert index["transformer"] == ["scanvas", "LinearDiTTransformer2DModel"]
    assert index["vae"] == ([None, None] if "pixels" in kind else ["diffusers", "AutoencoderKL"])
    copied = type(pipe).from_pipe(pipe)
    copied.set_progress_bar_config(disable=True)
    assert copied.transformer is pipe.transformer
    assert copied.vae is pipe.vae
    close(paint(copied, kind), expected)


# diffusers before scanvas; the other order is in test_diffusers_model.py.
_FRESH = """
from diffusers import DiffusionPipeline
import torch, diffusers, scanvas
assert diffusers.LinearDiTTransformer2DModel is scanvas.LinearDiTTransformer2DModel
assert not hasattr(diffusers, "NoSuchClass") and diffusers.DDIMScheduler
from diffusers.pipelines.pipeline_loading_utils import ALL_IMPORTABLE_CLASSES, LOADABLE_CLASSES
assert issubclass(scanvas.LinearDiTTransformer2DModel, getattr(scanvas, next(iter(LOADABLE_CLASSES["scanvas"]))))
for folder, condition in {runs}:
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    images = pipe(condition, num_inference_steps=2, output_type="pt", guidance_scale=3.0,
                  generator=torch.Generator().manual_seed(0)).images
    torch.save(images, folder + "/images.pt")
"""


def test_fresh_process(tmp_path):
    """What is saved here is loaded by ``DiffusionPipeline`` elsewhere, names of classes included."""
    runs, expected = [], {}
    for kind, condition in (("class", "goldfish"), ("text, pixels", "a handwritten seven")):
        pipe = pipeline(kind)
        folder = str(tmp_path / kind)
        pipe.save_pretrained(folder)
        runs.append((folder, condition))
        expected[folder] = paint(pipe, kind)
    code = _FRESH.format(runs=runs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder, images in expected.items():
        close(torch.load(f"{folder}/images.pt", weights_only=True), images)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_lora(kind, tmp_path):
    peft = pytest.importorskip("peft")
    pipe = pipeline(kind)
    expected = paint(pipe, kind)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    with_lora = paint(pipe, kind)
    assert (with_lora - expected).abs().max() > 1e-3
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(tmp_path, layers, transformer_lora_adapter_metadata=config.to_dict())
    pipe.transformer.delete_adapters("default")

    pipe = pipeline(kind)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    assert pipe.get_active_adapters() == ["style"]
    close(paint(pipe, kind), with_lora)
    close(paint(pipe, kind, attention_kwargs={"scale": 0.0}), expected)
    pipe.fuse_lora()
    close(paint(pipe, kind), with_lora)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    close(paint(pipe, kind), expected)
    with pytest.raises(ValueError, match=r"not LoRA weights: a\.weight"):
        pipe.load_lora_weights({"a.weight": torch.zeros(1)})
    with pytest.raises(TypeError, match="unknown keyword wieght_name"):
        pipe.load_lora_weights(tmp_path, wieght_name="x")


def test_prompt_encoding_in_isolation():
    finder = ReturnNameVisitor()  # how diffusers' own test learns the names of the results
    finder.visit(finder.get_ast_tree(cls=LinearDiTTextToImagePipeline))
    full = pipeline("text")
    expected = paint(full, "text", negative_prompt="a two")
    empty = dict.fromkeys(("transformer", "scheduler", "vae"))
    text_only = LinearDiTTextToImagePipeline(**{**components("text"), **empty})
    names = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    assert tuple(finder.return_names) == names
    encoded = dict(zip(names, text_only.encode_prompt("a handwritten seven", negative_prompt="a two")))
    assert encoded["prompt_embeds"].shape == (1, 77, 16)
    assert encoded["prompt_attention_mask"].sum() == 4
    without = pipeline("text", tokenizer=None, text_encoder=None)
    close(paint(without, "text", prompt=None, **encoded), expected)
    with pytest.raises(ValueError, match="without text_encoder and tokenizer give prompt_embeds"):
        paint(without, "text")

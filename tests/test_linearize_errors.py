"""What linearised layers cannot honour, and what ``linearize`` refuses."""

import pytest
import timm
import torch
from diffusers import Transformer2DModel
from linear_parts import (
    build,
    denoiser,
    lumina2,
    run,
)
from linearize_parts import same, snapshot
from torch import nn

import scanvas
from scanvas.diffusion.linear_attention_modules import key_weight
from scanvas.diffusion.linear_cores import TARGETS


def test_masks():
    """A mask of keys takes them out of the sums; one that differs from query to query can not be honoured."""
    model, _ = build("pixart")
    x = torch.randn(2, 6, 32)
    keep = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    for mixer in TARGETS:
        layer = scanvas.linearize(model, mixer, kernel_size=0)[0].transformer_blocks[0].attn1
        layer.record.value = (2, 3)  # within the reach of all windows
        for name, parameter in layer.named_parameters():
            if "inner" in name:  # which otherwise changes next to nothing before it is trained
                parameter.data.mul_(20)
        masked = layer(x, attention_mask=keep)
        for same_mask in (keep[:, None, None], (1 - keep.float())[:, None] * -10000.0):
            torch.testing.assert_close(layer(x, attention_mask=same_mask), masked)
        changed = x.clone()
        changed[0, 4:] += 1.0
        torch.testing.assert_close(layer(changed, attention_mask=keep)[0, :4], masked[0, :4], atol=1e-3, rtol=1e-3)
        assert (layer(changed) - layer(x))[0, :4].abs().max() > 1e-4
        if mixer not in ("gla", "agent", "cosformer", "retention"):  # which count or place the hidden tokens
            layer.record.value = (2, 2)
            torch.testing.assert_close(masked[0, :4], layer(x[:1, :4])[0])
            layer.record.value = (2, 3)
        with pytest.raises(ValueError, match=r"attention_mask: linear attention can only hide keys.*got \(2, 6, 6\)"):
            layer(x, attention_mask=torch.ones(2, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="must be bool, or floating"):
        key_weight(torch.ones(2, 6, dtype=torch.long), 2, 6)
    vit, inputs = build("vit")
    student = scanvas.linearize(vit, "lit")[0]
    with pytest.raises(ValueError, match="is_causal"):
        student(inputs["x"], is_causal=True)
    with pytest.raises(ValueError, match="attention_mask: linear attention can only hide keys"):
        student(inputs["x"], attn_mask=torch.zeros(13, 13))


def test_grids_that_do_not_match():
    model, _ = build("pixart")
    layer = scanvas.linearize(model, "lit")[0].transformer_blocks[0].attn1
    with pytest.raises(ValueError, match="grid of the image's tokens is not known"):
        layer(torch.randn(1, 6, 32))
    layer.record.value = (2, 4)
    with pytest.raises(ValueError, match="a grid of 2×4 does not match 6 image tokens"):
        layer(torch.randn(1, 6, 32))
    flux, inputs = build("flux")
    student = scanvas.linearize(flux, "lit")[0]
    two = {**inputs, "img_ids": inputs["img_ids"][torch.arange(24) % 12]}  # two images of 2×6
    with pytest.raises(ValueError, match="several images in one sequence, which needs kernel_size=0"):
        run(student, two)
    local = scanvas.linearize(flux, "local")[0]
    with pytest.raises(ValueError, match=r"several images .* another target than 'local', such as 'hedgehog'"):
        run(local, two)
    with pytest.raises(ValueError, match=r"several lengths .* linearize to another target than 'hybrid'"):
        run(scanvas.linearize(lumina2()[0], "hybrid")[0], lumina2()[1])
    assert run(scanvas.linearize(flux, "lit", kernel_size=0)[0], two).isfinite().all()
    dropping = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, patch_drop_rate=0.5)
    student = scanvas.linearize(dropping, "lit")[0].train()
    with pytest.raises(ValueError, match="does not match"):
        student(torch.randn(1, 3, 64, 64))


def test_bad_arguments_leave_the_model_alone():
    model, inputs = build("pixart")
    before = snapshot(model)
    for message, error, arguments in (
        ("mixer must be one of lit, .*; got 'hedgehogg'; did you mean 'hedgehog'", ValueError, {"mixer": "hedgehogg"}),
        ("inherit must be one of none, vo, qkvo; got 'qk'", ValueError, {"inherit": "qk"}),
        ("'kernal_size' is no option of 'lit', .*did you mean 'kernel_size'", TypeError, {"kernal_size": 3}),
        ("kernel_size must be odd", ValueError, {"kernel_size": 4}),
        (
            "matches no attention layer; did you mean 'transformer_blocks.1.attn1'",
            ValueError,
            {"layers": "transformer_block.1.attn1"},
        ),
        ("layers=2 chooses by measured sensitivity, which needs calibration", ValueError, {"layers": 2}),
        (r"fraction must be in \(0, 1\], got 1.5", ValueError, {"layers": 1.5, "calibration": [inputs]}),
        (r"number must be in 1…3, got 4", ValueError, {"layers": 4, "calibration": [inputs]}),
        ("calibration is empty", ValueError, {"calibration": []}),
        ("calibration must hold batches", TypeError, {"calibration": ["a"]}),
        ("calibration must be batches", TypeError, {"calibration": 3}),
        (
            r"batch 0 \(nonsense: int\) can not be run by PixArt.*'nonsense'",
            TypeError,
            {"calibration": [{"nonsense": 1}]},
        ),
        (
            r"batch 1 \(hidden_states: \(2, 5, 8, 12\) float32, .*\) can not be run by .* channels",
            ValueError,
            {"calibration": [inputs, {**inputs, "hidden_states": torch.zeros(2, 5, 8, 12)}]},
        ),
        (r"batch 0 \(\(2, 4, 8, 12\) float32\) can not be run", ValueError, {"calibration": torch.zeros(2, 4, 8, 12)}),
        (
            "the output of PixArtTransformer2DModel on batch 0 .* is not finite",
            ValueError,
            {"calibration": [{**inputs, "hidden_states": torch.full((2, 4, 8, 12), torch.nan)}]},
        ),
        (r"sizes must be a list of \(H, W\), got \(64, 64\)", TypeError, {"sizes": (64, 64)}),
        (r"sizes must be a list of \(H, W\), .* hold a patch; got \(1, 8\)", ValueError, {"sizes": [(1, 8)]}),
        (r"sizes .*; got \(2, 8, 8\)", ValueError, {"sizes": [(2, 8, 8)]}),
        ("seed must be a whole number, got 'a'", TypeError, {"seed": "a"}),
        ("kernel_size must be a whole number, got '3'", TypeError, {"kernel_size": "3"}),
        ("kernel_size must be a whole number, got 3.0", ValueError, {"kernel_size": 3.0}),
        ("eps must be a number ≥ 0, got -1", ValueError, {"eps": -1}),
        ("normalize must be True or False, got 1", ValueError, {"mixer": "gla", "normalize": 1}),
        ("hidden must be a whole number or None", TypeError, {"mixer": "linfusion", "hidden": "all"}),
        ("hidden must be positive, or None for 32", ValueError, {"mixer": "linfusion", "hidden": 0}),
        ("heads must divide the 4 heads of .*; got True", ValueError, {"heads": True}),
        ("initial_decay must be between 0 and 1, got 1.0", ValueError, {"mixer": "gla", "initial_decay": 1.0}),
        ("gate_rank must be positive", ValueError, {"mixer": "gla", "gate_rank": 0}),
        (
            "heads: 'local' keeps the scores of the softmax.* 4 heads .*; got 2",
            ValueError,
            {"mixer": "local", "heads": 2},
        ),
        ("radius must be a whole number of tokens, at least 1; got 0", ValueError, {"mixer": "local", "radius": 0}),
        ("pool must be the side of a square", ValueError, {"mixer": "local", "pool": 1}),
        ("qk_kernel_size must be odd, or 0", ValueError, {"mixer": "t5", "qk_kernel_size": 2}),
        ("every must be a whole number, at least 2", ValueError, {"mixer": "hybrid", "every": 1}),
        ("softmax_factor must be between 0 and 1, got 1", ValueError, {"mixer": "hybrid", "softmax_factor": 1}),
    ):
        for inplace in (False, True):
            with pytest.raises(error, match=message):
                scanvas.linearize(model, **arguments, inplace=inplace)
    assert same(model, before)
    assert type(model).__name__ == "PixArtTransformer2DModel"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not model.training

    with pytest.raises(ValueError, match=r"OptimizedModule wraps a PixArt.*model\._orig_mod"):
        scanvas.linearize(torch.compile(model))
    with pytest.raises(ValueError, match=r"DataParallel wraps a PixArt.*model\.module"):
        scanvas.linearize(nn.DataParallel(model))
    linear, _ = scanvas.linearize(model, "lit", keep_original=False)
    kept = snapshot(linear)
    for teacher in (build("dit")[0], scanvas.linearize(model, "lit")[0], None):
        with pytest.raises(ValueError, match=r"has no softmax at transformer_blocks|not there any more"):
            scanvas.delinearize(linear, teacher=teacher)
    assert same(linear, kept)
    assert type(linear).__name__ == "LinearizedPixArtTransformer2DModel"
    with pytest.raises(
        ValueError, match=r"does not know Linear; it knows AuraFlow.*, .*VisionTransformer.*register_adapter"
    ):
        scanvas.linearize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="does not know Transformer2DModel"):
        scanvas.linearize(
            Transformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=8, norm_num_groups=4)
        )
    with pytest.raises(ValueError, match=r"blocks.0.attn is DiffAttention, but for VisionTransformer only Attention"):
        scanvas.linearize(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, attn_layer="diff"))
    big = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=520, num_heads=4)
    with pytest.raises(ValueError, match="heads of at most 256 channels, but 1 heads of 520 channels have 520"):
        scanvas.linearize(big, "gla", heads=1)
    with pytest.raises(ValueError, match="rotated"):
        scanvas.linearize(denoiser(mixer_kwargs={"rope": True})[0], "lit")
    with pytest.raises(ValueError, match="qk_norm"):
        scanvas.linearize(denoiser(mixer_kwargs={"qk_norm": True})[0], "lit")
    with pytest.raises(ValueError, match="no softmax self-attention"):
        scanvas.linearize(denoiser(mixer="gla")[0], "lit")
    with pytest.raises(ValueError, match="layer_mixers: '0'…'2'"):
        denoiser(layer_mixers={"3": {"mixer": "linear"}})
    student, _ = scanvas.linearize(model, "lit")
    with pytest.raises(ValueError, match="ip_hidden_states is not supported"):
        student.transformer_blocks[0].attn1(torch.randn(1, 6, 32), ip_hidden_states=[1])
    with pytest.raises(ValueError, match="needs linearization"):
        scanvas.LinearizedPixArtTransformer2DModel(**{k: v for k, v in model.config.items() if not k.startswith("_")})

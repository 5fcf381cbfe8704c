"""The denoiser: sizes, scan orders, conditions, outputs, precision, and errors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusion_parts import VARIANTS, build, inputs
from mixer_cases import TYPICAL

from scanvas import create_denoiser, list_mixers
from scanvas.backbones.scan import ORDERS, from_order, to_order
from scanvas.diffusion.block import LinearDiTBlock
from scanvas.diffusion.conditioning import sincos_positions, sinusoid
from scanvas.diffusion.presets import PRESETS


def parameters(name, **overrides):
    with torch.device("meta"):
        return sum(p.numel() for p in create_denoiser(name, **overrides).parameters()) / 1e6


# ALGORITHMS.md A4, in millions; DiT's as in its table 1 (with the table of positions, which here is computed).
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *zip((f"dig_{s}_2" for s in ("s", "b", "l", "xl")), (33.0, 130.6, 464.8, 675.7)),
        *zip((f"dig_{s}_2_skip" for s in ("s", "b", "l", "xl")), (34.5, 136.5, 487.8, 710.2)),
        *zip((f"dit_{s}_2" for s in ("s", "b", "l", "xl")), (32.9, 130.3, 457.8, 674.8)),
    ],
)
def test_parameter_counts(name, expected):
    assert parameters(name) == pytest.approx(expected, abs=0.06)


def test_presets():
    assert {
        f"{family}_{size}_{patch}" for family in ("dig", "dit") for size in ("s", "b", "l", "xl") for patch in (2, 4, 8)
    } <= set(PRESETS)
    assert {f"lit_{size}_2" for size in ("s", "b", "l", "xl")} <= set(PRESETS)
    assert parameters("dig_s_2", num_classes=10) == pytest.approx(32.98 - 990 * 384 / 1e6, abs=0.01)
    for name in ("dig_t2i_nano", "dig_s_8"):
        model = create_denoiser(name, num_layers=2)
        assert model(**inputs(model)).sample.abs().max() == 0  # as DiT starts
    with pytest.raises(ValueError, match=r"must be one of .*dig_b_2.*got 'dig_m_2'"):
        create_denoiser("dig_m_2")
    with pytest.raises(TypeError, match="depht"):
        create_denoiser("dig_s_2", depht=3)


@pytest.mark.parametrize(
    ("mixer", "variant"),
    [
        *[(mixer, variant) for mixer in TYPICAL for variant in VARIANTS],
        *[(mixer, "neither, plain") for mixer in list_mixers() if mixer not in TYPICAL],
    ],
)
def test_every_mixer_any_rectangle(mixer, variant):
    window = {"mixer_kwargs": {"radius": 2}} if mixer == "hybrid" else {}  # or nothing is left for its linear part
    model = build(mixer, **VARIANTS[variant], **window)
    p = model.config.patch_size
    for height, width in ((8, 8), (3 * p, 7 * p), (p, p)):
        kwargs = inputs(model, grid=(height, width))
        out = model(**kwargs).sample
        assert out.shape == (2, model.config.out_channels, height, width)
        assert out.isfinite().all()
    assert torch.equal(model.train()(**kwargs).sample, out)  # nothing depends on the mode
    model(**inputs(model, grid=(4, 6))).sample.square().sum().backward()
    without = [name for name, w in model.named_parameters() if w.grad is None or not w.grad.abs().sum() > 0]
    assert all(name.startswith("class_embed") for name in without), without
    # each image by itself
    kwargs = inputs(model)
    alone = [model(**{k: v[i : i + 1] for k, v in kwargs.items()}).sample for i in range(2)]
    torch.testing.assert_close(model(**kwargs).sample, torch.cat(alone), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_scan_order_is_the_mixers_only(order):
    """A block in some order, and the same block in raster order on rearranged tokens: one result."""
    torch.manual_seed(0)
    mixer = {"bidirectional": False, "local": False, "output": "swish"}
    block = LinearDiTBlock(16, 2, 32, mixer_kwargs=mixer, order=order, depthwise_conv=False)
    plain = LinearDiTBlock(16, 2, 32, mixer_kwargs=mixer, depthwise_conv=False)
    plain.load_state_dict(block.state_dict())
    x, c, grid = torch.randn(2, 15, 16), torch.randn(2, 16), (3, 5)
    rearranged, new_grid = to_order(x, order, grid)
    expected = from_order(plain(rearranged, c, new_grid), order, grid)
    torch.testing.assert_close(block(x, c, grid), expected)
    # the first token visited sees only itself
    first = to_order(torch.arange(15).view(1, 15, 1), order, grid)[0][0, 0, 0]
    other = torch.randn(2, 15, 16)
    other[:, first] = x[:, first]
    torch.testing.assert_close(block(other, c, grid)[:, first], block(x, c, grid)[:, first])
    if order != "raster":
        assert not torch.allclose(block(x, c, grid), plain(x, c, grid), atol=1e-3)


def test_orders_cycle_and_spare_mixers_without_scan():
    assert [block.order for block in build(num_layers=5).transformer_blocks] == [*ORDERS, "raster"]
    assert {block.order for block in build("linear").transformer_blocks} == {"raster"}
    assert [b.order for b in build(scan_orders=["column", "raster"]).transformer_blocks] == ["column", "raster"] * 2


@torch.no_grad()
def test_depthwise_convolution_starts_as_the_identity():
    with_conv, without = build(num_classes=5), build(num_classes=5, depthwise_conv=False)
    assert not without.load_state_dict(with_conv.state_dict(), strict=False).missing_keys
    kwargs = inputs(with_conv, grid=(6, 10))
    torch.testing.assert_close(with_conv(**kwargs).sample, without(**kwargs).sample)


@torch.no_grad()
def test_long_skips():
    """The outputs of the first half go, last in first out, to the second half, in raster order."""
    model = build(long_skip=True, num_layers=8)
    received, given = {}, {}
    for i, block in enumerate(model.transformer_blocks):
        assert (block.skip_linear is not None) == (i > 4)

        def record(module, args, output, i=i):
            received[i], given[i] = args[5], output

        block.register_forward_hook(record)
    model(**inputs(model))
    assert [received[i] is given[j] for i, j in ((5, 2), (6, 1), (7, 0))] == [True] * 3
    assert all(received[i] is None for i in range(5))


@torch.no_grad()
def test_positions():
    # DiT's table, its columns first: position · 10000^(−i / (dim/4)), sine then cosine.
    table = sincos_positions((4, 6), 16, (4, 6), torch.device("cpu")).view(4, 6, 16)
    frequency = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    for row, column in ((0, 0), (3, 1), (2, 5)):
        expected = torch.cat([f(p * frequency) for p in (column, row) for f in (torch.sin, torch.cos)]).float()
        torch.testing.assert_close(table[row, column], expected)
    # twice as fine a grid holds the coarse one
    fine = sincos_positions((8, 12), 16, (4, 6), torch.device("cpu")).view(8, 12, 16)
    torch.testing.assert_close(fine[::2, ::2], table)
    # half-integer times are not rounded
    assert not torch.equal(sinusoid(torch.tensor([500.0]), 8), sinusoid(torch.tensor([500.5]), 8))


@torch.no_grad()
def test_time_and_class():
    model = build(num_classes=5)
    kwargs = inputs(model)
    out = model(**kwargs).sample
    none = model(**{**kwargs, "class_labels": None}).sample
    torch.testing.assert_close(none, model(**{**kwargs, "class_labels": torch.tensor([5, 5])}).sample)
    assert not torch.allclose(none, out, atol=1e-3)
    for t in (torch.tensor(10), torch.tensor([10]), torch.tensor([10, 10]), torch.tensor([10.0, 10.0]), 10):
        torch.testing.assert_close(
            model(**{**kwargs, "timestep": t}).sample, model(**{**kwargs, "timestep": torch.tensor([10, 10])}).sample
        )
    labels = torch.zeros(4000, dtype=torch.int64)
    dropped = model.drop_labels(labels, 0.1, torch.Generator().manual_seed(0))
    assert set(dropped.tolist()) == {0, 5}
    assert (dropped == 5).float().mean() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(labels, torch.zeros(4000, dtype=torch.int64))


@torch.no_grad()
def test_text_mask():
    model = build(caption_channels=12)
    kwargs = inputs(model)
    out = model(**kwargs).sample
    padding = kwargs["encoder_hidden_states"].clone()
    padding[:, 4:] = 1e3
    torch.testing.assert_close(model(**{**kwargs, "encoder_hidden_states": padding}).sample, out)
    short = {**kwargs, "encoder_hidden_states": padding[:, :4], "encoder_attention_mask": None}
    torch.testing.assert_close(model(**short).sample, out)
    bias = (1 - kwargs["encoder_attention_mask"][:, None].float()) * -10000
    torch.testing.assert_close(model(**{**kwargs, "encoder_attention_mask": bias}).sample, out)
    text = kwargs["encoder_hidden_states"].flip(0)
    assert not torch.allclose(model(**{**kwargs, "encoder_hidden_states": text}).sample, out, atol=1e-3)

    mask = kwargs["encoder_attention_mask"].clone()
    mask[1] = 0
    masked = model(**{**kwargs, "encoder_attention_mask": mask}).sample
    assert masked.isfinite().all()
    torch.testing.assert_close(masked[0], out[0])
    other = model(**{**kwargs, "encoder_attention_mask": mask, "encoder_hidden_states": torch.randn(2, 7, 12)}).sample
    torch.testing.assert_close(masked[1], other[1])  # no token counts


@pytest.mark.parametrize("mixer", TYPICAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_half_precision(mixer, dtype, mode):
    model = build(mixer, num_classes=5, caption_channels=12, long_skip=True, norm_type="ada_norm_single")
    kwargs = inputs(model)
    expected = model(**kwargs).sample
    if mode == "weights":
        model = copy.deepcopy(model).to(dtype)
        kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in kwargs.items()}
        out = model(**kwargs).sample
        assert out.dtype == dtype
    else:
        with torch.autocast("cpu", dtype):
            out = model(**kwargs).sample
    assert F.mse_loss(out.float(), expected).sqrt() / expected.std() < (0.03 if dtype == torch.bfloat16 else 0.005)
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_modulation_keeps_small_scales_in_bfloat16():
    from scanvas.kernels.norm.reference import modulate

    x = torch.tensor([[[64.0, -64.0]]], dtype=torch.bfloat16)
    scale = torch.tensor([[[2**-9, 3 * 2**-9]]], dtype=torch.bfloat16)  # 1 + scale would be rounded
    shift = torch.tensor([[[0.375, -0.125]]], dtype=torch.bfloat16)
    exact = x.double() * (1 + scale.double()) + shift.double()
    torch.testing.assert_close(modulate(x, shift, scale), exact.bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("mixer", ["gla", "linear", "softmax"])  # the presets'; a mixer's own tests compile it
@torch.no_grad()
def test_compile_and_export(mixer):
    # A second layer scans in another order; others would only be one more of the same.
    model = build(mixer, num_layers=2 if mixer == "gla" else 1, num_classes=5, caption_channels=12)
    kwargs = inputs(model)
    expected = model(**kwargs).sample
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**kwargs).sample, expected, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()
    exported = torch.export.export(model, (), {**kwargs, "return_dict": False})
    torch.testing.assert_close(exported.module()(**kwargs, return_dict=False)[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"out_channels": 5}, r"out_channels must be in_channels = 4 or, with a learned variance, 8; got 5"),
        ({"mlp": "relu"}, r"mlp must be one of swiglu, mix, gelu; got 'relu'"),
        ({"norm_type": "layer"}, r"norm_type must be one of ada_norm_zero, ada_norm_single; got 'layer'"),
        ({"prediction_type": "flow"}, r"prediction_type must be one of epsilon, .*flow_prediction; got 'flow'"),
        ({"prediction_type": "flow_prediction", "out_channels": 8}, "has no variance to learn"),
        ({"sample_size": 9}, r"sample_size \(height\) must be divisible by patch_size = 2, got 9.*8 and 10"),
        ({"mixer": "nope"}, r"mixer must be one of .*gla.*got 'nope'"),
        ({"num_classes": 0}, r"num_classes must be positive, or None for none; got 0"),
        ({"scan_orders": ["zigzag"]}, r"scan order must be one of raster, .*'zigzag'"),
        ({"mixer": "linear", "original_scan_order": True}, "mixers that scan"),
        ({"caption_channels": 8, "num_cross_attention_heads": 5}, r"must divide the width 32, got 5"),
    ],
)
def test_bad_configuration(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(**overrides)


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ({}, {"hidden_states": torch.zeros(2, 3, 8, 8)}, r"in_channels = 4, got shape \(2, 3, 8, 8\)"),
        (
            {},
            {"hidden_states": torch.zeros(2, 4, 8, 7)},
            r"width of hidden_states must be divisible .*nearest.* 6 and 8",
        ),
        ({}, {"timestep": torch.zeros(3)}, r"timestep must have 1 or 2 entries.*got shape \(3,\)"),
        ({}, {"class_labels": torch.tensor([0, 1])}, "model without classes"),
        ({"num_classes": 5}, {"class_labels": torch.tensor([0])}, r"class_labels must be \(2,\).*got shape \(1,\)"),
        ({"num_classes": 5}, {"class_labels": torch.tensor([6, -1])}, r"0…4, or 5 for no class; got \[-1, 6\]"),
        ({}, {"encoder_hidden_states": torch.zeros(2, 7, 12)}, "model without text"),
        ({}, {"encoder_attention_mask": torch.ones(2, 7)}, "without encoder_hidden_states"),
        ({"caption_channels": 12}, {"encoder_hidden_states": None}, "encoder_hidden_states are missing"),
        (
            {"caption_channels": 12},
            {"encoder_hidden_states": torch.zeros(2, 7, 9)},
            r"caption_channels = 12, got shape \(2, 7, 9\)",
        ),
        (
            {"caption_channels": 12},
            {"encoder_attention_mask": torch.ones(2, 1, 1, 7)},
            r"must be \(B, T\) or \(B, 1, T\)",
        ),
        ({}, {"added_cond_kwargs": {"resolution": torch.zeros(1)}}, r"added_cond_kwargs\['resolution'\]"),
        ({}, {"attention_kwargs": {"gligen": 1}}, r"may hold 'scale'.*got 'gligen'"),
    ],
)
def test_bad_inputs(overrides, changes, message):
    model = build(**overrides)
    with pytest.raises(ValueError, match=message):
        model(**{**inputs(model), **changes})

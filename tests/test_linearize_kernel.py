"""The targets made of the mixers' feature maps, and those that keep softmaxes of fewer pairs: core by core."""

import copy

import pytest
import timm
import torch
from linear_parts import FEW_MODELS, MORE_TARGETS, SoftmaxCore, build, run

import scanvas
from scanvas.backbones.mixers import MIXERS, create_mixer, list_mixers
from scanvas.backbones.rope import apply_rope
from scanvas.diffusion.adapters_backbones import MixerAttention
from scanvas.diffusion.linear_attention_modules import GridRecord, rotate_pairs
from scanvas.diffusion.linear_cores import NO_TARGETS, TARGETS
from scanvas.diffusion.linear_cores_placed import PlacedCore

WIDTH, HEADS = 16, 4
OPTIONS = {"cosformer": {"positions": "2d"}, "agent": {"grid_size": None}, "focused": {"grid_size": None}}
OPTIONS |= {"inline": {"local": False}, "mala": {"rope": False}, "rala": {"rope": False}, "nala": {"rope": False}}
OPTIONS |= {"sana": {"qkv_bias": True}, "sla": {"block": 4, "keep": 0.5}}


def make_core(target, heads=HEADS, **options):
    """A core in float64 whose parameters are all different from those it starts with."""
    torch.manual_seed(0)
    blocks = {"block": 4, "keep": 0.5} if target == "sla" else {}
    defaults = {**TARGETS[target].defaults, "kernel_size": 0, **blocks, **options}
    if "least" in defaults:
        defaults["least"] = 1.0  # reached by some tokens, and not by others
    core = TARGETS[target](WIDTH, WIDTH, heads, 1, **defaults, dtype=torch.float64)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return core


def qkv(tokens, batch=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, tokens, HEADS, WIDTH // HEADS, dtype=torch.float64, generator=generator) for _ in "qkv"]


def rotation(tokens):
    angles = torch.randn(tokens, WIDTH // HEADS // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return rotate_pairs(angles.cos(), angles.sin())


def place(core, start, grid):
    return (start, grid) if isinstance(core, PlacedCore) else ()


@pytest.mark.parametrize("grid", [(3, 4), (2, 3, 2)])
@pytest.mark.parametrize("target", MORE_TARGETS)
def test_map_masks_and_order(target, grid):
    """Text of 3 tokens before or after the image: the map times the values is the output, hidden text is as good as
    none, and where the text stands changes nothing."""
    tokens, text = 12, 3
    core = make_core(target, heads=HEADS if not TARGETS[target].fuses_heads else 2)
    q, k, v = qkv(text + tokens)
    rotate = rotation(text + tokens)
    hidden = torch.ones(2, text + tokens, dtype=torch.float64)
    hidden[:, 1] = 0
    hidden[1, 2] = 0.3
    for turn in (None, rotate):
        for weight in (None, hidden, hidden[:1]):
            args = (None, turn, weight)
            out = core.attend(q, k, v, *args, *place(core, text, grid))
            (matrix,) = core.attention_map_parts(q, k, *args, None, *place(core, text, grid)).values()
            torch.testing.assert_close((matrix @ core.fuse(v).transpose(1, 2)).transpose(1, 2), out)
            rows = torch.tensor([4, 0, 7])
            (some,) = core.attention_map_parts(q, k, *args, rows, *place(core, text, grid)).values()
            torch.testing.assert_close(some, matrix[:, :, rows])

    if target != "sla":  # whose blocks begin elsewhere
        check_text(core, (q, k, v), hidden, text, grid)
    hidden[:, 9] = 0  # of the image: what such a token asks, offers and holds is nothing to the others
    there = [i for i in range(15) if i not in (1, 9)]
    masked = core.mix(q, k, v, None, rotate, hidden, *place(core, text, grid))
    changed = [z.clone() for z in (q, k, v)]
    for z in changed:
        z[:, [1, 9]] += 1
    again = core.mix(*changed, None, rotate, hidden, *place(core, text, grid))
    torch.testing.assert_close(again[:, there], masked[:, there])
    assert not torch.allclose(
        core.mix(*changed, None, rotate, None, *place(core, text, grid))[:, there], masked[:, there]
    )


def check_text(core, tokens, hidden, text, grid):
    """Hidden text is as good as none, and where the text stands changes nothing."""
    q, k, v = tokens
    rotate = rotation(15)
    seen = [0, 2, *range(3, 15)]
    masked = core.mix(q, k, v, None, rotate, hidden, *place(core, text, grid))
    angles = torch.randn(15, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))[seen]
    shorter = rotate_pairs(angles.cos(), angles.sin())
    without = core.mix(*(z[:, seen] for z in (q, k, v)), None, shorter, hidden[:, seen], *place(core, text - 1, grid))
    torch.testing.assert_close(masked[:, seen], without)
    moved = [*range(3, 15), 0, 1, 2]
    first = core.mix(q, k, v, None, None, hidden, *place(core, text, grid))
    last = core.mix(*(z[:, moved] for z in (q, k, v)), None, None, hidden[:, moved], *place(core, 0, grid))
    torch.testing.assert_close(last, first[:, moved])


@pytest.mark.parametrize("target", MORE_TARGETS)
def test_a_core_is_its_mixer(target):
    """For queries, keys and values of a mixer of ours, its core gives what it gives."""
    grid, prefix = (3, 4), 2
    names = {"agents": ("agent_size", 3), "positions": ("pos_grid", (2, 5)), "gates": ("gate_grid", (2, 5))}
    defaults = TARGETS[target].defaults
    changed = {name: (keyword, value) for name, (keyword, value) in names.items() if name in defaults}
    options = dict(changed.values()) | OPTIONS.get(target, {})
    if target == "l2":
        options["least"] = 1.0
    torch.manual_seed(0)
    mixer = create_mixer(target, WIDTH, HEADS, dtype=torch.float64, **options)
    core = make_core(target, **({"agents": 3} if target == "agent" else {}))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, parameter in core.named_parameters():
            if name == "scale":
                parameter.copy_(mixer.scale.weight.repeat_interleave(WIDTH // HEADS))
            else:
                core.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = mixer.get_parameter(
                    name
                )
    x = torch.randn(2, prefix + 12, WIDTH, dtype=torch.float64)
    q, k, v = mixer.qkv(x)
    got = core.mix(q, k, v, x, None, None, *place(core, prefix, grid))
    if target == "sla":  # whose linear attention is beside the map
        got = got.flatten(2)
        torch.testing.assert_close(got, sum(mixer.branches(x, grid, prefix=prefix).values()))
        return
    torch.testing.assert_close(got, mixer.attend(x, grid, prefix))


@pytest.mark.parametrize("target", MORE_TARGETS)
def test_rotary_positions(target):
    """They count, by their differences alone, and as in the mixers that have some of their own."""
    core, (q, k, v) = make_core(target), qkv(14)
    where = place(core, 2, (3, 4))
    out = core.mix(q, k, v, None, None, None, *where)
    assert not torch.allclose(core.mix(q, k, v, None, rotation(14), None, *where), out)
    if target == "lina":  # its features come after them and are positive
        mixer = create_mixer(target, WIDTH, HEADS, rope=True, gate_grid=None, dtype=torch.float64)
        core = make_core(target, gates=0)
    elif target == "sla":  # whose linear attention, not the softmax's, has such features
        mixer = create_mixer(target, WIDTH, HEADS, rope=True, dtype=torch.float64, **OPTIONS[target])
        core.linear_proj.reset_parameters()
    else:
        angle = torch.full((14, 2), 0.7, dtype=torch.float64)
        turned = core.mix(q, k, v, None, rotate_pairs(angle.cos(), angle.sin()), None, *where)
        torch.testing.assert_close(turned, out)
        if target not in ("mala", "nala", "rala", "retention"):
            return
        mixer = create_mixer(target, WIDTH, HEADS, rope=True, dtype=torch.float64)
    x = torch.randn(2, 14, WIDTH, dtype=torch.float64)
    endpoint = target in ("mala", "nala", "rala")
    got = core.mix(*mixer.qkv(x), x, lambda z: apply_rope(z, (3, 4), 2, endpoint=endpoint), None, *where)
    torch.testing.assert_close(got, mixer.attend(x, (3, 4), 2))


@pytest.mark.parametrize("target", MORE_TARGETS)
def test_half_precision_and_gradients(target):
    core, (q, k, v) = make_core(target), qkv(15)
    exact = core.mix(q, k, v, None, None, None, *place(core, 3, (3, 4)))
    inputs = [z.bfloat16().requires_grad_() for z in (q, k, v)]
    out = core.bfloat16().mix(*inputs, None, None, None, *place(core, 3, (3, 4)))
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() < 0.1 * exact.abs().max()
    out.float().square().sum().backward()
    assert all(z.grad.isfinite().all() and z.grad.abs().sum() > 0 for z in inputs)
    assert all(p.grad.isfinite().all() for p in core.parameters())


@pytest.mark.parametrize(("target", "name"), [(t, n) for t in MORE_TARGETS for n in FEW_MODELS])
def test_calibration(target, name):
    """What is new is fitted and told of; a layer is never worse for it."""
    model, inputs = build(name)
    batch = inputs["x"] if set(inputs) == {"x"} else inputs
    _, report = scanvas.linearize(model, target, calibration=[batch])
    told = {row["name"]: row for row in report.tensors}
    fits = TARGETS[target].defaults["kernel_size"] or target == "l2"
    for path, fit in report.calibration.items():
        assert fit["error_after"] <= fit["error_before"] * 1.001 + 1e-9
        if name != "denoiser" and fits:
            assert fit["fitted"]
            assert fit["error_after"] < fit["error_before"]
        for key in fit["fitted"]:
            assert "fitted" in told[f"{path}.{key}"]["init"]


def test_every_mixer_is_a_target_or_the_error_says_why(monkeypatch):
    model, _ = build("pixart")
    assert {*NO_TARGETS} <= {*list_mixers()}
    assert not {*TARGETS} & {*NO_TARGETS}
    monkeypatch.setitem(MIXERS, "yours", MIXERS["softmax"])  # a mixer needs no line there
    with pytest.raises(ValueError, match="mixer: 'yours' is no target of linearize: no core takes"):
        scanvas.linearize(model, "yours")
    for name, why in NO_TARGETS.items():
        with pytest.raises(ValueError, match=f"mixer: '{name}' is no target of linearize: {why[:20]}"):
            scanvas.linearize(model, name)
    for message, mixer, options in (
        ("power must be at least 1, got 0.5", "focused", {"power": 0.5}),
        ("positions must be the side of a grid", "slab", {"positions": -1}),
        ("gates must be the side of a grid", "lina", {"gates": -1}),
        ("agents must be the side of a grid", "agent", {"agents": 0}),
        ("least must be positive, got 0", "l2", {"least": 0}),
        ("initial must be positive, got 0", "retention", {"initial": 0}),
        ("block must be a whole number of tokens", "sla", {"block": 0}),
        ("keep must be a share of the blocks", "sla", {"keep": 1.5}),
        ("heads: 'retention' keeps the scores", "retention", {"heads": 2}),
    ):
        with pytest.raises(ValueError, match=message):
            scanvas.linearize(model, mixer, **options)


def test_costs():
    """By hand, for 4 × 6 tokens of 32 channels in three layers."""
    model, _ = build("pixart")

    def after(mixer, **options):
        return scanvas.linearize(model, mixer, sizes=[(8, 12)], **options)[1].costs[0]

    N, C, d = 24, 32, 8
    assert after("agent", agents=2, kernel_size=0)["flops_after"] == 3 * 8 * N * 4 * C
    assert after("agent", agents=2)["bytes_after"] == 2 * 4 * N * 4
    assert after("retention", kernel_size=0)["flops_after"] == 3 * 4 * C * N * (4 + 6)
    assert after("retention")["bytes_after"] == 2 * 4 * N * 6
    assert after("sla", block=4, keep=0.5)["flops_after"] == 3 * N * (4 * 12 * C + 4 * C * d + 3 * C + C + 2 * C * d)
    assert after("nala", kernel_size=0)["flops_after"] == 3 * N * (4 * C * d * 2 + 3 * C * 2 + C)
    assert after("flow")["flops_after"] == 3 * N * (4 * C * d + 3 * C + C)


def test_no_grid_is_needed_where_no_place_counts():
    """Sums over all tokens know no height and width: such layers answer without the model."""
    for target in MORE_TARGETS:
        options = {key: 0 for key in ("kernel_size", "positions", "gates") if key in TARGETS[target].defaults}
        student, _ = scanvas.linearize(build("pixart")[0], target, **options)
        layer, x = student.transformer_blocks[0].attn1, torch.randn(1, 6, 32)
        if target in ("agent", "cosformer", "retention"):
            with pytest.raises(ValueError, match="grid of the image's tokens is not known"):
                layer(x)
        else:
            assert layer(x).shape == x.shape


def test_sana_is_lit_with_all_heads():
    model, inputs = build("pixart")
    one, _ = scanvas.linearize(model, "sana")
    other, _ = scanvas.linearize(model, "lit", heads=4, kernel_size=0, eps=1e-15)
    torch.testing.assert_close(run(one, inputs), run(other, inputs))


def test_sla_never_looks_at_a_block_of_hidden_keys():
    core, k = make_core("sla", keep=0.25), qkv(16)[1]
    hidden = torch.ones(1, 16, dtype=torch.float64)
    hidden[:, 4:8] = 0  # its mean is zero, and would fit queries to which all others point away
    (matrix,) = core.attention_map_parts(-k.abs(), k.abs(), None, None, hidden).values()
    assert matrix[..., 4:8].max() < 1e-20
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, HEADS, 16, dtype=torch.float64))


@pytest.mark.parametrize(("name", "count", "grid"), [("vig", 2, (3, 4)), ("agent_deit", 2, (3, 4))])
def test_our_backbones_show_their_maps_and_come_back(name, count, grid):
    model, inputs = build(name)
    student, report = scanvas.linearize(model, "mala")
    assert len(report.layers) == count
    assert report.costs[0]["size"] == [48, 64]
    assert report.costs[0]["tokens"] == 13
    shown = scanvas.attention_maps(student, inputs["x"])
    new = [layer for layer in shown if layer.name in {row["path"] for row in report.layers}]
    assert [(layer.grid, layer.prefix, layer.signed) for layer in new] == [(grid, 1, True)] * count
    for layer in new:
        torch.testing.assert_close(layer.rows() @ layer.values(), layer.attended(), atol=1e-5, rtol=1e-5)
    assert torch.equal(run(scanvas.delinearize(student), inputs), run(model, inputs))


@pytest.mark.parametrize("options", [{}, {"out_norm": True}, {"rope": False, "kernel_size": 0}])
def test_a_gated_softmax_keeps_all_but_the_softmax(options, monkeypatch):
    monkeypatch.setitem(TARGETS, "softmax", SoftmaxCore)
    torch.manual_seed(0)
    mixer, x = create_mixer("gated_softmax", 32, HEADS, fused_projections=True, **options), torch.randn(2, 14, 32)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    layer = MixerAttention(copy.deepcopy(mixer), "softmax", HEADS, {}, GridRecord())
    torch.testing.assert_close(layer(x, (3, 4), 2), mixer(x, (3, 4), 2), atol=1e-5, rtol=1e-5)
    assert not layer.plain_inside


def test_the_softmax_of_late_stages(tmp_path):
    """The first stages of a pyramid are linear already, and stay."""
    torch.manual_seed(0)
    model, x = timm.create_model("test_nalaformer", num_classes=5).eval(), torch.randn(2, 3, 64, 96)
    student, report = scanvas.linearize(model, "nala", calibration=[x])
    assert {row["path"].split(".")[1] for row in report.layers} == {"2", "3"}
    assert {row["status"] for row in report.tensors} == {"inherited", "new"}
    scanvas.save_linearized(student, tmp_path, num_classes=5)
    again = scanvas.load_linearized(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(x), student(x))
        assert not torch.equal(student(x), model(x))
        assert torch.equal(scanvas.delinearize(student)(x), model(x))

"""``linearize``: every family it knows, every target; inheritance, selection, report, errors."""

import copy
import json

import pytest
import timm
import torch
from diffusers import Transformer2DModel
from linear_parts import (
    DIFFUSERS,
    FEW_MODELS,
    GRIDS,
    MORE_TARGETS,
    SMALL_OPTIONS,
    TIMM,
    SoftmaxCore,
    build,
    denoiser,
    lumina2,
    run,
    sana,
    sana_qk_norm,
)
from torch import nn

import scanvas
from scanvas.diffusion import linear_swap
from scanvas.diffusion.adapters import _ADAPTERS, Adapter, known_models, register_adapter
from scanvas.diffusion.linear_attention_modules import LinearizedLayer, key_weight
from scanvas.diffusion.linear_cores import TARGETS, LitCore
from scanvas.diffusion.linear_select import select_layers

MODELS = [*DIFFUSERS, *TIMM, "denoiser"]
SWAPPED = [name for name in MODELS if name != "denoiser"]  # the others keep their mixers' own modules


def snapshot(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(model, before):
    state = model.state_dict()
    return state.keys() == before.keys() and all(torch.equal(state[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", [name for name in SWAPPED if not name.startswith("sana")])
def test_nothing_but_the_softmax_is_exchanged(name, monkeypatch):
    """With a softmax as the target the model answers as before: streams, norms, rotary positions, masks, order of
    tokens and projections are those of the original."""
    monkeypatch.setitem(TARGETS, "softmax", SoftmaxCore)
    model, inputs = build(name)
    student, report = scanvas.linearize(model, "softmax")
    assert sum(isinstance(m, LinearizedLayer) for m in student.modules()) == len(report.layers) > 0
    torch.testing.assert_close(run(student, inputs), run(model, inputs), atol=1e-5, rtol=1e-5)
    for layer in student.modules():  # and the replaced layers are what answers
        if isinstance(layer, LinearizedLayer):
            monkeypatch.setattr(layer.core, "mix", lambda q, k, v, x, rotate, weight: torch.zeros_like(v))
    assert (run(student, inputs) - run(model, inputs)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        *[(n, "local") for n in MODELS if not n.startswith("sana")],
        *[(n, "hybrid") for n in ("flux", "wan", "denoiser")],
    ],
)
def test_a_window_that_holds_all_is_the_softmax(name, mixer):
    """Scale, heads, rotary positions, masks and streams are those of the original; nothing linear is left."""
    model, inputs = build(name)
    if name == "lumina2":
        inputs = lumina2(lengths=(5, 5))[1]
    student, _ = scanvas.linearize(model, mixer, radius=99)
    torch.testing.assert_close(run(student, inputs), run(model, inputs), atol=1e-5, rtol=1e-5)
    student, _ = scanvas.linearize(model, mixer, radius=1)
    assert (run(student, inputs) - run(model, inputs)).abs().max() > 1e-4


def test_hybrid_with_softmax_tokens():
    """The other choice: every n-th token of the image, all of the text; frames of a video count on."""
    model, inputs = build("wan")
    student, report = scanvas.linearize(model, "hybrid", every=5, calibration=[inputs])
    layer = student.get_submodule(report.layers[0]["path"])
    seen = []
    layer.core.register_forward_hook(lambda _, args, out: seen.append(args))
    run(student, inputs)
    q, k, _, x, rotate, weight, start, grid = seen[0]
    assert (start, grid) == (0, (3, 4, 6))
    (matrix,) = layer.core.attention_map_parts(q, k, x, rotate, weight, None, start, grid).values()
    scores = torch.einsum("bihd,bjhd->bhij", rotate(q), rotate(k)) * 12**-0.5
    share = matrix[..., ::5] / matrix[..., ::5].sum(-1, keepdim=True)
    torch.testing.assert_close(share, scores[..., ::5].softmax(-1), atol=1e-5, rtol=1e-4)
    for path, fit in report.calibration.items():
        assert f"{path}.core.factor.weight" in {row["name"] for row in report.tensors}
        assert fit["error_after"] < fit["error_before"]


@pytest.mark.parametrize("family", [sana, sana_qk_norm])
def test_sana_is_lit_without_convolution(family):
    """SANA's attention is linear already; the swap changes only the kernel."""
    torch.manual_seed(0)
    model, inputs = family()
    student, _ = scanvas.linearize(model.eval(), "lit", heads=4, kernel_size=0, eps=1e-15)
    torch.testing.assert_close(run(student, inputs), run(model, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "mixer"), [(n, m) for n in MODELS for m in TARGETS if m not in MORE_TARGETS or n in FEW_MODELS]
)
def test_every_model_to_every_target(name, mixer, tmp_path):
    model, inputs = build(name)
    if name == "lumina2" and mixer in SMALL_OPTIONS:
        inputs = lumina2(lengths=(5, 5))[1]  # of several lengths, nobody knows where the images are
    before, expected, training = snapshot(model), run(model, inputs), model.training
    student, report = scanvas.linearize(model, mixer, **SMALL_OPTIONS.get(mixer, {}))
    got = run(student, inputs)
    assert got.isfinite().all()
    assert (got - expected).abs().max() > 1e-4
    assert same(model, before)
    assert type(model).__name__ == report.model[0]
    assert torch.equal(run(model, inputs), expected)
    assert model.training is training is student.training

    # Every tensor of attention is told of, once, and the shapes are right.
    told = {row["name"]: row for row in report.tensors if row["status"] != "dropped"}
    state = dict(student.named_parameters())
    paths = [row["path"] for row in report.layers]
    assert sorted(told) == sorted(k for k in state if any(k.startswith(p + ".") for p in paths))
    for key, row in told.items():
        assert row["shape"] == list(state[key].shape)
        if row["status"] == "inherited" and row["source"] == key:
            assert torch.equal(state[key], before[key]), key
    bare = (name, mixer) == ("lumina2", "lit") or mixer in ("cosformer", "flow", "inline", "sana")  # nothing is new
    assert {row["status"] for row in told.values()} == ({"inherited"} if bare else {"inherited", "new"})

    # What is new can be trained.
    student.train()
    out = student(*inputs.values()) if set(inputs) == {"x"} else student(**inputs).sample
    out.square().mean().backward()
    new = [key for key, row in told.items() if row["status"] == "new"]
    moved = [key for key in new if state[key].grad is not None and state[key].grad.abs().sum() > 0]
    # A modulator starts at zero, so that at first only its last layer has a gradient; and nothing after the last
    # layer of a classifier reads more than the class token, which what is new for the image does not touch.
    for key in set(new) - set(moved):
        assert "modulator" in key or "decay_proj" in key or (name in TIMM and key.startswith(f"{paths[-1]}.core."))
    assert moved or bare

    if name in TIMM:
        kwargs = TIMM[name][1]
        scanvas.save_linearized(student, tmp_path, **kwargs)
        loaded = scanvas.load_linearized(tmp_path)
    else:
        student.save_pretrained(tmp_path)
        loaded = type(student).from_pretrained(tmp_path)
    assert type(loaded) is type(student)
    assert torch.equal(run(loaded, inputs), got)
    with pytest.raises(ValueError, match="linearised already"):
        scanvas.linearize(loaded, mixer)


def test_lumina_with_a_convolution():
    """Captions of one length put all images at one place; of several, the convolution is refused."""
    torch.manual_seed(0)
    model, inputs = lumina2(lengths=(4, 4))
    student, _ = scanvas.linearize(model.eval(), "lit", kernel_size=3)
    run(student, inputs)
    assert linear_swap.records_of(student)[0].value == (4, 6)
    with pytest.raises(ValueError, match="captions of several lengths"):
        run(student, lumina2()[1])


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_those_of_the_input(name):
    model, inputs = build(name)
    student, _ = scanvas.linearize(model, "lit")
    run(student, inputs)
    grids = {tuple(record.value) for record in linear_swap.records_of(student)}
    assert sorted(grids) == GRIDS[name]


@pytest.mark.parametrize("name", ["pixart", "sd35", "flux", "wan", "unet", "vit_reg_qk_norm"])
def test_the_convolution_runs_over_the_image_only(name):
    """A kernel that shifts the image by one row changes the layer's output there by the values, and no other token."""
    model, inputs = build(name)
    student, report = scanvas.linearize(model, "lit", heads=1)
    layer = student.get_submodule(report.layers[0]["path"])
    seen = {}
    layer.core.register_forward_hook(lambda _, args, out: seen.update(args=args, out=out))
    run(student, inputs)
    without = seen["out"]
    with torch.no_grad():
        layer.core.conv.weight[:, 0, 1, 2] = 1.0
    run(student, inputs)
    *_, v, _, _, _, start, grid = seen["args"]
    *frames, H, W = grid
    count = H * W * (frames[0] if frames else 1)
    image = v.flatten(2)[:, start : start + count].unflatten(1, (-1, H, W))
    shifted = torch.zeros_like(image)
    shifted[:, :, 1:] = image[:, :, :-1]
    expected = without.clone()
    expected[:, start : start + count] += shifted.flatten(1, 3)
    torch.testing.assert_close(seen["out"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inherit", ["none", "vo", "qkvo"])
@pytest.mark.parametrize("name", ["sd35", "vit"])
def test_inheritance(name, inherit):
    model, _ = build(name)
    student, report = scanvas.linearize(model, "hedgehog", inherit=inherit, seed=3)
    again, _ = scanvas.linearize(model, "hedgehog", inherit=inherit, seed=3)
    assert same(again, snapshot(student))
    path = report.layers[0]["path"]
    layer, original = student.get_submodule(path), model.get_submodule(path)
    if name == "vit":
        parts = dict(zip("qkv", original.qkv.weight.chunk(3))) | {"o": original.proj.weight}
        own = {"q": layer.q_proj.weight, "k": layer.k_proj.weight, "v": layer.v_proj.weight, "o": layer.proj.weight}
    else:
        names = {"q": "to_q", "k": "to_k", "v": "add_v_proj", "o": "to_add_out"}
        parts = {key: getattr(original, n).weight for key, n in names.items()}
        own = {key: getattr(layer, n).weight for key, n in names.items()}
        assert torch.equal(layer.norm_q.weight, original.norm_q.weight) == ("q" in inherit)
    for key, weight in own.items():
        assert torch.equal(weight, parts[key]) == (key in (inherit if inherit != "none" else "")), key
    counts = {row["status"] for row in report.tensors}
    assert ("inherited" in counts) == (inherit != "none")


def test_heads_are_fused_in_their_order():
    model, _ = build("pixart")
    student, report = scanvas.linearize(model, "lit", heads=2, kernel_size=0)
    assert [(row["heads_before"], row["heads"]) for row in report.layers] == [(4, 2)] * 3
    layer = student.transformer_blocks[0].attn1
    x = torch.randn(1, 6, 32)
    q, k, v = (getattr(layer, n)(x)[0].view(6, 2, 16) for n in ("to_q", "to_k", "to_v"))
    scores = torch.einsum("nhd,mhd->hnm", q.relu(), k.relu())
    mixed = torch.einsum("hnm,mhd->nhd", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(layer(x)[0], layer.to_out[0](mixed.flatten(1)))
    for heads in (3, 0, 8, 1.5):
        with pytest.raises(ValueError, match=r"heads must divide the 4 heads of .*: 1, 2, 4; got"):
            scanvas.linearize(model, "lit", heads=heads)
    assert [LitCore.default_heads(n) for n in (6, 12, 16, 24, 1, 3)] == [2, 3, 4, 6, 1, 1]


def test_gla_starts_near_no_decay():
    model, _ = build("pixart")
    student, _ = scanvas.linearize(model, "gla", initial_decay=0.99)
    bias = student.transformer_blocks[0].attn1.core.decay_proj[1].bias
    torch.testing.assert_close((nn.functional.logsigmoid(bias) / 16).exp(), torch.full_like(bias, 0.99))
    own, _ = scanvas.linearize(build("denoiser")[0], "gla", initial_decay=0.99)
    bias = own.transformer_blocks[0].mixer.decay_proj[1].bias
    torch.testing.assert_close((nn.functional.logsigmoid(bias) / 16).exp(), torch.full_like(bias, 0.99))


def test_choice_of_layers():
    paths = [f"transformer_blocks.{i}.attn" for i in range(3)] + [
        f"single_transformer_blocks.{i}.attn" for i in range(2)
    ]
    softmax = dict.fromkeys(paths)
    assert select_layers(softmax, "all") == paths
    assert select_layers(softmax, "single*") == paths[3:]
    assert select_layers(softmax, ["single*1.attn", "transformer_blocks.0.*"]) == [paths[0], paths[4]]
    assert select_layers(softmax, [-1, 0]) == [paths[0], paths[4]]
    assert select_layers(softmax, range(2)) == paths[:2]
    for layers, message in {
        "singel_transformer_blocks.0.attn": r"no attention layer; did you mean 'single_transformer_blocks.0.attn'",
        "xyz": r"'xyz' matches no attention layer; there are transformer_blocks.0.attn …",
    }.items():
        with pytest.raises(ValueError, match=message):
            select_layers(softmax, layers)
    with pytest.raises(ValueError, match="index 5 is out of range: there are 5"):
        select_layers(softmax, [5])
    with pytest.raises(ValueError, match="empty"):
        select_layers(softmax, [])
    for layers in (None, True, {"a": 1}, [1.5]):
        with pytest.raises(TypeError, match="layers must be 'all'"):
            select_layers(softmax, layers)

    model, inputs = build("flux")
    student, report = scanvas.linearize(model, "lit", "single*")
    kinds = {
        p: isinstance(student.get_submodule(p), LinearizedLayer)
        for p in _ADAPTERS["FluxTransformer2DModel"].attentions(student)
    }
    assert list(kinds.values()) == [False, True, True]
    assert {row["layer"] for row in report.tensors if row["status"] == "softmax"} == {"transformer_blocks.0.attn"}
    assert run(student, inputs).isfinite().all()


def test_report(tmp_path):
    model, _ = build("pixart")
    _, report = scanvas.linearize(model, "lit", [0, 1], sizes=[(128, 128), (256, 256)])
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    small, large = report.costs
    assert (small["tokens"], large["tokens"]) == (64 * 64, 128 * 128)
    # By hand: 3 layers of width 32; two of them linear, one head of 32, convolution 5×5.
    N, C = 64 * 64, 32
    assert small["flops_before"] == 3 * 4 * N * N * C
    assert small["flops_after"] == 4 * N * N * C + 2 * (N * (4 * C * C + 3 * C + C) + 2 * N * C * 25)
    assert small["bytes_before"] == 4 * N * N * 2
    assert large["flops_before"] == 16 * small["flops_before"]
    text = str(report)
    for part in (
        "2 attention layers to 'lit', 1 left softmax",
        "heads 4 → 1",
        "core.conv.weight (zero",
        "needs training",
    ):
        assert part in text

    # Of the new targets: what has a score of its own; and the products of the inner network and its gradients.
    _, report = scanvas.linearize(model, "local", radius=2, sizes=[(8, 12)])
    pairs = 24 + 2 * (3 * 6 + 4 * 5) + 2 * 2 * 3 * 5  # of 4 × 6 tokens: themselves, beside, below, diagonally
    assert report.costs[0]["flops_after"] == 3 * 4 * 32 * pairs
    assert report.costs[0]["bytes_after"] == 2 * 4 * pairs
    _, report = scanvas.linearize(model, "t5", sizes=[(8, 12)])
    assert report.costs[0]["flops_after"] == 3 * (18 * 24 * 32 * 8 + 2 * 2 * 9 * 24 * 32)
    assert "core.inner.w1 (truncated normal" in str(report)
    _, report = scanvas.linearize(build("sd3")[0], "hybrid", every=4, sizes=[(8, 12)])
    exact = 24 * 6 + 2 * 24 * 333 + 333 * 333
    assert report.costs[0]["bytes_after"] == 2 * 4 * exact + 8 * 32 * 8

    unet, _ = build("unet")
    (cost,) = scanvas.linearize(unet, "lit", sizes=[(16, 24)])[1].costs
    assert cost["tokens"] == 16 * 24
    assert cost["flops_before"] == 3 * 4 * (384**2) * 16 + 4 * 4 * (96**2) * 32
    (cost,) = scanvas.linearize(build("sana")[0], "lit", heads=4, kernel_size=0, sizes=[(8, 8)])[1].costs
    assert cost["flops_after"] == cost["flops_before"] == 2 * 64 * (4 * 32 * 8 + 3 * 32 + 32)
    vit, _ = build("vit")
    (cost,) = scanvas.linearize(vit, "lit", sizes=[(48, 64)])[1].costs
    assert cost["tokens"] == 13


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


def test_denoiser_swaps_mixers_and_keeps_its_class():
    model, inputs = build("denoiser")
    student, _ = scanvas.linearize(model, "lit", [1], heads=2)
    assert type(student) is type(model)
    assert student.config.layer_mixers == {
        "1": {"mixer": "linear", "num_heads": 2, "kernel_size": 5, "eps": 1e-6, "qkv_bias": True}
    }
    assert [type(b.mixer).__name__ for b in student.transformer_blocks] == [
        "SoftmaxAttention",
        "LinearAttention",
        "SoftmaxAttention",
    ]
    more, _ = scanvas.linearize(student, "gla", [0])  # the rest can follow
    assert [b.order for b in more.transformer_blocks] == ["raster"] * 3
    rebuilt = type(more).from_config(more.config)
    rebuilt.load_state_dict(more.state_dict())
    assert torch.equal(run(rebuilt.eval(), inputs), run(more, inputs))
    dropped = [row["name"] for row in scanvas.linearize(model, "gla")[1].tensors if row["status"] == "dropped"]
    assert "transformer_blocks.0.mixer.to_q.bias" in dropped


def test_adapter_of_a_few_lines():
    class Net(nn.Module):
        """A model of someone else's."""

        def __init__(self):
            super().__init__()
            self.config = {"sample_size": 8}
            self.inner = copy.deepcopy(build("pixart")[0].transformer_blocks)

        def forward(self, hidden_states):
            x = hidden_states.flatten(2).transpose(1, 2)
            for block in self.inner:
                x = x + block.attn1(x)
            return x

    try:
        register_adapter(
            Adapter("Net", r"inner\.\d+\.attn1", grid=lambda model, args, kwargs: tuple(args[0].shape[2:]))
        )
        assert "Net" in known_models()
        net = Net()
        student, report = scanvas.linearize(net, "lit", sizes=[])
        assert type(student).__name__ == "LinearizedNet"
        assert len(report.layers) == 3
        assert student(torch.randn(1, 32, 4, 6)).shape == (1, 24, 32)
        assert type(scanvas.delinearize(student)) is Net
    finally:
        _ADAPTERS.pop("Net")

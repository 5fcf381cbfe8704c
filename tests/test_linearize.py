"""``linearize``: every family it knows, every target; inheritance, selection, report, errors."""

import pytest
import torch
from linear_parts import (
    DIFFUSERS,
    FEW_MODELS,
    GRIDS,
    MORE_TARGETS,
    SMALL_OPTIONS,
    TIMM,
    SoftmaxCore,
    build,
    lumina2,
    run,
    sana,
    sana_qk_norm,
)
from linearize_parts import same, snapshot
from torch import nn

import scanvas
from scanvas.diffusion import linear_swap
from scanvas.diffusion.linear_attention_modules import LinearizedLayer
from scanvas.diffusion.linear_cores import TARGETS, LitCore

MODELS = [*DIFFUSERS, *TIMM, "denoiser"]
SWAPPED = [name for name in MODELS if name != "denoiser"]  # the others keep their mixers' own modules


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


EVERYWHERE = ("lit", "linfusion", "gla", "local")
"""Targets that ask something else of a model: a convolution of the image, the layer's input, an order, a grid."""


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        (n, m)
        for n in MODELS
        for m in TARGETS
        if m in EVERYWHERE or n in FEW_MODELS or (m not in MORE_TARGETS and n in ("lumina2", "unet", "wan"))
    ],
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

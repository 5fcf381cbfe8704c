"""Rows of the map of gated linear attention against the definition, and what mixers tell beside their map."""

import pytest
import torch
from torch import nn

from scanvas.backbones.mixers import MIXERS, create_mixer
from scanvas.diffusion.linear_attention_modules import rotate_pairs
from scanvas.diffusion.linear_cores import TARGETS
from scanvas.kernels.gated import attention_matrix, attention_rows, gated_linear_attention


def _inputs(N, dtype, strength=1.0, H=2, Dk=5):
    g = torch.Generator().manual_seed(N)
    q, k, a, b = (torch.randn(2, N, H, Dk, generator=g, dtype=torch.float64) for _ in range(4))
    return q.to(dtype), k.to(dtype), *(-(strength * x.abs()).to(dtype) for x in (a, b))


@pytest.mark.parametrize("strength", [0.0, 0.05, 2.0, 1e4])
@pytest.mark.parametrize("N", [1, 31, 32, 33, 97])
def test_rows_are_those_of_the_definition(N, strength):
    q, k, g, r = _inputs(N, torch.float64, strength)
    both = (attention_rows(q, k, g) + attention_rows(q, k, r, reverse=True)) / 2
    torch.testing.assert_close(both, attention_matrix(q, k, g, r), atol=1e-12, rtol=1e-10)
    rows = torch.randperm(N, generator=torch.Generator().manual_seed(0))[: max(1, N // 3)]
    for reverse, decay in ((False, g), (True, r)):
        full = attention_rows(q, k, decay, reverse=reverse)
        torch.testing.assert_close(attention_rows(q, k, decay, rows, reverse=reverse), full[:, :, rows])
    v = torch.randn(2, N, 2, 3, dtype=torch.float64)
    expected = gated_linear_attention(q, k, v, g, r, impl="recurrent")
    torch.testing.assert_close(torch.einsum("bhij,bjhv->bihv", both, v), expected)


def test_half_precision_is_summed_in_float32_and_gradients_flow():
    q, k, g, _ = _inputs(70, torch.bfloat16, 0.1)
    rows = attention_rows(q, k, g, torch.tensor([69, 3]))
    assert rows.dtype == torch.float32
    exact = attention_rows(*(t.double() for t in (q, k, g)), torch.tensor([69, 3]))
    torch.testing.assert_close(rows.double(), exact, atol=1e-6, rtol=1e-5)
    q, k, g, _ = (t.requires_grad_() for t in _inputs(40, torch.float64, 0.3))
    weight = torch.randn(2, 2, 40, 40, dtype=torch.float64)
    got = torch.autograd.grad((attention_rows(q, k, g, reverse=True) * weight).sum(), (q, k, g))
    matrix = 2 * attention_matrix(q, k, torch.full_like(g, -1e4), g)  # a forward half that sees only the token itself
    itself = torch.einsum("bnhc,bnhc->bhn", q, k) * 5**-0.5
    expected = torch.autograd.grad(((matrix - torch.diag_embed(itself)) * weight).sum(), (q, k, g))
    torch.testing.assert_close(got, expected)


_ONE_WAY = {"bidirectional": False}
_BRANCHES = [
    *((name, {}, ("attention", "local")) for name in ("agent", "focused", "inline", "lina", "linear", "mala", "mlla")),
    *((name, {}, ("attention", "local")) for name in ("rala", "retention", "slab")),
    *((name, {}, ("forward", "backward")) for name in ("gdn", "gdn2", "hgrn2", "kda")),
    *((name, {}, ()) for name in ("cosformer", "flow", "hedgehog", "hybrid", "l2", "linfusion", "local", "sana")),
    *((name, {}, ()) for name in ("softmax", "t5")),
    ("gated_softmax", {}, ("attention", "local")),
    ("gated_softmax", {"out_norm": True}, ("attention", "local", "bias")),
    ("gla", {}, ("forward", "backward", "local")),
    ("gla", {"out_act": True, "rope": True, "expand_k": 1.0}, ("forward", "backward", "local")),
    ("gla", _ONE_WAY, ("attention", "local")),
    ("gla", {"output": "swish"}, ("forward", "backward")),
    ("gla", {"output": "swish", **_ONE_WAY}, ()),
    ("kda", _ONE_WAY, ()),
    ("hgrn2", _ONE_WAY, ()),
    ("nala", {}, ("attention", "local", "bias")),
    ("nala", {"kernel_size": 0}, ()),
    ("retention", {"gate": True}, ("attention", "local")),
    ("sla", {"block": 4, "keep": 0.4}, ("attention", "linear")),
    ("slab", {"kernel_size": 0}, ()),
]


def test_every_mixer_is_asked_for_its_branches():
    assert {name for name, *_ in _BRANCHES} == set(MIXERS)


@pytest.mark.parametrize(("name", "cfg", "names"), _BRANCHES)
def test_branches_add_up_to_what_the_output_projection_is_given(name, cfg, names):
    torch.manual_seed(0)
    mixer = create_mixer(name, 16, 2, dtype=torch.float64, **cfg).eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, grid, prefix = torch.randn(2, 2 + 21, 16, dtype=torch.float64), (3, 7), 2
    given = []
    mixer.to_out[0].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    expected = mixer(x, grid, prefix)
    parts = mixer.branches(x, grid, prefix=prefix)
    assert tuple(parts) == names
    if not names:
        return
    torch.testing.assert_close(sum(parts.values()), given[0])
    torch.testing.assert_close(mixer.to_out(sum(parts.values())), expected)
    # Each is what its name says. Norms and gates are factors which the directions have in common.
    if "backward" in parts:
        maps = mixer.attention_map_parts(x, grid, prefix=prefix)
        values = mixer.values(x, grid, prefix)
        alone = {key: (part @ values).transpose(1, 2).flatten(2) for key, part in maps.items()}
        torch.testing.assert_close(parts["forward"] * alone["backward"], parts["backward"] * alone["forward"])
    if "local" in parts and "bias" not in parts and name != "inline" and "out_act" not in cfg:
        # All but those have a local branch that depends on what is near alone.
        far = x.clone()
        far[:, -1] += 1.0
        moved = mixer.branches(far, grid, prefix=prefix)
        assert torch.equal(moved["local"][:, 2], parts["local"][:, 2])
        seen = [key for key in names if key in ("attention", "backward")] if cfg != _ONE_WAY else []
        assert all((moved[key] - parts[key])[:, 2].abs().max() > 1e-9 for key in seen)


@pytest.mark.parametrize("cfg", [{}, {**_ONE_WAY, "rope": True, "expand_k": 1.0}])
def test_directions_add_up(cfg):
    torch.manual_seed(0)
    mixer = create_mixer("gla", 24, 2, dtype=torch.float64, **cfg)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, grid = torch.randn(2, 3 + 20, 24, dtype=torch.float64), (4, 5)
    parts = mixer.attention_map_parts(x, grid, prefix=3)
    assert list(parts) == (["forward", "backward"] if cfg.get("bidirectional", True) else ["forward"])
    assert not parts["forward"].triu(1).any()
    assert "backward" not in parts or not parts["backward"].tril(-1).any()
    torch.testing.assert_close(sum(parts.values()), mixer.attention_map(x, grid, prefix=3))
    gates = nn.functional.logsigmoid(mixer.decay_proj(mixer.features(x, grid, 3))) / 16
    torch.testing.assert_close(torch.cat([d.flatten(2) for d in mixer.log_decays(x, grid, prefix=3)], -1), gates)


_TARGET_CASES = [
    *((name, {}) for name in TARGETS),
    ("gla", {"normalize": False}),
    ("local", {"radius": 2, "pool": 2, "base_tokens": 9}),
    ("hybrid", {"radius": 2}),
    ("hybrid", {"every": 3}),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("target", "cfg"), _TARGET_CASES)
def test_targets_of_linearize_tell_their_map(target, cfg, rotated, masked):
    torch.manual_seed(0)
    options = {**TARGETS[target].defaults, **cfg}
    core = TARGETS[target](24, 32, 2 if TARGETS[target].fuses_heads else 4, 1, **options, dtype=torch.float64).eval()
    place = core.place(2, (3, 4))  # two tokens before the image, and three after it
    with torch.no_grad():
        for name, parameter in core.named_parameters():
            if name != "scale":
                parameter.add_(0.2 * torch.randn_like(parameter))
    q, k, v = torch.randn(3, 2, 17, 4, 8, dtype=torch.float64).unbind(0)
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    angle = torch.randn(17, 4, dtype=torch.float64)
    rotate = rotate_pairs(angle.cos(), angle.sin()) if rotated else None
    weight = torch.rand(2, 17, dtype=torch.float64) if masked else None
    expected = core.attend(q, k, v, x, rotate, weight, *place)
    if not core.has_map:
        with pytest.raises(NotImplementedError, match="has no attention map"):
            core.attention_map_parts(q, k, x, rotate, weight, None, *place)
        return
    matrix = sum(core.attention_map_parts(q, k, x, rotate, weight, None, *place).values())
    out = torch.einsum("bhij,bjhv->bihv", matrix, core.fuse(v))
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-8)
    rows = torch.tensor([16, 2])
    some = sum(core.attention_map_parts(q, k, x, rotate, weight, rows, *place).values())
    torch.testing.assert_close(some, matrix[:, :, rows])

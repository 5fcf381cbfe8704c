"""Mixers with gates against their recurrences, token by token in float64, with the parameters by hand."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from scanvas.backbones.mixers import create_mixer, gla
from scanvas.backbones.mixers.base import is_plain
from scanvas.kernels.delta import IMPLEMENTATIONS, attention_rows, gated_delta_rule

GRID = (3, 5)


def build(name, dim=16, heads=2, **cfg):
    torch.manual_seed(0)
    mixer = create_mixer(name, dim, heads, dtype=torch.float64, **cfg)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.eval(), dict(mixer.named_parameters())


def tokens(count, dim=16):
    return torch.randn(1, count, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rms(y, weight):
    return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_hgrn2_is_its_definition():
    mixer, p = build("hgrn2", lower_bound=0.3)
    x = tokens(15)
    q, gate, v = (x[0] @ p[f"to_{n}.weight"].T for n in "qkv")
    reverse = x[0] @ p["reverse_gate_proj.weight"].T
    out = torch.zeros(15, 16, dtype=torch.float64)
    for head in range(2):
        s = slice(8 * head, 8 * head + 8)
        for logits, order in ((gate, range(15)), (reverse, reversed(range(15)))):
            state = torch.zeros(8, 8, dtype=torch.float64)
            for t in order:
                forget = 0.3 + 0.7 * logits[t, s].sigmoid()
                state = forget[:, None] * state + torch.outer(1 - forget, v[t, s])
                out[t, s] += 0.5 * (q[t, s] * q[t, s].sigmoid()) @ state
    torch.testing.assert_close(mixer.attend(x, GRID)[0].flatten(1), out)
    torch.testing.assert_close(mixer(x, GRID)[0], rms(out, p["out_norm.weight"]) @ p["to_out.0.weight"].T)
    one_sided, _ = build("hgrn2", bidirectional=False)
    changed = x.clone()
    changed[:, 7] += 1
    moved = (one_sided(changed, GRID) - one_sided(x, GRID)).abs().amax(-1)[0]
    assert moved[:7].max() == 0
    assert moved[7:].min() > 1e-6
    with pytest.raises(ValueError, match="lower_bound must be at least 0 and less than 1, got 1"):
        create_mixer("hgrn2", 16, 2, lower_bound=1)


@pytest.mark.parametrize(
    ("name", "cfg"),
    [("gdn", {}), ("gdn", {"negative_eigenvalues": True, "bidirectional": False}), ("kda", {}), ("gdn2", {})],
)
def test_delta_rules_are_their_definitions(name, cfg):
    """S ← α S, then the value that S gives for the key is erased, and the token's written."""
    prefix, directions = 2, 1 if cfg.get("bidirectional") is False else 2
    mixer, p = build(name, **cfg)
    N = prefix + 15
    x = tokens(N)
    joined = torch.cat([x @ p[f"to_{n}.weight"].T for n in "qkv"], dim=-1)
    image = joined[:, prefix:].transpose(1, 2).unflatten(2, GRID)
    image = F.conv2d(image, p["conv.weight"], padding=1, groups=joined.shape[-1]).flatten(2).transpose(1, 2)
    joined = F.silu(torch.cat((joined[:, :prefix], image), dim=1))[0]
    key_width, value_width = mixer.key_dim // 2, mixer.value_dim // 2
    q, k, v = (z.view(N, 2, -1) for z in joined.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1))
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))

    x = x[0]
    logits = x
    for layer in mixer.decay.proj:
        logits = logits @ layer.weight.T
    rate = p["decay.log_rate"].exp().view(directions, 2, 1)
    decay = (-rate * F.softplus(logits + p["decay.bias"]).view(N, directions, 2, -1)).exp()
    if name == "gdn2":
        erase = (x @ p["erase_proj.weight"].T).sigmoid().view(N, directions, 2, key_width)
        v = v * (x @ p["write_proj.weight"].T).sigmoid().view(N, 2, value_width)
        write = torch.ones(N, directions, 2, 1, dtype=x.dtype)
    else:
        erase = write = (x @ p["beta_proj.weight"].T).sigmoid().view(N, directions, 2, 1) * (
            2 if cfg.get("negative_eigenvalues") else 1
        )
    assert decay.shape[-1] == (1 if name == "gdn" else key_width)
    out = torch.zeros(N, 2, value_width, dtype=x.dtype)
    for head in range(2):
        for direction in range(directions):
            state = torch.zeros(key_width, value_width, dtype=x.dtype)
            for t in reversed(range(N)) if direction else range(N):
                key = k[t, head]
                state = decay[t, direction, head, :, None] * state
                state = state - torch.outer(key, (erase[t, direction, head] * key) @ state)
                state = state + torch.outer(key, write[t, direction, head] * v[t, head])
                out[t, head] += key_width**-0.5 / directions * q[t, head] @ state
    torch.testing.assert_close(mixer.attend(x[None], GRID, prefix)[0], out)

    normed = rms(out, p["out_norm.weight"]).flatten(1)
    if name == "gdn":
        gate = x @ p["gate_proj.weight"].T
        gate = gate * gate.sigmoid()
    else:
        gate = (x @ p["gate_proj.0.weight"].T @ p["gate_proj.1.weight"].T + p["gate_proj.1.bias"]).sigmoid()
    torch.testing.assert_close(mixer(x[None], GRID, prefix)[0], (normed * gate) @ p["to_out.0.weight"].T)


def test_delta_rule_with_equal_gates_is_the_simpler_one():
    kda, p = build("kda")
    gdn2, p2 = build("gdn2")
    with torch.no_grad():
        for key in p.keys() & p2.keys():
            p2[key].copy_(p[key])
        for key in ("beta_proj.weight", "erase_proj.weight", "write_proj.weight"):
            (p | p2)[key].zero_()  # all gates ½
    torch.testing.assert_close(gdn2(tokens(15), GRID), kda(tokens(15), GRID))


def test_decays_begin_as_in_the_papers():
    for name, least in (("gdn", 0), ("kda", 1), ("gdn2", 1)):
        decay = create_mixer(name, 256, 64).decay
        rate, step = decay.log_rate.exp(), F.softplus(decay.bias)
        assert rate.min() >= least
        assert 12 < rate.max() <= 16
        assert step.min() >= 0.99e-3
        assert step.max() <= 0.101
        assert 0.35 < (step < 0.01).float().mean() < 0.65  # log-uniform


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("N", [1, 3, 130, 300])
def test_delta_rule_in_chunks_is_the_recurrence(N, width):
    """Output, gradients and map, for decays from none to all, with one gate per head and with gates per channel of keys
    and of values; float32 as exact as float32 is."""
    generator = torch.Generator().manual_seed(N)
    sizes = (6, 6, 5, width, 5)
    q, k, v, b, w = (torch.randn(2, N, 2, d, dtype=torch.float64, generator=generator) for d in sizes)
    k, b = F.normalize(k, dim=-1), b.sigmoid()
    w = b if width == 1 else w.sigmoid()
    g = -torch.rand(2, N, 2, width, dtype=torch.float64, generator=generator)
    g[:, N // 2] = -1e4
    g[:, N // 3] = 0
    inputs = [z.requires_grad_() for z in (q, k, v, g, b, w)]
    results = []
    for impl in IMPLEMENTATIONS:
        out = gated_delta_rule(*inputs, impl=impl)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        out = results[0][0]
        torch.testing.assert_close(gated_delta_rule(*(z.float() for z in inputs)).double(), out, atol=1e-5, rtol=1e-5)
        turned = [z.flip(1) for z in inputs]
        both = zip(
            (attention_rows(q, k, g, b), attention_rows(*(turned[i] for i in (0, 1, 3, 4)), reverse=True)),
            (w * v, turned[5] * turned[2]),
            (out, out.flip(1)),
        )
        for matrix, values, expected in both:
            torch.testing.assert_close((matrix @ values.transpose(1, 2)).transpose(1, 2), expected)
        some = torch.tensor([N - 1, 0, N // 2])
        for reverse in (False, True):
            full = attention_rows(q, k, g, b, reverse=reverse)
            torch.testing.assert_close(attention_rows(q, k, g, b, some, reverse=reverse), full[:, :, some])


def test_delta_rule_refuses_what_does_not_fit():
    q, v, g = torch.zeros(1, 4, 2, 6), torch.zeros(1, 4, 2, 5), torch.zeros(1, 4, 2, 3)
    with pytest.raises(ValueError, match=r"log_decay must be .*\(1, 4, 2, 6\) or .*got \(1, 4, 2, 3\)"):
        gated_delta_rule(q, q, v, g, q)
    with pytest.raises(ValueError, match=r"q and k must be .*k \(1, 4, 2, 5\)"):
        gated_delta_rule(q, v, v, q, q)
    with pytest.raises(ValueError, match=r"erase_gate must be .*\(1, 4, 2, 6\) or .*got \(1, 4, 2, 5\)"):
        gated_delta_rule(q, q, v, q, v)
    with pytest.raises(ValueError, match=r"write_gate must be .*\(1, 4, 2, 5\) or .*got \(1, 4, 2, 6\)"):
        gated_delta_rule(q, q, v, q, q, q)
    with pytest.raises(ValueError, match=r"v must be .*got \(1, 3, 2, 5\)"):
        gated_delta_rule(q, q, v[:, 1:], q, q)
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', 'recurrent', 'torch'.*, got 'flash'"):
        gated_delta_rule(q, q, v, q, q, impl="flash")
    with pytest.raises(RuntimeError, match=r"triton.*(not available here|no Triton kernel)"):
        gated_delta_rule(q, q, v, q, q, impl="triton")
    with pytest.raises(ValueError, match="expand_k gives a width of 9, which num_heads = 2 does not divide"):
        create_mixer("gdn", 12, 2)
    assert isinstance(create_mixer("gdn", 16, 2).conv, nn.Conv2d)


@pytest.mark.parametrize("name", ["gla", "hgrn2", "gdn", "kda", "gdn2"])
def test_selective_rope_turns_by_running_sums(name):
    """With the angles summed and the planes turned one by one; the mixer without the option does the rest."""
    prefix, width = 2, {"gla": 4, "gdn": 6}.get(name, 8)
    mixer, p = build(name, selective_rope=True)
    plain = create_mixer(name, 16, 2, dtype=torch.float64).eval()
    plain.load_state_dict({k: v for k, v in mixer.state_dict().items() if not k.startswith("selective_rope")})
    x = tokens(17)
    matrix, values = mixer.attention_map(x, GRID, prefix=prefix), mixer.values(x, GRID, prefix)
    torch.testing.assert_close((matrix @ values).transpose(1, 2), mixer.attend(x, GRID, prefix))
    torch.testing.assert_close(values, plain.values(x, GRID, prefix))
    assert (mixer(x, GRID, prefix) - plain(x, GRID, prefix)).abs().max() > 1e-3

    seen = mixer.features(x, GRID, prefix) if name == "gla" else x
    heads = seen.view(17, 2, 8)
    unit = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(1)
    steps = unit @ p["selective_rope.proj.0.weight"].T @ p["selective_rope.proj.1.weight"].T
    image = F.conv2d(
        steps[prefix:].T.unflatten(1, GRID)[None], p["selective_rope.conv.weight"], padding=1, groups=width
    )
    steps = torch.cat((steps[:prefix], image[0].flatten(1).T)).view(17, 2, width // 2)
    angles = torch.zeros(17, 2, width // 2, dtype=x.dtype)
    for t in range(17):
        for c in range(width // 2):
            angles[t, :, c] = steps[: t + 1, :, c].sum(0) * 500000 ** (-2 * c / width)
    torch.testing.assert_close(mixer.selective_rope(seen, GRID, prefix)[0], angles)

    def turned(z):
        first, second = z[..., : width // 2], z[..., width // 2 :]
        turn = torch.polar(torch.ones_like(angles), angles)
        z = torch.complex(first, second) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    inputs = "_scan_inputs" if hasattr(mixer, "_scan_inputs") else "_tokens"
    with_rope, without = (getattr(m, inputs)(seen if name == "gla" else x, GRID, prefix) for m in (mixer, plain))
    torch.testing.assert_close(with_rope[0], turned(without[0]))
    if name == "hgrn2":
        keys, bare = (torch.stack([key for _, key in z[2]]) for z in (with_rope, without))
        torch.testing.assert_close(keys, turned(bare))
    else:
        torch.testing.assert_close(with_rope[1], turned(without[1]))
    half = mixer.to(torch.bfloat16)
    assert half(x.bfloat16(), GRID, prefix).isfinite().all()
    if name == "gla":
        small = {"img_size": (8, 12), "patch_size": 4, "depth": 1, "mixer_kwargs": {"selective_rope": True}}
        model, image = timm.create_model("test_vig", **small).eval(), torch.randn(1, 3, 8, 12)
        torch.testing.assert_close(torch.jit.script(model)(image), model(image))
        with pytest.raises(ValueError, match="selective_rope needs heads of an even width, got 3"):
            create_mixer(name, 12, 2, selective_rope=True)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"rope": True, "conv_act": True}, {"bidirectional": False, "local": False, "output": "swish"}]
)
def test_gla_projects_everything_at_once_on_a_gpu(monkeypatch, options, fused):
    mixer, _ = build("gla", fused_projections=fused, **options)
    x = tokens(1 + 15).requires_grad_()

    def run():
        y = mixer(x, GRID, 1)
        return y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])

    expected = run()
    monkeypatch.setattr(gla, "_at_once", lambda features, layers, *others: is_plain(*layers, *others))
    seen = []
    monkeypatch.setattr(F, "linear", lambda *args, linear=F.linear: seen.append(0) or linear(*args))
    for actual, value in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-9, atol=1e-12)
    assert len(seen) == 2  # everything, and the output
    monkeypatch.setattr(gla, "gated_layer_pays", lambda features: True)  # as in training on a GPU
    for actual, value in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-9, atol=1e-12)

    handle = mixer.gate_proj.register_forward_hook(lambda module, args, output: output * 0)
    switched_off = mixer(x, GRID, 1)
    handle.remove()
    assert (switched_off - expected[0]).abs().max() > 1e-3  # a hook is heard
    mixer.decay_proj[1] = nn.utils.parametrizations.weight_norm(mixer.decay_proj[1])
    torch.testing.assert_close(mixer(x, GRID, 1), expected[0], rtol=1e-9, atol=1e-12)

"""Mixers against their equations, written out again, and what they start from."""

import math

import pytest
import torch
from mixer_parts import build, tokens
from torch import nn

from scanvas.backbones.mixers import create_mixer, t5
from scanvas.backbones.rope import apply_rope, axial_angles


def test_reversal_equivariance():
    """Turning the image by 180° turns the result, if the two directions' gates are swapped and the kernel turned: no
    direction is preferred anywhere else."""
    mixer, turned = build("gla"), build("gla")
    with torch.no_grad():
        turned.conv.weight.copy_(mixer.conv.weight.flip(2, 3))
        for kind in ("weight", "bias"):
            forward, backward = getattr(mixer.decay_proj[1], kind).chunk(2)
            getattr(turned.decay_proj[1], kind).copy_(torch.cat((backward, forward)))
    x = tokens((4, 5))
    expected = mixer(x, (4, 5)).flip(1)
    torch.testing.assert_close(turned(x.flip(1), (4, 5)), expected)
    assert (mixer(x.flip(1), (4, 5)) - expected).abs().max() > 1e-4


def test_gla_is_its_definition():
    """The recurrence token by token in float64, with the parameters by hand (ViG, arXiv:2405.18425)."""
    mixer, grid = build("gla", dim=16, heads=2), (3, 5)
    x = tokens(grid, dim=16, batch=1)
    p = dict(mixer.named_parameters())
    image = x.transpose(1, 2).unflatten(2, grid)
    local = nn.functional.conv2d(image, p["conv.weight"], padding=1, groups=16).flatten(2)[0].T
    q, k, v = (local @ p[f"to_{n}.weight"].T for n in "qkv")
    gates = nn.functional.logsigmoid(
        local @ p["decay_proj.0.weight"].T @ p["decay_proj.1.weight"].T + p["decay_proj.1.bias"]
    )
    out = torch.zeros(15, 16, dtype=torch.float64)
    for head in range(2):
        keys, vals = slice(4 * head, 4 * head + 4), slice(8 * head, 8 * head + 8)
        for direction, order in enumerate((range(15), reversed(range(15)))):
            state = torch.zeros(4, 8, dtype=torch.float64)
            for t in order:
                decay = (gates[t, 8 * direction :][keys] / 16).exp()
                state = decay[:, None] * state + torch.outer(k[t, keys], v[t, vals])
                out[t, vals] += 0.5 * 4**-0.5 * q[t, keys] @ state
    torch.testing.assert_close(mixer.attend(x, grid)[0].flatten(1), out)

    def norm(y, weight):
        y = y.view(15, 2, 8)
        return (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).flatten(1)

    gate = (local @ p["gate_proj.weight"].T + p["gate_proj.bias"]).sigmoid()
    mixed = gate * norm(out, p["out_norm.weight"]) + (1 - gate) * norm(local, p["local_norm.weight"])
    torch.testing.assert_close(mixer(x, grid)[0], mixed @ p["to_out.0.weight"].T)


def test_linear_is_its_definition():
    mixer, grid = build("linear", dim=16, heads=2), (3, 5)
    x = tokens(grid, prefix=1, dim=16, batch=1)
    q, k, v = (getattr(mixer, f"to_{n}")(x)[0] for n in "qkv")
    out = torch.zeros(16, 16, dtype=torch.float64)
    for head in range(2):
        s = slice(8 * head, 8 * head + 8)
        scores = q[:, s].relu() @ k[:, s].relu().T
        out[:, s] = scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v[:, s]
    image = v[1:].T.unflatten(1, grid)[None]
    conv = nn.functional.conv2d(image, mixer.conv.weight, mixer.conv.bias, padding=2, groups=16)
    out[1:] += conv.flatten(2)[0].T
    torch.testing.assert_close(mixer(x, grid, 1)[0], mixer.to_out[0](out))


def test_hedgehog_is_its_definition():
    mixer, grid = build("hedgehog", dim=16, heads=2), (3, 5)
    x = tokens(grid, dim=16, batch=1)
    q, k, v = (getattr(mixer, f"to_{n}")(x)[0] for n in "qkv")
    out = torch.zeros(15, 16, dtype=torch.float64)
    for head in range(2):
        s = slice(8 * head, 8 * head + 8)
        features = []
        for z, layer in ((q, mixer.q_features), (k, mixer.k_features)):
            z = z[:, s] @ layer.weight[head]
            features.append(torch.cat((z.softmax(-1), (-z).softmax(-1)), dim=-1))
        scores = features[0] @ features[1].T
        out[:, s] = scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v[:, s]
    torch.testing.assert_close(mixer(x, grid)[0], mixer.to_out[0](out))


def test_linfusion_is_its_definition():
    mixer, grid = build("linfusion", dim=16, heads=2, hidden=4), (3, 5)
    x = tokens(grid, dim=16, batch=1)
    inner = {}
    for n in "qk":
        first, norm, _, last = getattr(mixer, f"{n}_modulator")
        inner[n] = x + last(nn.functional.leaky_relu(norm(first(x)), 0.01))
        assert first.out_features == 4
    q, k = (nn.functional.elu(getattr(mixer, f"to_{n}")(inner[n])[0]) + 1 for n in "qk")
    v = mixer.to_v(x)[0]
    out = torch.zeros(15, 16, dtype=torch.float64)
    for head in range(2):
        s = slice(8 * head, 8 * head + 8)
        scores = q[:, s] @ k[:, s].T
        out[:, s] = scores / (scores.sum(-1, keepdim=True) + 1e-4) @ v[:, s]
    torch.testing.assert_close(mixer(x, grid)[0], mixer.to_out[0](out))
    mixer.q_modulator.init_identity()
    torch.testing.assert_close(mixer.qkv(x)[0].flatten(2), mixer.to_q(x))


def test_softmax_is_its_definition():
    mixer, grid = build("softmax", dim=16, heads=2), (3, 5)
    x = tokens(grid, dim=16)
    attention = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([getattr(mixer, f"to_{n}").weight for n in "qkv"]))
        attention.in_proj_bias.copy_(torch.cat([getattr(mixer, f"to_{n}").bias for n in "qkv"]))
        attention.out_proj.load_state_dict(mixer.to_out[0].state_dict())
    torch.testing.assert_close(mixer(x, grid), attention(x, x, x, need_weights=False)[0])


def test_local_is_its_definition():
    """Query by query over the keys of its disc, with all pooled keys, and a scale that grows with the tokens."""
    grid, prefix = (5, 7), 2
    mixer = build("local", dim=16, heads=2, radius=3, pool=4, base_tokens=12)
    x = tokens(grid, prefix=prefix, dim=16, batch=1)
    q, k, v = (getattr(mixer, f"to_{n}")(x)[0].view(37, 2, 8) for n in "qkv")
    pooled = []
    for z in (k, v):
        image = torch.zeros(8, 8, 2, 8, dtype=z.dtype)
        image[:5, :7] = z[2:].view(5, 7, 2, 8)
        squares = [(image[a : a + 4, b : b + 4], a, b) for a in (0, 4) for b in (0, 4)]
        there = [min(4, 5 - a) * min(4, 7 - b) for _, a, b in squares]
        weight = mixer.pool.weight[..., None, None]
        pooled.append(torch.stack([(s * weight).sum((0, 1)) * 16 / n for (s, _, _), n in zip(squares, there)]))
    out = torch.zeros(37, 2, 8, dtype=x.dtype)
    scale = (math.log(370, 12) / 8) ** 0.5
    for i in range(37):
        keys = [0, 1, *range(2, 37)]
        if i >= 2:
            row, column = divmod(i - 2, 7)
            keys = [0, 1] + [j for j in keys[2:] if (row - (j - 2) // 7) ** 2 + (column - (j - 2) % 7) ** 2 < 9]
        k_, v_ = (torch.cat((z[keys], p)) if i >= 2 else z for z, p in zip((k, v), pooled))
        out[i] = torch.einsum("nh,nhd->hd", (torch.einsum("hd,nhd->nh", q[i], k_) * scale).softmax(0), v_)
    torch.testing.assert_close(mixer(x, grid, prefix)[0], mixer.to_out[0](out.flatten(1)))
    fresh = create_mixer("local", 16, 2, pool=4)
    assert (fresh.pool.weight == 1 / 16).all()
    plain = create_mixer("softmax", 16, 2, dtype=torch.float64)
    wide = create_mixer("local", 16, 2, radius=9, dtype=torch.float64)
    wide.load_state_dict(plain.state_dict())  # it has the weights of a softmax, and is one within its radius
    torch.testing.assert_close(wide(x, grid, prefix), plain(x, grid, prefix))


@pytest.mark.parametrize("at_a_time", [None, 7])
def test_t5_is_one_step_of_gradient_descent(at_a_time, monkeypatch):
    """The inner gradient by automatic differentiation, the key's norm and the convolutions by hand; without gradients
    also part by part."""
    grid, prefix = (3, 5), 1
    mixer = build("t5", dim=16, heads=2)
    x = tokens(grid, prefix=prefix, dim=16, batch=2)
    q, k, v = (getattr(mixer, f"to_{n}")(x) for n in "qkv")
    k = (k - k.mean(1, keepdim=True)) / (k.var(1, keepdim=True, unbiased=False) + 1.0).sqrt()
    convolved = []
    for z, conv in ((q, mixer.q_conv), (k, mixer.k_conv)):
        image = z[:, 1:].transpose(1, 2).unflatten(2, grid)
        local = nn.functional.conv2d(image, conv.weight, conv.bias, padding=1, groups=16).flatten(2).transpose(1, 2)
        convolved.append(torch.cat((z[:, :1], z[:, 1:] + local), dim=1))
    q, k = convolved
    expected = torch.zeros_like(q)
    for sample in range(2):
        for head in range(2):
            s = slice(8 * head, 8 * head + 8)
            weights = [getattr(mixer.inner, f"w{i}")[head].detach().requires_grad_() for i in (1, 2, 3)]

            def network(u, w1, w2, w3):
                return (nn.functional.silu(u @ w1) * (u @ w2)) @ w3

            loss = -(network(k[sample, :, s], *weights) * v[sample, :, s]).sum() * 8**-0.5 / 16
            steps = torch.autograd.grad(loss, weights)
            expected[sample, :, s] = network(q[sample, :, s], *(w - g for w, g in zip(weights, steps)))
    if at_a_time:
        monkeypatch.setattr(t5, "_AT_A_TIME", at_a_time)
    with torch.set_grad_enabled(not at_a_time):
        torch.testing.assert_close(mixer(x, grid, prefix), mixer.to_out[0](expected))
    assert create_mixer("t5", 16, 2).inner.w1.abs().max() < 0.1


@pytest.mark.parametrize("at_a_time", [1 << 22, 700])
def test_what_t5_depends_on_is_the_norm_of_the_jacobian(at_a_time, monkeypatch):
    monkeypatch.setattr(t5, "_NUMBERS_AT_A_TIME", at_a_time)
    mixer, grid, prefix = build("t5", dim=16, heads=2), (3, 4), 1
    with torch.no_grad():
        for weight in mixer.inner.parameters():
            weight.mul_(4)  # so that the first two matrices matter
    x = tokens(grid, prefix, batch=1, dim=16)
    q, k, v = mixer._inputs(x, grid, prefix)
    jacobian = torch.autograd.functional.jacobian(lambda v: mixer.inner(q, k, v), v.detach())[0, :, :, :, 0]
    expected = torch.stack([jacobian[:, head, :, :, head].square().sum((1, 3)).sqrt() for head in range(2)])
    torch.testing.assert_close(mixer.dependence(x, grid, prefix=prefix)[0], expected)
    rows = torch.tensor([12, 0, 5])
    torch.testing.assert_close(mixer.dependence(x, grid, rows, prefix=prefix)[0], expected[:, rows])
    half = mixer.float().bfloat16().dependence(x.bfloat16(), grid, rows, prefix=prefix)
    assert half.dtype == torch.float32


def test_rope_scores_depend_on_the_displacement_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 30, 2, 16).contiguous()
    scores = torch.einsum("bnhd,bmhd->hnm", apply_rope(q, (5, 6)), apply_rope(k, (5, 6)))[0].view(5, 6, 5, 6)
    torch.testing.assert_close(scores[1:, 1:, 1:, 1:], scores[:-1, :-1, :-1, :-1], atol=1e-5, rtol=1e-5)
    assert (scores[0, 0, 1, 0] - scores[0, 0, 0, 1]).abs() > 1e-3  # rows and columns turn different channels
    x = torch.randn(1, 33, 2, 16)
    out = apply_rope(x, (5, 6), 3)
    assert torch.equal(out[:, :3], x[:, :3])
    assert torch.equal(out[:, 3], x[:, 3])  # row 0, column 0
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert apply_rope(x.half(), (5, 6), 3).dtype == torch.float16
    assert axial_angles((5, 6), 16, x.device).shape == (30, 8)
    with pytest.raises(ValueError, match="divisible by 4, got 6"):
        apply_rope(torch.randn(1, 4, 1, 6), (2, 2))


def test_gla_initialisation():
    """Xavier with gain 2^-2.5 for projections and convolution, zero biases, norms of one (ViG's code)."""
    mixer = create_mixer("gla", 128, 2)
    for name, parameter in mixer.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(parameter)
            bound = 2**-2.5 * (6 / (fan_in + fan_out)) ** 0.5
            assert parameter.abs().max() <= bound, name
            assert parameter.abs().max() > 0.9 * bound, name

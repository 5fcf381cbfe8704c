"""Scan-free linear mixers against their equations: pair by pair in float64, with the parameters by hand."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F

from scanvas.backbones.mixers import create_mixer

GRID, PREFIX, N = (3, 5), 1, 16  # one prefix token and 15 of an image
PLACES = [(t // 5, t % 5) for t in range(15)]


def build(name, **cfg):
    torch.manual_seed(0)
    mixer = create_mixer(name, 16, 2, dtype=torch.float64, **cfg)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.eval()


def tokens():
    return torch.randn(1, N, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def qkv(mixer, x):
    """Each ``(heads, N, D)``."""
    return [getattr(mixer, f"to_{n}")(x)[0].view(N, 2, 8).transpose(0, 1) for n in "qkv"]


def joined(heads):
    return heads.transpose(0, 1).flatten(1)


def convolved(v, weight, bias, groups=16):
    """A depthwise convolution of ``(N, C)`` with zeros for the prefix."""
    image = v[PREFIX:].T.unflatten(1, GRID)[None]
    out = F.conv2d(image, weight, bias, padding=weight.shape[-1] // 2, groups=groups)
    return F.pad(out.flatten(2)[0].T, (0, 0, PREFIX, 0))


def conv(mixer, v):
    return convolved(joined(v), mixer.conv.weight, mixer.conv.bias)


def rotated(z, frequencies):
    """Pairs of neighbouring channels of ``(…, N, D)`` as complex numbers, turned by the row and then the column."""
    out = z.clone()
    for token, (row, column) in enumerate(PLACES, start=PREFIX):
        for i, place in enumerate([row, column]):
            for j, frequency in enumerate(frequencies):
                c = 2 * (i * len(frequencies) + j)
                turn = cmath.exp(1j * place * frequency)
                a, b = z[..., token, c], z[..., token, c + 1]
                out[..., token, c] = a * turn.real - b * turn.imag
                out[..., token, c + 1] = a * turn.imag + b * turn.real
    return out


PER_HEAD = (1.0, 1e-4)  # 10000^-linspace(0, 1, d/4)


def test_focused_is_its_definition():
    mixer, x = build("focused", grid_size=GRID), tokens()
    q, k, v = (joined(z) for z in qkv(mixer, x))
    k = torch.cat((k[:PREFIX], k[PREFIX:] + mixer.positions.weight.flatten(1).T))

    def phi(z):
        u = (z.relu() + 1e-6) / torch.log1p(mixer.feature_map.scale.exp())
        return u.norm(dim=1, keepdim=True) * u**3 / (u**3).norm(dim=1, keepdim=True)

    q, k = phi(q), phi(k)
    out = torch.zeros_like(v)
    for head in (slice(0, 8), slice(8, 16)):
        scores = q[:, head] @ k[:, head].T
        out[:, head] = scores / (scores.sum(1, keepdim=True) + 1e-6) @ v[:, head]
        out[:, head] += convolved(v[:, head], mixer.conv.weight, mixer.conv.bias, groups=8)
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], mixer.to_out[0](out))
    assert not create_mixer("focused", 16, 2).positions.weight.any()
    tiny = create_mixer("focused", 16, 2, dtype=torch.float32).feature_map(torch.full((1, 1, 16), -1.0))
    torch.testing.assert_close(tiny, torch.full_like(tiny, 1e-6 / math.log(2)))  # where u³ would be 0 in half precision


def test_agent_is_its_definition():
    mixer, x = build("agent", grid_size=(4, 2), agent_size=2, prefix_bias=True), tokens()
    q, k, v = qkv(mixer, x)
    image = q[:, PREFIX:].unflatten(1, GRID)
    areas = [(a, b) for a in (slice(0, 2), slice(1, 3)) for b in (slice(0, 3), slice(2, 5))]
    agents = torch.stack([image[:, a, b].mean((1, 2)) for a, b in areas], dim=1)

    def bias(tables):
        def resized(table, size):
            return F.interpolate(table.weight[None], size=size, mode="bilinear")[0]

        image = resized(tables.area, GRID) + resized(tables.rows, (3, 1)) + resized(tables.columns, (1, 5))
        return torch.cat((tables.prefix.weight.flatten(1), image.flatten(1)), dim=1).view(2, 4, N)

    gather = (agents @ k.mT / 8**0.5 + bias(mixer.to_agents)).softmax(-1)
    spread = (q @ agents.mT / 8**0.5 + bias(mixer.from_agents).mT).softmax(-1)
    expected = mixer.to_out[0](joined(spread @ (gather @ v)) + conv(mixer, v))
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], expected)
    fresh = create_mixer("agent", 16, 2)
    assert fresh.to_agents.area.weight.shape == (2 * 49, 7, 7)
    assert 0.01 < fresh.to_agents.area.weight.std() < 0.03


def test_inline_is_its_definition():
    mixer, x = build("inline"), tokens()
    q, k, v = qkv(mixer, x)
    s = 8**-0.5
    A = s / N * q @ k.mT + (1 - s * q @ k.mean(1, keepdim=True).mT) / N
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]))
    first, last = mixer.kernel_net[0], mixer.kernel_net[2]
    mean, hidden, kernels = x[0].mean(0), [], []
    for head in range(2):
        c, wide = slice(8 * head, 8 * head + 8), slice(72 * head, 72 * head + 72)
        hidden = F.gelu(first.weight[c, :, 0] @ mean[c] + first.bias[c])
        kernels.append(last.weight[wide, :, 0] @ hidden + last.bias[wide])
    local = convolved(joined(v), torch.cat(kernels).view(16, 1, 3, 3), None)
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], mixer.to_out[0](joined(A @ v) + local))
    blocks = [create_mixer("inline", 192, 6) for _ in range(12)]  # with what else DeiT-T has, the paper's 6.5M
    rest = 12 * (2 * 4 * 192 * 192 + 5 * 192 + 4 * 192) + 3 * 256 * 192 + 192 * (1 + 198 + 2) + 193 * 1000
    assert (sum(p.numel() for b in blocks for p in b.parameters()) + rest) / 1e6 == pytest.approx(6.5, abs=0.05)


def test_mlla_is_its_definition():
    mixer, x = build("mlla"), tokens()
    u = mixer.to_v(x)[0]
    inner = convolved(u, mixer.value_conv.weight, mixer.value_conv.bias)
    u = F.silu(torch.cat((u[:PREFIX], inner[PREFIX:])))
    q, k = (F.elu(layer(u)) + 1 for layer in (mixer.to_q, mixer.to_k))
    turned = [rotated(z, [10000 ** (-i / 4) for i in range(4)]) for z in (q, k)]  # over all 16 channels
    q, k, v, rq, rk = (z.view(N, 2, 8).transpose(0, 1) for z in (q, k, u, *turned))
    A = rq @ rk.mT / ((q @ k.mT).sum(-1, keepdim=True) + 1e-6)
    gate = F.silu(mixer.gate_proj(x[0]))
    expected = mixer.to_out[0]((joined(A @ v) + conv(mixer, v)) * gate)
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], expected, atol=1e-6, rtol=1e-6)  # angles are float32


def test_mala_is_its_definition():
    mixer, x = build("mala"), tokens()
    q, k, v = qkv(mixer, x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = 8**-0.5 * q @ k.mean(1, keepdim=True).mT
    plain, turned = q @ k.mT, rotated(q, PER_HEAD) @ rotated(k, PER_HEAD).mT
    plain, turned = (8**-0.5 / N * scores * (1 + 1 / (z + 1e-6)) - z / N for scores in (plain, turned))
    torch.testing.assert_close(plain.sum(-1), torch.ones_like(z[..., 0]), atol=1e-4, rtol=0)
    expected = mixer.to_out[0]((joined(turned @ v) + conv(mixer, v)) * mixer.gate_proj(x[0]))
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], expected, atol=1e-6, rtol=1e-6)


def test_rala_is_its_definition():
    mixer, x = build("rala"), tokens()
    q, k, v = qkv(mixer, x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    alpha = N * (8**-0.5 * k @ q.mean(1)[..., None]).softmax(1)
    k = alpha * k
    A = rotated(q, PER_HEAD) @ rotated(k, PER_HEAD).mT / ((q @ k.mT).sum(-1, keepdim=True) + 1e-6)
    expected = mixer.to_out[0]((joined(A @ v) + conv(mixer, v)) * mixer.gate_proj(x[0]))
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], expected, atol=1e-6, rtol=1e-6)


def test_nala_is_its_definition():
    mixer, x = build("nala"), tokens()
    q, k, v = qkv(mixer, x)
    length = q.square().sum(-1, keepdim=True).sqrt()
    power = 3 * (0.5 + length.tanh())
    numerator = divisor = 0
    for sign in (1, -1):
        fq = (sign * q / (length + 1e-6)).relu() ** power
        fk = (sign * k**3).relu()
        numerator = numerator + rotated(fq, PER_HEAD) @ rotated(fk, PER_HEAD).mT
        divisor = divisor + (fq @ fk.mT).sum(-1, keepdim=True)
    out = joined(numerator / (divisor + 1e-6) @ v) + conv(mixer, v)
    out = F.layer_norm(out, (16,), mixer.out_norm.weight, mixer.out_norm.bias) * F.silu(mixer.gate_proj(x[0]))
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], mixer.to_out[0](out), atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        mixer.to_q.weight.zero_(), mixer.to_q.bias.zero_()
    mixer(x, GRID, PREFIX).sum().backward()  # a query of length zero
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_flow_is_its_definition():
    mixer, x = build("flow"), tokens()
    q, k, v = qkv(mixer, x)
    q, k = q.sigmoid(), k.sigmoid()
    pairs = q @ k.mT
    incoming, outgoing = pairs.sum(2, keepdim=True) + 1e-6, pairs.sum(1, keepdim=True) + 1e-6
    sink = (pairs / outgoing).sum(2, keepdim=True)
    source = (pairs / incoming).sum(1).clamp(-1, 1)
    out = sink.sigmoid() * (pairs / incoming) @ (v * N * source.softmax(1)[..., None])
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], mixer.to_out[0](joined(out)))


@pytest.mark.parametrize("positions", ["1d", "2d"])
def test_cosformer_is_its_definition(positions):
    mixer, x = build("cosformer", positions=positions), tokens()
    q, k, v = qkv(mixer, x)
    q, k = q.relu(), k.relu()

    def angle(token, channel):
        if token < PREFIX:
            return math.pi / 4
        row, column = PLACES[token - PREFIX]
        if positions == "1d":
            return math.pi * (token - PREFIX) / (2 * 15)
        return math.pi * row / (2 * 3) if channel < 4 else math.pi * column / (2 * 5)

    w = torch.zeros(2, N, N, dtype=x.dtype)
    for i in range(N):
        for j in range(N):
            cosines = x.new_tensor([math.cos(angle(i, c) - angle(j, c)) for c in range(8)])
            w[:, i, j] = (q[:, i] * k[:, j] * cosines).sum(-1)
    out = w / w.sum(-1, keepdim=True).clamp_min(1e-6) @ v
    torch.testing.assert_close(mixer(x, GRID, PREFIX)[0], mixer.to_out[0](joined(out)))
    assert w.min() >= 0


def test_errors_of_options():
    for name, message, cfg in (
        ("focused", "power must be at least 1, got 0.5", {"power": 0.5}),
        ("focused", "kernel_size must be odd, or 0 for no convolution; got 4", {"kernel_size": 4}),
        ("agent", "agent_size must be positive, got 0", {"agent_size": 0}),
        ("cosformer", "positions must be '1d' or '2d', got '3d'", {"positions": "3d"}),
    ):
        with pytest.raises(ValueError, match=message):
            create_mixer(name, 16, 2, **cfg)
    for name in ("mala", "rala", "nala"):
        with pytest.raises(ValueError, match="rope needs heads of a width divisible by 4, got 6"):
            create_mixer(name, 24, 4)
    with pytest.raises(ValueError, match="rope needs dim divisible by 4, got 6"):
        create_mixer("mlla", 6, 2)


@pytest.mark.parametrize("name", ["mala", "rala", "nala", "gated_softmax"])
@torch.no_grad()
def test_float16_holds_what_fits_in_it(name):
    """Of inputs 20 times as large as a norm gives: sums and divisors are float32. At 30 times, MALA's exact product
    with its gate, which grows with the fourth power of the input, is beyond 65504, float16's largest number."""
    torch.manual_seed(0)
    mixer, x = create_mixer(name, 64, 2, dtype=torch.float16).eval(), 20 * torch.randn(2, 1 + 12 * 13, 64).half()
    got = mixer(x, (12, 13), 1).double()
    expected = mixer.double()(x.double(), (12, 13), 1)
    assert (got - expected).norm() < 0.01 * expected.norm()

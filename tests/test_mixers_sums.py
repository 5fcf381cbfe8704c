"""Mixers without gates over time against their equations, in float64, with the parameters by hand."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F

from scanvas import LinearDiTTransformer2DModel
from scanvas.backbones.mixers import create_mixer, sla

GRID = (3, 5)


def build(name, **cfg):
    torch.manual_seed(0)
    mixer = create_mixer(name, 16, 2, dtype=torch.float64, **cfg)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.eval()


def tokens(count):
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def qkv(mixer, x):
    return [getattr(mixer, f"to_{n}")(x)[0].view(-1, 2, 8).transpose(0, 1) for n in "qkv"]


def finish(mixer, out):
    """``(heads, N, D)`` through the output projection."""
    return mixer.to_out[0](out.transpose(0, 1).flatten(1))


def convolved(conv, tokens, grid=GRID):
    """A depthwise 5×5 convolution of ``(N, C)``."""
    image = tokens.T.unflatten(1, grid)[None]
    return F.conv2d(image, conv.weight, conv.bias, padding=2, groups=len(tokens.T)).flatten(2)[0].T


def divided(scores, v, eps):
    return scores / (scores.sum(-1, keepdim=True) + eps) @ v


def check_map(mixer, x, grid, prefix):
    matrix, values = mixer.attention_map(x, grid, prefix=prefix), mixer.values(x, grid, prefix)
    torch.testing.assert_close((matrix @ values).transpose(1, 2), mixer.attend(x, grid, prefix))
    rows = torch.tensor([3, 0])
    torch.testing.assert_close(mixer.attention_map(x, grid, rows, prefix=prefix), matrix[:, :, rows])


def test_sana_is_its_definition():
    mixer, x = build("sana", qk_norm=True), tokens(15)
    assert mixer.to_q.bias is None
    assert mixer.to_out[0].bias is not None
    q, k = (F.rms_norm(getattr(mixer, f"to_{n}")(x), (16,), getattr(mixer, f"{n}_norm").weight, 1e-6) for n in "qk")
    q, k = (z[0].view(-1, 2, 8).transpose(0, 1) for z in (q, k))
    v = qkv(mixer, x)[2]
    torch.testing.assert_close(mixer(x, GRID)[0], finish(mixer, divided(q.relu() @ k.relu().mT, v, 1e-15)))


@pytest.mark.parametrize("prefix", [0, 2])
def test_retention_is_its_definition(prefix):
    """Row by row, then column by column; tokens without a place join each line, at no distance."""
    mixer, x = build("retention", gate=True, initial=1.0, spread=3.0), tokens(prefix + 15)
    q, k, v = qkv(mixer, x)
    out = torch.zeros_like(v)
    first = list(range(prefix))
    for head, decay in enumerate((1 - 2**-1.0, 1 - 2**-2.5)):
        middle = v[head].clone()
        for step in (0, 1):
            source = middle.clone()
            for i in range(15):
                place = divmod(i, 5)
                line = [j for j in range(15) if divmod(j, 5)[step] == place[step]]
                away = [abs(divmod(j, 5)[1 - step] - place[1 - step]) for j in line]
                index = [prefix + j for j in line] + first
                fade = torch.tensor(away + [0] * prefix, dtype=v.dtype) * math.log(decay)
                weight = (k[head, index] @ q[head, prefix + i] * 8**-0.5 + fade).softmax(0)
                middle[prefix + i] = weight @ source[index]
        out[head] = middle
        out[head, :prefix] = (q[head, :prefix] @ k[head].T * 8**-0.5).softmax(-1) @ v[head]
    torch.testing.assert_close(mixer.attend(x, GRID, prefix)[0], out.transpose(0, 1))
    local = out.transpose(0, 1).flatten(1)
    local[prefix:] += convolved(mixer.conv, v.transpose(0, 1).flatten(1)[prefix:])
    expected = mixer.to_out[0](local * mixer.gate_proj(x)[0].sigmoid())
    torch.testing.assert_close(mixer(x, GRID, prefix)[0], expected)
    with pytest.raises(ValueError, match="initial must be positive and spread not negative, got 0 and 4"):
        create_mixer("retention", 16, 2, initial=0)


@pytest.mark.parametrize("prefix", [0, 2])
def test_lina_is_its_definition(prefix):
    mixer, x = build("lina", gate_grid=GRID), tokens(prefix + 15)
    q, k, v = qkv(mixer, x)
    kappa, nu = (F.pad(g.weight.flatten(1), (prefix, 0), value=1.0) for g in (mixer.k_gate, mixer.v_gate))
    scores = (q.relu() + 1e-6) @ ((k.relu() + 1e-6) * kappa[..., None]).mT
    out = divided(scores, v * nu[..., None], 1e-6).transpose(0, 1).flatten(1)
    out[prefix:] += convolved(mixer.conv, x[0, prefix:])
    torch.testing.assert_close(mixer(x, GRID, prefix)[0], mixer.to_out[0](out))


def test_places_are_interpolated_axis_by_axis():
    """A ramp along one axis stays one on another grid; a gate that is one does nothing on any."""
    gate = build("lina", gate_grid=(4, 6)).k_gate
    with torch.no_grad():
        gate.weight.copy_(torch.arange(6.0).expand(2, 4, 6))
    for grid in ((4, 12), (8, 3), (1, 6)):
        places = gate(grid, 1)
        assert (places[0] == 1).all()
        places = places[1:].view(*grid, 2)
        torch.testing.assert_close(places, places[:1].expand_as(places))
        assert (places.diff(dim=1) > 0.2).all()
    assert (create_mixer("lina", 16, 2).k_gate((7, 9), 2) == 1).all()
    assert (create_mixer("slab", 16, 2).position((7, 9), 2) == 0).all()
    with pytest.raises(ValueError, match=r"grid of parameters must be \(H, W\), both at least 1; got \(0, 3\)"):
        create_mixer("lina", 16, 2, gate_grid=(0, 3))


def test_slab_is_its_definition():
    mixer, x = build("slab", pos_grid=GRID), tokens(16)
    q, k, v = qkv(mixer, x)
    position = F.pad(mixer.position.weight.flatten(1).T, (0, 0, 1, 0)).view(16, 2, 8).transpose(0, 1)
    out = divided(q.relu() @ (k + position).relu().mT, v, 1e-6)
    assert mixer.conv.weight.shape == (8, 1, 5, 5)
    out[:, 1:] += torch.stack([convolved(mixer.conv, v[head, 1:]) for head in range(2)])  # one kernel for both heads
    torch.testing.assert_close(mixer(x, GRID, 1)[0], finish(mixer, out))


@pytest.mark.parametrize("at_a_time", [1024, 3])
def test_sla_is_its_definition(at_a_time, monkeypatch):
    """Blocks of 4 in 18 tokens, the last one half empty; of five blocks the two best are kept."""
    monkeypatch.setattr(sla, "_BLOCKS_AT_A_TIME", at_a_time)
    mixer, x = build("sla", block=4, keep=0.5), tokens(18)
    q, k, v = qkv(mixer, x)
    sparse, linear = torch.zeros_like(v), torch.zeros_like(v)
    blocks = [list(range(a, min(a + 4, 18))) for a in range(0, 18, 4)]
    for head in range(2):
        means = [torch.stack([z[head, b].mean(0) for b in blocks]) for z in (q, k - k.mean(1, keepdim=True))]
        for scores, queries in zip(means[0] @ means[1].T, blocks):
            keys = [j for b in scores.argsort(descending=True)[:2].tolist() for j in blocks[b]]
            weights = (q[head, queries] @ k[head, keys].T * 8**-0.5).softmax(-1)
            sparse[head, queries] = weights @ v[head, keys]
        linear[head] = divided(q[head].softmax(-1) @ k[head].softmax(-1).T, v[head], 1e-5)
    expected = sparse + linear @ mixer.linear_proj.weight.T + mixer.linear_proj.bias
    torch.testing.assert_close(mixer(x, (3, 6))[0], finish(mixer, expected))
    check_map(mixer, x, (3, 6), 0)

    fresh, softmax = create_mixer("sla", 16, 2, block=4, keep=1.0), create_mixer("softmax", 16, 2)
    fresh.load_state_dict(softmax.state_dict(), strict=False)  # with all blocks, at first, it is a softmax
    torch.testing.assert_close(fresh(x.float(), (3, 6)), softmax(x.float(), (3, 6)))
    for message, cfg in {
        "block must be a whole number of tokens, at least 1; got 0": {"block": 0},
        "keep must be a share of the blocks, more than 0 and at most 1; got 0": {"keep": 0},
    }.items():
        with pytest.raises(ValueError, match=message):
            create_mixer("sla", 16, 2, **cfg)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("window", [0, 2])
def test_l2_is_its_definition(window, prefix):
    mixer, x = build("l2", window=window, **({} if window else {"least": 8.0})), tokens(prefix + 15)
    q, k, v = qkv(mixer, x)
    if window:

        def seen(i, j):
            places = [divmod(n - prefix, 5) for n in (i, j)]
            return min(i, j) < prefix or all(a // 2 == b // 2 for a, b in zip(*places))

        mask = torch.tensor([[seen(i, j) for j in range(len(x[0]))] for i in range(len(x[0]))])
        out = (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    else:
        scores = q.relu() @ k.relu().mT
        total = scores.sum(-1, keepdim=True)
        assert (total < 8).any()  # the bound is met, and not by all
        assert (total > 8).any()
        out = mixer.scale.weight[:, None, None] * scores / total.clamp(min=8) @ v
        assert (create_mixer("l2", 16, 2).scale.weight == 8**-0.5).all()
    torch.testing.assert_close(mixer(x, GRID, prefix)[0], finish(mixer, out))
    check_map(mixer, x, GRID, prefix)
    half = copy.deepcopy(mixer).bfloat16()(x.bfloat16(), GRID, prefix)
    torch.testing.assert_close(half.double(), mixer(x, GRID, prefix), atol=0.1, rtol=0.1)
    if window and prefix:
        program = torch.export.export(mixer, (x, GRID, prefix)).module()
        torch.testing.assert_close(program(x.flip(1), GRID, prefix), mixer(x.flip(1), GRID, prefix))
    for message, cfg in {
        "window must be the side of a window in tokens, or 0 for none; got -1": {"window": -1},
        "least must be positive, got 0": {"least": 0},
    }.items():
        with pytest.raises(ValueError, match=message):
            create_mixer("l2", 16, 2, **cfg)


def test_l2_alternates_in_models_and_in_each_stage():
    def windows(blocks):
        return [block.mixer.window for block in blocks]

    vig = timm.create_model("test_vig", mixer="l2", depth=3, img_size=32, patch_size=8)
    assert windows(vig.blocks) == [7, 0, 7]
    stages = timm.create_model("test_vig_h", mixer="l2", depths=(2, 3), num_heads=(1, 2)).stages
    assert [windows(stage.blocks) for stage in stages] == [[7, 0], [7, 0, 7]]
    small = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 4, "mixer": "l2"}
    assert windows(LinearDiTTransformer2DModel(**small).transformer_blocks) == [7, 0, 7]
    same = LinearDiTTransformer2DModel(**small, mixer_kwargs={"window": 3}).transformer_blocks  # what is given counts
    assert windows(same) == [3, 3, 3]

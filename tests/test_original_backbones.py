"""MLLA, Agent-DeiT and InLine-DeiT: checkpoints under the original names against the architectures read once more from
their descriptions, in float64 and with attention as a matrix; DeiT itself against timm."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import scanvas  # noqa: F401 - registers the models
from scanvas.backbones.mixers import MIXERS
from scanvas.train.flops import count_flops


def randn(generator, *shape, scale=0.3):
    return scale * torch.randn(*shape, generator=generator)


class State(dict):
    """A checkpoint, filled by name and shape."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def layer(self, name, *shape, bias=True):
        fan = max(1, torch.Size(shape[1:]).numel())
        self[f"{name}.weight"] = randn(self.generator, *shape, scale=fan**-0.5)
        if bias:
            self[f"{name}.bias"] = randn(self.generator, shape[0])

    def norm(self, name, dim, batch=False):
        self[f"{name}.weight"], self[f"{name}.bias"] = 1 + randn(self.generator, dim), randn(self.generator, dim)
        if batch:
            self[f"{name}.running_mean"] = randn(self.generator, dim)
            self[f"{name}.running_var"] = 1 + randn(self.generator, dim).abs()
            self[f"{name}.num_batches_tracked"] = torch.tensor(7)


def load(name, state, path, **kwargs):
    torch.save({"model": dict(state)}, path / "original.pth")
    overlay = {"file": str(path / "original.pth")}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval().double()


def read(state, name, x, kind="linear", **kwargs):
    w, b = state[f"{name}.weight"].double(), state.get(f"{name}.bias")
    b = None if b is None else b.double()
    if kind == "linear":
        return F.linear(x, w, b)
    if kind == "norm":
        return F.layer_norm(x, w.shape, w, b, **kwargs)
    return F.conv2d(x, w, b, padding=w.shape[-1] // 2, groups=x.shape[1] // w.shape[1], **kwargs)


def batch_norm(state, name, x):
    w, b, mean, var = (
        state[f"{name}.{k}"].double()[:, None, None] for k in ("weight", "bias", "running_mean", "running_var")
    )
    return (x - mean) / (var + 1e-5).sqrt() * w + b


def image(x, grid):
    return x.transpose(1, 2).unflatten(2, grid)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# MLLA


def mlla_state(dim, depths, classes) -> State:
    s = State()
    for name, shape in {
        "conv1": (dim // 2, 3, 3, 3),
        "conv2.0": (dim // 2, dim // 2, 3, 3),
        "conv2.1": (dim // 2, dim // 2, 3, 3),
        "conv3.0": (4 * dim, dim // 2, 3, 3),
        "conv3.1": (dim, 4 * dim, 1, 1),
    }.items():
        s.layer(f"patch_embed.{name}.conv", *shape, bias=False)
        s.norm(f"patch_embed.{name}.norm", shape[0], batch=True)
    for i, depth in enumerate(depths):
        c = dim * 2**i
        for j in range(depth):
            p = f"layers.{i}.blocks.{j}"
            for name in ("cpe1", "cpe2", "dwc", "attn.lepe"):
                s.layer(f"{p}.{name}", c, 1, 3, 3)
            for name in ("in_proj", "act_proj", "out_proj"):
                s.layer(f"{p}.{name}", c, c)
            s.layer(f"{p}.attn.qk", 2 * c, c)
            s.norm(f"{p}.norm1", c)
            s.norm(f"{p}.norm2", c)
            s.layer(f"{p}.mlp.fc1", 4 * c, c)
            s.layer(f"{p}.mlp.fc2", c, 4 * c)
            s[f"{p}.attn.rope.rotations"] = torch.zeros(14, 14, c // 2, 2)
        if i < len(depths) - 1:
            p = f"layers.{i}.downsample.conv"
            s.layer(f"{p}.0.conv", 8 * c, c, 1, 1)
            s.layer(f"{p}.1.conv", 8 * c, 1, 3, 3)
            s.layer(f"{p}.2.conv", 2 * c, 8 * c, 1, 1)
            s.norm(f"{p}.2.norm", 2 * c, batch=True)
    s.norm("norm", c)
    s.layer("head", classes, c)
    return s


def turn(x: Tensor, grid) -> Tensor:
    """Rotary positions of ``(B, N, C)``: the first half of the channel pairs by the row, the second by the column."""
    count = x.shape[-1] // 4
    frequency = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    place = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).double()
    angle = torch.cat((place[:, :1] * frequency, place[:, 1:] * frequency), dim=1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def mlla_block(s, p, x, grid, heads):
    x = x + tokens(read(s, f"{p}.cpe1", image(x, grid), "conv"))
    z = read(s, f"{p}.norm1", x, "norm")
    gate = F.silu(read(s, f"{p}.act_proj", z))
    u = F.silu(tokens(read(s, f"{p}.dwc", image(read(s, f"{p}.in_proj", z), grid), "conv")))
    q, k = (F.elu(half) + 1 for half in read(s, f"{p}.attn.qk", u).chunk(2, dim=-1))
    weights = split(turn(q, grid), heads) @ split(turn(k, grid), heads).mT
    divisor = (split(q, heads) @ split(k, heads).mT).sum(-1, keepdim=True)
    attended = (weights / divisor @ split(u, heads)).transpose(1, 2).flatten(2)
    attended = attended + tokens(read(s, f"{p}.attn.lepe", image(u, grid), "conv"))
    x = x + read(s, f"{p}.out_proj", attended * gate)
    x = x + tokens(read(s, f"{p}.cpe2", image(x, grid), "conv"))
    return x + read(s, f"{p}.mlp.fc2", F.gelu(read(s, f"{p}.mlp.fc1", read(s, f"{p}.norm2", x, "norm"))))


def mlla_reading(s, x, depths, heads):
    def conv(name, x, **kwargs):
        return batch_norm(s, f"patch_embed.{name}.norm", read(s, f"patch_embed.{name}.conv", x, "conv", **kwargs))

    x = conv("conv1", x, stride=2).relu()
    x = x + conv("conv2.1", conv("conv2.0", x).relu())
    x = conv("conv3.1", conv("conv3.0", x, stride=2).relu())
    for i, depth in enumerate(depths):
        grid = x.shape[2:]
        x = tokens(x)
        for j in range(depth):
            x = mlla_block(s, f"layers.{i}.blocks.{j}", x, grid, heads[i])
        x = image(x, grid)
        if i < len(depths) - 1:
            p = f"layers.{i}.downsample.conv"
            x = read(s, f"{p}.0.conv", x, "conv").relu()
            x = read(s, f"{p}.1.conv", x, "conv", stride=2).relu()
            x = batch_norm(s, f"{p}.2.norm", read(s, f"{p}.2.conv", x, "conv"))
    return read(s, "head", read(s, "norm", tokens(x), "norm").mean(1))


@pytest.mark.parametrize("size", [(64, 64), (52, 90)])
def test_mlla(size, tmp_path):
    config = {"embed_dim": 16, "depths": (1, 2, 1), "num_heads": (1, 2, 4)}
    state = mlla_state(16, config["depths"], 5)
    model = load("mlla_tiny", state, tmp_path, num_classes=5, **config)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = mlla_reading(state, x, config["depths"], config["num_heads"])
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


# DeiT


def deit_state(kind, dim, depth, heads, grid, classes, agents=4) -> State:
    s = State()
    g = s.generator
    s.layer("patch_embed.proj", dim, 3, 8, 8)
    s["cls_token"], s["pos_embed"] = randn(g, 1, 1, dim), randn(g, 1, 1 + grid[0] * grid[1], dim)
    for i in range(depth):
        p = f"blocks.{i}"
        s.norm(f"{p}.norm1", dim)
        s.norm(f"{p}.norm2", dim)
        s.layer(f"{p}.attn.qkv", 3 * dim, dim)
        s.layer(f"{p}.attn.proj", dim, dim)
        s.layer(f"{p}.mlp.fc1", 4 * dim, dim)
        s.layer(f"{p}.mlp.fc2", dim, 4 * dim)
        if kind == "agent" and i < depth - 1:
            s.layer(f"{p}.attn.dwc", dim, 1, 3, 3)
            shapes = {
                "an_bias": (heads, agents, 7, 7),
                "na_bias": (heads, agents, 7, 7),
                "ah_bias": (1, heads, agents, grid[0], 1),
                "aw_bias": (1, heads, agents, 1, grid[1]),
                "ha_bias": (1, heads, grid[0], 1, agents),
                "wa_bias": (1, heads, 1, grid[1], agents),
                "ac_bias": (1, heads, agents, 1),
                "ca_bias": (1, heads, 1, agents),
            }
            s.update({f"{p}.attn.{name}": randn(g, *shape, scale=1.0) for name, shape in shapes.items()})
        if kind == "inline":
            s.layer(f"{p}.attn.residual.0", dim, dim // heads, 1)
            s.layer(f"{p}.attn.residual.2", 9 * dim, dim // heads, 1)
    s.norm("norm", dim)
    s.layer("head", classes, dim)
    return s


def softmax_attention(s, p, x, q, k, v, grid):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def local(out, image_values):
    """Add a convolution of the image's values, ``(B, C, H, W)``, to all tokens but the first."""
    return out + F.pad(tokens(image_values), (0, 0, 1, 0))


def agent_attention(s, p, x, q, k, v, grid):
    if f"{p}.dwc.weight" not in s:
        return softmax_attention(s, p, x, q, k, v, grid)
    t = {name: s[f"{p}.{name}_bias"].double() for name in ("an", "na", "ah", "aw", "ha", "wa", "ac", "ca")}
    heads, scale = q.shape[1], q.shape[-1] ** -0.5
    side = int(t["an"].shape[1] ** 0.5)
    pooled = F.adaptive_avg_pool2d(image(q.transpose(1, 2).flatten(2)[:, 1:], grid), side)
    agents = split(tokens(pooled), heads)
    area_1, area_2 = (F.interpolate(t[name], size=grid, mode="bilinear") for name in ("an", "na"))
    to_agents = torch.cat((t["ac"][0], (area_1 + t["ah"][0] + t["aw"][0]).flatten(2)), dim=-1)
    from_image = area_2.flatten(2).mT + (t["ha"][0] + t["wa"][0]).flatten(1, 2)
    from_agents = torch.cat((t["ca"][0], from_image), dim=1)
    gathered = (agents @ k.mT * scale + to_agents).softmax(-1) @ v
    return (q @ agents.mT * scale + from_agents).softmax(-1) @ gathered


def inline_attention(s, p, x, q, k, v, grid):
    N = x.shape[1]
    scores = q @ k.mT * q.shape[-1] ** -0.5 / N
    return (scores - scores.mean(-1, keepdim=True) + 1 / N) @ v


def deit_reading(s, x, depth, heads, grid, attention):
    x = F.conv2d(x, s["patch_embed.proj.weight"].double(), s["patch_embed.proj.bias"].double(), stride=8)
    x = torch.cat((s["cls_token"].double().expand(len(x), -1, -1), tokens(x)), dim=1) + s["pos_embed"].double()
    for i in range(depth):
        p = f"blocks.{i}.attn"
        z = read(s, f"blocks.{i}.norm1", x, "norm", eps=1e-6)
        q, k, v = (split(part, heads) for part in read(s, f"{p}.qkv", z).chunk(3, dim=-1))
        out = attention(s, p, z, q, k, v, grid).transpose(1, 2).flatten(2)
        values = image(v.transpose(1, 2).flatten(2)[:, 1:], grid)
        if f"{p}.dwc.weight" in s:
            out = local(out, read(s, f"{p}.dwc", values, "conv"))
        if f"{p}.residual.0.weight" in s:
            w = [s[f"{p}.residual.{j}.weight"].double() for j in (0, 2)]
            b = [s[f"{p}.residual.{j}.bias"].double() for j in (0, 2)]
            hidden = F.gelu(F.conv1d(z.mean(1)[:, :, None], w[0], b[0], groups=heads))
            kernels = F.conv1d(hidden, w[1], b[1], groups=heads).view(len(x), -1, 1, 3, 3)
            each = [F.conv2d(v_, k_, padding=1, groups=len(k_)) for v_, k_ in zip(values, kernels)]
            out = local(out, torch.stack(each))
        x = x + read(s, f"{p}.proj", out)
        z = read(s, f"blocks.{i}.norm2", x, "norm", eps=1e-6)
        x = x + read(s, f"blocks.{i}.mlp.fc2", F.gelu(read(s, f"blocks.{i}.mlp.fc1", z)))
    return read(s, "head", read(s, "norm", x, "norm", eps=1e-6)[:, 0])


@pytest.mark.parametrize("grid", [(3, 3), (8, 9)])
@pytest.mark.parametrize(("kind", "attention"), [("agent", agent_attention), ("inline", inline_attention)])
def test_deit(kind, attention, grid, tmp_path):
    state = deit_state(kind, 24, 3, 2, grid, 5)
    size = (8 * grid[0], 8 * grid[1])
    config = {"embed_dim": 24, "depth": 3, "num_heads": 2, "patch_size": 8, "img_size": size}
    if kind == "agent":
        config |= {"linear_layers": 2, "mixer_kwargs": {"agent_size": 2}}
    model = load(f"{kind}_deit_tiny", state, tmp_path, num_classes=5, **config)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(model(x), deit_reading(state, x, 3, 2, grid, attention), atol=1e-6, rtol=1e-6)


def test_what_belongs_to_places_is_resampled(tmp_path):
    """A checkpoint in a model for larger images is the model of its own size called with such images."""
    state = deit_state("agent", 24, 3, 2, (5, 5), 5)
    config = {"embed_dim": 24, "depth": 3, "num_heads": 2, "patch_size": 8, "linear_layers": 2, "num_classes": 5}
    config["mixer_kwargs"] = {"agent_size": 2}
    own = load("agent_deit_tiny", state, tmp_path, img_size=40, **config)
    larger = load("agent_deit_tiny", state, tmp_path, img_size=(48, 72), **config)
    assert larger.blocks[0].mixer.to_agents.rows.weight.shape == (8, 6, 1)
    x = torch.randn(1, 3, 48, 72, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(larger(x), own(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_deit_with_softmax_is_timms(pool, tmp_path):
    """Weights of timm's vision transformer load as they are."""
    config = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": (40, 24), "num_classes": 5}
    torch.manual_seed(0)
    theirs = timm.create_model("deit_tiny_patch16_224", global_pool=pool, fc_norm=False, **config).eval().double()
    ours = load("agent_deit_tiny", theirs.state_dict(), tmp_path, mixer="softmax", global_pool=pool, **config)
    x = torch.randn(2, 3, 40, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x))


# Which layers are linear, at what cost


def mixers_of(name, **kwargs):
    with torch.device("meta"):
        return [type(block.mixer) for block in timm.create_model(name, **kwargs).blocks]


def test_the_release_keeps_softmax_and_one_switch_takes_it_out():
    agent, softmax = MIXERS["agent"], MIXERS["softmax"]
    assert mixers_of("agent_deit_base") == [agent] * 4 + [softmax] * 8
    assert mixers_of("agent_deit_base", all_linear=True) == [agent] * 12
    assert mixers_of("agent_deit_base", mixer="linear", linear_layers=11) == [MIXERS["linear"]] * 11 + [softmax]
    for name, mixer in {"agent_deit_small": agent, "flatten_deit_tiny": MIXERS["focused"]}.items():
        assert mixers_of(name) == mixers_of(name, all_linear=True) == [mixer] * 12
    with pytest.raises(ValueError, match="linear_layers must be a number of layers or None for all, got -1"):
        timm.create_model("test_agent_deit", linear_layers=-1)


PUBLISHED = {"mlla_tiny": 4.2, "flatten_deit_tiny": 1.1, "agent_deit_base": 17.6, "inline_deit_base": 17.2}
"""Multiply-adds in 10⁹."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_cost(name):
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    assert count_flops(model, model.default_cfg["input_size"]) / 2e9 == pytest.approx(
        PUBLISHED[name], rel=0.02, abs=0.05
    )


def test_sizes_of_images():
    """A model is built for the size that its configuration names; the paper's Agent-DeiT-S for 448 has 23.1 M."""
    with torch.device("meta"):
        for name, side in {"inline_deit_tiny": 224, "inline_deit_small": 288, "inline_deit_base": 448}.items():
            model = timm.create_model(name)
            assert model.default_cfg["input_size"] == (3, side, side)
            assert model.grid_size == [side // 16] * 2
        larger = timm.create_model("agent_deit_small", img_size=448)
    assert round(sum(p.numel() for p in larger.parameters()) / 1e6, 1) == 23.1

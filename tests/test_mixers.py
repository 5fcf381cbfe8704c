"""Every mixer of the table: its map, its projections, prefix tokens, precision, errors."""

import copy
import math

import pytest
import torch
from mixer_cases import TYPICAL
from torch import nn

from scanvas.backbones.mixers import MIXERS, TokenMixer, create_mixer, list_mixers, t5
from scanvas.backbones.rope import apply_rope, axial_angles

CASES = [
    *[(name, {}) for name in MIXERS],
    ("gla", {"conv_act": True, "out_act": True, "rope": True, "expand_k": 1.0}),
    ("gla", {"bidirectional": False, "local": False, "output": "swish", "expand_k": 1.0, "expand_v": 2.0}),
    ("softmax", {"qk_norm": True, "rope": True}),
    ("linear", {"kernel_size": 0, "qkv_bias": False}),
    ("hybrid", {"radius": 2, "rope": True}),
    ("hybrid", {"every": 3, "qk_norm": True, "softmax_factor": 0.7}),
    ("local", {"radius": 2, "rope": True, "base_tokens": 9}),
    ("local", {"radius": 3, "pool": 4, "qk_norm": True, "base_tokens": 40}),
    ("agent", {"grid_size": (3, 4), "prefix_bias": True, "agent_size": 2}),
    ("cosformer", {"positions": "2d"}),
    ("focused", {"grid_size": None, "kernel_size": 0, "power": 2.0}),
    ("inline", {"local": False}),
    ("gated_softmax", {"out_norm": True}),
    ("mala", {"rope": False, "gated": False, "kernel_size": 0}),
    ("mlla", {"rope": False, "gated": False, "local": False}),
    ("retention", {"gate": True, "rope": True, "kernel_size": 0}),
    ("sana", {"qk_norm": True}),
    ("hgrn2", {"bidirectional": False, "lower_bound": 0.3}),
    ("gdn", {"bidirectional": False, "negative_eigenvalues": True, "expand_k": 1.0, "selective_rope": True}),
    ("lina", {"rope": True, "gate_grid": None}),
]
GRIDS = [(5, 7), (1, 9), (8, 3)]


def build(name, dim=24, heads=2, dtype=torch.float64, seed=0, **cfg):
    torch.manual_seed(seed)
    mixer = create_mixer(name, dim, heads, dtype=dtype, **cfg)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer.eval()


def tokens(grid, prefix=0, batch=2, dim=24, dtype=torch.float64):
    return torch.randn(batch, prefix + grid[0] * grid[1], dim, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("name", "cfg"), CASES)
def test_map_times_values_is_attend(name, cfg, grid, prefix):
    mixer, x = build(name, **cfg), tokens(grid, prefix)
    attended, values = mixer.attend(x, grid, prefix), mixer.values(x, grid, prefix)
    torch.testing.assert_close(mixer(x, grid, prefix), mixer.project(x, attended, grid, prefix))
    if not mixer.has_map:
        with pytest.raises(NotImplementedError, match=r"has no attention map: .*values"):
            mixer.attention_map(x, grid, prefix=prefix)
        assert values.shape == (2, 2, x.shape[1], 12)
        return
    full = mixer.attention_map(x, grid, prefix=prefix)
    assert full.dtype == torch.float64
    assert full.shape == (2, 2, x.shape[1], x.shape[1])
    torch.testing.assert_close((full @ values).transpose(1, 2), attended, atol=1e-10, rtol=1e-10)
    rows = torch.tensor([x.shape[1] - 1, 0, 4])
    torch.testing.assert_close(mixer.attention_map(x, grid, rows, prefix=prefix), full[:, :, rows])
    if mixer.row_stochastic:
        assert full.min() >= 0
        sums = full.sum(-1)
        # A query whose features vanish, as ReLU's can, asks nothing: the divisor of its row is ε.
        assert ((sums - 1).abs() < 1e-3).double().mean() > 0.95
        assert sums.max() < 1 + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "cfg"), [case for case in CASES if MIXERS[case[0]].has_map])
def test_map_is_float32_also_under_autocast(name, cfg, dtype):
    mixer, x = build(name, dtype=dtype, **cfg), tokens((4, 5), dtype=dtype)
    assert mixer.attention_map(x, (4, 5)).dtype == torch.float32
    exact = copy.deepcopy(mixer).double().attention_map(x.double(), (4, 5)).float()
    # The projections run in the model's dtype; what is built from them may lose no more than they do.
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float16):
        got = mixer.attention_map(x, (4, 5))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, exact, atol=4e-2 * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "cfg"), CASES)
def test_half_precision(name, cfg, dtype, autocast):
    """Output and gradients; tokens far from zero, so that sums of features formed in half precision would show."""
    mixer, x = build(name, dtype=torch.float32, **cfg), 2 * tokens((12, 13), 1, dtype=torch.float32)
    expected = mixer(x, (12, 13), 1)
    expected.square().mean().backward()
    reference = torch.cat([p.grad.flatten() for p in mixer.parameters()])
    mixer.zero_grad()
    with torch.autocast("cpu", dtype, enabled=autocast):
        got = mixer(x, (12, 13), 1) if autocast else mixer.to(dtype)(x.to(dtype), (12, 13), 1)
    got.float().square().mean().backward()
    error = (got.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < (0.04 if dtype == torch.bfloat16 else 0.006)
    gradient = torch.cat([p.grad.float().flatten() for p in mixer.parameters()])
    assert nn.functional.cosine_similarity(gradient, reference, dim=0) > 0.97


class Holder(nn.Module):
    """A model with a mixer, such as TorchScript wants one."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, x):
        return self.mixer(x, (3, 4), 1)


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_training_mode_export_script_and_offload(name):
    """Nothing depends on the mode; nothing reads a weight but the module that has it, when it is called. (Compilers and
    graphs with a dynamic batch: tests/test_backbones_export.py, on typical mixers.)"""
    accelerate = pytest.importorskip("accelerate")
    model, x = Holder(build(name, dtype=torch.float32)), tokens((3, 4), 1, dtype=torch.float32)
    expected = model(x)
    assert torch.equal(model.train()(x), expected)
    model.eval()
    torch.testing.assert_close(torch.jit.script(model)(x), expected, atol=1e-5, rtol=1e-5)
    if name not in TYPICAL:
        program = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(program(x.flip(0)), expected.flip(0), atol=1e-5, rtol=1e-5)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(model(x), expected)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("name", "cfg"), CASES)
def test_projections_fuse_and_split_without_changing_anything(name, cfg):
    mixer, x = build(name, **cfg), tokens((3, 5))
    state, expected = {k: v.clone() for k, v in mixer.state_dict().items()}, mixer(x, (3, 5))
    mixer.to_v.requires_grad_(False), mixer.to_q.requires_grad_(False), mixer.to_k.requires_grad_(False)
    mixer.fuse_projections()
    assert mixer.fused_projections == mixer.fusible
    if not mixer.fusible:
        assert create_mixer(name, 24, 2, fused_projections=True, **cfg).state_dict().keys() == state.keys()
        return
    assert not hasattr(mixer, "to_q")
    assert not mixer.to_qkv.weight.requires_grad
    torch.testing.assert_close(mixer(x, (3, 5)), expected)
    same = create_mixer(name, 24, 2, fused_projections=True, dtype=torch.float64, **cfg)
    same.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(same.eval()(x, (3, 5)), expected)
    mixer.fuse_projections(False)
    assert mixer.state_dict().keys() == state.keys()
    for key, value in mixer.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize(("name", "cfg"), CASES)
def test_prefix_tokens_take_part_but_not_in_what_is_2d(name, cfg):
    mixer, grid = build(name, **cfg), (3, 4)
    x = tokens(grid, prefix=2)
    out = mixer(x, grid, 2)
    changed = x.clone()
    changed[:, 0] += 1.0
    assert (mixer(changed, grid, 2)[:, 2:] - out[:, 2:]).abs().amax(-1).min() > 1e-8  # every image token sees it
    local = name == "local" and "radius" in cfg
    changed = x.clone()
    changed[:, 2] += 1.0  # the upper left token is far from the lower right one
    assert bool(((mixer(changed, grid, 2)[:, -1] - out[:, -1]).abs().amax(-1) > 1e-8).all()) != (
        local and not cfg.get("pool")
    )
    if cfg.get("bidirectional", True):
        changed = x.clone()
        changed[:, -1] += 1.0
        assert (mixer(changed, grid, 2)[:, :2] - out[:, :2]).abs().amax(-1).min() > 1e-8  # and it sees every one
    if name == "softmax":  # nothing else depends on the order of the prefix
        torch.testing.assert_close(mixer(x[:, [1, 0, *range(2, 14)]], grid, 2)[:, 2:], out[:, 2:])


@pytest.mark.parametrize(("name", "cfg"), CASES)
def test_only_the_grid_tells_a_rectangle_from_another(name, cfg):
    mixer, x = build(name, **cfg), tokens((3, 4))
    convolves = any(getattr(mixer, conv, None) is not None for conv in ("conv", "q_conv", "value_conv", "kernel_net"))
    two_d = convolves or cfg.get("rope", False) or cfg.get("radius", 8) < 4 or cfg.get("positions") == "2d"
    assert torch.allclose(mixer(x, (3, 4)), mixer(x, (4, 3)), atol=1e-9) != two_d
    with pytest.raises(ValueError, match=r"prefix \+ H·W.*\(B, 0 \+ 3·5, C\), got shape \(2, 12, 24\)"):
        mixer(x, (3, 5))
    with pytest.raises(ValueError, match=r"B, 1 \+ 3·4"):
        mixer(x, (3, 4), 1)


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


def test_table_and_errors():
    assert list_mixers() == sorted(MIXERS)
    for name, cls in MIXERS.items():
        assert issubclass(cls, TokenMixer)
        assert cls.paper.startswith("https://")
        assert cls.__doc__
        for heads in (5, 0, -2):
            with pytest.raises(
                ValueError, match=rf"{cls.__name__}: num_heads must divide dim = 24, got num_heads = {heads}"
            ):
                create_mixer(name, 24, heads)
        with pytest.raises(TypeError, match="no_such_thing"):
            create_mixer(name, 24, 2, no_such_thing=1)
    with pytest.raises(ValueError, match=r"mixer must be one of .*gla, .*softmax, t5; got 'attention'"):
        create_mixer("attention", 24, 2)
    for message, cfg in {
        r"expand_k gives a width of 3, which num_heads = 2 does not divide": {"expand_k": 0.125},
        r"expand_v gives a width of 0": {"expand_v": 0.01, "output": "swish"},
        r"output must be 'mix' or 'swish', got 'relu'": {"output": "relu"},
        r"output='mix'.*needs local=True and expand_v=1": {"local": False},
        r"output='mix'.*needs local=True and expand_v=1 ?": {"expand_v": 2.0},
        r"rope needs heads of a width divisible by 4, got 6": {"rope": True},
    }.items():
        with pytest.raises(ValueError, match=message):
            create_mixer("gla", 24, 2, **cfg)
    with pytest.raises(ValueError, match="rope needs heads of a width divisible by 4, got 6"):
        create_mixer("softmax", 24, 4, rope=True)
    with pytest.raises(ValueError, match="hidden must be positive, or None for dim; got 0"):
        create_mixer("linfusion", 24, 2, hidden=0)
    for kernel_size in (4, -3):
        with pytest.raises(ValueError, match=f"kernel_size must be odd, or 0.*got {kernel_size}"):
            create_mixer("linear", 24, 2, kernel_size=kernel_size)
        with pytest.raises(ValueError, match=f"kernel_size must be odd, or 0.*got {kernel_size}"):
            create_mixer("t5", 24, 2, kernel_size=kernel_size)
    for message, cfg in {
        "radius must be a whole number of tokens, at least 1; got 0": {"radius": 0},
        "pool must be the side of a square of tokens, at least 2, or 0 for none; got 1": {"pool": 1},
        "base_tokens must be the number of tokens in training, or None; got 1": {"base_tokens": 1},
    }.items():
        with pytest.raises(ValueError, match=message):
            create_mixer("local", 24, 2, **cfg)


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

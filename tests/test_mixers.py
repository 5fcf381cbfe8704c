"""Every mixer of the table: its map, its projections, prefix tokens, precision, errors."""

import copy
import inspect
import itertools

import pytest
import torch
from mixer_cases import TYPICAL
from mixer_parts import build, tokens
from torch import nn

from scanvas.backbones.mixers import MIXERS, TokenMixer, create_mixer, list_mixers

CASES = [
    *[(name, {}) for name in MIXERS],
    ("gla", {"conv_act": True, "out_act": True, "rope": True, "expand_k": 1.0}),
    ("gla", {"bidirectional": False, "local": False, "output": "swish", "expand_k": 1.0, "expand_v": 2.0}),
    ("softmax", {"qk_norm": True, "rope": True}),
    ("softmax", {"cosine": True, "rope": True}),
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
PLACES = [((5, 7), 0), ((1, 9), 3), ((8, 3), 3)]
"""Grids and numbers of prefix tokens."""


@pytest.mark.parametrize(("grid", "prefix"), PLACES)
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


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=["bf16-autocast", "bf16", "fp16"],
)
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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_training_mode_export_script_trace_and_offload(name):
    """Nothing depends on the mode, or on there being an image; nothing reads a weight but the module that has it, when
    it is called. (Compilers and graphs with a dynamic batch: tests/test_backbones_export.py, on typical mixers.)"""
    accelerate = pytest.importorskip("accelerate")
    model, x = Holder(build(name, dtype=torch.float32)), tokens((3, 4), 1, dtype=torch.float32)
    expected = model(x)
    assert torch.equal(model.train()(x), expected)
    model.eval()
    torch.testing.assert_close(torch.jit.script(model)(x), expected, atol=1e-5, rtol=1e-5)
    traced = torch.jit.trace(model, x, check_trace=False)
    torch.testing.assert_close(traced(x.flip(0)), expected.flip(0), atol=1e-5, rtol=1e-5)
    assert model(x[:0]).shape == (0, *expected.shape[1:])
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
    convolving = [name for name, cls in MIXERS.items() if "kernel_size" in inspect.signature(cls).parameters]
    assert {"linear", "nala", "t5"} < set(convolving)
    for name, kernel_size in itertools.product(convolving, (4, -3)):
        with pytest.raises(ValueError, match=f"^kernel_size must be odd, or 0 for no convolution; got {kernel_size}$"):
            create_mixer(name, 24, 2, kernel_size=kernel_size)
    for message, cfg in {
        "radius must be a whole number of tokens, at least 1; got 0": {"radius": 0},
        "pool must be the side of a square of tokens, at least 2, or 0 for none; got 1": {"pool": 1},
        "base_tokens must be the number of tokens in training, or None; got 1": {"base_tokens": 1},
    }.items():
        with pytest.raises(ValueError, match=message):
            create_mixer("local", 24, 2, **cfg)

"""Checkpoints of the original ViG project: golden outputs, and an independent reading of the architecture for what the
golden files do not show."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from original_parts import load, save, vig_h_state, vig_state
from safetensors.torch import load_file

import scanvas  # noqa: F401 - registers the models

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden files at {GOLDEN}")


def read_golden(style):
    from safetensors import safe_open

    with safe_open(GOLDEN / f"{style}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
    tensors = load_file(GOLDEN / f"{style}.safetensors")
    state = {k.removeprefix("state_dict."): v for k, v in tensors.items() if k.startswith("state_dict.")}
    cases = {k.split(".")[0] for k in tensors} - {"state_dict"}
    assert cases == {"square", "rect"}
    return config, state, [(tensors[f"{case}.input0"], tensors[f"{case}.output"]) for case in cases]


@golden
@pytest.mark.parametrize("form", ["bare.pth", "model.pth", "ddp.pth", "bare.safetensors"])
@pytest.mark.parametrize("style", ["vig_tiny_style", "vig_h_style"])
def test_golden(style, form, tmp_path):
    config, state, cases = read_golden(style)
    if style == "vig_tiny_style":
        name, kwargs = "vig_tiny_patch16_224", {k: config[k] for k in ("embed_dim", "depth", "num_heads", "img_size")}
    else:
        name = "vig_h_tiny_224"
        kwargs = {"embed_dim": config["base_dim"], "depths": config["depths"], "num_heads": config["num_heads"]}
    if form == "model.pth":
        state = {"model": state, "epoch": 3}
    if form == "ddp.pth":
        state = {"model": {f"module.{k}": v for k, v in state.items()}}
    model = load(name, save(state, tmp_path / form), num_classes=config["num_classes"], **kwargs)
    for x, expected in cases:
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=0)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def layer_norm_2d(x, weight, bias):
    mean = x.mean(1, keepdim=True)
    var = (x - mean).square().mean(1, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() * weight[:, None, None] + bias[:, None, None]


def silu(x):
    return x * x.sigmoid()


def original_mixer(w, x, grid, heads, conv_act, out_act):
    """``x`` (N, C) → (N, C)."""
    N, C = x.shape
    image = x.T.reshape(1, C, *grid)
    local = F.conv2d(image, w["in_proj.0.weight"], padding=1, groups=C).reshape(C, N).T
    local = silu(local) if conv_act else local
    q, k, v = (local @ w["qkv_proj.weight"].T).split([C // 2, C // 2, C], dim=1)
    logits = local @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
    decays = logits.sigmoid().pow(1 / 16).chunk(2, dim=1)
    q, k, v, *decays = (y.reshape(N, heads, -1) for y in (q, k, v, *decays))
    out = torch.zeros_like(v)
    for decay, order in zip(decays, (range(N), reversed(range(N)))):
        state = v.new_zeros(heads, k.shape[-1], v.shape[-1])
        for t in order:
            state = decay[t, :, :, None] * state + k[t, :, :, None] * v[t, :, None, :]
            out[t] += 0.5 * k.shape[-1] ** -0.5 * (q[t, :, :, None] * state).sum(1)
    gate = (local @ w["g_proj.weight"].T + w["g_proj.bias"]).sigmoid().reshape(N, heads, -1)
    out = gate * rms_norm(out, w["g_norm.weight"]) + (1 - gate) * rms_norm(
        local.reshape(N, heads, -1), w["l_norm.weight"]
    )
    out = out.reshape(N, C)
    return (silu(out) if out_act else out) @ w["o_proj.weight"].T


def swiglu(x, up, down):
    a, b = (x @ up.T).chunk(2, dim=-1)
    return (silu(a) * b) @ down.T


def part(state, prefix):
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def original_vig(state, x, *, heads, grid, activations, patch=16):
    """Logits of the plain model for one image ``(1, 3, H, W)``; position embeddings are made for ``grid``."""
    w = {k: v.double() for k, v in state.items()}
    p = "patch_embed.proj."
    x = F.conv2d(x.double(), w[p + "0.weight"], w[p + "0.bias"], stride=patch // 2, padding=1)
    x = silu(layer_norm_2d(x, w[p + "1.weight"], w[p + "1.bias"]))
    x = F.conv2d(x, w[p + "3.weight"], w[p + "3.bias"], stride=2, padding=1)
    x = layer_norm_2d(x, w[p + "4.weight"], w[p + "4.bias"])
    here = x.shape[2:]
    position = w["pos_embed"].reshape(1, *grid, -1).permute(0, 3, 1, 2)
    if tuple(here) != tuple(grid):
        position = F.interpolate(position, size=here, mode="bicubic", align_corners=False)
    x = (x + position).flatten(2)[0].T
    depth = 1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks."))
    for i in range(depth):
        b = part(w, f"blocks.{i}.")
        x = x + original_mixer(
            part(b, "attn."), rms_norm(x, b["attn_norm.weight"]), here, heads, activations, activations
        )
        x = x + swiglu(rms_norm(x, b["mlp_norm.weight"]), b["mlp.gate_proj.weight"], b["mlp.down_proj.weight"])
    return rms_norm(x, w["norm.weight"]).mean(0, keepdim=True) @ w["head.weight"].T + w["head.bias"]


def original_vig_h(state, x, *, heads):
    w = {k: v.double() for k, v in state.items()}
    p = "patch_embed."
    x = F.conv2d(x.double(), w[p + "0.weight"], w[p + "0.bias"], stride=2, padding=1)
    x = F.gelu(layer_norm_2d(x, w[p + "2.weight"], w[p + "2.bias"]))
    x = F.conv2d(x, w[p + "5.weight"], w[p + "5.bias"], stride=2, padding=1)
    x = layer_norm_2d(x, w[p + "7.weight"], w[p + "7.bias"])
    for stage, count in enumerate(heads):
        layer = part(w, f"layers.{stage}.")
        grid = x.shape[2:]
        for i in range(1 + max(int(k.split(".")[1]) for k in layer if k.startswith("blocks."))):
            b = part(layer, f"blocks.{i}.")
            y = layer_norm_2d(x, b["norm.weight"], b["norm.bias"]).flatten(2)[0].T
            y = original_mixer(part(b, "op."), y, grid, count, False, False)
            x = x + y.T.reshape(x.shape)
            y = layer_norm_2d(x, b["norm2.weight"], b["norm2.bias"]).flatten(2)[0].T
            x = x + swiglu(y, b["mlp.fc1.weight"], b["mlp.fc2.weight"]).T.reshape(x.shape)
        if stage < len(heads) - 1:
            x = F.conv2d(x, layer["downsample.1.weight"], layer["downsample.1.bias"], stride=2, padding=1)
            x = layer_norm_2d(x, layer["downsample.3.weight"], layer["downsample.3.bias"])
    x = layer_norm_2d(x, w["classifier.norm.weight"], w["classifier.norm.bias"]).mean((2, 3))
    return x @ w["classifier.head.weight"].T + w["classifier.head.bias"]


def test_the_reading_of_the_architecture_is_right():
    """It reproduces the golden files itself."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden files at {GOLDEN}")
    _, state, cases = read_golden("vig_tiny_style")
    for x, expected in cases:
        got = torch.cat([original_vig(state, y[None], heads=1, grid=(4, 4), activations=True) for y in x])
        torch.testing.assert_close(got.float(), expected, atol=1e-4, rtol=0)
    config, state, cases = read_golden("vig_h_style")
    for x, expected in cases:
        got = torch.cat([original_vig_h(state, y[None], heads=config["num_heads"]) for y in x])
        torch.testing.assert_close(got.float(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "C", "depth", "heads"),
    [
        ("vig_tiny_patch16_224", 48, 1, 3),
        ("vig_small_patch16_224", 64, 3, 4),
        ("vig_base_patch16_224", 96, 2, 1),
    ],
)
def test_other_plain_configurations(name, C, depth, heads, tmp_path):
    """Widths, depths, heads, no activations but in T; the file's 4×4 grid at sizes it was not made for."""
    state = vig_state(C, depth, heads, 16)
    file = save({"model": state}, tmp_path / "original.pth")
    kwargs = {"embed_dim": C, "depth": depth, "num_heads": heads, "num_classes": 10}
    for size in ((64, 64), (96, 48), (48, 112)):
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
        expected = original_vig(state, x, heads=heads, grid=(4, 4), activations="tiny" in name).float()
        with torch.no_grad():
            for img_size in (64, size):  # resampled in the forward, or when the file is read
                got = load(name, file, img_size=img_size, **kwargs)(x)
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("C", "depths", "heads"),
    [(8, (1, 2, 1, 1), (1, 2, 4, 8)), (24, (1, 1, 1), (3, 3, 6)), (16, (2, 1, 1, 1), (2, 2, 2, 2))],
)
def test_other_hierarchical_configurations(C, depths, heads, tmp_path):
    state = vig_h_state(C, depths, heads)
    model = load(
        "vig_h_small_224",
        save(state, tmp_path / "original.pth"),
        embed_dim=C,
        depths=depths,
        num_heads=heads,
        num_classes=10,
    )
    for size in ((64, 64), (96, 32), (45, 71)):
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            torch.testing.assert_close(model(x), original_vig_h(state, x, heads=heads).float(), atol=1e-4, rtol=1e-4)

"""Checkpoints of the original ViG project: golden outputs, and an independent reading of the architecture for what the
golden files do not show."""

import json
import math
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import scanvas  # noqa: F401 - registers the models

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden files at {GOLDEN}")


def save(state, path):
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


def load(name, file, **kwargs):
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **kwargs).eval()


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


# The architecture once more, from its description: float64, one token at a time, original names.


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


def random_state(shapes, seed=0):
    """Every tensor matters: matrices keep the size of what they are given, norms lie around one."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and key.endswith("weight")
        fan_in = math.prod(shape[1:])
        state[key] = 1 + 0.3 * value if norm else value * (fan_in**-0.5 if len(shape) in (2, 4) else 0.3)
    return state


def mixer_shapes(prefix, C, heads):
    return {
        f"{prefix}in_proj.0.weight": (C, 1, 3, 3),
        f"{prefix}qkv_proj.weight": (2 * C, C),
        f"{prefix}gk_proj.0.weight": (16, C),
        f"{prefix}gk_proj.1.weight": (C, 16),
        f"{prefix}gk_proj.1.bias": (C,),
        f"{prefix}o_proj.weight": (C, C),
        f"{prefix}g_norm.weight": (C // heads,),
        f"{prefix}l_norm.weight": (C // heads,),
        f"{prefix}g_proj.weight": (C, C),
        f"{prefix}g_proj.bias": (C,),
    }


def vig_state(C, depth, heads, places, classes=10, patch=16):
    kernel = patch // 2 + 1
    shapes = {
        "pos_embed": (1, places, C),
        "patch_embed.proj.0.weight": (C // 2, 3, kernel, kernel),
        "patch_embed.proj.0.bias": (C // 2,),
        "patch_embed.proj.1.weight": (C // 2,),
        "patch_embed.proj.1.bias": (C // 2,),
        "patch_embed.proj.3.weight": (C, C // 2, 3, 3),
        "patch_embed.proj.3.bias": (C,),
        "patch_embed.proj.4.weight": (C,),
        "patch_embed.proj.4.bias": (C,),
        "norm.weight": (C,),
        "head.weight": (classes, C),
        "head.bias": (classes,),
    }
    hidden = math.ceil(8 * C // 3 / 256) * 256
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.attn_norm.weight": (C,),
            f"blocks.{i}.mlp_norm.weight": (C,),
            f"blocks.{i}.mlp.gate_proj.weight": (2 * hidden, C),
            f"blocks.{i}.mlp.down_proj.weight": (C, hidden),
            **mixer_shapes(f"blocks.{i}.attn.", C, heads),
        }
    return random_state(shapes)


def vig_h_state(C, depths, heads, classes=10):
    shapes = {
        "patch_embed.0.weight": (C // 2, 3, 3, 3),
        "patch_embed.0.bias": (C // 2,),
        "patch_embed.2.weight": (C // 2,),
        "patch_embed.2.bias": (C // 2,),
        "patch_embed.5.weight": (C, C // 2, 3, 3),
        "patch_embed.5.bias": (C,),
        "patch_embed.7.weight": (C,),
        "patch_embed.7.bias": (C,),
    }
    for stage, (depth, count) in enumerate(zip(depths, heads)):
        width = C * 2**stage
        hidden = math.ceil(8 * width // 3 / 32) * 32
        for i in range(depth):
            prefix = f"layers.{stage}.blocks.{i}."
            shapes |= {f"{prefix}{n}.{kind}": (width,) for n in ("norm", "norm2") for kind in ("weight", "bias")}
            shapes |= {f"{prefix}mlp.fc1.weight": (2 * hidden, width), f"{prefix}mlp.fc2.weight": (width, hidden)}
            shapes |= mixer_shapes(f"{prefix}op.", width, count)
        if stage < len(depths) - 1:
            prefix = f"layers.{stage}.downsample."
            shapes |= {f"{prefix}1.weight": (2 * width, width, 3, 3), f"{prefix}1.bias": (2 * width,)}
            shapes |= {f"{prefix}3.weight": (2 * width,), f"{prefix}3.bias": (2 * width,)}
    shapes |= {"classifier.norm.weight": (width,), "classifier.norm.bias": (width,)}
    return random_state(shapes | {"classifier.head.weight": (classes, width), "classifier.head.bias": (classes,)})


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


# Our own checkpoints through the same door


@pytest.mark.parametrize("name", ["test_vig", "test_vig_h"])
@pytest.mark.parametrize("mixer", ["gla", "softmax"])
@pytest.mark.parametrize(("saved_fused", "wanted_fused"), [(True, True), (True, False), (False, True), (False, False)])
def test_our_checkpoints_with_joint_and_separate_projections(name, mixer, saved_fused, wanted_fused, tmp_path):
    def kwargs(fused):
        return {"img_size": 32, "mixer": mixer, "mixer_kwargs": {"fused_projections": fused}}

    model = timm.create_model(name, **kwargs(saved_fused)).eval()
    loaded = load(name, save(model.state_dict(), tmp_path / "ours.safetensors"), **kwargs(wanted_fused))
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)


def test_positions_of_a_rectangle(tmp_path):
    """Equal places are left alone, others resampled if their grid is known, else refused by name."""
    model = timm.create_model("test_vig", img_size=(32, 128)).eval()
    file = save(model.state_dict(), tmp_path / "ours.safetensors")
    assert torch.equal(load("test_vig", file, img_size=(32, 128)).pos_embed, model.pos_embed)
    with pytest.raises(ValueError, match=r"pos_embed has 8 places"):
        load("test_vig", save({**model.state_dict(), "pos_embed": torch.zeros(1, 8, 64)}, tmp_path / "odd.pth"))
    timm.models.save_for_hf(model, str(tmp_path / "dir"), safe_serialization=True)
    other = timm.create_model(f"local-dir:{tmp_path / 'dir'}", pretrained=True, img_size=(128, 32))
    model.set_input_size((128, 32))
    torch.testing.assert_close(other.pos_embed, model.pos_embed)


# What timm adapts, and what does not fit


@pytest.mark.parametrize("name", ["test_vig", "test_vig_h"])
def test_other_classes_channels_and_features_as_timm_does_it(name, tmp_path):
    model = timm.create_model(name, num_classes=12, img_size=160).eval()
    file = save(model.state_dict(), tmp_path / "ours.safetensors")
    x = torch.randn(1, 3, 64, 64)
    for classes in (12, 5, 0):
        loaded = load(name, file, num_classes=classes)
        torch.testing.assert_close(loaded.forward_features(x), model.forward_features(x))
        assert loaded(x).shape[1] == (classes or model.num_features)
        if classes == 12:  # a classifier that fits is kept, whatever timm takes for the file's number of classes
            torch.testing.assert_close(loaded(x), model(x))
    grey = load(name, file, num_classes=12, in_chans=1)
    torch.testing.assert_close(grey(x[:, :1]), model(x[:, :1].expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)
    features = load(name, file, features_only=True, out_indices=(0, 2))(x)
    torch.testing.assert_close(features, model.forward_intermediates(x, indices=[0, 2], intermediates_only=True))
    with pytest.raises(
        ValueError,
        match=rf"{model.default_cfg['classifier']}.weight has 12 classes, the model 1000; pass num_classes=12",
    ):
        load(name, file)


def first(state, suffix):
    return next(key for key in state if key.endswith(suffix))


@pytest.mark.parametrize("name", ["vig_small_patch16_224", "vig_h_small_224"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda s: s.update({first(s, "g_norm.weight"): torch.ones(5)}),
            r"out_norm\.weight has shape \(5,\), the model's is",
        ),
        (lambda s: s.pop(first(s, "o_proj.weight")), r"to_out\.0\.weight is missing"),
        (lambda s: s.update({first(s, "qkv_proj.weight"): torch.ones(7, 5)}), r"to_qkv\.weight has shape \(7, 5\)"),
        (lambda s: s.update(extra=torch.ones(1)), r"extra has no place in the model"),
        (
            lambda s: s.update(
                {first(s, "norm.bias" if "layers.0.blocks.0.norm.bias" in s else "norm.weight"): torch.ones(2, 2)}
            ),
            r"norm1?\.\w+ has shape \(2, 2\)",
        ),
        (lambda s: s.pop(first(s, "head.bias")), r"head\.(fc\.)?bias is missing"),
        (
            lambda s: s.pop(first(s, "patch_embed.proj.0.weight" if "pos_embed" in s else "patch_embed.0.weight")),
            r"(proj|stem)\.0\.weight is missing",
        ),
    ],
)
def test_a_misfit_is_named(name, damage, message, tmp_path):
    if name == "vig_small_patch16_224":
        state, kwargs = vig_state(32, 1, 2, 16), {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 64}
    else:
        state = vig_h_state(8, (1, 1), (1, 1))
        kwargs = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1)}
    load(name, save(state, tmp_path / "good.pth"), num_classes=10, **kwargs)
    damage(state)
    with pytest.raises(ValueError, match=message):
        load(name, save(state, tmp_path / "bad.pth"), num_classes=10, **kwargs)


def test_a_checkpoint_of_another_size_names_a_few_and_counts_the_rest(tmp_path):
    file = save(vig_state(32, 3, 2, 16), tmp_path / "original.pth")
    with pytest.raises(ValueError, match=r"does not fit Vig: .*has shape.*; and \d+ more$") as error:
        load("vig_small_patch16_224", file, embed_dim=64, depth=2, num_heads=2, num_classes=10)
    assert len(str(error.value)) < 1500

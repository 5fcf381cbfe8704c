"""RAVLT, MAViT and NaLaFormer against their papers' equations, read off the released files' tensors in float64."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F

import scanvas  # noqa: F401 - registers the models

DEPTHS, DIMS, HEADS, RATIO, WIDTH, CLASSES = (1, 1, 1, 2), (8, 16, 24, 32), (1, 2, 2, 4), 3.5, 40, 5
KINDS = {"ravlt": "rala", "mavit": "mala", "nalaformer": "nala"}


def original_state(family, seed=0):
    """Tensors of random weights under the names and in the shapes of the released files. Every tensor matters."""
    nala = family == "nalaformer"
    shapes = {}

    def conv(name, out, given, kernel=1, linear=False):
        shapes[f"{name}.weight"] = (out, given) if linear else (out, given, kernel, kernel)
        shapes[f"{name}.bias"] = (out,)

    def batch_norm(name, dim):
        shapes.update({f"{name}.{part}": (dim,) for part in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{name}.num_batches_tracked"] = ()

    widths = (3, DIMS[0] // 2, DIMS[0] // 2, DIMS[0] // 2, DIMS[0])
    for i in range(4):
        conv(f"patch_embed.proj.{3 * i}", widths[i + 1], widths[i], 3)
        batch_norm(f"patch_embed.proj.{3 * i + 1}", widths[i + 1])
    for i, (depth, dim) in enumerate(zip(DEPTHS, DIMS)):
        shapes[f"layers.{i}.RoPE.angle"] = (dim // HEADS[i] // 2,)
        for j in range(depth):
            p = f"layers.{i}.blocks.{j}."
            hidden = int(RATIO * dim)
            for norm in ("norm1.norm", "norm2.norm", *(["attn.ln"] if nala else [])):
                shapes |= {f"{p}{norm}.weight": (dim,), f"{p}{norm}.bias": (dim,)}
            conv(f"{p}attn.{'qkvg' if nala else 'qkvo'}", 4 * dim, dim, linear=nala)
            conv(f"{p}attn.lepe", dim, 1, 5)
            conv(f"{p}attn.{'out_proj' if nala else 'proj'}", dim, dim, linear=nala)
            conv(f"{p}ffn.fc1", hidden, dim, linear=nala)
            conv(f"{p}ffn.fc2", dim, hidden, linear=nala)
            conv(f"{p}ffn.dwconv", hidden, 1, 3)
            for name in ("cpe1", "cpe2") if nala else ("pos",):
                conv(p + name, dim, 1, 3)
            shapes |= {f"{p}gamma_{k}": (1, dim, 1, 1) for k in (1, 2)}
        if i < len(DIMS) - 1:
            conv(f"layers.{i}.downsample.reduction", DIMS[i + 1], dim, 3)
            batch_norm(f"layers.{i}.downsample.norm", DIMS[i + 1])
    conv("proj", WIDTH, DIMS[-1], linear=nala)
    batch_norm("norm", WIDTH)
    conv("head", CLASSES, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) in (2, 4) and not key.endswith(("gamma_1", "gamma_2")):
            state[key] = value * math.prod(shape[1:]) ** -0.5
        elif key.endswith(("weight", "running_var", "gamma_1", "gamma_2")):
            state[key] = 1 + 0.5 * value.tanh()
        else:
            state[key] = 0.3 * value
    return state


def rotate(x, H, W):
    """Pairs (2i, 2i+1) of ``(heads, N, d)`` as complex numbers; a quarter of d frequencies from 1 to 1e-4 for rows, and
    the same for columns."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    frequency = 10000 ** -torch.linspace(0, 1, x.shape[-1] // 4, dtype=torch.float64)
    rows, columns = (torch.arange(n, dtype=torch.float64)[:, None] * frequency for n in (H, W))
    angle = torch.cat((rows[:, None].expand(H, W, -1), columns[None].expand(H, W, -1)), dim=-1).flatten(0, 1)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def attention(kind, q, k, H, W):
    """The N×N matrix, by the definition: nothing is summed before it is weighted."""
    d, N = q.shape[-1], q.shape[-2]
    if kind == "softmax":
        return (rotate(q, H, W) @ rotate(k, H, W).mT / d**0.5).softmax(-1)
    if kind == "nala":
        length = q.norm(dim=-1, keepdim=True)
        power = 3 * (0.5 + length.tanh())
        q, k = ([(sign * z).relu() for sign in (1, -1)] for z in (q / length, k**3))
        q = [z**power for z in q]
        top = sum(rotate(a, H, W) @ rotate(b, H, W).mT for a, b in zip(q, k))
        return top / sum(a @ b.mT for a, b in zip(q, k)).sum(-1, keepdim=True)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    if kind == "mala":
        z = (q @ k.mT).mean(-1, keepdim=True) / d**0.5
        return (1 + 1 / z) * (rotate(q, H, W) @ rotate(k, H, W).mT) / d**0.5 / N - z / N
    k = k * N * (q.mean(-2, keepdim=True) @ k.mT / d**0.5).softmax(-1).mT
    return (rotate(q, H, W) @ rotate(k, H, W).mT) / (q @ k.mT).sum(-1, keepdim=True)


def original(state, x, family, all_linear):
    """Logits of one image ``(1, 3, H, W)``."""

    def conv(name, y, stride=1, depthwise=False):
        weight = state[f"{name}.weight"]
        weight = weight if weight.ndim == 4 else weight[..., None, None]
        groups = y.shape[1] if depthwise else 1
        return F.conv2d(y, weight, state[f"{name}.bias"], stride, weight.shape[-1] // 2, groups=groups)

    def batch_norm(name, y):
        w, b, mean, variance = (state[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var"))
        return F.batch_norm(y, mean, variance, w, b)

    def layer_norm(name, y, eps):
        w, b = state[f"{name}.weight"], state[f"{name}.bias"]
        return F.layer_norm(y.movedim(1, -1), w.shape, w, b, eps).movedim(-1, 1)

    for i in range(4):
        x = batch_norm(f"patch_embed.proj.{3 * i + 1}", conv(f"patch_embed.proj.{3 * i}", x, 2 if i in (0, 3) else 1))
        x = F.gelu(x) if i < 3 else x
    nala = family == "nalaformer"
    for i, depth in enumerate(DEPTHS):
        kind = KINDS[family] if all_linear or i < 2 else "softmax"
        H, W = x.shape[2:]
        for j in range(depth):
            p = f"layers.{i}.blocks.{j}."
            x = x + conv(f"{p}{'cpe1' if nala else 'pos'}", x, depthwise=True)
            joint = conv(f"{p}attn.{'qkvg' if nala else 'qkvo'}", layer_norm(f"{p}norm1.norm", x, 1e-6))
            q, k, v, gate = joint.chunk(4, dim=1)
            q, k, values = (z[0].flatten(1).unflatten(0, (HEADS[i], -1)).mT for z in (q, k, v))
            y = (attention(kind, q, k, H, W) @ values).mT.reshape(v.shape) + conv(f"{p}attn.lepe", v, depthwise=True)
            y = layer_norm(f"{p}attn.ln", y, 1e-5) * F.silu(gate) if nala else y * gate
            x = x + state[f"{p}gamma_1"] * conv(f"{p}attn.{'out_proj' if nala else 'proj'}", y)
            x = x + conv(f"{p}cpe2", x, depthwise=True) if nala else x
            y = F.gelu(conv(f"{p}ffn.fc1", layer_norm(f"{p}norm2.norm", x, 1e-6)))
            x = x + state[f"{p}gamma_2"] * conv(f"{p}ffn.fc2", y + conv(f"{p}ffn.dwconv", y, depthwise=True))
        if i < len(DEPTHS) - 1:
            x = batch_norm(f"layers.{i}.downsample.norm", conv(f"layers.{i}.downsample.reduction", x, 2))
    x = F.silu(batch_norm("norm", conv("proj", x))).mean((2, 3), keepdim=True)
    return conv("head", x).flatten(1)


def load(family, file, **kwargs):
    return timm.create_model(
        f"{family}_tiny",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file)},
        depths=DEPTHS,
        embed_dims=DIMS,
        num_heads=HEADS,
        mlp_ratio=RATIO,
        head_width=WIDTH,
        **{"num_classes": CLASSES, **kwargs},
    ).eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("all_linear", [False, True])
@pytest.mark.parametrize("family", KINDS)
@torch.no_grad()
def test_released_files_give_what_the_equations_give(family, all_linear, fused, tmp_path):
    state = original_state(family)
    torch.save({"model": state}, tmp_path / "original.pth")
    kwargs = {part: {"fused_projections": fused} for part in ("mixer_kwargs", "softmax_kwargs")}
    if family == "nalaformer":
        kwargs["softmax_kwargs"]["out_norm"] = True
    model = load(family, tmp_path / "original.pth", all_linear=all_linear, dtype=torch.float64, **kwargs)
    for size in ((64, 96), (75, 41)):
        x = torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        expected = torch.cat([original(state, image[None], family, all_linear) for image in x])
        # RoPE's angles are float32, and ε is added to divisors that the equations leave alone.
        torch.testing.assert_close(model(x), expected, atol=2e-5, rtol=2e-5)


def test_files_of_other_classes_and_files_that_do_not_fit(tmp_path):
    state = original_state("ravlt")
    torch.save(state, tmp_path / "original.pth")
    model = load("ravlt", tmp_path / "original.pth", num_classes=3)
    assert model.head.fc.weight.shape == (3, WIDTH)
    torch.testing.assert_close(model.norm[0].weight.double(), state["proj.weight"], atol=1e-6, rtol=0)
    del state["layers.3.blocks.1.gamma_2"]
    state["layers.0.blocks.0.attn.qkvo.weight"] = torch.zeros(36, 8, 1, 1)
    torch.save(state, tmp_path / "original.pth")
    with pytest.raises(ValueError, match=r"stages\.0\.blocks\.0\.mixer.*blocks\.1\.ls2\.gamma is missing"):
        load("ravlt", tmp_path / "original.pth")

"""Original DiG checkpoints: golden outputs, and a plain re-implementation of the original's data flow."""

import json
import os
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from scanvas import LinearDiTTransformer2DModel, convert_dig_checkpoint
from scanvas.diffusion.convert import convert_file, load_tensors

GOLDEN = Path(os.environ.get("SCANVAS_GOLDEN", Path(__file__).parent.parent.parent / "shared" / "golden"))


def original(sd, x, t, y, head_dim):
    """The original's forward pass as ALGORITHMS.md A4 writes it down, one token and one state at a time."""
    dim, _, p, _ = sd["x_embedder.proj.weight"].shape
    depth = 1 + max(int(key.split(".")[1]) for key in sd if key.startswith("blocks."))

    def linear(key, x):
        return F.linear(x, sd[f"{key}.weight"], sd.get(f"{key}.bias"))

    def norm(x, shift, scale):
        return F.layer_norm(x, (dim,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    def attention(key, x):
        q, k, v, g = (linear(f"{key}.{name}_proj", x) for name in "qkvg")
        decay = (F.logsigmoid(linear(f"{key}.gk_proj.1", linear(f"{key}.gk_proj.0", x))) / 16).exp()
        q, k, v, decay = (t.unflatten(-1, (v.shape[-1] // head_dim, -1)) for t in (q, k, v, decay))
        state, out = 0, []
        for i in range(x.shape[1]):
            state = decay[:, i, :, :, None] * state + k[:, i, :, :, None] * v[:, i, :, None]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, i] * q.shape[-1] ** -0.5, state))
        out = torch.stack(out, 1)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6) * sd[f"{key}.g_norm_swish_gate.weight"]
        return linear(f"{key}.o_proj", out.flatten(2) * F.silu(g))

    def mlp(key, x):
        gate, up = linear(f"{key}.gate_proj", x).chunk(2, -1)
        return linear(f"{key}.down_proj", F.silu(gate) * up)

    x = F.conv2d(x, sd["x_embedder.proj.weight"], sd["x_embedder.proj.bias"], stride=p)
    edge = x.shape[-1]
    x = x.flatten(2).transpose(1, 2) + sd["pos_embed"]
    angle = t[:, None].float() * 10000 ** (-torch.arange(128) / 128)
    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", torch.cat((angle.cos(), angle.sin()), -1))))
    c = c + sd["y_embedder.embedding_table.weight"][y]
    skips = []
    has_skips = any("skip_linear" in key for key in sd)
    for i in range(depth):
        b = f"blocks.{i}"
        if has_skips and i > depth // 2:
            x = linear(f"{b}.skip_linear", torch.cat((x, skips.pop()), -1))
        s1, m1, g1, s2, m2, g2 = linear(f"{b}.adaLN_modulation.1", F.silu(c)).chunk(6, -1)
        x = x + g1[:, None] * attention(f"{b}.attn", norm(x, s1, m1))
        x = x + g2[:, None] * mlp(f"{b}.mlp", norm(x, s2, m2))
        image = x.transpose(1, 2).unflatten(2, (edge, edge))
        image = F.conv2d(image, sd[f"{b}.dw_conv.weight"], sd[f"{b}.dw_conv.bias"], padding=1, groups=dim)
        x = image.flatten(2).transpose(1, 2).flip(1)
        if i % 2:
            x = x.unflatten(1, (edge, edge)).transpose(1, 2).flatten(1, 2)
        if has_skips and i < depth // 2 - 1:
            skips.append(x)
    shift, scale = linear("final_layer.adaLN_modulation.1", F.silu(c)).chunk(2, -1)
    x = linear("final_layer.linear", norm(x, shift, scale))
    x = x.unflatten(1, (edge, edge)).unflatten(-1, (p, p, -1))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def random_checkpoint(dim, depth, edge, patch, head_dim, skip, classes=5, channels=3):
    """Random weights under the original's names."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        fan_in = shape[-1] if len(shape) > 1 else 4
        return torch.randn(*shape, generator=generator) * fan_in**-0.5

    sd = {
        "x_embedder.proj.weight": randn(dim, channels, patch, patch),
        "x_embedder.proj.bias": randn(dim),
        "t_embedder.mlp.0.weight": randn(dim, 256),
        "t_embedder.mlp.0.bias": randn(dim),
        "t_embedder.mlp.2.weight": randn(dim, dim),
        "t_embedder.mlp.2.bias": randn(dim),
        "y_embedder.embedding_table.weight": randn(classes + 1, dim),
        "final_layer.adaLN_modulation.1.weight": randn(2 * dim, dim),
        "final_layer.adaLN_modulation.1.bias": randn(2 * dim),
        "final_layer.linear.weight": randn(2 * channels * patch**2, dim),
        "final_layer.linear.bias": randn(2 * channels * patch**2),
    }
    frequency = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim / 4))
    angle = torch.arange(edge)[:, None] * frequency
    axis = torch.cat((angle.sin(), angle.cos()), -1).float()
    sd["pos_embed"] = torch.cat((axis.repeat(edge, 1), axis.repeat_interleave(edge, 0)), -1)[None]
    for i in range(depth):
        shapes = {
            "adaLN_modulation.1.weight": (6 * dim, dim),
            "adaLN_modulation.1.bias": (6 * dim,),
            "attn.q_proj.weight": (dim // 2, dim),
            "attn.k_proj.weight": (dim // 2, dim),
            "attn.v_proj.weight": (dim, dim),
            "attn.g_proj.weight": (dim, dim),
            "attn.o_proj.weight": (dim, dim),
            "attn.gk_proj.0.weight": (16, dim),
            "attn.gk_proj.1.weight": (dim // 2, 16),
            "attn.gk_proj.1.bias": (dim // 2,),
            "attn.g_norm_swish_gate.weight": (head_dim,),
            "mlp.gate_proj.weight": (512, dim),
            "mlp.down_proj.weight": (dim, 256),
            "dw_conv.weight": (dim, 1, 3, 3),
            "dw_conv.bias": (dim,),
        }
        if skip and i > depth // 2:
            shapes |= {"skip_linear.weight": (dim, 2 * dim), "skip_linear.bias": (dim,)}
        sd |= {f"blocks.{i}.{key}": randn(*shape) for key, shape in shapes.items()}
    return sd


def golden():
    path = GOLDEN / "dig_plain_style.safetensors"
    if not path.exists():
        pytest.skip(f"no golden outputs at {path}; set SCANVAS_GOLDEN")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        config = json.loads(file.metadata()["config"])
    return (
        {k.removeprefix("state_dict."): v for k, v in tensors.items() if k.startswith("state_dict.")},
        tensors,
        config,
    )


@torch.no_grad()
def test_golden():
    state_dict, tensors, config = golden()
    model = convert_dig_checkpoint(state_dict)
    out = model(*(tensors[f"a.input{i}"] for i in range(3))).sample
    torch.testing.assert_close(out, tensors["a.output"], atol=1e-5, rtol=1e-5)
    assert model.config.sample_size == config["input_size"]
    assert (model.config.num_classes, model.config.mlp_hidden) == (config["num_classes"], config["mlp_hidden"])


# The sizes of the original have depths divisible by four; others end in another order, which must not matter.
@pytest.mark.parametrize(
    ("dim", "depth", "edge", "patch", "head_dim", "skip"),
    [
        (64, 4, 4, 2, 64, False),
        (96, 6, 3, 1, 48, False),
        (64, 5, 4, 2, 32, False),
        (64, 12, 4, 2, 64, True),
        (96, 8, 5, 1, 32, True),
        (64, 6, 3, 4, 64, True),
    ],
)
@torch.no_grad()
def test_original_flow(dim, depth, edge, patch, head_dim, skip):
    sd = random_checkpoint(dim, depth, edge, patch, head_dim, skip)
    x = torch.randn(2, 3, edge * patch, edge * patch, generator=torch.Generator().manual_seed(1))
    t, y = torch.tensor([3, 871]), torch.tensor([5, 2])
    model = convert_dig_checkpoint({"ema": sd})
    expected = original(sd, x, t, y, head_dim)
    assert expected.std() > 0.1
    error = (model(x, t, y).sample - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, error
    assert model.config.long_skip == skip
    assert model.config.num_attention_heads == dim // head_dim
    if skip:  # the switch is what makes the difference
        assert model.config.original_scan_order
        model.register_to_config(original_scan_order=False)
        assert (model(x, t, y).sample - expected).abs().max() / expected.abs().max() > 1e-2


@torch.no_grad()
def test_command(tmp_path, command):
    sd = random_checkpoint(64, 8, 4, 2, 64, True)
    save_file(sd, tmp_path / "dig.safetensors")
    code, out, _ = command("convert", tmp_path / "dig.safetensors", "--out", tmp_path / "model")
    assert code == 0
    assert "8 blocks of width 64, with long skips" in out
    x, t, y = torch.randn(1, 3, 8, 8), torch.tensor([500]), torch.tensor([1])
    loaded = LinearDiTTransformer2DModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(loaded(x, t, y).sample, convert_dig_checkpoint(sd)(x, t, y).sample)
    for source, message in ((tmp_path / "none.pt", "no file"), (tmp_path / "broken.safetensors", "no tensor")):
        save_file({"a": torch.zeros(1)}, tmp_path / "broken.safetensors")
        code, _, err = command("convert", source, "--out", tmp_path / "model")
        assert code == 1
        assert message in err


@torch.no_grad()
def test_files(tmp_path):
    sd = random_checkpoint(64, 4, 4, 2, 64, False)
    x, t, y = torch.randn(1, 3, 8, 8), torch.tensor([500]), torch.tensor([1])
    first = convert_dig_checkpoint(sd)
    expected = deepcopy(first).double()(x.double(), t, y).sample
    save_file(sd, tmp_path / "dig.safetensors")
    torch.save({"model": sd, "ema": sd, "args": Namespace(model="DiG-S/2")}, tmp_path / "dig.pt")

    convert_file(tmp_path / "dig.pt", tmp_path / "converted")
    for model in (
        LinearDiTTransformer2DModel.from_pretrained(tmp_path / "converted"),
        LinearDiTTransformer2DModel.from_single_file(str(tmp_path / "dig.safetensors")),
        LinearDiTTransformer2DModel.from_single_file(
            str(tmp_path / "converted" / "diffusion_pytorch_model.safetensors"), config=str(tmp_path / "converted")
        ),
    ):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, first.state_dict()[name])
        # In float64: how float32 sums are rounded depends on where the file's tensors lie in memory.
        torch.testing.assert_close(model.double()(x.double(), t, y).sample, expected)


def test_misfits_are_named(tmp_path):
    sd = random_checkpoint(64, 4, 4, 2, 64, False)
    broken = {k: v for k, v in sd.items() if k != "blocks.1.dw_conv.bias"}
    broken |= {"blocks.2.mlp.down_proj.weight": torch.zeros(64, 255), "extra": torch.zeros(1)}
    save_file(broken, tmp_path / "broken.safetensors")
    for load in (
        lambda: convert_dig_checkpoint(broken),
        lambda: LinearDiTTransformer2DModel.from_single_file(str(tmp_path / "broken.safetensors")),
    ):
        with pytest.raises(ValueError, match="fit") as error:
            load()
        for part in (
            "blocks.2.mlp.fc2.weight has shape (64, 255)",
            "blocks.1.conv.bias is missing",
            "extra has no place",
        ):
            assert part in str(error.value)
    with pytest.raises(ValueError, match=r"no tensor x_embedder.proj.weight.*it has a, b"):
        convert_dig_checkpoint({"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(ValueError, match="pos_embed does not hold the fixed sin-cos positions"):
        convert_dig_checkpoint(sd | {"pos_embed": torch.zeros(1, 16, 64)})
    with pytest.raises(ValueError, match="pos_embed has 15 positions, which is not a square grid"):
        convert_dig_checkpoint(sd | {"pos_embed": torch.zeros(1, 15, 64)})
    with pytest.raises(FileNotFoundError, match="no file"):
        load_tensors(tmp_path / "absent.pt")

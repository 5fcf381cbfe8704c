"""Checkpoints in the original layouts, with random weights."""

import math

import timm
import torch
from safetensors.torch import save_file

import scanvas  # noqa: F401 - registers the models


def save(state, path):
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


def load(name, file, **kwargs):
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **kwargs).eval()


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

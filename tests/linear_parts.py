"""Small softmax models of every family that ``linearize`` knows, their inputs, and a core that is a softmax itself."""

import timm
import torch
import torch.nn.functional as F
from diffusers import (
    AuraFlowTransformer2DModel,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    HunyuanDiT2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)

from scanvas import LinearDiTTransformer2DModel
from scanvas.diffusion.linear_cores import LinearCore
from scanvas.diffusion.linear_cores_kernel import KERNEL_TARGETS
from scanvas.diffusion.linear_cores_softmax import SOFTMAX_TARGETS


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dit():
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        out_channels=4,
    )
    # DiT fixes the size of its positions; only squares run
    return model, {
        "hidden_states": _randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }


def pixart():
    model = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=3,
        sample_size=8,
        caption_channels=12,
        cross_attention_dim=32,
    )
    return model, {
        "hidden_states": _randn(2, 4, 8, 12),
        "encoder_hidden_states": _randn(2, 5, 12),
        "timestep": torch.tensor([3, 7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sana(**kwargs):
    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=12,
        sample_size=8,
        **kwargs,
    )
    return model, {
        "hidden_states": _randn(2, 4, 6, 8),
        "encoder_hidden_states": _randn(2, 5, 12),
        "timestep": torch.tensor([3, 7]),
    }


def sana_qk_norm():
    return sana(qk_norm="rms_norm_across_heads")


def sd3(**kwargs):
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=12,
        caption_projection_dim=32,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=16,
        **kwargs,
    )
    return model, {
        "hidden_states": _randn(2, 4, 8, 12),
        "encoder_hidden_states": _randn(2, 5, 12),
        "pooled_projections": _randn(2, 10),
        "timestep": torch.tensor([3.0, 7.0]),
    }


def sd35():
    return sd3(qk_norm="rms_norm", dual_attention_layers=(0,))


def flux():
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 4, 8),
    )
    ids = torch.zeros(4, 6, 3)
    ids[..., 1], ids[..., 2] = torch.arange(4)[:, None], torch.arange(6)
    return model, {
        "hidden_states": _randn(2, 24, 4),
        "encoder_hidden_states": _randn(2, 5, 12),
        "pooled_projections": _randn(2, 10),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": ids.view(24, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def qwen():
    model = QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=1,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(4, 4, 8),
    )
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    return model, {
        "hidden_states": _randn(2, 24, 4),
        "encoder_hidden_states": _randn(2, 5, 12),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 6)]] * 2,
    }


def auraflow():
    model = AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=1,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=12,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    )
    return model, {
        "hidden_states": _randn(2, 4, 8, 12),
        "encoder_hidden_states": _randn(2, 5, 12),
        "timestep": torch.tensor([0.3, 0.7]),
    }


def hunyuan():
    model = HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=32,
        num_layers=4,
        cross_attention_dim=12,
        cross_attention_dim_t5=16,
        pooled_projection_dim=8,
        text_len=4,
        text_len_t5=3,
        activation_fn="gelu-approximate",
    )
    angles = _randn(16, 8)
    return model, {
        "hidden_states": _randn(2, 4, 8, 8),
        "timestep": torch.tensor([3.0, 7.0]),
        "encoder_hidden_states": _randn(2, 4, 12),
        "text_embedding_mask": torch.ones(2, 4),
        "encoder_hidden_states_t5": _randn(2, 3, 16),
        "text_embedding_mask_t5": torch.ones(2, 3),
        "image_meta_size": torch.ones(2, 6),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": tuple(f(angles).repeat_interleave(2, dim=-1) for f in (torch.cos, torch.sin)),
    }


def wan():
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": _randn(2, 4, 3, 8, 12),
        "encoder_hidden_states": _randn(2, 5, 12),
        "timestep": torch.tensor([3, 7]),
    }


def lumina2(lengths=(3, 5)):
    model = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=64,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(32, 32, 32),
        cap_feat_dim=12,
    )
    return model, {
        "hidden_states": _randn(2, 4, 8, 12),
        "encoder_hidden_states": _randn(2, 5, 12),
        "encoder_attention_mask": (torch.arange(5) < torch.tensor(lengths)[:, None]).long(),
        "timestep": torch.tensor([0.3, 0.7]),
    }


def unet():
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return model, {
        "sample": _randn(2, 4, 16, 24),
        "encoder_hidden_states": _randn(2, 5, 12),
        "timestep": torch.tensor([3, 7]),
    }


def denoiser(**kwargs):
    size = {"sample_size": 8, "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 8, "mlp_hidden": 64}
    model = LinearDiTTransformer2DModel(**{**size, "mixer": "softmax", "num_classes": 5, **kwargs})
    return model, {
        "hidden_states": _randn(2, 4, 8, 12),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 5]),
    }


DIFFUSERS = {
    f.__name__: f
    for f in (dit, pixart, sana, sana_qk_norm, sd3, sd35, flux, qwen, auraflow, hunyuan, lumina2, wan, unet)
}
GRIDS = {  # of the whole model, or of the first and the last host
    "dit": [(4, 4)], "pixart": [(4, 6)], "sana": [(6, 8)], "sana_qk_norm": [(6, 8)], "sd3": [(4, 6)], "sd35": [(4, 6)],
    "flux": [(4, 6)], "qwen": [(4, 6)], "auraflow": [(4, 6)], "hunyuan": [(4, 4)], "wan": [(3, 4, 6)],
    "unet": [(8, 12), (16, 24)],
}  # fmt: skip
_SMALL = {"img_size": (48, 64), "depth": 2, "embed_dim": 48, "num_heads": 3}
TIMM = {
    "vit": ("vit_tiny_patch16_224", {**_SMALL, "num_classes": 7}),
    "vit_reg_qk_norm": (
        "vit_tiny_patch16_224",
        {**_SMALL, "qk_norm": True, "reg_tokens": 4, "class_token": False, "global_pool": "avg"},
    ),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", _SMALL),
    "eva02": ("eva02_tiny_patch14_224", {**_SMALL, "img_size": (42, 56)}),
    "dinov3": ("vit_small_patch16_dinov3", {**_SMALL, "embed_dim": 192}),
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", {**_SMALL, "embed_dim": 192}),
    "vig": (
        "test_vig",
        {**_SMALL, "mixer": "softmax", "mixer_kwargs": {"qk_norm": True}, "class_token": True, "rope": True},
    ),
    "agent_deit": ("test_agent_deit", {"img_size": (48, 64)}),  # has agent attention, and softmax behind it
}


MORE_TARGETS = (*KERNEL_TARGETS, *SOFTMAX_TARGETS)
FEW_MODELS = ("qwen", "vit", "denoiser")
"""Targets that are tried core by core in tests/test_linearize_kernel.py, and in whole models only in these: text and
image with a mask and rotary positions; class token; mixers of ours."""

SMALL_OPTIONS = {"local": {"radius": 2, "pool": 2}, "hybrid": {"radius": 2}, "sla": {"block": 4, "keep": 0.3}}
"""Of targets whose windows by default hold all of such small images."""


def build(name):
    """A model in eval mode, its weights all different from zero, and its inputs."""
    torch.manual_seed(0)
    if name in TIMM:
        architecture, kwargs = TIMM[name]
        model = timm.create_model(architecture, **kwargs)
        inputs = {"x": _randn(2, 3, *kwargs["img_size"])}
    else:
        model, inputs = {**DIFFUSERS, "denoiser": denoiser}[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval(), inputs


def run(model, inputs):
    with torch.no_grad():
        out = model(*inputs.values()) if set(inputs) == {"x"} else model(**inputs)
    return out.sample if hasattr(out, "sample") else out


class SoftmaxCore(LinearCore):
    """Softmax attention as a target: a model linearised to it must answer as before."""

    def mix(self, q, k, v, x, rotate, weight):
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        bias = None if weight is None else weight.log()[:, None, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)

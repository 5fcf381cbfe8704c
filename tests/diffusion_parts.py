"""Small denoisers and components of pipelines, made without any download."""

import torch
from diffusers import AutoencoderKL
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from scanvas import LinearDiTTransformer2DModel

SMALL = {"sample_size": 8, "num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 16, "mlp_hidden": 64}
VARIANTS = {
    "classes": {"num_classes": 5, "out_channels": 8},
    "text": {"caption_channels": 12, "norm_type": "ada_norm_single", "mlp": "mix"},
    "both, long skips": {"num_classes": 5, "caption_channels": 12, "long_skip": True, "num_layers": 6},
    "neither, plain": {"mlp": "gelu", "depthwise_conv": False, "patch_size": 1},
}


def build(mixer="gla", **overrides):
    torch.manual_seed(0)
    return LinearDiTTransformer2DModel(**{**SMALL, "mixer": mixer, **overrides}).eval()


def inputs(model, batch=2, grid=(8, 8), seed=0):
    g = torch.Generator().manual_seed(seed)
    c = model.config
    kwargs = {
        "hidden_states": torch.randn(batch, c.in_channels, *grid, generator=g),
        "timestep": torch.randint(0, 1000, (batch,), generator=g),
    }
    if c.num_classes:
        kwargs["class_labels"] = torch.randint(0, c.num_classes + 1, (batch,), generator=g)
    if c.get("caption_channels"):
        kwargs["encoder_hidden_states"] = torch.randn(batch, 7, c.caption_channels, generator=g)
        kwargs["encoder_attention_mask"] = (torch.arange(7) < 4).long().expand(batch, 7)
    return kwargs


WORDS = ("<pad>", "</s>", "<unk>", "a", "handwritten", "seven", "two", "very", "long", "painting", "of")


def tokenizer():
    """One token a word, and ``</s>`` at the end."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def text_encoder(width=16):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return T5EncoderModel(config).eval()


def vae(latent_channels=4, force_upcast=False):
    """Halves height and width."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=16,
        force_upcast=force_upcast,
    ).eval()


def denoiser(**overrides):
    """Two blocks of width 16 with random, not zero, weights."""
    torch.manual_seed(0)
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "mlp_hidden": 32,
    }
    return LinearDiTTransformer2DModel(**{**config, **overrides}).eval()

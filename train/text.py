"""Text encoders for training: a pretrained one from transformers, or a small CLIP with the words of the captions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .denoise_config import TextConfig
from .errors import ConfigError, UserError
from .quiet import no_bars

_SPECIAL = {"pad_token": "[pad]", "unk_token": "[unknown]", "bos_token": "[start]", "eos_token": "[end]"}


def word_tokenizer(captions: Iterable[str], max_length: int):
    """A transformers tokenizer whose vocabulary is the words of ``captions`` in lower case, digits one by one."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for caption in captions for word in re.findall(r"\d|[^\W\d]+|[^\w\s]", caption.lower())})
    vocabulary = {word: i for i, word in enumerate([*_SPECIAL.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d|[^\W\d]+|[^\w\s]"), "removed", invert=True)]
    )
    start, end = _SPECIAL["bos_token"], _SPECIAL["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, vocabulary[start]), (end, vocabulary[end])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **_SPECIAL)


def small_clip(tokenizer, width: int, config: TextConfig) -> nn.Module:
    """A CLIP text encoder (arXiv:2103.00020) with fresh weights whose features are ``width`` wide."""
    from transformers import CLIPTextConfig, CLIPTextModel

    if width % config.heads:
        raise ConfigError(f"text.heads={config.heads} must divide the denoiser's caption_channels={width}")
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            projection_dim=width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.max_length,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def load_text(config: TextConfig) -> tuple[Any, nn.Module]:
    """Tokenizer and encoder from ``text.pretrained``. Raises ConfigError where they cannot be loaded."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModel, T5EncoderModel

    source = config.pretrained
    parts = (Path(source) / "model_index.json").is_file()
    places = {
        "tokenizer": {"subfolder": "tokenizer"} if parts else {},
        "model": {"subfolder": "text_encoder"} if parts else {},
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **places["tokenizer"])
        kind = AutoConfig.from_pretrained(source, **places["model"]).model_type
        cls = {"t5": T5EncoderModel, "clip": CLIPTextModel, "clip_text_model": CLIPTextModel}.get(kind, AutoModel)
        with no_bars():
            encoder = cls.from_pretrained(source, **places["model"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"text.pretrained={source!r} cannot be loaded: {' '.join(str(error).split())[:400]}"
        ) from error
    if tokenizer.pad_token is None:
        raise ConfigError(f"text.pretrained={source!r}: its tokenizer has no padding token")
    return tokenizer, encoder


def create_text(config: TextConfig, width: int, captions: Iterable[str]) -> tuple[Any, nn.Module, bool]:
    """``(tokenizer, encoder, whether it is trained along)``; features must be ``width`` wide, else ConfigError."""
    if config.max_length < 3:
        raise ConfigError(f"text.max_length must be at least 3, and is {config.max_length}")
    try:
        import transformers  # noqa: F401 - an optional dependency
    except ImportError as error:
        raise UserError("a denoiser with text needs the package transformers: pip install 'scanvas[text]'") from error
    if config.pretrained is None:
        if config.train is False:
            raise ConfigError("text.train=false needs text.pretrained: a new text encoder knows no words yet")
        tokenizer = word_tokenizer(captions, config.max_length)
        return tokenizer, small_clip(tokenizer, width, config), True
    tokenizer, encoder = load_text(config)
    got = getattr(encoder.config, "hidden_size", None) or getattr(encoder.config, "d_model", None)
    if got != width:
        raise ConfigError(
            f"the features of text.pretrained={config.pretrained!r} are {got} wide, and the denoiser takes "
            f"caption_channels={width}: set model.kwargs.caption_channels={got}"
        )
    return tokenizer, encoder, bool(config.train)


class Tokens:
    """Captions → token ids and mask, as the pipeline makes them. Remembers captions that come again."""

    def __init__(self, tokenizer, length: int):
        self.tokenizer, self.length = tokenizer, min(length, tokenizer.model_max_length)
        self.known: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """``(ids (B, T), mask (B, T))``, int64."""
        new = [caption for caption in dict.fromkeys(captions) if caption not in self.known]
        if len(self.known) + len(new) > 100_000:  # captions that hardly come again
            self.known, new = {}, list(dict.fromkeys(captions))
        if new:
            made = self.tokenizer(
                new,
                padding="max_length",
                max_length=self.length,
                truncation=True,
                return_attention_mask=True,
                return_tensors="pt",
            )
            self.known.update(zip(new, zip(made.input_ids, made.attention_mask)))
        ids, masks = zip(*(self.known[caption] for caption in captions))
        return torch.stack(ids), torch.stack(masks)

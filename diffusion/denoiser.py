"""``LinearDiTTransformer2DModel``: a diffusion transformer, with any mixer for its attention, as a diffusers model."""

from functools import wraps
from importlib import import_module

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.loaders import FromOriginalModelMixin, PeftAdapterMixin
from diffusers.models.attention import AttentionMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import USE_PEFT_BACKEND, scale_lora_layers, unscale_lora_layers
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenMixer, layer_options
from scanvas.backbones.scan import ORDERS, from_order, to_order

from .block import MLPS, NORMS, LinearDiTBlock
from .checks import check_denoiser_inputs, check_multiple, check_one_of, to_size
from .conditioning import AdaptiveLayerNorm, TextProjection, TimeEmbedding, sincos_positions

PREDICTIONS = ("epsilon", "v_prediction", "sample", "flow_prediction")


class LinearDiTTransformer2DModel(
    ModelMixin, ConfigMixin, AttentionMixin, PeftAdapterMixin, FromOriginalModelMixin, CacheMixin
):
    """A denoiser of images or latents of any height and width, conditioned on time and on classes, text or both.

    One class for DiG (arXiv:2405.18428: ``mixer="gla"`` in one direction, scan orders, ``depthwise_conv``), LiT
    (arXiv:2501.12976: ``mixer="linear"``), much of SANA (arXiv:2410.10629: with ``mlp="mix"`` and adaLN-single) and DiT
    (arXiv:2212.09748: ``mixer="softmax"``). ``scanvas.create_denoiser`` builds the published sizes.

    Args:
        sample_size: height and width the positions are made for, in pixels of the latent: an int or ``(H, W)``.
        patch_size: side of a patch.
        in_channels: channels of the latent.
        out_channels: ``in_channels`` (default), or twice as many for a learned variance.
        num_layers, num_attention_heads, attention_head_dim: the width is heads × head dimension.
        mixer, mixer_kwargs: see ``scanvas.create_mixer``.
        layer_mixers: other mixers for some blocks: the block's index, as a string, → ``mixer``, ``num_heads`` and the
            mixer's own keywords. What ``scanvas.linearize`` writes.
        scan_orders: orders of the blocks, repeated, for mixers that depend on one; see ``backbones.scan.ORDERS``.
        depthwise_conv: a 3×3 depthwise convolution after each block, at first the identity.
        long_skip: outputs of the first half of the blocks are joined to the inputs of the second.
        original_scan_order: hand over long skips, and leave the output, in scan order as the original code of DiG did.
            Only for its checkpoints: they were trained with skips that reach every other block transposed.
        mlp: ``"swiglu"``, ``"mix"`` or ``"gelu"``.
        mlp_hidden: its inner width; by default ⌈8/3·C⌉ to a multiple of 256, 2.5·C or 4·C.
        norm_type: ``"ada_norm_zero"`` or ``"ada_norm_single"``.
        num_classes: classes; label ``num_classes`` means none. ``None`` for a model without classes.
        caption_channels: width of the text encoder's features; ``None`` for a model without text.
        num_cross_attention_heads: heads of the attention to text, ``num_attention_heads`` by default.
        prediction_type: what the model is trained to predict, in the words of diffusers' schedulers: ``"epsilon"``,
            ``"v_prediction"``, ``"sample"`` or ``"flow_prediction"``. The pipelines check it against the scheduler.
        timestep_scale: factor which pipelines put on the scheduler's timesteps, as in SANA.

    Raises:
        ValueError: an argument is not allowed; the message names it.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["LinearDiTBlock"]  # noqa: RUF012 - diffusers declares these as lists
    _repeated_blocks = ["LinearDiTBlock"]  # noqa: RUF012
    # Embeddings and norms, and the convolutions and decays, whose weights mixers hand to kernels.
    _skip_layerwise_casting_patterns = ["patch_embed", "norm", "embed", "conv", "decay_proj"]  # noqa: RUF012

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_layers: int = 12,
        num_attention_heads: int = 6,
        attention_head_dim: int = 64,
        mixer: str = "gla",
        mixer_kwargs: dict | None = None,
        scan_orders: tuple[str, ...] = tuple(ORDERS),
        depthwise_conv: bool = True,
        long_skip: bool = False,
        original_scan_order: bool = False,
        mlp: str = "swiglu",
        mlp_hidden: int | None = None,
        norm_type: str = "ada_norm_zero",
        num_classes: int | None = None,
        caption_channels: int | None = None,
        num_cross_attention_heads: int | None = None,
        prediction_type: str = "epsilon",
        timestep_scale: float = 1.0,
        layer_mixers: dict[str, dict] | None = None,
    ):
        super().__init__()
        out_channels = in_channels if out_channels is None else out_channels
        if out_channels not in (in_channels, 2 * in_channels):
            raise ValueError(
                f"out_channels must be in_channels = {in_channels} or, with a learned variance, {2 * in_channels}; "
                f"got {out_channels}"
            )
        check_one_of("mlp", mlp, MLPS)
        check_one_of("norm_type", norm_type, NORMS)
        check_one_of("prediction_type", prediction_type, PREDICTIONS)
        if prediction_type == "flow_prediction" and out_channels != in_channels:
            raise ValueError(
                "prediction_type 'flow_prediction' has no variance to learn: out_channels must be in_channels"
            )
        if num_layers < 1 or not scan_orders:
            raise ValueError(f"num_layers and scan_orders must not be empty, got {num_layers} and {scan_orders}")
        for name, value in (("num_classes", num_classes), ("caption_channels", caption_channels)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, or None for none; got {value}")
        for name, size in zip(("height", "width"), to_size(sample_size)):
            check_multiple(f"sample_size ({name})", size, patch_size, "patch_size")
        dim = num_attention_heads * attention_head_dim
        if dim % 4:
            raise ValueError(f"the width must be divisible by 4 for the 2-D positions, got {dim}")
        self.register_to_config(out_channels=out_channels)
        self.inner_dim = dim
        self.gradient_checkpointing = False
        self._fused_mixers: list[TokenMixer] = []

        self.patch_embed = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        self.time_embed = TimeEmbedding(dim)
        self.class_embed = None if num_classes is None else nn.Embedding(num_classes + 1, dim)
        self.caption_embed = None if caption_channels is None else TextProjection(caption_channels, dim)
        self.adaln_single = nn.Linear(dim, 6 * dim) if norm_type == "ada_norm_single" else None
        cross_heads = None if caption_channels is None else num_cross_attention_heads or num_attention_heads
        receivers = range(num_layers // 2 + 1, num_layers) if long_skip else ()
        mixers = [(mixer, num_attention_heads, layer_options(mixer, i, mixer_kwargs)) for i in range(num_layers)]
        for index, other in (layer_mixers or {}).items():
            if index not in map(str, range(num_layers)) or "mixer" not in other:
                raise ValueError(f"layer_mixers: '0'…'{num_layers - 1}' → {{'mixer': …}}, got {index!r} → {other}")
            own = {key: value for key, value in other.items() if key not in ("mixer", "num_heads")}
            mixers[int(index)] = (other["mixer"], other.get("num_heads", num_attention_heads), own)
        self.transformer_blocks = nn.ModuleList(
            LinearDiTBlock(
                dim,
                mixers[i][1],
                mlp_hidden,
                mixer=mixers[i][0],
                mixer_kwargs=mixers[i][2],
                mlp=mlp,
                norm_type=norm_type,
                order=scan_orders[i % len(scan_orders)],
                depthwise_conv=depthwise_conv,
                long_skip=i in receivers,
                cross_attention_heads=cross_heads,
            )
            for i in range(num_layers)
        )
        if original_scan_order and not self.transformer_blocks[0].mixer.needs_scan:
            raise ValueError(f"original_scan_order is for mixers that scan; {mixer!r} does not")
        self.norm_out = AdaptiveLayerNorm(dim)
        self.modulation_out = NORMS[norm_type](dim, 2)
        self.proj_out = nn.Linear(dim, patch_size**2 * out_channels)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, LinearDiTBlock) and module.conv is not None:
                module.conv.init_identity()
        for module in self.modules():  # some mixers have weights of their own
            if isinstance(module, TokenMixer) and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.xavier_uniform_(self.patch_embed.weight.view(self.inner_dim, -1))
        nn.init.zeros_(self.patch_embed.bias)
        for layer in (self.time_embed.linear_1, self.time_embed.linear_2, self.class_embed, self.adaln_single):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)

    @torch.no_grad()
    def zero_init(self) -> "LinearDiTTransformer2DModel":
        """Zero what DiT (section 3.2) and PixArt zero before training from scratch: adaLN-Zero, the output of attention
        to text and the output layer, so that the model predicts 0 at first. ``create_denoiser`` does it; a model built
        otherwise starts from non-zero weights, like all of diffusers' models."""
        layers = [self.proj_out, getattr(self.modulation_out, "linear", None)]
        for block in self.transformer_blocks:
            layers += [getattr(block.modulation, "linear", None), block.attn2 and block.attn2.to_out[0]]
        for layer in layers:
            if layer is not None:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
        return self

    def drop_labels(self, class_labels: Tensor, probability: float, generator: torch.Generator | None = None) -> Tensor:
        """Replace each of the labels ``(B,)`` by the null label with this probability, for training with
        classifier-free guidance (arXiv:2207.12598). The model itself drops nothing, in training or not."""
        drop = torch.rand(class_labels.shape, generator=generator, device=class_labels.device) < probability
        return class_labels.masked_fill(drop, self.config.num_classes)

    def fuse_qkv_projections(self) -> None:
        """One projection instead of three in every mixer, of two in attention to text: quicker, the same result. Not
        while LoRA layers are loaded, which it would lose."""
        if getattr(self, "_hf_peft_config_loaded", False):
            raise ValueError("fuse_qkv_projections would lose the LoRA layers; fuse_lora() and unload_lora() first")
        super().fuse_qkv_projections()
        for block in self.transformer_blocks:
            if not block.mixer.fused_projections:
                block.mixer.fuse_projections()
                self._fused_mixers.append(block.mixer)

    def unfuse_qkv_projections(self) -> None:
        """Undo ``fuse_qkv_projections``."""
        super().unfuse_qkv_projections()
        while self._fused_mixers:
            self._fused_mixers.pop().fuse_projections(False)

    def enable_cache(self, config) -> None:
        """As in diffusers, whose caches that skip blocks are told here what a block takes and returns."""
        TransformerBlockRegistry.register(LinearDiTBlock, TransformerBlockMetadata(return_hidden_states_index=0))
        super().enable_cache(config)

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path_or_dict, **kwargs) -> "LinearDiTTransformer2DModel":
        """Load an original DiG checkpoint, see ``convert_dig_checkpoint``, or with ``config=DIRECTORY`` a file of ours.

        All else is as in diffusers' ``from_single_file``.
        """
        import_module("scanvas.diffusion.convert")  # enters the conversion in diffusers' table
        if "config" not in kwargs:
            kwargs.setdefault("original_config", {})  # the hyper-parameters are read off the tensors
        return super().from_single_file(pretrained_model_link_or_path_or_dict, **kwargs)

    @wraps(ModelMixin.save_pretrained)  # pipelines look at its signature
    def save_pretrained(self, *args, **kwargs) -> None:
        # Projections are saved unfused, as ``from_pretrained`` will look for them.
        fused = bool(self._fused_mixers)
        if fused:
            self.unfuse_qkv_projections()
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            if fused:
                self.fuse_qkv_projections()

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        added_cond_kwargs: dict | None = None,
        attention_kwargs: dict | None = None,
        cross_attention_kwargs: dict | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """
        Args:
            hidden_states: ``(B, in_channels, H, W)``, H and W divisible by ``patch_size``.
            timestep: ``(B,)``, ``(1,)`` or a scalar, in [0, 1000], integer or not.
            class_labels: ``(B,)`` int64 in 0…num_classes; ``None`` for no class.
            encoder_hidden_states: ``(B, T, caption_channels)``, needed by a model with text.
            encoder_attention_mask: ``(B, T)``, non-zero where a text token counts, or ``(B, 1, T)`` to be added to the
                scores. A row without any such token is as if there were no text.
            added_cond_kwargs: accepted for PixArt's pipelines as long as it holds nothing.
            attention_kwargs, cross_attention_kwargs: may hold ``scale``, that of LoRA layers.
            return_dict: return a ``Transformer2DModelOutput``, else a tuple.

        Returns:
            ``sample`` ``(B, out_channels, H, W)``.

        Raises:
            ValueError: an input is missing, superfluous or of the wrong shape.
        """
        scale = self._lora_scale(attention_kwargs, cross_attention_kwargs)
        text, text_mask = encoder_hidden_states, encoder_attention_mask
        check_denoiser_inputs(self.config, hidden_states, timestep, class_labels, text, text_mask, added_cond_kwargs)
        if scale is not None:
            scale_lora_layers(self, scale)
        try:
            sample = self._denoise(hidden_states, timestep, class_labels, text, text_mask)
        finally:
            if scale is not None:
                unscale_lora_layers(self, scale)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _denoise(self, latent, timestep, class_labels, text, text_mask) -> Tensor:
        B, _, height, width = latent.shape
        p, dtype = self.config.patch_size, latent.dtype
        grid = (height // p, width // p)
        base = tuple(size // p for size in to_size(self.config.sample_size))

        x = self.patch_embed(latent).flatten(2).transpose(1, 2)
        x = x + sincos_positions(grid, self.inner_dim, base, x.device).to(x.dtype)
        condition = self.time_embed(torch.as_tensor(timestep, device=x.device).reshape(-1).expand(B), dtype)
        if self.class_embed is not None:
            if class_labels is None:
                class_labels = torch.full((B,), self.config.num_classes, device=x.device)
            condition = condition + self.class_embed(class_labels)
        if text is not None:
            text = self.caption_embed(text)
        shared = condition
        if self.adaln_single is not None:
            shared = self.adaln_single(nn.functional.silu(condition))
            condition = condition.repeat(1, 2)  # the table of the output layer has two parts

        x = self._run_blocks(x, shared, grid, text, text_mask)

        shift, scale = self.modulation_out(condition)
        x = self.proj_out(self.norm_out(x, shift, scale))
        x = x.view(B, *grid, p, p, self.config.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(B, self.config.out_channels, height, width)

    def _run_blocks(self, x: Tensor, condition: Tensor, grid: tuple[int, int], text, text_mask) -> Tensor:
        depth = len(self.transformer_blocks)
        orders = self.config.scan_orders
        skips: list[tuple[Tensor, str]] = []
        for i, block in enumerate(self.transformer_blocks):
            skip = None
            if block.skip_linear is not None:
                skip, order = skips.pop()
                if self.config.original_scan_order:
                    # The sequence stored in one order is read in another.
                    skip = from_order(to_order(skip, order, grid)[0], block.order, grid)
            args = (x, condition, grid, text, text_mask, skip)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, *args)
            else:
                x = block(*args)
            if self.config.long_skip and i < (depth - 1) // 2:
                skips.append((x, orders[(i + 1) % len(orders)]))
        return to_order(x, orders[depth % len(orders)], grid)[0] if self.config.original_scan_order else x

    @staticmethod
    def _lora_scale(*kwargs: dict | None) -> float | None:
        scale = None
        for entries in kwargs:
            for key, value in (entries or {}).items():
                if key != "scale":
                    raise ValueError(f"attention_kwargs may hold 'scale', that of LoRA layers; got {key!r}")
                scale = value
        return scale if USE_PEFT_BACKEND else None

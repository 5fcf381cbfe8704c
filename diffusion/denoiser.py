"""``LinearDiTTransformer2DModel``: a diffusion transformer, with any mixer for its attention, as a diffusers model."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import FromOriginalModelMixin
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - diffusers looks for it beside its models
from torch import Tensor, nn

from scanvas.backbones.mixers import TokenMixer, layer_options
from scanvas.backbones.scan import ORDERS, from_order, to_order

from .block import MLPS, NORMS, LinearDiTBlock
from .checks import check_multiple, check_one_of, check_outputs, to_size
from .conditioning import AdaptiveLayerNorm, TextProjection, TimeEmbedding, sincos_positions
from .denoiser_base import Denoiser


class LinearDiTTransformer2DModel(Denoiser, FromOriginalModelMixin):
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

    _no_split_modules = ["LinearDiTBlock"]  # noqa: RUF012 - diffusers declares these as lists
    _repeated_blocks = ["LinearDiTBlock"]  # noqa: RUF012

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
        out_channels = check_outputs(in_channels, out_channels, prediction_type, num_classes)
        check_one_of("mlp", mlp, MLPS)
        check_one_of("norm_type", norm_type, NORMS)
        if num_layers < 1 or not scan_orders:
            raise ValueError(f"num_layers and scan_orders must not be empty, got {num_layers} and {scan_orders}")
        if caption_channels is not None and caption_channels < 1:
            raise ValueError(f"caption_channels must be positive, or None for none; got {caption_channels}")
        for name, size in zip(("height", "width"), to_size(sample_size)):
            check_multiple(f"sample_size ({name})", size, patch_size, "patch_size")
        dim = num_attention_heads * attention_head_dim
        if dim % 4:
            raise ValueError(f"the width must be divisible by 4 for the 2-D positions, got {dim}")
        self.register_to_config(out_channels=out_channels)
        self.inner_dim = dim
        self.gradient_checkpointing = False

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

    @classmethod
    def size_multiple(cls, config: Mapping[str, Any]) -> int:
        return config["patch_size"]

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

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path_or_dict, **kwargs) -> "LinearDiTTransformer2DModel":
        """Load an original DiG checkpoint, see ``convert_dig_checkpoint``, or with ``config=DIRECTORY`` a file of ours.

        All else is as in diffusers' ``from_single_file``.
        """
        import_module("scanvas.diffusion.convert")  # enters the conversion in diffusers' table
        if "config" not in kwargs:
            kwargs.setdefault("original_config", {})  # the hyper-parameters are read off the tensors
        return super().from_single_file(pretrained_model_link_or_path_or_dict, **kwargs)

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

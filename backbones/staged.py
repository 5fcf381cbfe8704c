"""What timm asks of a staged backbone: the grid's sides halve and the width grows from stage to stage."""

from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, get_device_dtype, to_2tuple
from timm.models import build_model_with_cfg
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from .norm import LayerNorm2d

__all__ = ["Stage", "StagedBackbone", "build_staged", "check_stages", "staged_cfg"]


def check_stages(**entries: tuple) -> None:
    """Raise ValueError unless every argument has one entry for each stage."""
    if len({len(values) for values in entries.values()}) > 1:
        lists = (list(entries), [str(values) for values in entries.values()])
        names, given = (f"{', '.join(words[:-1])} and {words[-1]}" for words in lists)
        raise ValueError(f"{names} must have one entry a stage, got {given}")


class Stage(nn.Module):
    """Down-sampling, then blocks at one resolution.

    Args:
        downsample: ``(B, C, H, W)`` → ``(B, C', H', W')``; ``nn.Identity()`` in the first stage.
        blocks: called as ``block(tokens, grid)``.
    """

    def __init__(self, downsample: nn.Module, blocks: list[nn.Module]):
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` → ``(B, C', H', W')``, in memory channels-last."""
        x = self.downsample(x)
        grid = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid)
            else:
                x = block(x, grid)
        return x.transpose(1, 2).unflatten(2, grid)


class StagedBackbone(nn.Module):
    """The methods of timm's contract for a model of ``stem`` (``(B, in_chans, H, W)`` → ``(B, C, H/4, W/4)``),
    ``stages``, ``norm`` and ``head``. A subclass makes the first two and calls ``_make_head``. Nothing in a model
    depends on the size of its images."""

    def _make_head(
        self,
        in_chans: int,
        num_classes: int,
        dims: list[int],
        global_pool: str,
        drop_rate: float,
        norm: nn.Module | None = None,
        width: int | None = None,
        **factory,
    ) -> None:
        """Norm, classifier and what timm reads; ``dims`` are the widths of the stages. A ``norm`` other than LayerNorm
        may change the width of the last to ``width``."""
        width = dims[-1] if width is None else width
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.embed_dim = dims[0]
        self.num_features = self.head_hidden_size = width
        self.num_prefix_tokens = 0
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": dim, "reduction": 4 * 2**i} for i, dim in enumerate(dims)
        ]
        self.norm = LayerNorm2d(width, eps=1e-5, **factory) if norm is None else norm
        self.head = ClassifierHead(width, num_classes, pool_type=global_pool, drop_rate=drop_rate, **factory)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        blocks = (
            r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ]
        )
        return {"stem": r"^stem", "blocks": blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one, and the pooling if it is given."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **get_device_dtype(self))
        self.head_hidden_size = self.head.num_features

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Record another image size; the model takes any."""
        update_model_input_size(self, to_2tuple(img_size))

    def forward_features(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, num_features, H/32, W/32)``."""
        return self.norm(self.stages(self.stem(x.contiguous(memory_format=torch.channels_last))))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits) if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_chans, H, W)`` → ``(B, num_classes)``."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of chosen stages, each ``(B, C, H, W)``, and the final ones.

        Args:
            x: ``(B, in_chans, H, W)``.
            indices: the last n stages if an int, all if ``None``, else those listed.
            norm: apply the final norm to the last stage's features.
            stop_early: do not compute stages after the last one wanted.
            output_fmt: ``"NCHW"``, the only one.
            intermediates_only: leave out the final features.
        """
        if output_fmt != "NCHW":
            raise ValueError("output_fmt must be 'NCHW', got '" + output_fmt + "'")
        take, last = feature_take_indices(len(self.stages), indices)
        if torch.jit.is_scripting() or not stop_early:  # noqa: SIM108 - TorchScript can not slice modules
            stages = self.stages
        else:
            stages = self.stages[: last + 1]
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        intermediates = []
        for i, stage in enumerate(stages):
            x = stage(x)
            if i in take:
                final = norm and i == len(self.stages) - 1
                intermediates.append((self.norm(x) if final else x).contiguous())
        if intermediates_only:
            return intermediates
        return self.norm(x), intermediates

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what ``forward_intermediates`` does not need for these stages; returns their indices. Norm and head
        have the width of the last stage, so they go with it."""
        take, last = feature_take_indices(len(self.stages), indices)
        shortened = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if shortened:
            self.num_features = self.feature_info[last]["num_chs"]
        if prune_norm or shortened:
            self.norm = nn.Identity()
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take


def build_staged(
    cls: type[StagedBackbone], variant: str, pretrained: bool, pretrained_filter_fn: Any, **kwargs
) -> StagedBackbone:
    """timm's builder, told how to take features of stages."""
    if kwargs.get("features_only"):
        kwargs.setdefault("num_classes", 0)
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=pretrained_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )


def staged_cfg(**kwargs) -> dict[str, Any]:
    """An entry of timm's ``default_cfgs``."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": False,
        "pool_size": (7, 7),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }

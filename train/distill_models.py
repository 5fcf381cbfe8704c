"""Teacher and student of a distillation: what goes on inside them, and which parameters are trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scanvas.backbones.scan import ORDERS, from_order
from scanvas.diffusion.block import LinearDiTBlock
from scanvas.diffusion.linear_swap import add_hooks

from .distill_config import StageConfig, TeacherConfig
from .errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Calls = dict[str, tuple[tuple, dict, Any]]
"""Path → arguments, keywords and output of a module's call."""


def tensors(output: Any) -> list[Tensor]:
    """The tensors of what a layer or block returns: one for each stream."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


def block_of(path: str) -> str:
    """The block that an attention layer belongs to: what is numbered."""
    return re.match(r"(.*\.\d+)\.", path)[1]


def move(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``change`` applied to the real floating tensors of nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return change(tree) if tree.is_floating_point() else tree
    if isinstance(tree, (tuple, list)):
        return type(tree)(move(item, change) for item in tree)
    return {key: move(item, change) for key, item in tree.items()} if isinstance(tree, dict) else tree


class Recorder:
    """Keeps the calls of some modules while it is entered."""

    def __init__(self, root: nn.Module, paths: Iterable[str]):
        self.root, self.paths, self.calls = root, list(paths), {}
        self.handles: list = []

    def _hook(self, path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self.calls[path] = (args, kwargs, self._in_raster(path, args, output))

        return hook

    def _in_raster(self, path: str, args: tuple, output: Any) -> Any:
        """Our denoiser's blocks rearrange the tokens for mixers that scan."""
        block = self.root.get_submodule(path.rpartition(".")[0])
        order = block.order if isinstance(block, LinearDiTBlock) and path.endswith(".mixer") else "raster"
        if order == "raster":
            return output
        height, width = args[1]
        return from_order(output, order, (width, height) if ORDERS[order][0] else (height, width))

    def __enter__(self) -> Recorder:
        for path in self.paths:
            module = self.root.get_submodule(path)
            self.handles.append(module.register_forward_hook(self._hook(path), with_kwargs=True))
        return self

    def __exit__(self, *_) -> None:
        while self.handles:
            self.handles.pop().remove()


class Teacher:
    """The softmax model: in eval mode, without gradients, in a dtype of its own, on the device or visiting it.

    Args:
        net: what is called; ``root(net)`` is the module that attention paths start from.
        cast: ``(inputs, dtype)`` → the inputs of ``net`` in that dtype.
    """

    def __init__(self, net: nn.Module, root: Callable[[nn.Module], nn.Module], cast: Callable, device: torch.device):
        self.net, self.root, self.cast, self.device = net.requires_grad_(False).eval(), root, cast, device
        self.dtype = torch.float32
        self.students: dict[str, nn.Module] = {}
        self.whole: Callable = self.net  # what is called where nothing inside is looked at

    def settle(self, config: TeacherConfig, students: dict[str, nn.Module]) -> None:
        """Take on the dtype, the quantisation and the place that the recipe wants; let linearised layers know the grid
        of the teacher's calls. When it has been copied for the student."""
        self.dtype = DTYPES[config.dtype]
        root = self.root(self.net)
        if self.dtype != torch.float32:  # diffusers' models warn of any cast
            root.to(self.dtype)
        if config.quantize:
            _quantize(root, config.quantize)
        add_hooks(root, students)
        self.students = students
        if config.offload:
            from accelerate import cpu_offload

            root.to("cpu")
            cpu_offload(root, self.device)

    def compile(self) -> None:
        """Compile the calls of the whole network; those that look inside stay as they are, because a compiled network
        does not run hooks that come later."""
        net = self.net
        self.whole = torch.compile(lambda *inputs: net(*inputs))

    def grids(self) -> dict[str, Any]:
        """Path → grid of the image's tokens in the latest call, for the layers that ask for it."""
        return {path: layer.record.value for path, layer in self.students.items() if hasattr(layer, "record")}

    @torch.no_grad()
    def __call__(self, inputs: tuple, paths: Iterable[str] = ()) -> tuple[Tensor, Calls]:
        """Output, and the calls of the modules at ``paths``. Under the run's autocast unless it has its own dtype."""
        paths = list(paths)
        net = self.net if paths else self.whole
        with Recorder(self.root(self.net), paths) as record:
            if self.dtype == torch.float32:
                return net(*inputs), record.calls
            with torch.autocast(self.device.type, enabled=False):
                return net(*self.cast(inputs, self.dtype)), record.calls


def _quantize(root: nn.Module, kind: str) -> None:
    config = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}[kind]
    try:
        from torchao import quantization

        quantization.quantize_(root, getattr(quantization, config)())
    except ImportError as error:  # also of what torchao itself needs for some formats
        raise ConfigError(
            f"teacher.quantize={kind} needs the package torchao and what it asks for ({error}); pip install torchao, "
            "or leave teacher.quantize out"
        ) from error


@dataclass
class Forced:
    """The teacher's calls of some layers or blocks, for the student's to be called likewise."""

    calls: Calls
    grids: dict[str, Any]  # path → grid of the image's tokens, for layers that ask for it
    probes: dict[str, Callable] = field(default_factory=dict)  # path → MapProbe
    outputs: bool = True  # whether more than maps is wanted


class Student(nn.Module):
    """The linearised network with the calls that stages make; what the loop trains, and what processes share.

    Args:
        net: as the teacher's, with linear layers.
        root: ``net`` → the module that paths start from.
        layers: paths of the linear layers.
    """

    def __init__(self, net: nn.Module, root: Callable[[nn.Module], nn.Module], layers: list[str]):
        super().__init__()
        self.net, self._root, self.layers = net, root, layers

    @property
    def root(self) -> nn.Module:
        return self._root(self.net)

    def no_weight_decay(self) -> set[str]:
        """What timm's optimisers are to leave alone."""
        names = getattr(self.net, "no_weight_decay", set)()
        return {f"net.{name}" for name in names}

    def enable_gradient_checkpointing(self) -> None:
        """See the loop."""
        switch = getattr(self.root, "enable_gradient_checkpointing", None) or self.root.set_grad_checkpointing
        switch()

    def forward(self, inputs: tuple, watched: Collection[str] = (), forced: Forced | None = None):
        """The network's output and the outputs of its modules at ``watched``. With ``forced``, instead, what modules
        make of the arguments that the teacher's had, and their maps: ``(path → output, path → pair of maps)``."""
        if forced is None:
            return self._watched(inputs, watched) if watched else (self.net(*inputs), {})
        for path, grid in forced.grids.items():
            self.root.get_submodule(path).record.value = grid
        made, maps = {}, {}
        for path, (args, kwargs, _) in forced.calls.items():
            args, kwargs = (self._in_own_dtype(tree) for tree in (args, kwargs))
            if forced.outputs:
                made[path] = self.call(path, args, kwargs)
            if path in forced.probes:
                maps[path] = forced.probes[path](self.root.get_submodule(path), args, kwargs)
        return made, maps

    @torch.compiler.disable
    def _watched(self, inputs: tuple, watched: Iterable[str]) -> tuple[Any, dict[str, Any]]:
        """Hooks that come and go are not for a compiler."""
        with Recorder(self.root, watched) as record:
            output = self.net(*inputs)
        return output, {path: made for path, (_, _, made) in record.calls.items()}

    def _in_own_dtype(self, tree: Any) -> Any:
        dtype = next(self.parameters()).dtype
        return move(tree, lambda tensor: tensor.to(dtype))

    def call(self, path: str, args: tuple, kwargs: dict) -> Any:
        """One layer or block."""
        parent = self.root.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, LinearDiTBlock) and path.endswith(".mixer"):
            return parent.mix(*args, **kwargs)  # in the block's scan order
        return self.root.get_submodule(path)(*args, **kwargs)


def reach(student: Student, kind: str) -> list[str]:
    """Paths of the modules that the losses of a kind of stage go through."""
    if kind == "attention":
        return student.layers
    if kind == "block":
        return list(dict.fromkeys(map(block_of, student.layers)))
    return [""]


def choose_trained(student: Student, stage: StageConfig, new: set[str]) -> None:
    """Let the parameters that a stage trains require gradients, and no others; adds LoRA layers where it wants them.

    ``new``: names of the tensors that the teacher does not have. Raises ConfigError: there is nothing to train.
    """
    root = student.root
    student.requires_grad_(False)
    if stage.train == "lora":
        _add_lora(root, student.layers, new, stage)
    inside = tuple(f"{path}." for path in student.layers)
    reached = tuple(f"{path}." if path else "" for path in reach(student, stage.kind))
    count = 0
    for name, parameter in root.named_parameters():
        wanted = (
            stage.train == "all"
            or (stage.train == "attention" and name.startswith(inside))
            or (stage.train in ("new", "lora") and name in new)
            or "lora_" in name
        )
        if wanted and name.startswith(reached):
            parameter.requires_grad_(True)
            count += 1
    if not count:
        raise ConfigError(
            f"the stage {stage.kind!r} has train={stage.train}, and this linearised model has no tensor that is new: "
            "all its projections are inherited; use attention, lora or all"
        )


def _add_lora(root: nn.Module, layers: list[str], new: set[str], stage: StageConfig) -> None:
    """Low-rank additions (arXiv:2106.09685) to the projections that were inherited."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("train=lora needs the package peft: pip install 'scanvas[lora]'") from error
    targets = [
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(tuple(f"{path}." for path in layers))
        and f"{name}.weight" not in new
    ]
    if not targets:
        raise ConfigError("train=lora: the linear layers inherited no projection to add to; use attention or all")
    config = LoraConfig(r=stage.lora_rank, lora_alpha=stage.lora_alpha, target_modules=targets)
    inject_adapter_in_model(config, root)


@torch.no_grad()
def merge_lora(root: nn.Module) -> nn.Module:
    """Put LoRA layers into the weights they add to, in place. Returns ``root``."""
    if not any(hasattr(module, "lora_A") for module in root.modules()):
        return root
    for name, module in list(root.named_modules()):
        if hasattr(module, "lora_A"):
            module.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, module.get_base_layer())
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        if attribute in vars(root):
            delattr(root, attribute)
    return root


def merged(net: nn.Module, root: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """``net`` as it is to be saved: a copy with its LoRA layers merged, or itself if it has none."""
    if not any(hasattr(module, "lora_A") for module in net.modules()):
        return net
    net = copy.deepcopy(net)
    merge_lora(root(net))
    return net

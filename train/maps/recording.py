"""Record the attention of a model while it runs, as the model computes it."""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from typing import Any

import torch
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scanvas.backbones.mixers import TokenMixer
from scanvas.diffusion.adapters import Adapter, container_grid, find_adapter, latent_grid, patch_grid
from scanvas.diffusion.block import LinearDiTBlock
from scanvas.diffusion.linear_attention_modules import LinearizedLayer, StreamAttention
from scanvas.diffusion.linear_cores import LinearCore

from .dependence import DependenceLayer
from .layers import CoreLayer, FeatureLayer, LayerMap, MixerLayer, SoftmaxLayer

_SDPA = nn.functional.scaled_dot_product_attention
_SANA_EPS = 1e-15  # of diffusers' SanaLinearAttnProcessor2_0


class Recorder(TorchFunctionMode):
    """``with Recorder(model) as recorder: model(...)`` fills ``recorder.layers``, one ``LayerMap`` for each attention
    in the order in which they ran. A further forward pass starts afresh.

    Softmax attention is taken from the very call of ``scaled_dot_product_attention``, so norms of queries and keys,
    rotary positions, masks and grouped heads are in it whatever the model; mixers, linearised layers and SANA's own
    attention from what they are called with. ``recorder.skipped`` says what could not be recorded and why.

    Args:
        model: a timm model, or a denoiser of diffusers or scanvas.
        gradients: keep, in the graph, ``recorder.outputs`` (name → output of the layer's module) and ``recorder.mixed``
            (name → what ``LayerMap.attended_gradient`` wants the gradient of).
    """

    def __init__(self, model: nn.Module, *, gradients: bool = False):
        super().__init__()
        self.model = model
        self.gradients = gradients
        self.layers: list[LayerMap] = []
        self.skipped: dict[str, str] = {}
        self.outputs: dict[str, Tensor] = {}
        self.mixed: dict[str, Tensor] = {}
        self._stack: list[tuple[str, nn.Module, tuple, dict]] = []
        self._grids: dict[str, tuple[int, ...] | None] = {}
        self._batch = 0
        self._handles: list[Any] = []
        self._unfused: list[nn.Module] = []
        self._orders = {id(m.mixer): m.order for m in model.modules() if isinstance(m, LinearDiTBlock)}
        self._adapter: Adapter | None = None
        with suppress(ValueError):  # a class that linearize does not know; the grid is guessed then
            self._adapter = find_adapter(model)

    def __enter__(self):
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter_module(name), prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave_module(name), always_call=True),
            ]
            if getattr(module, "fused_attn", None) is False:  # timm's slow form never calls the function we listen to
                module.fused_attn = True
                self._unfused.append(module)
        return super().__enter__()

    def __exit__(self, *stop):
        for handle in self._handles:
            handle.remove()
        for module in self._unfused:
            module.fused_attn = False
        self._handles, self._unfused = [], []
        return super().__exit__(*stop)

    def _enter_module(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not name:
                self.layers, self._stack = [], []
                self.skipped, self.outputs, self.mixed, self._grids = {}, {}, {}, {}
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 2]
                self._batch = len(tensors[0]) if tensors else 0
            self._note_grid(name, module, args, kwargs)
            if isinstance(module, TokenMixer):
                self._record_mixer(name, module, args, kwargs)
            elif isinstance(module, LinearCore):
                self._record_core(name, module, args, kwargs)
            elif isinstance(getattr(module, "processor", None), SanaLinearAttnProcessor2_0):
                self._record_sana(name, module, args, kwargs)
            self._stack.append((name, module, args, kwargs))

        return hook

    def _leave_module(self, name: str):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            while self._stack and self._stack.pop()[1] is not module:
                pass
            output = output[0] if isinstance(output, tuple) else output
            if not self.gradients or not self.layers or not isinstance(output, Tensor):
                return
            layer = self.layers[-1].name
            if layer == name:
                self.outputs[name] = output
            if isinstance(module, LinearCore) or (layer == name and isinstance(module, TokenMixer)):
                self.mixed[layer] = output

        return hook

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is _SDPA and self._stack:
            self._record_softmax(out, *args, **kwargs)
        return out

    def _note_grid(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remember the grid that this call tells, for the layers inside."""
        grid = None
        if self._adapter is not None:
            if name in {self._adapter.host(layer) for layer in self._layer_paths()}:
                grid = self._adapter.grid(module, args, kwargs)
        elif hasattr(module, "dynamic_feat_size") and name.endswith("patch_embed"):
            grid = patch_grid(module, args, kwargs)
        elif not name and hasattr(getattr(module, "config", None), "patch_size"):
            grid = latent_grid(module, args, kwargs)
        elif type(module).__name__ == "Transformer2DModel":
            grid = container_grid(module, args, kwargs)
        if grid is not None:
            self._grids[name] = tuple(map(int, grid))

    def _layer_paths(self) -> list[str]:
        if not hasattr(self, "_paths"):
            self._paths = list(self._adapter.attentions(self.model))
        return self._paths

    def _grid(self, name: str) -> tuple[int, int] | None:
        """Of the layer at ``name``, frames of a video below one another."""
        inside = name + "."
        hosts = [h for h in self._grids if not h or h.endswith("patch_embed") or inside.startswith(h + ".")]
        grid = self._grids[max(hosts, key=len)] if hosts else None
        return grid if grid is None or len(grid) == 2 else (math.prod(grid[:-1]), grid[-1])

    def _add(self, layer: LayerMap, text_first: bool = True) -> None:
        """Find out what the tokens are, and keep the layer."""
        if layer.kind == "cross":
            layer.text = slice(0, layer.keys)
            if layer.grid is not None and math.prod(layer.grid) != layer.tokens:
                layer.grid = None
        elif not isinstance(layer, MixerLayer) and layer.grid is not None:
            others = layer.tokens - math.prod(layer.grid)
            if others < 0:
                layer.grid = None
            elif others and self._text_inside():
                layer.prefix = others if text_first else 0
                layer.text = slice(0, others) if text_first else slice(layer.tokens - others, layer.tokens)
            else:
                layer.prefix = others
        layer.index = len(self.layers)
        self.layers.append(layer)

    def _text_inside(self) -> bool:
        """Tokens beside the image's are text, not a class or registers."""
        return not hasattr(self.model, "num_prefix_tokens")

    def _record_mixer(self, name: str, mixer: TokenMixer, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(mixer.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        x, grid, prefix = (bound.arguments[key] for key in ("x", "grid", "prefix"))
        grid = (int(grid[0]), int(grid[1]))
        kind = MixerLayer if mixer.has_map else DependenceLayer
        self._add(kind(name, mixer, x.detach(), grid, prefix, self._orders.get(id(mixer), "raster")))

    def _record_core(self, name: str, core: LinearCore, args: tuple, kwargs: dict) -> None:
        if not core.has_map:
            self.skipped[name.rpartition(".")[0]] = f"{type(core).__name__} has no attention map"
            return
        values = inspect.signature(core.forward).bind(*args, **kwargs).arguments.values()
        values = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        layer = next((m for _, m, *_ in reversed(self._stack) if isinstance(m, LinearizedLayer)), None)
        name = name.rpartition(".")[0]
        text_first = layer.text_first if isinstance(layer, StreamAttention) else True
        self._add(CoreLayer(name, core, values, self._grid(name)), text_first)

    def _record_sana(self, name: str, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        with torch.no_grad():
            q, k, v = attention.to_q(x), attention.to_k(x), attention.to_v(x)
            q = q if attention.norm_q is None else attention.norm_q(q)
            k = k if attention.norm_k is None else attention.norm_k(k)
            q, k, v = (t.unflatten(-1, (attention.heads, -1)) for t in (q.relu().float(), k.relu().float(), v))
        self._add(FeatureLayer(name, self._grid(name), q, k, v, _SANA_EPS))

    def _record_softmax(
        self, out, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ) -> None:
        if any(isinstance(m, TokenMixer | LinearCore) for _, m, *_ in self._stack):
            return  # recorded already, in its own terms
        name, module, args, kwargs = self._stack[-1]
        if any(layer.name == name for layer in self.layers):
            name = f"{name}#{1 + sum(layer.name.partition('#')[0] == name for layer in self.layers)}"
        if query.ndim != 4 or query.shape[0] != self._batch:
            self.skipped[name] = (
                f"its queries are {tuple(query.shape)}, not those of the whole image: windows or pooling"
            )
            return
        tensors = [t.detach() for t in (query, key, value, out)]
        mask = None if attn_mask is None else attn_mask.detach()
        if self.gradients:
            self.mixed[name] = out
        layer = SoftmaxLayer(name, self._grid(name), *tensors, mask, is_causal, scale)
        tokens = args[0] if args else kwargs.get("hidden_states")
        text = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
        takes_text = hasattr(module, "to_k") and isinstance(text, Tensor) and text is not tokens
        joint = getattr(module, "add_k_proj", None) is not None
        if layer.tokens != layer.keys or (takes_text and not joint):
            layer.kind = "cross"
        options = self._adapter.module_options(self.model, name) if self._adapter and joint else {}
        self._add(layer, options.get("text_first", True))

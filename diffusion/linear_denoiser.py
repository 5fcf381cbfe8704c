"""Our own denoiser under ``linearize``: its mixers are exchanged, and its config says so in ``layer_mixers``."""

from typing import Any

import torch
from torch import nn

from scanvas.backbones.mixers import create_mixer
from scanvas.backbones.mixers.softmax import SoftmaxAttention, UnitNorm

from .adapters import Adapter, register_adapter
from .linear_attention_modules import GridRecord
from .linear_cores import decay_logit
from .linear_neutral import start_neutral

_OPTIONS: dict[str, dict[str, str]] = {
    "lit": {"kernel_size": "kernel_size", "eps": "eps"},
    "linfusion": {"hidden": "hidden", "eps": "eps"},
    "hedgehog": {"eps": "eps"},
    "gla": {"gate_rank": "gate_rank"},
    "local": {"radius": "radius", "pool": "pool", "base_tokens": "base_tokens"},
    "t5": {"kernel_size": "qk_kernel_size"},
    "hybrid": {"radius": "radius", "every": "every", "softmax_factor": "softmax_factor"},
    "agent": {"agent_size": "agents", "kernel_size": "kernel_size"},
    "cosformer": {},
    "flow": {"eps": "eps"},
    "focused": {"power": "power", "kernel_size": "kernel_size", "eps": "eps"},
    "inline": {},
    "l2": {"least": "least"},
    "lina": {"gate_grid": "gates", "kernel_size": "kernel_size", "eps": "eps"},
    "mala": {"kernel_size": "kernel_size"},
    "nala": {"kernel_size": "kernel_size", "eps": "eps"},
    "rala": {"kernel_size": "kernel_size", "eps": "eps"},
    "retention": {"initial": "initial", "spread": "spread", "kernel_size": "kernel_size"},
    "sana": {"eps": "eps"},
    "sla": {"block": "block", "keep": "keep", "eps": "eps"},
    "slab": {"pos_grid": "positions", "kernel_size": "kernel_size", "eps": "eps"},
}
"""Target → keywords of its mixer, and the target's options that they come from."""
_ALWAYS: dict[str, dict[str, Any]] = {
    "gla": {"expand_k": 1.0},
    "agent": {"grid_size": None},
    "cosformer": {"positions": "2d"},
    "focused": {"grid_size": None},
    "inline": {"local": False},
    "l2": {"window": 0},
    "mala": {"rope": False, "gated": False},
    "nala": {"rope": False},
    "rala": {"rope": False, "gated": False},
}
"""Keywords that make the mixer what the target is."""
_LIKE_SOFTMAX = ("local", "hybrid", "sla")  # mixers with norms and rotary positions on queries and keys
_ROTATED = ("gla", "lina", "retention", *_LIKE_SOFTMAX)  # with the softmax's rotary positions


def mixer_config(spec: dict[str, Any], original: SoftmaxAttention) -> dict[str, Any]:
    """The entry of ``layer_mixers`` for a layer: name, heads and keywords of the mixer."""
    target = spec["mixer"]
    config = {"mixer": "linear" if target == "lit" else target, "num_heads": spec["heads"], **_ALWAYS.get(target, {})}
    for keyword, option in _OPTIONS[target].items():
        value = spec["options"][option]
        config[keyword] = value if not keyword.endswith("_grid") else [value, value] if value else None
    if original.to_out[1].p:
        config["proj_drop"] = original.to_out[1].p
    if target in _ROTATED:
        config["rope"] = original.rope
    if target != "gla":
        config["qkv_bias"] = original.to_out[0].bias is not None
    if target in _LIKE_SOFTMAX and not isinstance(original.q_norm, nn.Identity):
        config.update(qk_norm=True, norm_eps=original.q_norm.eps)
    return config


def write_entries(model: nn.Module, entries: dict[str, dict] | None) -> None:
    """Set ``layer_mixers`` in the config; it is no default any more, or ``from_config`` would leave it out."""
    defaults = [name for name in model.config.get("_use_default_values", []) if name != "layer_mixers"]
    model.register_to_config(layer_mixers=entries or None, _use_default_values=defaults)


class DenoiserAdapter(Adapter):
    """Exchanges mixers for mixers."""

    parts = {"q": ("to_q", "q_norm"), "k": ("to_k", "k_norm"), "v": ("to_v",), "o": ("to_out",)}  # noqa: RUF012

    def heads(self, attention: nn.Module) -> int:
        return attention.num_heads

    def verify(self, path: str, attention: nn.Module) -> None:
        if not isinstance(attention, SoftmaxAttention):
            raise ValueError(
                f"{path} is {type(attention).__name__}, which is linear already; only softmax mixers can be linearised"
            )

    @torch.no_grad()
    def replace(
        self, model: nn.Module, path: str, original: nn.Module, spec: dict[str, Any], record: GridRecord
    ) -> nn.Module:
        self.refuse(path, original, spec)
        if original.fused_projections:
            original.fuse_projections(False)
        config = mixer_config(spec, original)
        like = original.to_q.weight
        name, heads = config.pop("mixer"), config.pop("num_heads")
        mixer = create_mixer(name, original.dim, heads, device=like.device, dtype=like.dtype, **config)
        for part in (name for names in self.parts.values() for name in names if hasattr(mixer, name)):
            source = dict(getattr(original, part).named_parameters())
            for key, parameter in getattr(mixer, part).named_parameters():
                if key in source:
                    parameter.copy_(source[key])
                else:  # SANA's output has a bias in any case
                    nn.init.zeros_(parameter)
        start_neutral(mixer)
        if name == "gla":
            nn.init.constant_(mixer.decay_proj[1].bias, decay_logit(spec["options"]["initial_decay"]))
        return mixer

    def scan_order(self, model: nn.Module, path: str, layer: nn.Module) -> str:
        """The one that the config gives blocks whose mixers depend on it."""
        orders = model.config.scan_orders
        return orders[int(path.split(".")[1]) % len(orders)] if layer.needs_scan else "raster"

    def finish(self, model: nn.Module, linearization: dict[str, Any], originals: dict[str, nn.Module]) -> None:
        """Enter the new mixers in the config, and let blocks walk in the order that the config gives such mixers."""
        entries = dict(model.config.layer_mixers or {})
        for path, spec in linearization["layers"].items():
            block = model.transformer_blocks[int(path.split(".")[1])]
            entries[path.split(".")[1]] = mixer_config(spec, originals[path])
            block.order = self.scan_order(model, path, block.mixer)
        write_entries(model, entries)

    @staticmethod
    def refuse(path: str, original: nn.Module, spec: dict[str, Any]) -> None:
        """What a mixer of ours can not take over from the softmax."""
        if isinstance(original.q_norm, UnitNorm):
            raise ValueError(f"{path}: softmax of cosines (cosine=True) can not be linearised")
        if not isinstance(original.q_norm, nn.Identity) and spec["mixer"] not in _LIKE_SOFTMAX:
            raise ValueError(
                f"{path}: its queries and keys are normalised (qk_norm), which of the targets only "
                f"{' and '.join(map(repr, _LIKE_SOFTMAX))} do"
            )
        if original.rope and spec["mixer"] not in _ROTATED:
            raise ValueError(
                f"{path}: its queries and keys are rotated (rope), which of the targets only "
                f"{', '.join(map(repr, _ROTATED))} do"
            )
        if "kernel_size" not in _OPTIONS[spec["mixer"]].values() and spec["options"].get("kernel_size"):
            raise ValueError(f"kernel_size: the mixer {spec['mixer']!r} has no convolution of values; leave it at 0")


register_adapter(DenoiserAdapter("LinearDiTTransformer2DModel", r"transformer_blocks\.\d+\.mixer"))

"""Gated linear attention: ViG's bidirectional mixer and the causal one of GLA and DiG."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scanvas.backbones.rope import apply_rope
from scanvas.kernels import dispatch
from scanvas.kernels.gate import gated_mix, swish_norm
from scanvas.kernels.gated import attention_rows, gated_linear_attention_from_logits
from scanvas.kernels.gated.reference import log_decay_from_logits
from scanvas.kernels.layer import compose_projections, gated_layer, gated_layer_pays

from .base import TokenConv, TokenMixer, is_plain, rms_factor
from .selective_rope import SelectiveRope, rotate


def _at_once(features: Tensor, without_bias: list[nn.Module], *others: nn.Module) -> bool:
    """Whether to compute what these layers do by one product of their weights."""
    narrow = features.is_cuda and features.shape[-1] <= 512
    return narrow and is_plain(*without_bias, *others) and all(layer.bias is None for layer in without_bias)


class NormWeight(nn.RMSNorm):
    """The parameters of an RMSNorm that is computed inside a fused operation.

    The weight is got by calling the module, so that offloading, which hooks into calls, brings it to the device. What
    hooks in (it takes the place of ``forward``) may reuse the memory as soon as the call is over: then it is a copy.
    """

    def forward(self) -> Tensor:
        copied = False
        if not torch.jit.is_scripting():
            copied = "forward" in self.__dict__
        return self.weight.clone() if copied else self.weight.view_as(self.weight)


@torch.jit.ignore
def _swish_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``swish_norm`` with a signature that TorchScript can read."""
    return swish_norm(o, gate, weight, eps=eps)


class SwishNorm(nn.RMSNorm):
    """``RMSNorm(o) ⊙ SiLU(gate)``: see ``swish_norm``."""

    def forward(self, o: Tensor, gate: Tensor) -> Tensor:
        return _swish_norm(o, gate, self.weight, self.eps)


class GatedLinearAttention(TokenMixer):
    """``o_t = d^-½ q_t S_t``, ``S_t = diag(α_t) S_{t-1} + k_tᵀ v_t`` with a decay per channel, ``O(N)`` in time.

    By default the mixer of ViG (arXiv:2405.18425): queries, keys, values and gates are taken from ``ℓ = DWConv3×3(x)``;
    each direction has gates of its own (direction-wise gating) and the two scans are averaged; the result is mixed with
    the local features, ``G ⊙ RMSNorm(o) + (1 − G) ⊙ RMSNorm(ℓ)`` with ``G = σ(W ℓ + b)`` (2-D gating locality
    injection). With ``bidirectional=False, local=False, output="swish"`` it is the layer of GLA (arXiv:2312.06635,
    section 4.4) as used by DiG (arXiv:2405.18428): ``RMSNorm(o) ⊙ SiLU(W x)``.

    Decays are ``α = σ(W₂ W₁ ℓ)^(1/16)``. There is no normaliser: entries of the map may be negative.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        expand_k, expand_v: width of the keys and of the values as a multiple of ``dim``.
        bidirectional: scan from both sides; else only from the first token.
        local: take everything from the 3×3 convolution of the input.
        conv_act: SiLU after that convolution.
        output: ``"mix"`` (needs ``local``) or ``"swish"``.
        out_act: SiLU after the mix.
        gate_rank: inner width of the low-rank projection of the gates.
        gate_normalizer: the 16 in the decay.
        rope: rotate queries and keys by 2-D position.
        selective_rope: rotate them by angles the tokens choose, see ``SelectiveRope``.
        norm_eps: of the output norms.
        proj_drop: dropout after the output projection.
        impl: implementation of the scan, see ``gated_linear_attention``.
    """

    needs_scan: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2405.18425"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        bidirectional: bool = True,
        local: bool = True,
        conv_act: bool = False,
        output: str = "mix",
        out_act: bool = False,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        rope: bool = False,
        selective_rope: bool = False,
        norm_eps: float = 1e-6,
        proj_drop: float = 0.0,
        impl: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        factory = {"device": device, "dtype": dtype}
        key_dim, value_dim = int(dim * expand_k), int(dim * expand_v)
        for name, width in (("expand_k", key_dim), ("expand_v", value_dim)):
            if width < 1 or width % num_heads:
                raise ValueError(f"{name} gives a width of {width}, which num_heads = {num_heads} does not divide")
        if output not in ("mix", "swish"):
            raise ValueError(f"output must be 'mix' or 'swish', got {output!r}")
        if output == "mix" and (not local or value_dim != dim):
            raise ValueError("output='mix' mixes with the local features: it needs local=True and expand_v=1")
        if rope:
            self.check_rope(key_dim)
        self.bidirectional = bidirectional
        self.output = output
        self.conv_act = "silu" if conv_act else None
        self.out_act = "silu" if out_act else None
        self.gate_normalizer = gate_normalizer
        self.rope = rope
        self.norm_eps = norm_eps
        self.impl = impl

        self.conv = TokenConv(dim, 3, bias=False, **factory) if local else None
        self.make_projections(key_dim, value_dim, bias=False, proj_drop=proj_drop, **factory)
        directions = 2 if bidirectional else 1
        self.decay_proj = nn.Sequential(
            nn.Linear(dim, gate_rank, bias=False, **factory),
            nn.Linear(gate_rank, directions * key_dim, **factory),
        )
        self.gate_proj = nn.Linear(dim, value_dim, bias=output == "mix", **factory)
        norm = NormWeight if output == "mix" else SwishNorm
        self.out_norm = norm(value_dim // num_heads, eps=norm_eps, **factory)
        self.local_norm = NormWeight(dim // num_heads, eps=norm_eps, **factory) if output == "mix" else None
        width = key_dim // num_heads
        self.selective_rope = SelectiveRope(dim, num_heads, width, **factory) if selective_rope else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier-uniform with gain 2^-2.5 for projections and convolution, zero biases, as in ViG, GLA and DiG."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.selective_rope is not None:
            self.selective_rope.reset_parameters()

    def features(self, x: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        """The local features ℓ, or ``x`` itself."""
        return x if self.conv is None else self.convolve(self.conv, x, grid, prefix, self.conv_act)

    def _projections(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor | None]:
        """Queries, keys, values and the logits of the decays of each direction, all ``(B, N, heads, D)``; and the
        logits of the output gate ``(B, N, C)`` if they came with the others.

        On a GPU everything is one product for models that are not wide, in which the two factors of the decays'
        low-rank projection are multiplied first: products of few columns are bound by memory and by launches. It
        spares an H200 some 20 of a layer's 500 µs at 65,536 tokens of 192 channels; at 1,152 channels the larger
        product takes a percent longer.
        """
        readers, down, up = self._projecting()
        if _at_once(features, [*readers, down], up, self.gate_proj):
            weights, gate = [layer.weight for layer in readers], self.gate_proj
            weight, bias = compose_projections(weights, down.weight, up.weight, gate.weight, up.bias, gate.bias)
            directions = len(up.weight) // self.key_dim
            widths = (self.key_dim, self.key_dim, self.value_dim, *[self.key_dim] * directions, self.value_dim)
            *parts, out_gate = F.linear(features, weight, bias).split(widths, dim=-1)
            q, k, v, *gates = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        else:
            q, k, v = self.qkv(features)
            out_gate = None
            # Unbound, not indexed: the gradient of an index is a tensor of zeros with a part filled in.
            gates = list(self.decay_proj(features).unflatten(-1, (-1, self.num_heads, q.shape[-1])).unbind(2))
        return q, k, v, gates, out_gate

    def _projecting(self) -> tuple[list[nn.Module], nn.Module, nn.Module]:
        """The layers that give queries, keys and values, and the two of the decays."""
        readers = [self.to_qkv] if self.fused_projections else [self.to_q, self.to_k, self.to_v]
        down, up = (getattr(self.decay_proj, name) for name in "01")  # a scripted Sequential cannot be unpacked
        return readers, down, up

    def _in_one(self, features: Tensor) -> Tensor | None:
        """All between the convolution and the output projection as one operator, ``gated_layer``, or ``None`` where
        that does not pay or the steps are not its own."""
        own = self.output == "mix" and self.bidirectional and not self.rope and self.selective_rope is None
        if not own or self.impl != "auto" or not gated_layer_pays(features):
            return None
        readers, down, up = self._projecting()
        biases = [up.bias, self.gate_proj.bias]
        if not _at_once(features, [*readers, down], up, self.gate_proj) or any(x is None for x in biases):
            return None
        weights = [*(layer.weight for layer in readers), up.weight @ down.weight, self.gate_proj.weight]
        weight, bias = torch.cat(weights), torch.cat(biases)
        if dispatch.autocasts(features.device.type):
            dtype = torch.get_autocast_dtype(features.device.type)
            features, weight, bias = features.to(dtype), weight.to(dtype), bias.to(dtype)
        return gated_layer(
            features,
            weight,
            bias,
            self.out_norm(),
            self.local_norm(),
            num_heads=self.num_heads,
            normalizer=self.gate_normalizer,
            eps=self.norm_eps,
            activation=self.out_act,
        )

    def _scan_inputs(self, features: Tensor, grid: tuple[int, int], prefix: int):
        """Queries, keys, values, logits of the decays of both directions, and those of the output gate if known."""
        q, k, v, gates, out_gate = self._projections(features)
        if self.rope:
            q, k = apply_rope(q, grid, prefix), apply_rope(k, grid, prefix)
        if self.selective_rope is not None:
            angles = self.selective_rope(features, grid, prefix)
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v, gates[0], gates[1] if self.bidirectional else None, out_gate

    def _scan(self, features: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor | None]:
        """What the scan gives, and the logits of the output gate if they are known."""
        q, k, v, gate, reverse_gate, out_gate = self._scan_inputs(features, grid, prefix)
        attended = gated_linear_attention_from_logits(
            q, k, v, gate, reverse_gate, normalizer=self.gate_normalizer, impl=self.impl
        )
        return attended, out_gate

    def _project(self, features: Tensor, attended: Tensor, gate: Tensor | None = None) -> Tensor:
        gate = self.gate_proj(features) if gate is None else gate
        if self.output == "mix":
            out = gated_mix(
                attended,
                features,
                gate,
                self.out_norm(),
                self.local_norm(),
                eps=self.norm_eps,
                activation=self.out_act,
            )
        else:
            out = self.out_norm(attended, gate)
        return self.to_out(out)

    def mix(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        features = self.features(x, grid, prefix)
        mixed = self._in_one(features)
        return self._project(features, *self._scan(features, grid, prefix)) if mixed is None else self.to_out(mixed)

    def attend(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._scan(self.features(x, grid, prefix), grid, prefix)[0]

    def project(self, x: Tensor, attended: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self._project(self.features(x, grid, prefix), attended)

    def values(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return self.qkv(self.features(x, grid, prefix))[2].transpose(1, 2)

    def attention_map(self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0) -> Tensor:
        return sum(self.attention_map_parts(x, grid, rows, prefix=prefix).values())

    def attention_map_parts(
        self, x: Tensor, grid: tuple[int, int], rows: Tensor | None = None, *, prefix: int = 0
    ) -> dict[str, Tensor]:
        q, k, _, gate, reverse_gate, _ = self._scan_inputs(self.features(x, grid, prefix), grid, prefix)
        forward = attention_rows(q, k, log_decay_from_logits(gate, self.gate_normalizer), rows)
        if reverse_gate is None:
            return {"forward": forward}
        reverse = log_decay_from_logits(reverse_gate, self.gate_normalizer)
        return {"forward": forward / 2, "backward": attention_rows(q, k, reverse, rows, reverse=True) / 2}

    def log_decays(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> tuple[Tensor, ...]:
        gates = self._scan_inputs(self.features(x, grid, prefix), grid, prefix)[3:5]
        return tuple(log_decay_from_logits(gate, self.gate_normalizer) for gate in gates if gate is not None)

    def branches(self, x: Tensor, grid: tuple[int, int], *, prefix: int = 0) -> dict[str, Tensor]:
        features = self.features(x, grid, prefix)
        q, k, v, gate, reverse_gate, _ = self._scan_inputs(features, grid, prefix)
        options = {"normalizer": self.gate_normalizer, "impl": self.impl}
        parts = {"attention": gated_linear_attention_from_logits(q, k, v, gate, **options)}
        if reverse_gate is not None:
            flipped = (z.flip(1) for z in (q, k, v, reverse_gate))
            backward = gated_linear_attention_from_logits(*flipped, **options).flip(1)
            parts = {"forward": parts["attention"] / 2, "backward": backward / 2}
        weight = self.out_norm() if self.output == "mix" else self.out_norm.weight
        factor = weight * rms_factor(sum(parts.values()), self.norm_eps)
        parts = {name: (part * factor).flatten(2) for name, part in parts.items()}
        out_gate = self.gate_proj(features)
        if self.output == "swish":
            return {name: part * F.silu(out_gate) for name, part in parts.items()} if len(parts) > 1 else {}
        local = features.unflatten(-1, (self.num_heads, -1))
        local = (local * rms_factor(local, self.norm_eps) * self.local_norm()).flatten(2)
        out_gate = out_gate.sigmoid()
        parts = {name: part * out_gate for name, part in parts.items()} | {"local": local * (1 - out_gate)}
        if self.out_act is None:
            return parts
        factor = sum(parts.values()).sigmoid()  # SiLU(y) = σ(y) y
        return {name: part * factor for name, part in parts.items()}

"""The targets of ``linearize`` that know nothing of an image's height and width but in a convolution, and the table of
all targets."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanvas.backbones.mixers.hedgehog import HedgehogFeatures
from scanvas.backbones.mixers.linfusion import Modulator, positive
from scanvas.kernels.gated import attention_rows, gated_linear_attention_from_logits
from scanvas.kernels.gated.api import MAX_HEAD_DIM
from scanvas.kernels.gated.reference import log_decay_from_logits
from scanvas.kernels.linear import attention_matrix, linear_attention

from .linear_core import LinearCore, Rotate
from .linear_cores_kernel import KERNEL_TARGETS
from .linear_cores_placed import HybridCore, LocalCore, TTTCore
from .linear_cores_softmax import SOFTMAX_TARGETS


class KernelCore(LinearCore):
    """Division-normalised linear attention; rotary positions only in the numerator, whose features may be negative
    after it while those of the divisor stay positive (RoFormer, arXiv:2104.09864, eq. 19)."""

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, eps: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        self.eps = eps

    @staticmethod
    def feature(z: Tensor) -> Tensor:
        raise NotImplementedError

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None) -> Tensor:
        q, k = self.feature(q), self.feature(k)
        if weight is not None:
            k = k * weight[..., None, None].to(k.dtype)
        divisor = {}
        if rotate is not None:
            divisor = {"normalizer_q": self.fuse(q), "normalizer_k": self.fuse(k)}
            q, k = rotate(q), rotate(k)
        return linear_attention(self.fuse(q), self.fuse(k), self.fuse(v), eps=self.eps, **divisor)

    def attention_map_parts(
        self, q: Tensor, k: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        q, k = self.feature(q), self.feature(k)
        if weight is not None:
            k = k * weight[..., None, None].to(k.dtype)
        divisor = {"normalizer_q": self.fuse(q), "normalizer_k": self.fuse(k)}
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        return {"map": attention_matrix(self.fuse(q), self.fuse(k), eps=self.eps, rows=rows, **divisor)}


class LitCore(KernelCore):
    """LiT (arXiv:2501.12976): ReLU features, few heads, and a depthwise 5×5 convolution on the values."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 5, "eps": 1e-6}

    @classmethod
    def default_heads(cls, heads: int) -> int:
        """The divisor nearest to a quarter: 2 for DiT-S (6 heads), 4 for DiT-XL (16), as in the paper."""
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        return min(divisors, key=lambda n: (abs(n - heads / 4), -n))

    @staticmethod
    def feature(z: Tensor) -> Tensor:
        return z.relu()


class LinFusionCore(KernelCore):
    """LinFusion (arXiv:2409.02097): ELU + 1 features, queries and keys of ``x + f(x)``; ``f`` starts at zero."""

    defaults: ClassVar[dict[str, Any]] = {"hidden": None, "kernel_size": 0, "eps": 1e-4}

    def __init__(
        self, dim: int, value_dim: int, heads: int, streams: int, *, hidden: int | None, eps: float, **options
    ):
        super().__init__(dim, value_dim, heads, streams, eps=eps, **options)
        if hidden is not None and hidden < 1:
            raise ValueError(f"hidden must be positive, or None for {dim}, the width of the tokens; got {hidden}")
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.q_modulators = nn.ModuleList(Modulator(dim, hidden, **factory) for _ in range(streams))
        self.k_modulators = nn.ModuleList(Modulator(dim, hidden, **factory) for _ in range(streams))
        for modulator in (*self.q_modulators, *self.k_modulators):
            modulator.init_identity()

    feature = staticmethod(positive)

    def query_input(self, x: Tensor, stream: int) -> Tensor:
        return self.q_modulators[stream](x)

    def key_input(self, x: Tensor, stream: int) -> Tensor:
        return self.k_modulators[stream](x)


class HedgehogCore(LinearCore):
    """Hedgehog (arXiv:2402.04347): learned spiky features, after the rotary positions as in LoLCATs
    (arXiv:2410.10254), so that they are positive and know the positions."""

    defaults: ClassVar[dict[str, Any]] = {"kernel_size": 0, "eps": 1e-6}

    def __init__(self, dim: int, value_dim: int, heads: int, streams: int, *, eps: float, **options):
        super().__init__(dim, value_dim, heads, streams, **options)
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        self.eps = eps
        self.q_features = HedgehogFeatures(heads, value_dim // heads, **factory)
        self.k_features = HedgehogFeatures(heads, value_dim // heads, **factory)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        q, k = self.q_features(self.fuse(q)), self.k_features(self.fuse(k))
        if weight is not None:
            k = k * weight[..., None, None].to(k.dtype)
        return linear_attention(q, k, self.fuse(v), eps=self.eps)

    def attention_map_parts(
        self, q: Tensor, k: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        q, k = self.q_features(self.fuse(q)), self.k_features(self.fuse(k))
        if weight is not None:
            k = k * weight[..., None, None].to(k.dtype)
        return {"map": attention_matrix(q, k, eps=self.eps, rows=rows)}


class GlaCore(LinearCore):
    """Gated linear attention from both sides (arXiv:2312.06635; ViG, arXiv:2405.18425), each channel scaled at the end.

    ``initial_decay`` is the decay per token at the start: near 1, all tokens are seen nearly alike. With ``normalize``
    queries and keys go through ELU + 1 and the result is divided by what values of one would give, so that the layer
    starts as an average of values, as a softmax is; rotary positions are in the numerator only. Without, it is the
    layer of the papers: scores of any sign and an RMSNorm per head.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "gate_rank": 16,
        "initial_decay": 0.999,
        "normalize": True,
        "kernel_size": 0,
    }
    normalizer: ClassVar[float] = 16.0
    signed: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        value_dim: int,
        heads: int,
        streams: int,
        *,
        gate_rank: int,
        initial_decay: float,
        normalize: bool,
        **options,
    ):
        super().__init__(dim, value_dim, heads, streams, **options)
        factory = {key: options[key] for key in ("device", "dtype") if key in options}
        if value_dim // heads > MAX_HEAD_DIM:
            raise ValueError(
                f"heads: gated linear attention takes heads of at most {MAX_HEAD_DIM} channels, but {heads} heads of "
                f"{value_dim} channels have {value_dim // heads}"
            )
        if gate_rank < 1:
            raise ValueError(f"gate_rank must be positive, got {gate_rank}")
        self.normalize = normalize
        self.decay_proj = nn.Sequential(
            nn.Linear(dim, gate_rank, bias=False, **factory), nn.Linear(gate_rank, 2 * value_dim, **factory)
        )
        self.scale = nn.Parameter(torch.ones(value_dim, **factory))
        nn.init.xavier_uniform_(self.decay_proj[0].weight)
        nn.init.xavier_uniform_(self.decay_proj[1].weight, gain=2**-2.5)
        nn.init.constant_(self.decay_proj[1].bias, decay_logit(initial_decay))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None
    ) -> Tensor:
        if self.normalize:
            q, k = positive(q), positive(k)
        if weight is not None:
            k = k * weight[..., None, None].to(k.dtype)
        plain_q, plain_k = self.fuse(q), self.fuse(k)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        gates = self.decay_proj(x).unflatten(-1, (2, self.heads, -1)).unbind(2)
        out = gated_linear_attention_from_logits(
            self.fuse(q), self.fuse(k), self.fuse(v), *gates, normalizer=self.normalizer
        )
        dtype = torch.promote_types(out.dtype, torch.float32)
        if self.normalize:
            ones = torch.ones(*v.shape[:2], self.heads, 1, device=v.device, dtype=dtype)
            divisor = gated_linear_attention_from_logits(plain_q, plain_k, ones, *gates, normalizer=self.normalizer)
            out = out.to(dtype) / (divisor + 1e-6)
        return out

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None) -> Tensor:
        out = self.attend(q, k, v, x, rotate, weight)
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        if not self.normalize:
            out = nn.functional.rms_norm(out, out.shape[-1:], eps=1e-6)
        return (out * self.scale.view(self.heads, -1)).to(v.dtype)

    def log_decays(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decays of the two directions, ``(B, N, heads, Dk)`` float32, from tokens ``(B, N, C)``."""
        gates = self.decay_proj(x).unflatten(-1, (2, self.heads, -1)).unbind(2)
        forward, backward = (log_decay_from_logits(gate, self.normalizer) for gate in gates)
        return forward, backward

    def attention_map_parts(
        self, q: Tensor, k: Tensor, x: Tensor, rotate: Rotate | None, weight: Tensor | None, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        if self.normalize:
            q, k = positive(q), positive(k)
        if weight is not None:
            k = k * weight[..., None, None].to(k.dtype)
        decays = self.log_decays(x)

        def both(q: Tensor, k: Tensor) -> list[Tensor]:
            q, k = self.fuse(q), self.fuse(k)
            return [attention_rows(q, k, g, rows, reverse=bool(i)) / 2 for i, g in enumerate(decays)]

        parts = both(q, k) if rotate is None else both(rotate(q), rotate(k))
        if self.normalize:
            plain = parts if rotate is None else both(q, k)
            divisor = sum(part.sum(-1, keepdim=True) for part in plain) + 1e-6
            parts = [part / divisor for part in parts]
        return dict(zip(("forward", "backward"), parts))


def decay_logit(decay: float) -> float:
    """The gate logit of a decay per token: ``log σ(logit) / 16 = log decay``.

    Raises:
        ValueError: the decay is not between 0 and 1.
    """
    if not 0 < decay < 1:
        raise ValueError(f"initial_decay must be between 0 and 1, got {decay}")
    probability = decay**GlaCore.normalizer
    return math.log(probability / (1 - probability))


TARGETS: dict[str, type[LinearCore]] = {
    "lit": LitCore,
    "linfusion": LinFusionCore,
    "hedgehog": HedgehogCore,
    "gla": GlaCore,
    "local": LocalCore,
    "t5": TTTCore,
    "hybrid": HybridCore,
    **KERNEL_TARGETS,
    **SOFTMAX_TARGETS,
}
"""Name → what takes the place of the softmax."""

_DELTA = (
    "its scan corrects what it has stored, by gates that are all new, and is no average of values that a softmax could "
    "be compared with; 'gla' is the target with gates"
)
NO_TARGETS: dict[str, str] = {
    "gated_softmax": "it is a softmax, with a gate",
    "gdn": _DELTA,
    "gdn2": _DELTA,
    "hgrn2": "its keys are its forget gates, so that those of the softmax have no place in it; take 'gla'",
    "kda": _DELTA,
    "linear": "as a target it is called 'lit'",
    "mlla": "its queries and keys are projected from its values, so that none of the softmax's fit; 'linfusion' has "
    "the same features",
    "softmax": "it is what is replaced",
}
"""Mixers that are no targets, and why."""

"""``gated_layer``: checks and dispatch."""

from collections.abc import Callable

import torch
from torch import Tensor

from scanvas.kernels import dispatch
from scanvas.kernels.gate.api import ACTIVATIONS
from scanvas.kernels.gated.api import MAX_HEAD_DIM

from . import reference

IMPLEMENTATIONS: dict[str, Callable] = {"torch": reference.layer}
COMPOSING: dict[str, Callable] = {"torch": reference.compose}
if dispatch.TRITON_USABLE:
    from . import compose, triton

    IMPLEMENTATIONS["triton"] = triton.layer
    COMPOSING["triton"] = compose.compose


def gated_layer_pays(features: Tensor) -> bool:
    """Whether the gradients of a layer with these features should come from one operator: on a GPU, in training."""
    kernels = "triton" in IMPLEMENTATIONS and features.is_cuda and features.dtype != torch.float64
    return kernels and torch.is_grad_enabled()


def gated_layer(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    *,
    num_heads: int,
    normalizer: float = 16.0,
    eps: float = 1e-6,
    activation: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """Projections, ``gated_linear_attention_from_logits`` of both directions and ``gated_mix``: the mixer of ViG
    (arXiv:2405.18425, section 3) between its convolution and its output projection.

    Step by step the result is the same. For training it pays to have the gradients of all projections written side by
    side, where their products read them: autograd copies those of slices together, and adds up in passes of their own
    what reaches the features from two sides. On an H200 that and the sums for the biases were 0.17 of the 1.9 ms of a
    layer's step at 65,536 tokens of 192 channels.

    Args:
        features: ``(B, N, C)``, the local features.
        weight: ``(4·K + 2·C, C)``, rows of queries (K channels of all heads), keys (K), values (C), gates of the
            forward (K) and of the reverse scan (K), and of the output gate (C).
        bias: ``(2·K + C,)``, of both scans' gates and of the output gate.
        o_weight, local_weight: ``(C / num_heads,)``, weights of the two norms of ``gated_mix``.
        num_heads: must divide K and C.
        normalizer: see ``gated_linear_attention_from_logits``.
        eps, activation: see ``gated_mix``.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        ``(B, N, C)`` in the dtype of ``features``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or a name is unknown.
    """
    vectors = {"bias": bias, "o_weight": o_weight, "local_weight": local_weight}
    dispatch.check_tensors("gated_layer", features=features, weight=weight, **vectors)
    if features.ndim != 3:
        raise ValueError(f"gated_layer: features must be (B, N, C), got {tuple(features.shape)}")
    C = features.shape[2]
    rows = weight.shape[0] - 2 * C
    if weight.ndim != 2 or weight.shape[1] != C or rows < 4 or rows % 4:
        raise ValueError(f"gated_layer: weight must be (4·K + 2·C, C) with C = {C}, got {tuple(weight.shape)}")
    K = rows // 4
    if num_heads < 1 or K % num_heads or C % num_heads:
        raise ValueError(f"gated_layer: num_heads must divide K = {K} and C = {C}, got {num_heads}")
    if features.shape[1] < 1:
        raise ValueError("gated_layer: features must have at least one token, got none")
    if max(K, C) // num_heads > MAX_HEAD_DIM:
        raise ValueError(
            f"gated_layer: heads are at most {MAX_HEAD_DIM} wide, got {K // num_heads} and {C // num_heads} (K and C = "
            f"{K} and {C} by {num_heads} heads)"
        )
    shapes = {"bias": (2 * K + C,), "o_weight": (C // num_heads,), "local_weight": (C // num_heads,)}
    for name, shape in shapes.items():
        if tuple(vectors[name].shape) != shape:
            raise ValueError(f"gated_layer: {name} must be {shape}, got {tuple(vectors[name].shape)}")
    if not features.dtype == weight.dtype == bias.dtype:
        raise TypeError(
            f"gated_layer: features, weight and bias must have one dtype, got {features.dtype}, {weight.dtype} and "
            f"{bias.dtype}"
        )
    if not normalizer > 0:
        raise ValueError(f"gated_layer: normalizer must be positive, got {normalizer}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_layer: activation must be one of {ACTIVATIONS}, got {activation!r}")
    name = dispatch.resolve("gated_layer", impl, features.device, IMPLEMENTATIONS, features.dtype)
    run = IMPLEMENTATIONS[name]
    return run(features, weight, bias, o_weight, local_weight, num_heads, float(normalizer), eps, activation)


def compose_projections(
    readers: list[Tensor],
    down: Tensor,
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The weights of a layer's projections as one matrix, the factors of the low-rank one multiplied, and the biases.

    Args:
        readers: weights of queries, keys and values, ``(rows, C)`` each, or one of all.
        down, up: of the gates of the scans, ``(rank, C)`` and ``(rows, rank)``.
        gate: of the output gate, ``(rows, C)``.
        up_bias, gate_bias: ``(rows,)`` or ``None`` for zeros.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the latter, one launch, is for inference.

    Returns:
        ``(all rows, C)`` and ``(all rows,)``.

    Raises:
        RuntimeError: ``impl="triton"`` while a gradient is being recorded.
        ValueError: ``impl`` is unknown or the number of readers is neither one nor three.
    """
    if len(readers) not in (1, 3):
        raise ValueError(f"compose_projections: readers must be one tensor or three, got {len(readers)}")
    tensors = [x for x in (*readers, down, up, gate, up_bias, gate_bias) if x is not None]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if impl == "triton" and recorded:
        raise RuntimeError("compose_projections: impl='triton' has no gradient; use impl='torch'")
    if impl == "auto" and (recorded or dispatch.autocasts(up.device.type) or len({x.dtype for x in tensors}) > 1):
        impl = "torch"
    name = dispatch.resolve("compose_projections", impl, up.device, COMPOSING, up.dtype)
    return COMPOSING[name](readers, down, up, gate, up_bias, gate_bias)

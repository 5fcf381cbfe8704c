"""``gated_mix``: checks and dispatch."""

from collections.abc import Callable

from torch import Tensor

from scanvas.kernels import dispatch

from .reference import mix

IMPLEMENTATIONS: dict[str, Callable] = {"torch": mix}
if dispatch.TRITON_USABLE:
    from . import triton

    IMPLEMENTATIONS["triton"] = triton.mix
ACTIVATIONS = (None, "silu")


def gated_mix(
    o: Tensor,
    local: Tensor,
    gate: Tensor,
    o_weight: Tensor,
    local_weight: Tensor,
    *,
    eps: float = 1e-6,
    activation: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """``σ(gate)·RMSNorm(o) + (1 − σ(gate))·RMSNorm(local)``, then optionally SiLU.

    The 2-D gating locality injection of ViG (arXiv:2405.18425, section 3.3); both norms are per head.

    Args:
        o: ``(B, N, H, D)``, output of the global attention.
        local: ``(B, N, H·D)``, local features.
        gate: ``(B, N, H·D)``, logits.
        o_weight, local_weight: ``(D,)``, weights of the two norms.
        eps: added to the mean square in both norms.
        activation: ``None`` or ``"silu"``, applied to the result.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        ``(B, N, H·D)`` in the dtype of ``gate``; computed in float32 (float64 if ``gate`` is).

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or ``activation`` or ``impl`` is unknown.
    """
    dispatch.check_tensors("gated_mix", o=o, local=local, gate=gate, o_weight=o_weight, local_weight=local_weight)
    if o.ndim != 4:
        raise ValueError(f"gated_mix: o must be (B, N, H, D), got {tuple(o.shape)}")
    B, N, H, D = o.shape
    for name, x, shape in (
        ("local", local, (B, N, H * D)),
        ("gate", gate, (B, N, H * D)),
        ("o_weight", o_weight, (D,)),
        ("local_weight", local_weight, (D,)),
    ):
        if tuple(x.shape) != shape:
            raise ValueError(f"gated_mix: {name} must be {shape} for o of shape {tuple(o.shape)}, got {tuple(x.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_mix: activation must be one of {ACTIVATIONS}, got {activation!r}")
    name = dispatch.resolve("gated_mix", impl, o.device, IMPLEMENTATIONS, gate.dtype)
    return IMPLEMENTATIONS[name](o, local, gate, o_weight, local_weight, eps, activation)

"""``gated_mix`` and ``swish_norm``: checks and dispatch."""

from collections.abc import Callable

from torch import Tensor

from scanvas.kernels import dispatch

from . import reference

IMPLEMENTATIONS: dict[str, Callable] = {"torch": reference.mix}
SWISH_IMPLEMENTATIONS: dict[str, Callable] = {"torch": reference.swish_norm}
if dispatch.TRITON_USABLE:
    from . import swish, triton

    IMPLEMENTATIONS["triton"] = triton.mix
    SWISH_IMPLEMENTATIONS["triton"] = swish.swish_norm
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
    given = {"local": local, "gate": gate, "o_weight": o_weight, "local_weight": local_weight}
    _check("gated_mix", o, given)
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_mix: activation must be one of {ACTIVATIONS}, got {activation!r}")
    name = dispatch.resolve("gated_mix", impl, o.device, IMPLEMENTATIONS, gate.dtype)
    return IMPLEMENTATIONS[name](o, local, gate, o_weight, local_weight, eps, activation)


def swish_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float = 1e-5, impl: str = "auto") -> Tensor:
    """``RMSNorm(o) ⊙ SiLU(gate)``, the norm per head: the output gate of GLA (arXiv:2312.06635, section 4.4).

    Args:
        o: ``(B, N, H, D)``, output of the attention.
        gate: ``(B, N, H·D)``, logits.
        weight: ``(D,)``, of the norm.
        eps: added to the mean square.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the latter computes in float32.

    Returns:
        ``(B, N, H·D)`` in the dtype of ``gate``.

    Raises:
        ValueError, TypeError: as ``gated_mix``.
    """
    _check("swish_norm", o, {"gate": gate, "weight": weight})
    name = dispatch.resolve("swish_norm", impl, o.device, SWISH_IMPLEMENTATIONS, gate.dtype)
    return SWISH_IMPLEMENTATIONS[name](o, gate, weight, eps)


def _check(op: str, o: Tensor, given: dict[str, Tensor]) -> None:
    """Weights are ``(D,)``, all others ``(B, N, H·D)``."""
    dispatch.check_tensors(op, o=o, **given)
    if o.ndim != 4:
        raise ValueError(f"{op}: o must be (B, N, H, D), got {tuple(o.shape)}")
    B, N, H, D = o.shape
    for name, x in given.items():
        shape = (D,) if name.endswith("weight") else (B, N, H * D)
        if tuple(x.shape) != shape:
            raise ValueError(f"{op}: {name} must be {shape} for o of shape {tuple(o.shape)}, got {tuple(x.shape)}")

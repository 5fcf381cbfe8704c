"""``gated_delta_rule``: checks and dispatch."""

from collections.abc import Callable

import torch
from torch import Tensor

from scanvas.kernels import dispatch

from . import fla
from .chunked import chunked
from .reference import recurrent

IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "torch": chunked}
if fla.INSTALLED and torch.cuda.is_available():
    IMPLEMENTATIONS["fla"] = fla.fla


def _check_shapes(q, k, v, log_decay, erase_gate, write_gate):
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(
            f"gated_delta_rule: q and k must be (B, N, H, Dk), got q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"gated_delta_rule: v must be (B, N, H, Dv) with (B, N, H) = {tuple(q.shape[:3])}, got {tuple(v.shape)}"
        )
    of = {"log_decay": (log_decay, q, "Dk"), "erase_gate": (erase_gate, q, "Dk"), "write_gate": (write_gate, v, "Dv")}
    for name, (x, whole, width) in of.items():
        if x is not None and x.shape not in (whole.shape, (*whole.shape[:3], 1)):
            raise ValueError(
                f"gated_delta_rule: {name} must be (B, N, H, {width}) = {tuple(whole.shape)} or (B, N, H, 1), got "
                f"{tuple(x.shape)}"
            )


@dispatch.outside_autocast
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase_gate: Tensor,
    write_gate: Tensor | None = None,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """A scan whose state is corrected, not only added to: with the erase gate b and the write gate w
    ``S_t = (I − k_tᵀ (b_t ⊙ k_t)) diag(exp(g_t)) S_{t-1} + k_tᵀ (w_t ⊙ v_t)``, ``o_t = scale · q_t S_t``, from the
    first token to the last.

    With ``b = w = β`` per head it is Gated DeltaNet (arXiv:2412.06464, eq. 10) if g is one per head, Kimi Delta
    Attention (arXiv:2510.26692) if it is one per channel; with gates per channel it is Gated DeltaNet-2. The state
    stays bounded if ``0 ≤ (b ⊙ k) · k ≤ 2``, which unit keys and gates up to 1 see to.

    Args:
        q, k: ``(B, N, H, Dk)``.
        v: ``(B, N, H, Dv)``.
        log_decay: g, ``(B, N, H, Dk)``, or ``(B, N, H, 1)`` for one decay per head; natural logarithm, ≤ 0.
        erase_gate: b, ``(B, N, H, Dk)`` or ``(B, N, H, 1)``.
        write_gate: w, ``(B, N, H, Dv)`` or ``(B, N, H, 1)``; 1 by default. Pass the very tensor ``erase_gate`` where
            they are one gate: kernels made for that are faster.
        scale: factor on the result, ``Dk ** -0.5`` by default.
        impl: ``"torch"``, chunked and linear in N; ``"fla"``, flash-linear-attention's kernels, if that package is
            installed, for tensors on a CUDA device, v in float16 or bfloat16 (to which q and k are rounded) and head
            dimensions that are multiples of 8 from 16 to 256, once differentiable and not traceable; ``"auto"`` for
            ``"fla"`` where it can run, else ``"torch"``; or the definition ``"recurrent"``.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype; sums are formed in float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype or device; the message names it.
        RuntimeError: the implementation asked for can not run here; the message says why.
    """
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "erase_gate": erase_gate, "write_gate": write_gate}
    dispatch.check_tensors("gated_delta_rule", optional=("write_gate",), **tensors)
    _check_shapes(**tensors)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if impl in ("auto", "fla"):
        reason = fla.refusal(**tensors)
        if reason is None:
            return fla.fla(**tensors, scale=scale)
        if impl == "fla":
            raise RuntimeError(
                f"gated_delta_rule: impl='fla' can not run here: {reason}. Use impl='torch' or impl='auto'."
            )
    name = dispatch.resolve("gated_delta_rule", impl, q.device, IMPLEMENTATIONS, q.dtype)
    written = v if write_gate is None else write_gate * v
    return IMPLEMENTATIONS[name](q, k, written, log_decay, erase_gate * k, scale).to(v.dtype)

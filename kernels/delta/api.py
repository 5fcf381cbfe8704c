"""``gated_delta_rule``: checks and dispatch."""

from collections.abc import Callable

from torch import Tensor

from scanvas.kernels import dispatch

from .chunked import chunked
from .reference import recurrent

IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "torch": chunked}


@dispatch.outside_autocast
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """A scan whose state is corrected, not only added to: ``S_t = (I − k_tᵀ e_t) diag(exp(g_t)) S_{t-1} + k_tᵀ v_t``,
    ``o_t = scale · q_t S_t``, from the first token to the last.

    With ``e = β k``, values ``β v`` and one g per head it is Gated DeltaNet (arXiv:2412.06464, eq. 10); with one g per
    channel Kimi Delta Attention (arXiv:2510.26692); with ``e = b ⊙ k`` and values ``w ⊙ v`` Gated DeltaNet-2. The state
    stays bounded if ``0 ≤ e · k ≤ 2``, which unit keys and gates up to 1 see to.

    Args:
        q, k, erase: ``(B, N, H, Dk)``; ``erase`` is e, the key whose value is taken out of the state.
        v: ``(B, N, H, Dv)``, what is written.
        log_decay: g, ``(B, N, H, Dk)``, or ``(B, N, H, 1)`` for one decay per head; natural logarithm, ≤ 0.
        scale: factor on the result, ``Dk ** -0.5`` by default.
        impl: ``"auto"``; ``"torch"``, chunked and linear in N; or the definition ``"recurrent"``.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype; sums are formed in float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype or device; the message names it.
    """
    dispatch.check_tensors("gated_delta_rule", q=q, k=k, v=v, log_decay=log_decay, erase=erase)
    if q.ndim != 4 or k.shape != q.shape or erase.shape != q.shape:
        raise ValueError(
            f"gated_delta_rule: q, k and erase must be (B, N, H, Dk), got q {tuple(q.shape)}, k {tuple(k.shape)} and "
            f"erase {tuple(erase.shape)}"
        )
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"gated_delta_rule: v must be (B, N, H, Dv) with (B, N, H) = {tuple(q.shape[:3])}, got {tuple(v.shape)}"
        )
    if log_decay.shape not in (q.shape, (*q.shape[:3], 1)):
        raise ValueError(
            f"gated_delta_rule: log_decay must be (B, N, H, Dk) = {tuple(q.shape)} or (B, N, H, 1), got "
            f"{tuple(log_decay.shape)}"
        )
    name = dispatch.resolve("gated_delta_rule", impl, q.device, IMPLEMENTATIONS, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return IMPLEMENTATIONS[name](q, k, v, log_decay, erase, scale)

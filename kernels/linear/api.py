"""``linear_attention``: checks and dispatch."""

from collections.abc import Callable

from torch import Tensor

from scanvas.kernels import dispatch

from .reference import attention_matrix, linear, quadratic

__all__ = ["IMPLEMENTATIONS", "attention_matrix", "linear_attention"]

IMPLEMENTATIONS: dict[str, Callable] = {"torch": linear, "quadratic": quadratic}
if dispatch.TRITON_USABLE:
    from . import triton

    IMPLEMENTATIONS["triton"] = triton.linear


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalizer_q: Tensor | None = None,
    normalizer_k: Tensor | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> Tensor:
    """Non-causal linear attention ``q (Σ_j k_jᵀ v_j) / (q · Σ_j k_j + eps)`` (arXiv:2006.16236, eq. 5).

    Args:
        q, k: ``(B, N, H, D)`` features, non-negative unless you know better (a feature map such as ReLU has been
            applied): the divisor is not guarded against other signs. A row of zeros gives an output of zero.
        v: ``(B, N, H, Dv)``.
        normalizer_q, normalizer_k: ``(B, N, H, D')``, other features for the divisor, for mixers which rotate those of
            the numerator. ``q`` and ``k`` by default; give both or neither.
        eps: added to the divisor. Sums and divisor are float32 (float64 for float64 inputs).
        impl: ``"auto"``, ``"torch"``, ``"triton"`` or the definition ``"quadratic"``.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or ``impl`` is unknown.
    """
    normalizers = {"normalizer_q": normalizer_q, "normalizer_k": normalizer_k}
    dispatch.check_tensors("linear_attention", optional=normalizers, q=q, k=k, v=v, **normalizers)
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(
            f"linear_attention: q and k must be (B, N, H, D), got q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"linear_attention: v must be (B, N, H, Dv) with (B, N, H) = {tuple(q.shape[:3])}, got {tuple(v.shape)}"
        )
    if (normalizer_q is None) != (normalizer_k is None):
        raise ValueError("linear_attention: give both normalizer_q and normalizer_k, or neither")
    if normalizer_q is None:
        normalizer_q, normalizer_k = q, k
    elif normalizer_q.shape != normalizer_k.shape or normalizer_q.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"linear_attention: normalizer_q and normalizer_k must be (B, N, H, D') with (B, N, H) = "
            f"{tuple(q.shape[:3])}, got {tuple(normalizer_q.shape)} and {tuple(normalizer_k.shape)}"
        )
    name = dispatch.resolve("linear_attention", impl, q.device, IMPLEMENTATIONS, v.dtype)
    return IMPLEMENTATIONS[name](q, k, v, normalizer_q, normalizer_k, eps)

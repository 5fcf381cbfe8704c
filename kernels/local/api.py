"""``local_attention`` and ``hybrid_attention``: checks and dispatch."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from scanvas.kernels import dispatch

from .disc import Grid, covers
from .flex import flex
from .reference import dense, hybrid_dense
from .windowed import hybrid_windowed, windowed

IMPLEMENTATIONS: dict[str, Callable] = {"torch": windowed, "dense": dense, "flex": flex}
HYBRID_IMPLEMENTATIONS: dict[str, Callable] = {"torch": hybrid_windowed, "dense": hybrid_dense}
_FLEX_HEAD_DIM = 16  # the least that flex attention takes on a GPU
_FLEX_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LEAST_LOG_WEIGHT = -1e4
"""Log weights are cut off here: the exponential is zero all the same, and a query whose keys are all hidden gets their
mean instead of NaN."""


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    radius: int,
    *,
    start: int = 0,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    log_weight: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of each image token to those less than ``radius`` away (CLEAR, arXiv:2412.16112): a disc in a
    grid of two axes, a ball in one of three. Tokens of no image (text, class, registers) see, and are seen by, all.

    Args:
        q, k: ``(B, N, H, D)``.
        v: ``(B, N, H, Dv)``.
        grid: ``(H, W)`` or ``(T, H, W)`` of the image's tokens, which are in raster order.
        radius: r; a pair takes part if its Euclidean distance in tokens is less than r.
        start: index of the image's first token; tokens before and after the image are of no image.
        extra_k, extra_v: ``(B, M, H, D)`` and ``(B, M, H, Dv)``, more keys that only image tokens see.
        log_weight: ``(B or 1, N)``, added to the scores of each key.
        scale: of the scores, D^-½ by default.
        impl: ``"auto"``; ``"torch"``, tile by tile; ``"flex"``, PyTorch's flex attention with a mask of blocks, which
            ``"auto"`` takes on a GPU except under ``torch.export``; or the definition ``"dense"``.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or ``impl`` is unknown.
    """
    grid = tuple(grid)
    scale = _check("local_attention", q, k, v, grid, start, log_weight, scale)
    dispatch.check_tensors("local_attention", optional=("extra_k", "extra_v"), q=q, extra_k=extra_k, extra_v=extra_v)
    _check_radius("local_attention", radius)
    if (extra_k is None) != (extra_v is None):
        raise ValueError("local_attention: give both extra_k and extra_v, or neither")
    if extra_k is not None and (
        extra_k.shape[:2] != extra_v.shape[:2]
        or extra_k.shape[0] != k.shape[0]
        or extra_k.shape[2:] != k.shape[2:]
        or extra_v.shape[2:] != v.shape[2:]
    ):
        raise ValueError(
            f"local_attention: extra_k and extra_v must be (B, M, H, D) and (B, M, H, Dv) beside k {tuple(k.shape)} "
            f"and v {tuple(v.shape)}, got {tuple(extra_k.shape)} and {tuple(extra_v.shape)}"
        )
    if log_weight is not None:
        log_weight = log_weight.clamp_min(LEAST_LOG_WEIGHT)
    if impl == "auto":
        fits = q.is_cuda and q.dtype in _FLEX_DTYPES and min(q.shape[-1], v.shape[-1]) >= _FLEX_HEAD_DIM
        # PyTorch before 2.7 can not tell exporting from compiling.
        exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()
        exporting = exporting or torch.onnx.is_in_onnx_export()
        impl = "flex" if fits and not exporting and not covers(grid, radius) else "torch"
    name = dispatch.resolve("local_attention", impl, q.device, IMPLEMENTATIONS, q.dtype)
    return IMPLEMENTATIONS[name](q, k, v, grid, radius, start, extra_k, extra_v, log_weight, scale)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features_q: Tensor,
    features_k: Tensor,
    factor: Tensor,
    grid: Grid,
    *,
    radius: int | None = None,
    every: int | None = None,
    start: int = 0,
    log_weight: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention to some keys and linear attention to the others, under one divisor (LoLCATs, arXiv:2410.10254,
    section 3.3)::

        o_i = (Σ_{j ∈ S} γ exp(s_ij − max_{S} s_i) v_j + Σ_{j ∉ S} φ(q_i)·φ(k_j) v_j) / (the same with ones for v_j)

    S is the disc of ``radius`` around the query, or every ``every``-th token of the image for all queries (Attention
    Surgery, arXiv:2509.24899). Keys of no image are always in S, and queries of no image see all with a softmax.

    Args:
        q, k, v, grid, start, log_weight, scale: as for ``local_attention``.
        features_q, features_k: ``(B, N, H, F)`` ≥ 0.
        factor: γ, ``(H,)`` > 0.
        radius, every: one of the two.
        impl: ``"auto"``, ``"torch"`` or the definition ``"dense"``.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype; everything is summed in float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or ``impl`` is unknown.
    """
    grid = tuple(grid)
    scale = _check("hybrid_attention", q, k, v, grid, start, log_weight, scale)
    dispatch.check_tensors("hybrid_attention", q=q, features_q=features_q, features_k=features_k, factor=factor)
    if (radius is None) == (every is None):
        raise ValueError(f"hybrid_attention: give radius or every, got radius = {radius} and every = {every}")
    _check_radius("hybrid_attention", 1 if radius is None else radius)
    if every is not None and every < 1:
        raise ValueError(f"hybrid_attention: every must be at least 1, got {every}")
    if features_q.shape != features_k.shape or features_q.ndim != 4 or features_q.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"hybrid_attention: features_q and features_k must be (B, N, H, F) with (B, N, H) = {tuple(q.shape[:3])}, "
            f"got {tuple(features_q.shape)} and {tuple(features_k.shape)}"
        )
    if factor.shape != q.shape[2:3]:
        raise ValueError(f"hybrid_attention: factor must be (H,) = ({q.shape[2]},), got {tuple(factor.shape)}")
    if log_weight is not None:
        log_weight = log_weight.clamp_min(LEAST_LOG_WEIGHT)
    name = dispatch.resolve("hybrid_attention", impl, q.device, HYBRID_IMPLEMENTATIONS, q.dtype)
    return HYBRID_IMPLEMENTATIONS[name](
        q, k, v, features_q, features_k, factor, grid, radius, every, start, log_weight, scale
    )


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, grid: Grid, start: int, log_weight, scale) -> float:
    dispatch.check_tensors(op, optional=("log_weight",), q=q, k=k, v=v, log_weight=log_weight)
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{op}: q, k must be (B, N, H, D) and v (B, N, H, Dv), got q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    N, tokens = q.shape[1], math.prod(grid)
    if len(grid) not in (2, 3) or min(grid) < 1:
        raise ValueError(f"{op}: grid must be (H, W) or (T, H, W), got {grid}")
    if not 0 <= start <= N - tokens:
        raise ValueError(f"{op}: a grid of {'×'.join(map(str, grid))} at start = {start} does not fit into {N} tokens")
    if log_weight is not None and (log_weight.shape[0] not in (1, q.shape[0]) or log_weight.shape[1:] != (N,)):
        raise ValueError(
            f"{op}: log_weight must be (B or 1, N) with (B, N) = {tuple(q.shape[:2])}, got {tuple(log_weight.shape)}"
        )
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check_radius(op: str, radius: int) -> None:
    if not isinstance(radius, int) or radius < 1:
        raise ValueError(f"{op}: radius must be a whole number of tokens, at least 1; got {radius!r}")

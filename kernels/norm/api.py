"""``token_norm``, ``add_norm``, ``gated_add``: checks and dispatch."""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from scanvas.kernels import dispatch
from scanvas.kernels.scan_order import check_order

from . import reference
from .reference import Norm

IMPLEMENTATIONS: dict[str, ModuleType] = {"torch": reference}
if dispatch.TRITON_USABLE:
    from . import triton

    IMPLEMENTATIONS["triton"] = triton
KINDS = ("rms", "layer")


def token_norm(
    x: Tensor,
    *,
    kind: str = "rms",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    order: str = "raster",
    grid: tuple[int, int] | None = None,
    impl: str = "auto",
) -> Tensor:
    """``norm(x)·weight + bias``, then ``·(1 + scale) + shift``, in one pass over memory.

    RMSNorm (arXiv:1910.07467, eq. 4) or LayerNorm over the channels; with ``shift`` and ``scale`` the adaptive norm of
    DiT (arXiv:2212.09748, section 3.2).

    Args:
        x: ``(B, N, C)``.
        kind: ``"rms"`` or ``"layer"``.
        weight, bias: ``(C,)``; a bias only for ``"layer"``.
        shift, scale: ``(B, 1, C)``, both or neither.
        eps: added to the mean square, or to the variance.
        order, grid: the result's tokens come in this scan order of a grid ``(H, W)``, see ``scan_order.to_order``.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the latter computes in float32.

    Returns:
        ``(B, N, C)`` in the dtype of ``x``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together, or a name is unknown.
    """
    _check("token_norm", x, kind, {"weight": weight, "bias": bias}, {"shift": shift, "scale": scale})
    grid = _check_order("token_norm", x, order, grid)
    run = _implementation("token_norm", impl, x)
    return run(x, weight, bias, shift, scale, Norm(kind == "layer", eps, order, grid))


def add_norm(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None = None,
    *,
    kind: str = "rms",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    order: str = "raster",
    grid: tuple[int, int] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The end of one residual branch and the start of the next: ``y = x + gate·branch`` and ``token_norm(y)``.

    Args:
        x: ``(B, N, C)``, the residual stream.
        branch: ``(B, N, C)``, its tokens in the scan order ``order`` of ``grid``; those of ``x`` and of the results are
            in raster order.
        gate: ``(B, 1, C)``, or ``None`` for 1.
        kind, weight, bias, shift, scale, eps, impl: see ``token_norm``.

    Returns:
        ``y`` and its norm, each ``(B, N, C)`` in the dtype of ``x``.

    Raises:
        ValueError, TypeError: as ``token_norm``.
    """
    _check(
        "add_norm", x, kind, {"weight": weight, "bias": bias}, {"shift": shift, "scale": scale, "gate": gate}, branch
    )
    grid = _check_order("add_norm", x, order, grid)
    run = _implementation("add_norm", impl, x)
    return run(x, branch, gate, weight, bias, shift, scale, Norm(kind == "layer", eps, order, grid))


def gated_add(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    *,
    order: str = "raster",
    grid: tuple[int, int] | None = None,
    impl: str = "auto",
) -> Tensor:
    """``x + gate·branch``, the branch in a scan order; arguments and errors as in ``add_norm``."""
    _check("gated_add", x, "rms", {}, {"gate": gate}, branch)
    grid = _check_order("gated_add", x, order, grid)
    run = _implementation("gated_add", impl, x)
    return run(x, branch, gate, order, grid)


def _check(
    op: str,
    x: Tensor,
    kind: str,
    per_channel: dict[str, Tensor | None],
    per_image: dict[str, Tensor | None],
    branch: Tensor | None = None,
) -> None:
    given = {"branch": branch, **per_channel, **per_image}
    dispatch.check_tensors(op, optional=given, x=x, **given)
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {KINDS}, got {kind!r}")
    if x.ndim != 3:
        raise ValueError(f"{op}: x must be (B, N, C), got {tuple(x.shape)}")
    B, _, C = x.shape
    shapes = {"branch": tuple(x.shape), **dict.fromkeys(per_channel, (C,)), **dict.fromkeys(per_image, (B, 1, C))}
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{op}: {name} must be {shapes[name]} for x of shape {tuple(x.shape)}, got {tuple(tensor.shape)}"
            )
    if (per_image.get("shift") is None) != (per_image.get("scale") is None):
        raise ValueError(f"{op}: shift and scale go together; only one was given")
    if kind == "rms" and per_channel.get("bias") is not None:
        raise ValueError(f"{op}: kind='rms' has no bias")


def _check_order(op: str, x: Tensor, order: str, grid: tuple[int, int] | None) -> tuple[int, int]:
    check_order(order)
    if grid is None:
        if order != "raster":
            raise ValueError(f"{op}: order={order!r} needs the grid (H, W) of the tokens")
        return 1, x.shape[1]
    if min(grid) < 0 or grid[0] * grid[1] != x.shape[1]:
        raise ValueError(f"{op}: grid must be (H, W) of the {x.shape[1]} tokens of x, got {tuple(grid)}")
    return grid[0], grid[1]


def _implementation(op: str, impl: str, x: Tensor) -> Callable:
    return getattr(IMPLEMENTATIONS[dispatch.resolve(op, impl, x.device, IMPLEMENTATIONS, x.dtype)], op)

"""Division-normalised linear attention in Triton: two launches forward, five backward, no copy of q, k or v.

Floor: q, k, v read once and the output written once; each is read in its own dtype and summed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanvas.kernels.tiles import unit

from .kernels import apply_kernel, divisor_gradient_kernel, reduce_kernel

_TOKENS = 64
_WARPS = 4
_PROGRAMS = 1024  # enough to fill the largest chips a few times over
_PIECE = 64
_STEPS = 8  # tiles of tokens of a program: at least, where it sums, and at most, where its matrix stays with it


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _placed(**tensors: Tensor) -> dict[str, Tensor | int]:
    """A kernel's arguments for these tensors ``(B, N, H, …)``: themselves, and their strides in units."""
    arguments = {}
    for name, x in tensors.items():
        size = unit(x)
        batch, token, head, _ = x.stride()
        arguments |= {f"{name}_ptr": x, f"UNIT_{name.upper()}": size, f"{name}_batch": batch // size}
        arguments |= {f"{name}_token": token // size, f"{name}_head": head // size}
    return arguments


def _piece(width: int) -> int:
    return min(_PIECE, max(16, triton.next_power_of_2(width)))


def _options(x: Tensor) -> dict:
    """A product of float32, and of float16, whose range the sums would leave, is made of three of tf32."""
    kind = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32)
    return {"DT": kind, "PREC": "tf32x3", "BN": _TOKENS, "num_warps": _WARPS}


def _reduce(
    x: Tensor, y: Tensor, u: Tensor, divisor: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``Σ_n x_nᵀ y_n / divisor_n`` ``(B, H, X, Y)`` and ``Σ_n weight_n u_n`` ``(B, H, U)``, float32."""
    x, y, u = _dense(x), _dense(y), _dense(u)
    (B, N, H, X), Y, U = x.shape, y.shape[-1], u.shape[-1]
    BX, BY = _piece(X), _piece(Y)
    pieces = triton.cdiv(X, BX) * triton.cdiv(Y, BY)
    tiles = triton.cdiv(N, _TOKENS)
    segments = max(1, min(triton.cdiv(_PROGRAMS, B * H * pieces), tiles // _STEPS))
    steps = triton.cdiv(tiles, segments)
    segments = triton.cdiv(tiles, steps)
    out = x.new_empty((B, H, segments, X, Y), dtype=torch.float32)
    total = x.new_empty((B, H, segments, U), dtype=torch.float32)
    with torch.cuda.device_of(x):
        reduce_kernel[(B * H, segments, pieces)](
            **_placed(x=x, y=y, u=u), divisor_ptr=divisor, w_ptr=weight, out_ptr=out, total_ptr=total,
            N=N, H=H, steps=steps, X=X, Y=Y, U=U, DIVIDE=divisor is not None, WEIGHT=weight is not None,
            BX=BX, BY=BY, BU=triton.next_power_of_2(U), **_options(x),
        )  # fmt: skip
    return (out[:, :, 0], total[:, :, 0]) if segments == 1 else (out.sum(2), total.sum(2))


def _apply(
    x: Tensor,
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    normalise: tuple[Tensor, Tensor, float] | None = None,
    divisor: Tensor | None = None,
    added: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """``x @ matrix`` ``(B, N, H, Y)``, with ``normalise=(u, total, eps)`` over ``u · total + eps``, which is written to
    ``divisor``; else over ``divisor``, if it is given; plus ``weight · added``."""
    x = _dense(x)
    B, N, H, X = x.shape
    Y = matrix.shape[-2 if transposed else -1]
    u, total, eps = normalise or (x, None, 0.0)
    u = _dense(u)
    U = u.shape[-1]
    BX, BY = _piece(X), _piece(Y)
    pieces = triton.cdiv(Y, BY)
    tiles = triton.cdiv(N, _TOKENS)
    steps = max(1, min(_STEPS, tiles, tiles * B * H * pieces // _PROGRAMS))
    out = x.new_empty((B, N, H, Y), dtype=dtype)
    with torch.cuda.device_of(x):
        apply_kernel[(triton.cdiv(tiles, steps) * B * H, pieces)](
            **_placed(x=x, u=u), matrix_ptr=matrix.contiguous(), total_ptr=total, divisor_ptr=divisor, w_ptr=weight,
            added_ptr=added, out_ptr=out, N=N, H=H, eps=eps, steps=steps, X=X, Y=Y, U=U, ONE_PIECE=X <= BX,
            NORMALISE=normalise is not None, DIVIDE=normalise is None and divisor is not None, ADD=added is not None,
            WEIGHT=weight is not None, TRANSPOSED=transposed, BX=BX, BY=BY, BU=triton.next_power_of_2(U), **_options(x),
        )  # fmt: skip
    return out


def _divisor_gradient(q: Tensor, d_out: Tensor, state: Tensor, divisor: Tensor) -> Tensor:
    q, d_out = _dense(q), _dense(d_out)
    (B, N, H, D), V = q.shape, d_out.shape[-1]
    gradient = torch.empty_like(divisor)
    with torch.cuda.device_of(q):
        divisor_gradient_kernel[(triton.cdiv(N, _TOKENS) * B * H,)](
            **_placed(q=q, d=d_out), matrix_ptr=state, divisor_ptr=divisor, gradient_ptr=gradient,
            N=N, H=H, D=D, V=V, BX=_piece(D), BY=_piece(V), **_options(q),
        )  # fmt: skip
    return gradient


@torch.library.custom_op("scanvas::linear_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor | None, normalizer_k: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, divisors ``(B, N, H)``, and the sums ``(B, H, D, Dv)`` and ``(B, H, D')``."""
    state, total = _reduce(k, v, k if normalizer_k is None else normalizer_k)
    state, total = state.contiguous(), total.contiguous()
    divisor = q.new_empty(q.shape[:3], dtype=torch.float32)
    normalise = (q if normalizer_q is None else normalizer_q, total, eps)
    return _apply(q, state, v.dtype, normalise=normalise, divisor=divisor), divisor, state, total


@_forward.register_fake
def _(q, k, v, normalizer_q, normalizer_k, eps):
    B, N, H, D = q.shape
    width = D if normalizer_q is None else normalizer_q.shape[-1]
    shapes = ((B, N, H), (B, H, D, v.shape[-1]), (B, H, width))
    return v.new_empty(v.shape), *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


@torch.library.custom_op("scanvas::linear_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalizer_q: Tensor | None,
    normalizer_k: Tensor | None,
    divisor: Tensor,
    state: Tensor,
    total: Tensor,
    d_out: Tensor,
) -> list[Tensor]:
    """Gradients of q, k, v and, if they are there, of the normalizers."""
    d_out = d_out.contiguous()
    d_divisor = _divisor_gradient(q, d_out, state, divisor)
    own = normalizer_q is None
    d_state, d_total = _reduce(q, d_out, q if own else normalizer_q, divisor, d_divisor)
    d_state, d_total = d_state.contiguous(), d_total.contiguous()
    more = {"added": total, "weight": d_divisor} if own else {}
    d_q = _apply(d_out, state, q.dtype, transposed=True, divisor=divisor, **more)
    d_k = _apply(v, d_state, k.dtype, transposed=True, added=d_total if own else None)
    grads = [d_q, d_k, _apply(k, d_state, v.dtype)]
    if not own:
        grads.append((d_divisor.unsqueeze(-1) * total.unsqueeze(1)).to(normalizer_q.dtype))
        grads.append(d_total.unsqueeze(1).to(normalizer_k.dtype).expand(normalizer_k.shape).contiguous())
    return grads


@_backward.register_fake
def _(q, k, v, normalizer_q, normalizer_k, divisor, state, total, d_out):
    return [x.new_empty(x.shape) for x in (q, k, v, normalizer_q, normalizer_k) if x is not None]


def _setup_context(ctx, inputs, output):
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate(ctx, d_out, *_):
    grads = _backward(*ctx.saved_tensors, d_out)
    return *grads, *[None] * (6 - len(grads))


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def linear(q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor, normalizer_k: Tensor, eps: float) -> Tensor:
    """Arguments and result as ``reference.linear``; sums in float32 whatever the dtypes."""
    if any(x.dtype == torch.float64 for x in (q, k, v)):
        raise TypeError(
            "linear_attention: impl='triton' computes in float32, but an input is float64; use impl='torch'"
        )
    own = normalizer_q is q and normalizer_k is k
    # One dtype for all factors of a product; that of the output is v's.
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    factors = [x.to(dtype) for x in (q, k, v)]
    out = _forward(*factors, *((None, None) if own else (normalizer_q, normalizer_k)), eps)[0]
    return out.to(v.dtype)

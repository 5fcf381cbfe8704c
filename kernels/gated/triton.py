"""Gated linear attention in Triton, as operators PyTorch can trace, export and differentiate.

The algorithm is drawn in README.md; the kernels are in fused.py, states.py, chunks.py and backward.py, tiles and
launches in launch.py.
"""

import torch
from torch import Tensor

from . import launch


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors: an empty one stands for ``None``."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


@torch.library.custom_op("scanvas::gated_linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    reverse_gate: Tensor | None,
    initial_state: Tensor | None,
    reverse_initial_state: Tensor | None,
    scale: float,
    normalizer: float,
    return_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, final, reverse_final = launch.forward(
        q, k, v, gate, reverse_gate, initial_state, reverse_initial_state, scale, normalizer, return_states
    )
    return out, _or_empty(final, q), _or_empty(reverse_final, q)


@_forward.register_fake
def _(
    q, k, v, gate, reverse_gate, initial_state, reverse_initial_state, scale, normalizer, return_states
):  # fmt: skip
    B, _, H, DK = q.shape

    def state(wanted):
        return q.new_empty((B, H, DK, v.shape[-1]) if wanted else 0, dtype=torch.float32)

    return v.new_empty(v.shape), state(return_states), state(return_states and reverse_gate is not None)


@torch.library.custom_op("scanvas::gated_linear_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    reverse_gate: Tensor | None,
    initial_state: Tensor | None,
    reverse_initial_state: Tensor | None,
    d_out: Tensor,
    d_final: Tensor | None,
    d_reverse_final: Tensor | None,
    scale: float,
    normalizer: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = launch.backward(
        q, k, v, gate, reverse_gate, d_out, initial_state, reverse_initial_state, d_final, d_reverse_final, scale,
        normalizer,
    )  # fmt: skip
    return tuple(_or_empty(x, q) for x in gradients)


@_backward.register_fake
def _(
    q, k, v, gate, reverse_gate, initial_state, reverse_initial_state, d_out, d_final, d_reverse_final, scale,
    normalizer,
):  # fmt: skip
    inputs = (q, k, v, gate, reverse_gate, initial_state, reverse_initial_state)
    return tuple(q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    *tensors, scale, normalizer, return_states = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = scale, normalizer, return_states


def _differentiate(ctx, d_out, d_final, d_reverse_final):
    tensors = ctx.saved_tensors
    scale, normalizer, return_states = ctx.settings
    reverse = tensors[4] is not None
    gradients = _backward(
        *tensors,
        d_out,
        d_final if return_states else None,
        d_reverse_final if return_states and reverse else None,
        scale,
        normalizer,
    )
    return *(None if x is None else g for x, g in zip(tensors, gradients)), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    reverse_gate: Tensor | None,
    *,
    scale: float,
    normalizer: float | None = None,
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
    return_states: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as ``reference.recurrent``; with a ``normalizer`` the gates are logits of the log decays
    ``logsigmoid(gate) / normalizer``. Without ``return_states`` the states are not computed and come as ``None``.

    Raises:
        TypeError: an input is float64, which the kernels, summing in float32, would not honour.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("the gate", gate), ("the reverse gate", reverse_gate)):
        if x is not None and x.dtype == torch.float64:
            raise TypeError(
                f"gated_linear_attention: impl='triton' sums in float32, but {name} is float64; use 'torch'"
            )
    if scale == 0:  # gradients of states are kept divided by the scale
        q, scale = q * 0, 1.0
    out, final, reverse_final = _forward(
        q, k, v, gate, reverse_gate, initial_state, reverse_initial_state, scale, normalizer or 0.0, return_states
    )
    if not return_states:
        return out, None, None
    return out, final, None if reverse_gate is None else reverse_final

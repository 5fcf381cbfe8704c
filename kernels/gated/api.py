"""``gated_linear_attention``: checks, defaults and dispatch."""

from collections.abc import Callable

from torch import Tensor

from scanvas.kernels import dispatch

from .chunked import chunked
from .reference import accumulation_dtype, log_decay_from_logits, quadratic, recurrent

IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "quadratic": quadratic, "torch": chunked}
if dispatch.TRITON_USABLE:
    from .triton import fused

    IMPLEMENTATIONS["triton"] = fused
MAX_HEAD_DIM = 256


def _check_shape(name: str, x: Tensor, shape: tuple, meaning: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"gated_linear_attention: {name} must be {meaning} = {shape}, got {tuple(x.shape)}")


def _check_all(q, k, v, gate, reverse_gate, initial_state, reverse_initial_state, gate_name):
    states = {"initial_state": initial_state, "reverse_initial_state": reverse_initial_state}
    gates = {gate_name: gate, f"reverse_{gate_name}": reverse_gate}
    optional = (f"reverse_{gate_name}", *states)
    dispatch.check_tensors("gated_linear_attention", optional=optional, q=q, k=k, v=v, **gates, **states)
    for name, x in (("q", q), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"gated_linear_attention: {name} must be (B, N, H, D), got shape {tuple(x.shape)}")
    B, N, H, Dk = q.shape
    Dv = v.shape[-1]
    for name, size in (("N", N), ("the head dimension of q", Dk), ("the head dimension of v", Dv)):
        if size < 1:
            raise ValueError(f"gated_linear_attention: {name} must be at least 1, got {size}")
    for name, size in (("q", Dk), ("v", Dv)):
        if size > MAX_HEAD_DIM:
            raise ValueError(
                f"gated_linear_attention: the head dimension of {name} is at most {MAX_HEAD_DIM}, got {size}"
            )
    if reverse_gate is None and reverse_initial_state is not None:
        raise ValueError(
            f"gated_linear_attention: reverse_initial_state was given without reverse_{gate_name}, so there is no "
            "reverse scan to start"
        )
    _check_shape("v", v, (B, N, H, Dv), "(B, N, H, Dv)")
    for name, x in {"k": k, **gates}.items():
        if x is not None:
            _check_shape(name, x, (B, N, H, Dk), "(B, N, H, Dk)")
    for name, x in states.items():
        if x is not None:
            _check_shape(name, x, (B, H, Dk, Dv), "(B, H, Dk, Dv)")


@dispatch.outside_autocast
def _run(q, k, v, gate, reverse_gate, normalizer, scale, impl, initial_state, reverse_initial_state, return_states):
    dtype = accumulation_dtype(q, k, v, gate, reverse_gate)
    name = dispatch.resolve("gated_linear_attention", impl, q.device, IMPLEMENTATIONS, dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    states = {"initial_state": initial_state, "reverse_initial_state": reverse_initial_state}
    if name == "triton":  # fuses the gate's activation
        return IMPLEMENTATIONS[name](
            q, k, v, gate, reverse_gate, scale=scale, normalizer=normalizer, return_states=return_states, **states
        )
    if normalizer is not None:
        gate = log_decay_from_logits(gate, normalizer)
        reverse_gate = None if reverse_gate is None else log_decay_from_logits(reverse_gate, normalizer)
    return IMPLEMENTATIONS[name](q, k, v, gate, reverse_gate, scale=scale, **states)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    reverse_log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    impl: str = "auto",
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
    return_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """Linear attention with a decay per channel and token, in one or in both directions.

    Forward scan: ``S_t = diag(exp(log_decay_t)) S_{t-1} + k_tᵀ v_t`` and ``o_t = scale · q_t S_t``. With
    ``reverse_log_decay`` the result is the mean of the left-to-right and of the right-to-left scan; a token sees itself
    in both. Sources: GLA (arXiv:2312.06635, eq. 3), ViG (arXiv:2405.18425, section 3).

    Args:
        q, k: ``(B, N, H, Dk)``, 1 ≤ Dk ≤ 256, any strides, any floating dtype.
        v: ``(B, N, H, Dv)``, 1 ≤ Dv ≤ 256.
        log_decay: ``(B, N, H, Dk)``, natural logarithm (≤ 0) of the decay applied on entering a token. Values are not
            checked, since that would have to wait for the device: a positive one makes the state grow.
        reverse_log_decay: the same for the scan from the right; ``None`` leaves that scan out (causal attention).
        scale: factor on the scores, ``Dk ** -0.5`` by default.
        impl: ``"triton"`` (fused, on a GPU), ``"torch"`` (chunked, linear in N), ``"auto"`` for the first of these that
            can run, or one of the definitions ``"recurrent"`` and ``"quadratic"``. If q, k and v are bfloat16 the
            kernels round log decays to bfloat16 too.
        initial_state, reverse_initial_state: ``(B, H, Dk, Dv)``, the state left of the first token and right of the
            last one; zero by default. With them a sequence can be processed in pieces.
        return_states: also return the states after the last and before the first token.

    Returns:
        ``(B, N, H, Dv)`` in v's dtype; sums are formed in float32 (float64 for float64 inputs). With ``return_states``
        a tuple of that, the final state of the forward and that of the reverse scan (``None`` if there is none), both
        ``(B, H, Dk, Dv)`` in the dtype of the sums.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype or device; the message names it.
        RuntimeError: the implementation asked for can not run here.
    """
    _check_all(q, k, v, log_decay, reverse_log_decay, initial_state, reverse_initial_state, "log_decay")
    states = (initial_state, reverse_initial_state)
    result = _run(q, k, v, log_decay, reverse_log_decay, None, scale, impl, *states, return_states)
    return result if return_states else result[0]


def gated_linear_attention_from_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: Tensor,
    reverse_gate_logits: Tensor | None = None,
    *,
    normalizer: float = 16.0,
    scale: float | None = None,
    impl: str = "auto",
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
    return_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """``gated_linear_attention`` with ``log_decay = logsigmoid(gate_logits) / normalizer``, which the kernels fuse.

    The logits have the shape of the log decays and any value; all else is as in ``gated_linear_attention``.
    """
    _check_all(q, k, v, gate_logits, reverse_gate_logits, initial_state, reverse_initial_state, "gate_logits")
    if not normalizer > 0:
        raise ValueError(f"gated_linear_attention: normalizer must be positive, got {normalizer}")
    states = (initial_state, reverse_initial_state)
    result = _run(q, k, v, gate_logits, reverse_gate_logits, float(normalizer), scale, impl, *states, return_states)
    return result if return_states else result[0]

"""Attention to a disc, alone and with linear attention to the rest, against definitions written out in float64."""

import pytest
import torch
import torch.nn.functional as F

from scanvas.kernels.local import count_pairs, hybrid_attention, hybrid_matrix, local_attention
from scanvas.kernels.local.disc import covers
from scanvas.kernels.local.flex import _cached_plan, _plan
from scanvas.kernels.local.reference import in_disc

# grid, radius, start, tokens after the image, extra keys; more than one tile along every axis in some
CASES = [
    ((5, 7), 2, 0, 0, 0),
    ((19, 10), 3, 4, 0, 0),
    ((9, 21), 1, 0, 3, 5),
    ((3, 4), 9, 2, 1, 0),  # all within reach of all
    ((3, 4), 9, 2, 1, 3),
    ((3, 9, 6), 2, 2, 3, 0),
    ((1, 17), 4, 1, 0, 2),
]
BUDGET = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def tensors(case, dtype=torch.float64, width=8, seed=0):
    grid, _, start, after, extra = case
    generator = torch.Generator().manual_seed(seed)
    N = start + torch.Size(grid).numel() + after
    shapes = [(2, N, 3, width)] * 2 + [(2, N, 3, 5)] + [(2, extra, 3, width), (2, extra, 3, 5)] * bool(extra)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_hand(case, q, k, v, extra_k=None, extra_v=None, log_weight=None, scale=None):
    """Query by query, key by key."""
    grid, radius, start, _, _ = case
    N, tokens = q.shape[1], torch.Size(grid).numel()
    place = {start + i: torch.unravel_index(torch.tensor(i), grid) for i in range(tokens)}
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for i in range(N):
        keys = [
            j
            for j in range(N)
            if i not in place
            or j not in place
            or sum((int(a) - int(b)) ** 2 for a, b in zip(place[i], place[j])) < radius**2
        ]
        k_, v_ = k[:, keys], v[:, keys]
        bias = 0 if log_weight is None else log_weight[:, keys]
        if extra_k is not None and i in place:
            k_, v_ = torch.cat((k_, extra_k), 1), torch.cat((v_, extra_v), 1)
            bias = bias if log_weight is None else F.pad(bias, (0, extra_k.shape[1]))
        scores = torch.einsum("bhd,bnhd->bnh", q[:, i], k_) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if log_weight is None else scores + bias[..., None]
        out[:, i] = torch.einsum("bnh,bnhd->bhd", scores.softmax(1), v_)
    return out


FLEX = [(case, weighted, "flex") for case in CASES[2:6:3] for weighted in (False, True)]  # it takes its time to compile


@pytest.mark.parametrize(
    ("case", "weighted", "impl"),
    [*[(c, w, i) for c in CASES for w in (False, True) for i in ("torch", "dense")], *FLEX],
    ids=str,
)
def test_local_is_its_definition(case, weighted, impl):
    q, k, v, *extra = tensors(case)
    options = dict(zip(("extra_k", "extra_v"), extra))
    if weighted:
        options |= {"log_weight": torch.randn(2, q.shape[1], dtype=q.dtype), "scale": 0.7}
    got = local_attention(q, k, v, case[0], case[1], start=case[2], impl=impl, **options)
    torch.testing.assert_close(got, by_hand(case, q, k, v, **options), atol=1e-6 if impl == "flex" else 1e-12, rtol=0)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_precisions(case, dtype):
    low = [x.requires_grad_() for x in tensors(case, dtype)]
    high = [x.detach().double().requires_grad_() for x in low]
    names = ("extra_k", "extra_v")
    out, exact = (
        local_attention(*x[:3], *case[:2], start=case[2], impl=impl, **dict(zip(names, x[3:])))
        for x, impl in ((low, "auto"), (high, "dense"))
    )
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    out.backward(upstream), exact.backward(upstream.double())
    assert out.dtype == dtype
    for a, b in [(out, exact), *((a.grad, b.grad) for a, b in zip(low, high))]:
        assert (a.double() - b).norm() <= 3 * BUDGET[dtype] * (b.norm() + 1e-6)


def hybrid_inputs(case, dtype=torch.float64):
    q, k, v = tensors(case, dtype)[:3]
    generator = torch.Generator().manual_seed(2)
    features = torch.rand(2, *q.shape[:3], 4, generator=generator, dtype=torch.float64).to(dtype)
    return [q, k, v, *features, torch.tensor([0.1, 0.5, 2.0], dtype=dtype)]


@pytest.mark.parametrize("choice", ["disc", 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES[:4] + CASES[5:6], ids=str)
def test_hybrid_is_its_definition(case, weighted, choice):
    grid, radius, start, *_ = case
    q, k, v, fq, fk, factor = inputs = hybrid_inputs(case)
    options = {"start": start, **({"radius": radius} if choice == "disc" else {"every": choice})}
    weight = torch.ones(2, q.shape[1], dtype=q.dtype)
    if weighted:
        weight = torch.rand(2, q.shape[1], dtype=q.dtype) + 0.1
        options["log_weight"] = weight.log()
    tokens = torch.Size(grid).numel()
    at = torch.stack(torch.unravel_index(torch.arange(tokens), grid), -1)
    expected = torch.zeros_like(v)
    for i in range(q.shape[1]):
        exact = torch.ones(q.shape[1], dtype=torch.bool)
        if 0 <= i - start < tokens:
            image = (
                (at - at[i - start]).square().sum(-1) < radius**2 if choice == "disc" else torch.arange(tokens) % 3 == 0
            )
            exact[start : start + tokens] = image
        s = torch.einsum("bhd,bnhd->bnh", q[:, i], k) * 8**-0.5 + weight.log()[..., None]
        s[:, ~exact] = -torch.inf
        a = factor * (s - s.amax(1, keepdim=True)).exp()
        flat = torch.einsum("bhd,bnhd->bnh", fq[:, i], fk) * weight[..., None]
        a = torch.where(exact[None, :, None], a, flat)
        expected[:, i] = torch.einsum("bnh,bnhd->bhd", a / a.sum(1, keepdim=True), v)
    for impl in ("torch", "dense"):
        got = hybrid_attention(*inputs, grid, impl=impl, **options)
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)
    rows = torch.tensor([q.shape[1] - 1, 0, 3])
    matrix = hybrid_matrix(q, k, fq, fk, factor, grid, **options)
    torch.testing.assert_close(hybrid_matrix(q, k, fq, fk, factor, grid, rows=rows, **options), matrix[:, :, rows])


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("choice", [{"radius": 3}, {"every": 4}])
def test_hybrid_gradients_and_precisions(choice, dtype):
    case = ((19, 10), 3, 4, 0, 0)
    low = [x.requires_grad_() for x in hybrid_inputs(case, dtype)]
    high = [x.detach().double().requires_grad_() for x in low]
    out = hybrid_attention(*low, case[0], start=4, **choice)
    exact = hybrid_attention(*high, case[0], start=4, impl="dense", **choice)
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    out.backward(upstream), exact.backward(upstream.double())
    assert out.dtype == dtype
    for a, b in [(out, exact), *((a.grad, b.grad) for a, b in zip(low, high))]:
        assert (a.double() - b).norm() <= 3 * BUDGET[dtype] * (b.norm() + 1e-6)


def test_a_query_that_may_see_nothing_is_finite():
    q, k, v = tensors(CASES[0], torch.bfloat16)
    hidden = torch.full((1, q.shape[1]), -torch.inf)
    for impl in ("torch", "dense"):
        assert local_attention(q, k, v, (5, 7), 2, log_weight=hidden, impl=impl).isfinite().all()


def test_pairs_are_counted():
    for grid, radius in (((5, 7), 2), ((19, 3), 5), ((3, 4, 6), 3), ((1, 1), 1), ((9, 9), 30)):
        at = torch.stack(torch.unravel_index(torch.arange(torch.Size(grid).numel()), grid), -1)
        seen = (at[:, None] - at).square().sum(-1) < radius**2
        assert count_pairs(grid, radius) == seen.sum()
        assert covers(grid, radius) == bool(seen.all())


@pytest.mark.parametrize(
    ("grid", "radius", "start", "after", "extra"),
    [((40, 36), 12, 37, 11, 90), ((4, 20, 17), 4, 0, 3, 0), ((64, 64), 8, 130, 0, 0)],
)
def test_blocks_of_flex_hold_all_that_is_visible(grid, radius, start, after, extra):
    """Kernels skip blocks that are not listed and do not mask those that are said to be full."""
    N = start + torch.Size(grid).numel() + after
    order, mask = _plan(N, grid, radius, start, extra, torch.device("cpu"))
    assert order.sort().values.tolist() == list(range(N))
    seen = in_disc(N, grid, radius, start, order)[:, order]
    image = (order >= start) & (order < N - after)
    seen = torch.cat((seen, image[:, None].expand(-1, extra)), dim=1)
    i, j = torch.arange(N)[:, None], torch.arange(N + extra)
    assert torch.equal(mask.mask_mod(None, None, *torch.broadcast_tensors(i, j)), seen)
    some, full = (torch.zeros(-(-N // 128), -(-(N + extra) // 128), dtype=torch.bool) for _ in range(2))
    for blocks, count, indices in (
        (some, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row, (n, listed) in enumerate(zip(count[0, 0], indices[0, 0])):
            blocks[row, listed[:n].long()] = True
    assert not (some & full).any()
    padded = F.pad(seen, (0, -(N + extra) % 128, 0, -N % 128))
    tiles = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    assert not (tiles.any(3).any(1) & ~(some | full)).any()
    padded[N:] = True  # queries beyond the last are nobody's
    assert not (full & ~padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).all(3).all(1)).any()


def test_flex_needs_few_blocks():
    """A disc of radius 8 touches the neighbours of a tile of 8 × 16 tokens only."""
    for side, least in ((64, 60), (256, 97)):
        _, mask = _plan(side**2, (side, side), 8, 0, 0, torch.device("cpu"))
        assert mask.sparsity() > least
    with torch.inference_mode():
        order, mask = _cached_plan(64, (8, 8), 2, 0, 0, torch.device("cpu"))
    assert not order.is_inference()  # or training after inference could not use it
    assert not mask.kv_indices.is_inference()


def test_errors():
    q, k, v = tensors(CASES[0])
    for message, arguments in {
        "radius must be a whole number of tokens, at least 1; got 0": ((5, 7), 0),
        "radius must be a whole number of tokens, at least 1; got 1.5": ((5, 7), 1.5),
        r"a grid of 5×8 at start = 0 does not fit into 35 tokens": ((5, 8), 2),
        r"grid must be \(H, W\) or \(T, H, W\), got \(35,\)": ((35,), 2),
    }.items():
        with pytest.raises(ValueError, match=message):
            local_attention(q, k, v, *arguments)
    with pytest.raises(ValueError, match=r"log_weight must be \(B or 1, N\)"):
        local_attention(q, k, v, (5, 7), 2, log_weight=torch.zeros(3, 35))
    with pytest.raises(ValueError, match="both extra_k and extra_v"):
        local_attention(q, k, v, (5, 7), 2, extra_k=k)
    with pytest.raises(ValueError, match=r"extra_k and extra_v must be \(B, M, H, D\)"):
        local_attention(q, k, v, (5, 7), 2, extra_k=k, extra_v=k)
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'torch', 'dense', 'flex', got 'fast'"):
        local_attention(q, k, v, (5, 7), 2, impl="fast")
    with pytest.raises(ValueError, match="give radius or every, got radius = None and every = None"):
        hybrid_attention(*hybrid_inputs(CASES[0]), (5, 7))
    with pytest.raises(ValueError, match="every must be at least 1"):
        hybrid_attention(*hybrid_inputs(CASES[0]), (5, 7), every=0)
    with pytest.raises(ValueError, match=r"factor must be \(H,\) = \(3,\), got \(2,\)"):
        hybrid_attention(*hybrid_inputs(CASES[0])[:5], torch.ones(2, dtype=q.dtype), (5, 7), every=2)

"""Attention to a disc by flex attention on a GPU, against the tile-by-tile form and its gradients in float64."""

import pytest
import torch
from test_kernels_local import BUDGET

from scanvas.kernels.local import local_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# grid, radius, start, tokens after the image, extra keys, head width; several shapes in one process
CASES = [
    ((64, 64), 8, 512, 0, 0, 128),
    ((33, 47), 5, 0, 11, 0, 72),
    ((48, 40), 16, 130, 3, 120, 64),
    ((7, 20, 18), 4, 0, 0, 0, 64),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flex_and_its_gradients(case, dtype, weighted):
    grid, radius, start, after, extra, width = case
    N = start + torch.Size(grid).numel() + after
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, N, 2, width)] * 3 + [(2, extra, 2, width)] * (2 if extra else 0)
    low = [torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes]
    high = [x.detach().double().requires_grad_() for x in low]
    options = {"start": start}
    if weighted:
        options["log_weight"] = torch.randn(2, N, generator=generator).cuda()
    names = ("extra_k", "extra_v")
    out = local_attention(*low[:3], grid, radius, **options, **dict(zip(names, low[3:])), impl="flex")
    exact = local_attention(*high[:3], grid, radius, **options, **dict(zip(names, high[3:])), impl="torch")
    upstream = torch.randn(exact.shape, generator=generator).cuda().to(dtype)
    out.backward(upstream), exact.backward(upstream.double())
    assert out.dtype == dtype
    allowed = {torch.float32: 2e-3}.get(
        dtype, 3 * BUDGET[dtype]
    )  # float32 as three products or as TF32, as Triton does
    for a, b in [(out, exact), *((a.grad, b.grad) for a, b in zip(low, high))]:
        assert (a.double() - b).norm() <= allowed * b.norm()


def test_auto_takes_it_and_memory_is_linear():
    def peak(side):
        q, k, v = (torch.randn(1, side * side, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        with torch.no_grad():
            local_attention(q, k, v, (side, side), 8)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            local_attention(q, k, v, (side, side), 8)
        return torch.cuda.max_memory_allocated() - before

    assert peak(256) < 5 * peak(128)

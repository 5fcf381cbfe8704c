"""``scanvas bench ops|models`` on a GPU: bfloat16, beside SDPA and flash-linear-attention, as multiples of the floor.

The floor of an operation is the time to move each input and output through memory once at the copy bandwidth measured
in the same run. Kernels are timed as replays of a CUDA graph where they can be captured, so that what Python does
between launches is left out for everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scanvas.kernels.gated import gated_linear_attention_from_logits

from .measure import ratio
from .recording import record


@dataclass(frozen=True)
class Problem:
    """Tokens and batch (their product constant), heads, width of keys and of values."""

    tokens: int
    batch: int
    heads: int = 6
    key: int = 32
    value: int = 64


PROBLEMS = (
    Problem(196, 256),
    Problem(784, 64),
    Problem(1024, 64),
    Problem(4096, 16),
    Problem(16384, 4),
    Problem(65536, 1),
    Problem(1024, 64, heads=16, key=36, value=72),  # DiT-XL's heads
)


def graphed_ms(call: Callable[[], Any], repeats: int = 10, rounds: int = 5) -> float:
    """Milliseconds of one call: the median over ``rounds`` of a graph of ``repeats`` calls, or of as many plain calls
    where the call cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = record(call, stream, repeats)
    if graph is not None:
        replay = graph.replay
    else:

        def replay() -> None:
            for _ in range(repeats):
                call()

    replay()
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / repeats)
    return sorted(taken)[rounds // 2]


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device, by a kernel: the copies of a CUDA graph go
    through other engines and are slower."""
    source = torch.zeros(2**29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 8 * source.numel() / (graphed_ms(lambda: torch.neg(source, out=target), repeats=4) / 1e3)


def floor_bytes(p: Problem, backward: bool) -> int:
    """Bytes in bfloat16: forward reads q, k, v and two gates and writes the output; backward reads the five and the
    output's gradient and writes five gradients."""
    keys, values = 4 * p.key, p.value
    elements = keys + 2 * values
    if backward:
        elements += keys + 2 * values + keys + values
    return 2 * elements * p.tokens * p.batch * p.heads


def _ours(p: Problem):
    def tensor(width):
        return torch.randn(p.batch, p.tokens, p.heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    inputs = [tensor(p.key), tensor(p.key), tensor(p.value), tensor(p.key), tensor(p.key)]
    return inputs, lambda: gated_linear_attention_from_logits(*inputs, impl="triton")


def _softmax(p: Problem, backends: list[SDPBackend] | None = None):
    shape = (p.batch, p.heads, p.tokens, p.value)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def call() -> Tensor:
        with sdpa_kernel(backends) if backends else nullcontext():
            return F.scaled_dot_product_attention(*inputs)

    return inputs, call


def _flash(p: Problem):
    return _softmax(p, [SDPBackend.FLASH_ATTENTION])


def _both_ways(p: Problem):
    """flash-linear-attention has causal kernels only: they run on the sequence and its flip, joined."""
    from fla.ops.gla import chunk_gla

    inputs, _ = _ours(p)

    def call() -> Tensor:
        q, k, v, forward, backward = inputs
        q, k, v = (torch.cat((x, x.flip(1))) for x in (q, k, v))
        gates = F.logsigmoid(torch.cat((forward, backward.flip(1))).float()) / 16
        out = chunk_gla(q, k, v, gates)[0]
        first, second = out.chunk(2)
        return (first + second.flip(1)) / 2

    return inputs, call


# "SDPA" is what PyTorch picks by itself, on Hopper often cuDNN's kernel.
PEERS: dict[str, Callable] = {"scanvas": _ours, "SDPA": _softmax, "SDPA flash": _flash}
if find_spec("fla") is not None:
    PEERS["flash-linear-attention, both ways"] = _both_ways


def op_rows(bandwidth: float) -> Iterator[dict[str, Any]]:
    """One row a peer and problem: forward and forward+backward in ms, their multiple of the floor, peak memory."""
    for name, build in PEERS.items():
        for p in PROBLEMS:
            torch.cuda.empty_cache()
            inputs, call = build(p)
            upstream = torch.randn_like(call())

            def train(inputs=inputs, call=call, upstream=upstream):
                return torch.autograd.grad(call(), inputs, upstream)

            def infer(call=call):
                with torch.no_grad():
                    return call()

            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            train()
            peak = torch.cuda.max_memory_allocated() - before
            floors = [floor_bytes(p, backward) / bandwidth * 1e3 for backward in (False, True)]
            forward, both = graphed_ms(infer), graphed_ms(train)
            yield {
                "peer": name,
                "tokens": p.tokens,
                "batch": p.batch,
                "heads": f"{p.heads}×{p.key}/{p.value}",
                "forward_ms": forward,
                "forward_backward_ms": both,
                "forward_floors": forward / floors[0],
                "both_floors": both / floors[1],
                "peak_mb": peak / 2**20,
            }
            del inputs, call, upstream, train, infer


# model, batch at each image size
MODELS: tuple[tuple[str, dict[int, int]], ...] = (
    ("vig_small_patch16_224", {224: 256}),
    ("deit_small_patch16_224", {224: 256}),
    ("deit_base_patch16_224", {224: 256}),
    ("vig_tiny_patch16_224", {224: 256, 512: 64, 768: 32, 1024: 16, 2048: 4}),
    ("deit_tiny_patch16_224", {224: 256, 512: 64, 768: 32, 1024: 16, 2048: 4}),
)


def model_rows(models=MODELS) -> Iterator[dict[str, Any]]:
    """Images a second of inference and of a training step, and peak memory of inference, in bfloat16."""
    import timm

    import scanvas  # noqa: F401 - registers the models with timm

    for name, sizes in models:
        for side, batch in sizes.items():
            torch.cuda.empty_cache()
            with torch.device("cuda"):
                model = timm.create_model(name, img_size=side).bfloat16()
            image = torch.randn(batch, 3, side, side, device="cuda", dtype=torch.bfloat16)

            def infer(model=model, image=image):
                with torch.inference_mode():
                    return model(image)

            def train(model=model, image=image):
                model(image).float().square().mean().backward()
                model.zero_grad(set_to_none=False)

            model.eval()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            infer()
            peak = torch.cuda.max_memory_allocated() - before
            inference = graphed_ms(infer, repeats=3, rounds=3)
            model.train()
            training = graphed_ms(train, repeats=2, rounds=3)
            yield {
                "model": name,
                "side": side,
                "batch": batch,
                "images_per_second": batch / inference * 1e3,
                "trained_per_second": batch / training * 1e3,
                "peak_mb": peak / 2**20,
            }
            del model, image, infer, train


# preset of ours, blocks, heads and head width of diffusers' DiT, sides of the image in pixels (8 to a latent's)
DENOISERS = (("dig_s_2", (12, 6, 64), (256, 512, 1024, 1792)), ("dig_xl_2", (28, 16, 72), (512, 1024, 1792, 2048)))


def denoiser_rows(denoisers=DENOISERS) -> Iterator[dict[str, Any]]:
    """One forward pass, one image, bfloat16: a DiG beside diffusers' DiT of the same size with flash attention."""
    from diffusers import DiTTransformer2DModel

    from scanvas.diffusion.presets import create_denoiser

    for preset, (layers, heads, width), sides in denoisers:
        config = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": width}
        for side in sides:
            size = side // 8
            with torch.device("cuda"):  # where random weights are made in no time
                models = {
                    preset: create_denoiser(preset, sample_size=size),
                    f"DiT {preset[4:]}": DiTTransformer2DModel(
                        **config, in_channels=4, out_channels=8, sample_size=size
                    ),
                }
            for name, model in models.items():
                torch.cuda.empty_cache()
                model = model.eval().bfloat16()
                latent = torch.randn(1, 4, size, size, device="cuda", dtype=torch.bfloat16)
                time, label = torch.full((1,), 500, device="cuda"), torch.zeros(1, device="cuda", dtype=torch.int64)

                def infer(model=model, latent=latent, time=time, label=label):
                    with torch.inference_mode():
                        return model(latent, timestep=time, class_labels=label, return_dict=False)

                infer()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                infer()
                peak = torch.cuda.max_memory_allocated() - before
                milliseconds = graphed_ms(infer, repeats=2, rounds=3)
                yield {"model": name, "side": side, "ms_per_image": milliseconds, "peak_mb": peak / 2**20}
                del model, infer


def op_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the kernels were built to reach, row by row."""
    at = {(r["tokens"], r["heads"], r["peer"]): r for r in rows}
    ratios = []
    for (tokens, heads, peer), ours in at.items():
        if peer != "scanvas":
            continue
        wide = heads.startswith("16")
        where = f"N={tokens}, heads {heads}"
        ratios.append(ratio(f"forward / floor, {where}", ours["forward_floors"], at_most=3.5 if wide else 2.5))
        ratios.append(ratio(f"forward+backward / floor, {where}", ours["both_floors"], at_most=3.5 if wide else 3.0))
        for key in ("forward_ms", "forward_backward_ms"):
            softmax = min(at[tokens, heads, name][key] for name in ("SDPA", "SDPA flash"))
            wanted = 15.0 if tokens >= 16384 else 2.0 if tokens >= 1024 else 1.0
            what = f"fastest SDPA / scanvas, {key[:-3].replace('_', '+')}, {where}"
            ratios.append(ratio(what, softmax / ours[key], at_least=wanted))
            peer_row = at.get((tokens, heads, "flash-linear-attention, both ways"))
            if peer_row is not None:
                what = f"flash-linear-attention / scanvas, {key[:-3].replace('_', '+')}, {where}"
                ratios.append(ratio(what, peer_row[key] / ours[key], at_least=8.0))
        if peer_row is not None:
            what = f"memory, scanvas / flash-linear-attention, {where}"
            ratios.append(ratio(what, ours["peak_mb"] / peer_row["peak_mb"], at_most=0.25))
    return ratios


def model_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ViG-S against DeiT-B at 224², and ViG-T against DeiT-T at every size."""
    at = {(row["model"], row["side"]): row for row in rows}
    ratios = []
    for key in ("images_per_second", "trained_per_second"):
        pair = [at[f"{name}_patch16_224", 224][key] for name in ("vig_small", "deit_base")]
        ratios.append(ratio(f"vig_small / deit_base, {key}, 224²", pair[0] / pair[1], at_least=2.0))
        for side, wanted in ((224, 1.0), (512, 1.0), (768, 1.0), (1024, 2.5), (2048, 5.0)):
            pair = [at[f"{name}_patch16_224", side][key] for name in ("vig_tiny", "deit_tiny")]
            ratios.append(ratio(f"vig_tiny / deit_tiny, {key}, {side}²", pair[0] / pair[1], at_least=wanted))
    return ratios


def denoiser_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """DiG against DiT: faster from 512 pixels up, and by much at the largest."""
    ratios = []
    for ours, theirs in zip(rows[0::2], rows[1::2]):
        wanted = {("dig_s_2", 1792): 2.5, ("dig_xl_2", 2048): 2.2}.get((ours["model"], ours["side"]), 1.0)
        where = f"{ours['model']}, {ours['side']} px"
        ratios.append(
            ratio(f"DiT / DiG, time, {where}", theirs["ms_per_image"] / ours["ms_per_image"], at_least=wanted)
        )
        ratios.append(ratio(f"DiG / DiT, peak memory, {where}", ours["peak_mb"] / theirs["peak_mb"], at_most=1.0))
    return ratios

"""``scanvas bench ops|models``: time and memory beside those of peers, all measured in one run, saved as JSON and PNG.

A row is added by adding a peer: an entry of ``OP_PEERS`` builds a callable from a shape, an entry of ``MODEL_PEERS``
names a timm model. ``RATIOS`` below each says what is compared with what.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from scanvas.kernels.gated import gated_linear_attention

from . import bench_gpu
from .evaluate import pick_device
from .measure import DIRECT_PAGES, in_fresh_process, peak_memory, process_peak, ratio, times, versions

SHORT, LONG = 1024, 65536  # tokens


@dataclass(frozen=True)
class Shape:
    """A problem: batch, tokens, heads, width of keys and of values."""

    batch: int
    tokens: int
    heads: int = 3
    key: int = 32
    value: int = 64


@dataclass(frozen=True)
class OpPeer:
    """``build(shape, device, dtype)`` gives a function of no arguments that returns the output, which requires grad.
    Beyond ``longest`` tokens it would take too long or too much memory."""

    build: Callable[[Shape, torch.device, torch.dtype], Callable[[], torch.Tensor]]
    longest: int = LONG
    devices: tuple[str, ...] = ("cpu", "cuda")


def _gated(impl: str):
    def build(shape: Shape, device: torch.device, dtype: torch.dtype):
        q, k, v, *decays = _inputs(shape, device, dtype)
        return lambda: gated_linear_attention(q, k, v, *decays, impl=impl)

    return build


def _softmax(shape: Shape, device: torch.device, dtype: torch.dtype):
    """Softmax attention as a ViT of the same width has it: query and key as wide as the value."""
    q, k, v = (
        torch.randn(shape.batch, shape.heads, shape.tokens, shape.value, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    return lambda: F.scaled_dot_product_attention(q, k, v)


def _inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    widths = (shape.key, shape.key, shape.value, shape.key, shape.key)
    made = [torch.randn(shape.batch, shape.tokens, shape.heads, width, generator=generator) for width in widths]
    made[3:] = [F.logsigmoid(gate) / 16 for gate in made[3:]]
    return [x.to(device, dtype).requires_grad_() for x in made]


OP_PEERS: dict[str, OpPeer] = {
    "torch": OpPeer(_gated("torch")),
    "recurrent": OpPeer(_gated("recurrent"), longest=SHORT, devices=("cpu",)),
    "softmax (SDPA)": OpPeer(_softmax, longest=4096),
}


def bench_ops(out: str, *, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Forward, and forward with backward, of ``gated_linear_attention`` and its peers over sequence lengths."""
    chosen = pick_device(device)
    dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    if chosen.type == "cuda":
        bandwidth = bench_gpu.copy_bandwidth()
        known = versions(chosen) | {"copy": f"{bandwidth / 1e12:.2f} TB/s"}
        rows = _shown(bench_gpu.op_rows(bandwidth))
        drawn = [row for row in rows if row["heads"] == rows[0]["heads"]]
        result = {"versions": known, "rows": rows, "ratios": bench_gpu.op_ratios(rows)}
        return _finish(Path(out), "ops", result, _panels(drawn, "peer", "tokens", _OP_PANELS))
    lengths = [SHORT, 4096] if quick else [SHORT, 4096, 16384, LONG]
    calls = {
        (tokens, name): peer.build(Shape(1, tokens), chosen, dtype)
        for tokens in lengths
        for name, peer in OP_PEERS.items()
        if chosen.type in peer.devices and tokens <= peer.longest
    }
    forward = times({key: _no_grad(call) for key, call in calls.items()}, chosen)
    both = times({key: _with_backward(call) for key, call in calls.items()}, chosen)
    rows = [
        {
            "tokens": tokens,
            "peer": name,
            "forward_ms": forward[tokens, name] * 1e3,
            "forward_backward_ms": both[tokens, name] * 1e3,
            "us_per_token": both[tokens, name] * 1e6 / tokens,
        }
        for tokens, name in calls
    ]
    ratios = _op_ratios(rows)
    result = {"versions": versions(chosen), "shape": asdict(Shape(1, 0)), "dtype": str(dtype), "rows": rows}
    return _finish(
        Path(out), "ops", result | {"ratios": ratios}, _panels(rows, "peer", "tokens", [*_OP_PANELS, _PER_TOKEN])
    )


def bench_denoisers(out: str) -> dict[str, Any]:
    """DiG beside diffusers' DiT on a GPU: time and peak memory of a forward pass, by resolution."""
    chosen = pick_device("cuda")
    known = versions(chosen)
    rows = _shown(bench_gpu.denoiser_rows())
    result = {"versions": known, "rows": rows, "ratios": bench_gpu.denoiser_ratios(rows)}
    return _finish(Path(out), "denoisers", result, _panels(rows, "model", "side", _DENOISER_PANELS))


def _no_grad(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    def run():
        with torch.no_grad():
            call()

    return run


def _with_backward(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    return lambda: call().sum().backward()


def _op_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = {(row["peer"], row["tokens"]): row for row in rows}
    ratios = []
    if ("recurrent", SHORT) in at:
        loop, fast = at["recurrent", SHORT], at["torch", SHORT]
        for key in ("forward_ms", "forward_backward_ms"):
            what = f"torch is faster than the recurrent loop at {SHORT} tokens ({key[:-3].replace('_', ' + ')})"
            ratios.append(ratio(what, loop[key] / fast[key], at_least=20.0))
    longest = max(row["tokens"] for row in rows)
    what = f"torch, time per token at {longest} tokens over that at {SHORT}"
    growth = at["torch", longest]["us_per_token"] / at["torch", SHORT]["us_per_token"]
    ratios.append(ratio(what, growth, at_most=1.3))
    return ratios


MODEL_PEERS = ("vig_tiny_patch16_224", "deit_tiny_patch16_224")
_IMAGES = {224: 16, 1024: 1}  # resolution → images in a batch


def bench_models(out: str, *, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Inference of a ViG and of timm's ViT of the same size; memory in a process for each."""
    chosen = pick_device(device)
    if chosen.type == "cuda":
        known = versions(chosen)
        rows = _shown(bench_gpu.model_rows())
        result = {"versions": known, "rows": rows, "ratios": bench_gpu.model_ratios(rows)}
        return _finish(Path(out), "models", result, _panels(rows, "model", "side", _MODEL_PANELS))
    rows = []
    for side in [224] if quick else list(_IMAGES):
        requests = [{"name": n, "side": side, "batch": _IMAGES[side], "device": str(chosen)} for n in MODEL_PEERS]
        peaks = [in_fresh_process("scanvas.train.bench", request, DIRECT_PAGES) for request in requests]
        calls = {request["name"]: _model_call(request) for request in requests}
        # A machine that others use too has slow minutes: the quick calls have more turns, to be over several of them.
        seconds = times(calls, chosen, rounds=25 if side == 224 and not quick else 5)
        for request, peak in zip(requests, peaks):
            rows.append(
                {
                    "model": request["name"],
                    "side": side,
                    "batch": request["batch"],
                    "images_per_second": request["batch"] / seconds[request["name"]],
                    "peak_mb": peak["tensors"] / 2**20,
                    "process_mb": peak["process"] / 2**20,
                }
            )
    result = {"versions": versions(chosen), "rows": rows, "ratios": _model_ratios(rows), "notes": _MEMORY_NOTE}
    return _finish(Path(out), "models", result, _panels(rows, "model", "side", _MODEL_PANELS))


_MEMORY_NOTE = (
    "peak_mb: MiB of tensors that live at once in a forward pass, beyond weights and image. process_mb: MiB by which\n"
    f"the resident memory of a fresh process rises in its second pass, with {'='.join(*DIRECT_PAGES.items())}"
)


def _model_call(request: dict[str, Any]) -> Callable[[], None]:
    """One forward pass of the model, resolution and batch that ``request`` names."""
    import timm

    import scanvas  # noqa: F401 - registers the models with timm

    device, side = torch.device(request["device"]), request["side"]
    model = timm.create_model(request["name"], img_size=side).eval().to(device)
    image = torch.randn(request["batch"], 3, side, side, device=device)

    def call() -> None:
        with torch.inference_mode():
            model(image)

    return call


def measure_peaks(request: dict[str, Any]) -> dict[str, int]:
    """Bytes of one forward pass beyond the weights, of the process and of its tensors; run in a fresh process."""
    call = _model_call(request)
    return {"process": process_peak(call), "tensors": peak_memory(call, torch.device(request["device"]))}


def _model_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ours, theirs = MODEL_PEERS
    at = {(row["model"], row["side"]): row for row in rows}
    wanted = {224: 0.7, 1024: 2.0}
    ratios = []
    for side in sorted({row["side"] for row in rows}):
        a, b = at[ours, side], at[theirs, side]
        what = f"{ours} over {theirs}, images/s at {side}²"
        ratios.append(ratio(what, a["images_per_second"] / b["images_per_second"], at_least=wanted[side]))
        if side == 1024:
            for key, of in (("peak_mb", "tensors"), ("process_mb", "the process")):
                what = f"{ours} over {theirs}, peak memory of {of} at {side}²"
                ratios.append(ratio(what, a[key] / b[key], at_most=1.0))
    return ratios


def _finish(out: Path, name: str, result: dict[str, Any], panels: list[tuple]) -> dict[str, Any]:
    """Print the tables, save JSON and PNG."""
    print("  ".join(f"{k} {v}" for k, v in result["versions"].items()))
    keys = list(result["rows"][0])
    _print_rows([keys, *[[row[k] for k in keys] for row in result["rows"]]])
    print()
    lines = [[r["what"], r["ratio"], r["wanted"], "yes" if r["met"] else "NO"] for r in result["ratios"]]
    _print_rows([["ratio", "measured", "wanted", "met"], *lines])
    if "notes" in result:
        print(f"\n{result['notes']}")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    saved = f"saved {out / name}.json"
    try:
        _plot(out / f"{name}.png", panels)
        saved += f" and {out / name}.png"
    except ImportError:
        saved += "; for the plot: pip install 'scanvas[demo]'"
    print(f"\n{saved}")
    return result


def _shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each shown as soon as it is measured: a run that is cut short has not measured for nothing."""
    kept = []
    for row in rows:
        print("  ".join(f"{key} {_text(value)}" for key, value in row.items()), file=sys.stderr, flush=True)
        kept.append(row)
    return kept


def _text(cell: Any) -> str:
    return (
        f"{cell:,.3f}"
        if isinstance(cell, float) and abs(cell) < 10
        else f"{cell:,.1f}"
        if isinstance(cell, float)
        else str(cell)
    )


def _print_rows(rows: list[list[Any]]) -> None:
    text = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text)]
    for row in text:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]))


_OP_PANELS = [("forward", "forward_ms", "ms"), ("forward and backward", "forward_backward_ms", "ms")]
_PER_TOKEN = ("forward and backward, per token", "us_per_token", "µs")
_MODEL_PANELS = [
    ("inference", "images_per_second", "images/s"),
    ("peak memory beyond the weights", "peak_mb", "MiB"),
]
_DENOISER_PANELS = [("forward, one image", "ms_per_image", "ms"), _MODEL_PANELS[1]]


def _panels(rows: list[dict[str, Any]], line: str, x: str, wanted: list[tuple[str, str, str]]) -> list[tuple]:
    """One panel for each (title, key, unit) of ``wanted``, one line in it for each value of the key ``line``."""
    names = list(dict.fromkeys(row[line] for row in rows))
    label = {"side": "pixels a side"}.get(x, x)
    return [
        (title, label, unit, {n: [(row[x], row[key]) for row in rows if row[line] == n] for n in names})
        for title, key, unit in wanted
    ]


def _plot(path: Path, panels: list[tuple]) -> None:
    """``panels``: (title, x label, y label, line name → points), both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for axis, (title, x, y, lines) in zip(figure.subplots(1, len(panels), squeeze=False).ravel(), panels):
        for name, points in lines.items():
            axis.loglog(*zip(*points), marker="o", label=name, base=2)
        for scale in (axis.xaxis, axis.yaxis):  # plain numbers instead of powers of two
            scale.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.2g}")
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    print(json.dumps(measure_peaks(json.loads(sys.argv[1]))))

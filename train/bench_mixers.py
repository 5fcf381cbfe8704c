"""``scanvas bench mixers``: every mixer's cost by resolution, how fast a backbone with it is, its accuracy after an
equal training, and how much of a softmax teacher comes back when its weights are put into it. See
bench_mixers_train.py and bench_mixers_report.py.

A row is saved as soon as it is measured, and a mixer that cannot do something is a row that says why. A run into the
same folder goes on where the last one stopped, and tries what failed once more, at the end.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scanvas.backbones.mixers import MIXERS, create_mixer, list_mixers

from .bench import _text
from .bench_gpu import graphed_ms
from .bench_mixers_images import load_images, random_images
from .bench_mixers_report import identity, merge, save_rows, stored_rows
from .bench_mixers_train import Budget, complete, speeds, trainings
from .errors import ConfigError, UserError, nearest
from .evaluate import pick_device
from .flops import count_flops
from .measure import peak_memory, times, versions

KINDS = ("time", "speed", "accuracy", "recovery")
_TRAINED = {"accuracy", "recovery"}
SIDES = (14, 32, 64, 128)
_CPU, _GPU = (192, 3, 4096), (384, 6, 65536)  # channels, heads, tokens of a batch


class Layer(nn.Module):
    """A mixer as a model of tokens; of one whose layers alternate, all of its kinds one after another."""

    def __init__(self, name: str, side: int, dim: int, heads: int):
        super().__init__()
        self.grid = (side, side)
        turns = MIXERS[name].in_turn
        self.mixers = nn.ModuleList(create_mixer(name, dim, heads, fused_projections=True, **turn) for turn in turns)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, side², dim)`` → the same shape."""
        for mixer in self.mixers:
            x = mixer(x, self.grid)
        return x


def bench_mixers(
    out: str,
    *,
    mixers: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    data: str | None = None,
    device: str | None = None,
    sides: Sequence[int] = SIDES,
    seeds: Sequence[int] = (0,),
    shard: str = "1/1",
    merge_from: Sequence[str] | None = None,
    **budget: Any,
) -> list[dict[str, Any]]:
    """Measure this shard's mixers, in the order given, and save ``rows-IofN.json`` and ``.csv`` after each row; then
    join all that lies in ``out`` to ``mixers.json``, ``.csv``, ``.md`` and ``.png``. ``merge_from``: join what lies
    there, and measure nothing. ``budget``: fields of ``Budget``. Returns the joined rows.

    Raises:
        ConfigError: an argument is unknown or out of range, or ``out`` holds figures of another budget.
        DataError: see ``load_images``.
    """
    folder = Path(out)
    if merge_from is not None:
        return merge([Path(place) for place in merge_from], folder)
    names, kinds, number, total = _checked(mixers, only, data, sides, seeds, shard, budget)
    chosen = pick_device(device)
    place = folder / f"rows-{number}of{total}.json"
    rows = stored_rows([place]) if place.exists() else []
    earlier = stored_rows(sorted(folder.glob("rows-*.json")))
    work: list[Iterator] = []
    if "time" in kinds:
        work.append(_layers(names, sides, chosen))
    if set(kinds) - {"time"}:
        dtype = "bfloat16" if chosen.type == "cuda" else "float32"
        limit = budget.pop("images", None)
        trained = bool(_TRAINED & set(kinds))
        images = load_images(data, chosen, limit, folder / "images.safetensors") if trained else random_images(chosen)
        equal = complete(Budget(dtype=dtype, **budget), images)
        if "speed" in kinds:
            work.append(speeds(names, images, equal, _name(chosen)))
        for what in kinds:
            if what in _TRAINED:
                _same_budget(earlier, what, equal.text(what == "recovery"), folder)
                work.append(trainings(what, names, list(seeds), images, equal, folder))
    known = versions(chosen)
    print("  ".join(f"{key} {value}" for key, value in known.items()))
    done = {identity(row) for row in earlier if not row["failed"]}
    again = {identity(row) for row in earlier} - done
    if done:
        print(f"{len(done)} rows of an earlier run are kept; delete {folder} to measure them anew")
    missing = [item for part in work for item in part if identity(item[0]) not in done]
    for name, measure in sorted(missing, key=lambda item: identity(item[0]) in again):
        row = name | _tried(measure, chosen)
        print("  ".join(f"{key} {_text(value)}" for key, value in row.items() if key != "budget"), file=sys.stderr)
        sys.stderr.flush()
        rows = [old for old in rows if identity(old) != identity(row)] + [row]
        save_rows(rows, known, place)
        if row["failed"]:
            _check_device(chosen, row)
    return merge([folder], folder)


def _checked(mixers, only, data, sides, seeds, shard, budget) -> tuple[list[str], list[str], int, int]:
    """Mixers of this shard, kinds of rows, number of the shard and of all shards."""
    for option, values, allowed in (("--mixers", mixers, list_mixers()), ("--only", only, KINDS)):
        for value in values or ():
            if value not in allowed:
                raise ConfigError(f"{option}: unknown {value!r}{nearest(value, allowed, limit=40)}")
    kinds = [kind for kind in KINDS if kind in (only or KINDS)]
    if data is None and _TRAINED & set(kinds):
        raise ConfigError(
            "--data DIR, a folder with train.parquet and test.parquet, is needed for accuracy and recovery; without "
            "it take --only time speed"
        )
    for option, values in (("--grids", sides), ("--seeds", [seed + 1 for seed in seeds])):
        if not values or min(values) < 1:
            raise ConfigError(f"{option} takes whole numbers, at least {int(option == '--grids')}; got {list(values)}")
    for name, value in budget.items():
        if value is not None and not value > 0:
            option = {"batch": "batch-size"}.get(name, name.replace("_", "-"))
            raise ConfigError(f"--{option} must be positive, got {value}")
    first, _, last = shard.partition("/")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"--shard takes i/n with i from 1 to n, such as 2/4; got {shard!r}")
    # A softmax comes first: its model is the teacher that other shards look for.
    names = sorted(dict.fromkeys(mixers or list_mixers()), key=lambda name: name != "softmax")
    return names[int(first) - 1 :: int(last)], kinds, int(first), int(last)


def _same_budget(rows: list[dict[str, Any]], what: str, budget: str, folder: Path) -> None:
    for row in rows:
        if row["what"] == what and row["budget"] != budget:
            raise ConfigError(
                f"{folder} holds {what} of another budget ({row['budget']}) than this run's ({budget}): choose another "
                "--out"
            )


def _tried(measure: Callable[[dict[str, Any]], None], device: torch.device) -> dict[str, Any]:
    """What ``measure`` fills a row with; what fails leaves what came before it."""
    began, row, failed = time.perf_counter(), {}, ""
    try:
        measure(row)
    except Exception as error:  # noqa: BLE001 - whatever a mixer raises is what its row says
        failed = first_line(error)
    gc.collect()  # models and graphs hold one another in circles
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a device that is lost; see _check_device
            torch.cuda.empty_cache()
    return {**row, "failed": failed, "seconds": time.perf_counter() - began}


def _check_device(device: torch.device, row: dict[str, Any]) -> None:
    """After an illegal access a process can do nothing more on a GPU: all further rows would fail with it. So they
    would where its generator gives no numbers any more; see recording.py."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.rand(1, device=device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise UserError(
                f"{device} does not answer this process any more after {row['what']} of {row['mixer']} "
                f"({row['failed']}): run the same command again, which goes on with the rest"
            ) from error


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def _layers(names: list[str], sides: Sequence[int], device: torch.device) -> Iterator:
    dim, heads, tokens = _GPU if device.type == "cuda" else _CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    budget = f"{_name(device)}, {dim} channels, {heads} heads, {str(dtype).removeprefix('torch.')}"
    for name in names:
        for side in sides:
            batch = max(1, tokens // side**2)
            row = {"what": "time", "mixer": name, "side": side, "batch": batch, "budget": budget}
            shape = (name, side, batch, dim, heads)
            yield row, lambda row, shape=shape: measure_layer(row, *shape, device, dtype)


def measure_layer(
    row: dict[str, Any],
    name: str,
    side: int,
    batch: int,
    dim: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Parameters, FLOPs of one image, milliseconds and peak memory (MiB, beyond input and weights) of one layer on
    ``side²`` tokens: forward alone, and with the backward pass."""
    with torch.device("meta"):
        counted = Layer(name, side, dim, heads).eval()
    each = len(counted.mixers)
    row["parameters"] = sum(p.numel() for p in counted.parameters()) / each
    row["flops"] = count_flops(counted, (side**2, dim)) / each
    with torch.device(device):
        layer = Layer(name, side, dim, heads).to(dtype)
        x = torch.randn(batch, side**2, dim, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)

    def infer() -> Tensor:
        with torch.no_grad():
            return layer(x)

    def train() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream, allow_unused=True)

    for kind, call, layers in (("forward", infer, 1), ("forward_backward", train, each)):
        row[f"{kind}_mb"] = peak_memory(call, device) / 2**20 / layers  # those before the last are kept for backward
        row[f"{kind}_ms"] = _milliseconds(call, device) / each


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median or the least of a few calls, of fewer where one takes long."""
    first = times({"": call}, device, rounds=1)[""]
    if device.type == "cuda":
        return graphed_ms(call, max(1, min(10, int(0.02 / first))), 3 if first < 0.2 else 1)
    return 1e3 * (first if first > 1 else min(first, times({"": call}, device, rounds=4)[""]))

"""``scanvas bench mixers`` on images and grids of a few pixels."""

import functools
import io
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from scanvas.backbones.mixers import create_mixer
from scanvas.diffusion.linear_neutral import start_neutral
from scanvas.train import (
    bench_mixers,
    bench_mixers_images,
    bench_mixers_plot,
    bench_mixers_report,
    bench_mixers_step,
    bench_mixers_train,
)
from scanvas.train.bench_mixers_images import load_images
from scanvas.train.bench_mixers_tables import short_table
from scanvas.train.bench_mixers_train import Budget
from scanvas.train.errors import DataError, NonFiniteError, UserError

SMALL = ("--device", "cpu", "--grids", 4, 6, "--depth", 1, "--epochs", 2, "--recover-epochs", 1, "--batch-size", 16)


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Parquet files of 8×8 images: three classes, each of a colour."""
    folder, generator = tmp_path_factory.mktemp("colours"), torch.Generator().manual_seed(0)
    for split, count in (("train", 48), ("test", 12)):
        rows = []
        for number in range(count):
            pixels = torch.randint(90, (8, 8, 3), generator=generator, dtype=torch.uint8)
            pixels[..., number % 3] += 120
            file = io.BytesIO()
            Image.fromarray(pixels.numpy()).save(file, "PNG")
            rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": number % 3})
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def test_shards_cut_and_joined(colours, tmp_path, command, monkeypatch):
    """Two shards, one cut short and taken up again, one with a mixer that fails; their rows make one table."""
    run = ("bench", "mixers", "--data", colours, "--mixers", "softmax", "linear", "slab", *SMALL)
    wanted = bench_mixers_train.measure_recovery
    monkeypatch.setattr(bench_mixers, "_CPU", (24, 2, 256))  # channels, heads, tokens
    narrow = functools.partial(Budget, model="test_vig")
    monkeypatch.setattr(bench_mixers, "Budget", narrow)
    drawn, draw = [], bench_mixers_report.draw
    monkeypatch.setattr(
        bench_mixers_report, "draw", lambda *a: drawn.append(a) or (draw(*a) if len(drawn) == 3 else None)
    )

    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_mixers_train, "measure_recovery", cut)
    code, _, _ = command(*run, "--shard", "1/2", "--out", tmp_path / "a")
    assert code == 130
    place = tmp_path / "a" / "rows-1of2.json"
    before = json.loads(place.read_text())["rows"]
    assert [(row["what"], row["mixer"]) for row in before] == [
        *[("time", name) for name in ("softmax", "softmax", "slab", "slab")],
        *[("speed", name) for name in ("softmax", "slab")],
        *[("accuracy", name) for name in ("softmax", "slab")],
    ]
    monkeypatch.setattr(bench_mixers_train, "measure_recovery", wanted)
    code, out, err = command(*run, "--shard", "1/2", "--out", tmp_path / "a")
    assert code == 0, err
    assert "8 rows of an earlier run are kept" in out
    rows = json.loads(place.read_text())["rows"]
    assert rows[:8] == before
    assert [(row["what"], row["mixer"]) for row in rows[8:]] == [("recovery", name) for name in ("softmax", "slab")]
    assert not any(row["failed"] for row in rows)
    assert (tmp_path / "a" / "rows-1of2.csv").read_text().count("\n") == 11

    def fails(name, *args, **kwargs):
        if args == (24, 2):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried …")
        return create_mixer(name, *args, **kwargs)

    monkeypatch.setattr(bench_mixers, "create_mixer", fails)
    code, _, err = command(*run, "--shard", "2/2", "--out", tmp_path / "b")
    assert code == 0, err
    code, out, err = command("bench", "mixers", "--merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "all")
    assert code == 0, err
    joined = json.loads((tmp_path / "all" / "mixers.json").read_text())["rows"]
    by = {(row["what"], row["mixer"], row.get("side")): row for row in joined}
    assert len(by) == len(joined) == 3 * (2 + 1 + 1 + 1)
    short = (tmp_path / "all" / "table.md").read_text()
    assert short in out
    for table in (short, (tmp_path / "all" / "mixers.md").read_text()):
        header, _, *lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len(lines) == 3
        assert {line.count("|") for line in lines} == {header.count("|")}
        assert "`linear`, time (6): OutOfMemoryError: CUDA out of memory." in table
    assert set(drawn[2][0]) == {"softmax", "linear", "slab"}
    assert (tmp_path / "all" / "mixers.png").stat().st_size > 10_000  # of all that are joined the one that is drawn

    softmax, linear = by["time", "softmax", 6], by["time", "linear", 6]
    assert (softmax["batch"], softmax["failed"]) == (256 // 36, "")
    assert softmax["parameters"] == 4 * 24 * 25
    assert softmax["flops"] == 8 * 36 * 24**2 + 4 * 36**2 * 24
    assert 0 < softmax["forward_ms"] < softmax["forward_backward_ms"]
    assert 0 < softmax["forward_mb"] < softmax["forward_backward_mb"]
    assert "forward_ms" not in linear
    images, speed = load_images(str(colours), torch.device("cpu")), by["speed", "softmax", None]
    built = bench_mixers_train.build("softmax", images, narrow(depth=1))
    assert speed["parameters"] == sum(p.numel() for p in built.parameters())
    assert 0 < speed["trained_per_second"] < speed["images_per_second"]
    assert speed["trained_mb"] > 0
    for name in ("softmax", "linear", "slab"):  # colours are told apart by any
        assert by["accuracy", name, None]["accuracy"] > 60
        assert by["recovery", name, None]["recovered"] > 60
        assert by["recovery", name, None]["teacher"] == by["accuracy", "softmax", None]["accuracy"]
    control = by["recovery", "softmax", None]
    assert (control["kept"], control["swapped"]) == (1, control["teacher"])
    assert [by["recovery", name, None]["how"] for name in ("softmax", "linear", "slab")] == [
        "names",
        *["linearize"] * 2,
    ]
    # All of it but one 14×14 position and a 5×5 kernel with its bias a channel.
    added, before = 64 * (14 * 14 + 26), speed["parameters"]
    assert by["recovery", "slab", None]["kept"] == pytest.approx(before / (before + added))

    # What failed is tried once more, after the rest.
    monkeypatch.setattr(bench_mixers, "create_mixer", create_mixer)
    code, _, err = command(*run, "--shard", "2/2", "--out", tmp_path / "b", "--grids", 4, 2)
    assert code == 0, err
    rows = json.loads((tmp_path / "b" / "rows-2of2.json").read_text())["rows"]
    assert [(row["what"], row.get("side"), row["failed"]) for row in rows[-3:]] == [
        ("recovery", None, ""),
        ("time", 2, ""),
        ("time", 4, ""),
    ]

    for arguments, message in (
        ((*run, "--out", tmp_path / "a", "--epochs", 1), "accuracy of another budget"),
        (("bench", "mixers", "--merge", colours, "--out", tmp_path / "c"), "no rows of scanvas bench mixers lie in"),
        ((*run, "--out", tmp_path / "c", "--mixers", "slap"), "--mixers: unknown 'slap'; did you mean 'sla"),
        ((*run, "--out", tmp_path / "c", "--shard", "3/2"), "--shard takes i/n with i from 1 to n"),
        ((*run, "--out", tmp_path / "c", "--grids", 0), "--grids takes whole numbers, at least 1; got [0]"),
        ((*run, "--out", tmp_path / "c", "--batch-size", 0), "--batch-size must be positive, got 0"),
        (("bench", "mixers", "--out", tmp_path / "c"), "--data DIR, a folder with train.parquet"),
        ((*run, "--out", tmp_path / "c", "--data", tmp_path), "holds no train*.parquet"),
    ):
        code, _, err = command(*arguments)
        assert code == 1
        assert message in err
    assert not (tmp_path / "c").exists()


def test_images_are_shifted_and_mirrored(colours):
    """Every drawn image is a window of its padded image, maybe mirrored; one draw has several kinds."""
    images = load_images(str(colours), torch.device("cpu"), limit=9)
    assert images.labels.tolist() == [0, 1, 2] * 3
    assert (images.side, images.classes, len(images.test)) == (8, 3, 9)
    index = torch.arange(9)
    drawn, labels = images.draw(index, torch.Generator().manual_seed(0))
    assert torch.equal(labels, images.labels)
    found = set()
    for number in range(9):
        windows = images.scaled(images.padded[number].unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4))
        for flip in (False, True):
            same = (windows.flip(-1) if flip else windows).sub(drawn[number]).abs().amax((2, 3, 4)) == 0
            found |= {(number, flip, *place) for place in same.nonzero().tolist()}
    assert {entry[0] for entry in found} == set(range(9))
    assert len({entry[1:] for entry in found}) > 5


def test_images_are_decoded_once(colours, tmp_path, monkeypatch):
    """A second process maps what the first decoded, unless the files or the limit are others, or what is kept is not
    whole."""
    folder, cache, reads = tmp_path / "data", tmp_path / "out" / "images.safetensors", []
    shutil.copytree(colours, folder)
    read = bench_mixers_images._read
    monkeypatch.setattr(bench_mixers_images, "_read", lambda *a: reads.append(a) or read(*a))

    def load(limit=9):
        return load_images(str(folder), torch.device("cpu"), limit, cache)

    first, again = load(), load()
    assert len(reads) == 2
    for name in ("padded", "labels", "test", "test_labels"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert len(load(6).labels) == 6
    os.utime(folder / "test.parquet", ns=(1, 1))
    load(6)
    cache.write_bytes(cache.read_bytes()[:100])
    assert len(load(6).labels) == 6
    assert len(reads) == 8


def test_images_that_do_not_fit_are_named(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    for second, message in (
        (b"no image", "image 1 of .*train.parquet cannot be read"),
        (None, "of one size; number 1"),
    ):
        if second is None:
            other = io.BytesIO()
            Image.new("L", (8, 6)).save(other, "PNG")
            second = other.getvalue()
        rows = [{"image": data, "label": 0} for data in (file.getvalue(), second)]
        for split in ("train", "test"):
            parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        with pytest.raises(DataError, match=message):
            load_images(str(tmp_path), torch.device("cpu"))


def test_weights_by_name(colours):
    """Where linearize has no such target, what fits by name and shape is the teacher's, fused or not."""
    images, budget = load_images(str(colours), torch.device("cpu")), Budget(depth=1)
    teacher = bench_mixers_train.build("softmax", images, budget)
    for mixer in ("kda", "mlla"):
        model, how, kept = bench_mixers_train.convert(mixer, 0, images, budget, teacher)
        assert how == "names"
        assert torch.equal(model.patch_embed.proj[0].weight, teacher.patch_embed.proj[0].weight)
        model.blocks[0].mixer.fuse_projections(False)
        q, k, v = teacher.blocks[0].mixer.to_qkv.weight.chunk(3)
        for part, weight in (("to_q", q), ("to_k", k), ("to_v", v)):
            assert torch.equal(getattr(model.blocks[0].mixer, part).weight, weight)
        assert 0.5 < kept < 1


@pytest.mark.parametrize(
    "name", ["agent", "gated_softmax", "gla", "inline", "linfusion", "mala", "mlla", "nala", "rala", "t5"]
)
def test_what_is_new_starts_as_nothing(name):
    """What a mixer adds to the projections of a softmax does not touch its output at first."""
    torch.manual_seed(0)
    options = {"expand_k": 1.0} if name == "gla" else {}
    mixer, x = create_mixer(name, 24, 2, **options), torch.randn(1, 12, 24)
    start_neutral(mixer)
    for gate in [mixer.gate_proj(x)] if name in ("gated_softmax", "mala", "rala") else []:
        torch.testing.assert_close(gate, torch.ones_like(gate))
    if name in ("mlla", "nala"):
        torch.testing.assert_close(torch.nn.functional.silu(mixer.gate_proj(x)), torch.ones(1, 12, 24))
    for conv in ("conv", "q_conv", "k_conv", "value_conv"):
        layer = getattr(mixer, conv, None)
        if layer is not None:
            expected = x if (name, conv) in (("gla", "conv"), ("mlla", "value_conv")) else torch.zeros_like(x)
            torch.testing.assert_close(layer(x, (3, 4)), expected)
    if name == "inline":
        assert mixer.local(x, x.unflatten(-1, (2, 12)), (3, 4), 0).abs().max() == 0
    if name == "linfusion":
        torch.testing.assert_close(mixer.q_modulator(x), x)


def test_a_loss_that_is_not_finite_is_said(colours):
    budget = Budget(depth=1, epochs=1, batch=16, lr=1e9)
    images = load_images(str(colours), torch.device("cpu"))
    model = bench_mixers_train.build("softmax", images, budget)
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="not finite in 3 of 3 steps"):
        bench_mixers_train.train(model, images, budget, 1, 0)


def test_a_device_that_is_lost_ends_the_run(monkeypatch):
    """After an illegal access every further row of the process would fail with it."""
    row, device = {"what": "speed", "mixer": "gla", "failed": "AcceleratorError: illegal access"}, torch.device("cuda")

    def lost(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for place, name in ((torch.cuda, "synchronize"), (torch, "rand"), (torch.cuda, "empty_cache")):
        monkeypatch.setattr(place, name, lambda *_, **__: None)
    bench_mixers._check_device(device, row)
    for place, name in ((torch.cuda, "synchronize"), (torch, "rand")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lost)
            with pytest.raises(UserError, match=r"after speed of gla \(AcceleratorError: illegal access\): run the s"):
                bench_mixers._check_device(device, row)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mixer", ["softmax", "gla", "mala"])
def test_recorded_steps_train_as_plain_ones(mixer, colours, monkeypatch):
    """The same weights after a dozen steps, of which all but the first three are replays, with rates that change."""
    images, budget = load_images(str(colours), torch.device("cuda")), Budget(depth=1, batch=16)
    made, changes = [], []

    def kept(*arguments):
        made.append(bench_mixers_step.Step(*arguments))
        return made[-1]

    monkeypatch.setattr(bench_mixers_train, "Step", kept)
    for plain in (3, 10**6):
        monkeypatch.setattr(bench_mixers_step, "_PLAIN", plain)
        torch.manual_seed(0)
        model = bench_mixers_train.build(mixer, images, budget)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        bench_mixers_train.train(model, images, budget, 4, 0)
        changes.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    assert [step.recorded for step in made] == [True, False]
    # AdamW makes much of the last bits of a gradient that is nearly zero, so that single weights may differ.
    assert (changes[0] - changes[1]).norm() < 0.05 * changes[1].norm()


def test_the_short_table_and_the_plot(tmp_path, monkeypatch):
    """Seeds are averaged, the device's times are taken where there are also those of a CPU, what failed is marked;
    labels of a crowd of points cover neither one another nor points."""
    reached = {"softmax": [60.0], "gla": [70.0, 72.0, 74.0], "mala": [65.0]}
    rows = [
        {"what": "accuracy", "mixer": name, "seed": seed, "budget": "b", "failed": "", "accuracy": value}
        for name, values in reached.items()
        for seed, value in enumerate(values)
    ]
    for device, factor in (("CPU, 1 head", 1e3), ("H200, 1 head", 1)):
        for side in (14, 32, 128):
            row = {"what": "time", "mixer": "gla", "side": side, "batch": 2, "budget": device, "failed": ""}
            rows.append(row | {"forward_backward_ms": factor * side**2 / 1e4, "forward_backward_mb": factor * side})
    rows.append({"what": "time", "mixer": "mala", "side": 14, "batch": 2, "budget": "H200, 1 head", "failed": "Bad: x"})
    for name, speed in (("softmax", 9e3), ("gla", 8e3), ("mala", 7e3)):
        row = {"what": "speed", "mixer": name, "budget": "H200, m", "failed": "", "parameters": 2.345e6}
        rows.append(row | {"images_per_second": speed, "trained_per_second": speed / 4})
    recovery = {"what": "recovery", "seed": 0, "budget": "r", "failed": ""}
    rows += [
        recovery | {"mixer": "gla", "swapped": 30.0, "recovered": 66.61},
        recovery | {"mixer": "mala", "swapped": 9},
    ]
    header, _, *lines = short_table(rows).splitlines()[:5]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *lines)]
    assert cells[0][-3:] == ["ns a token, H200, 14² / 128²", "MiB, 128²", "µs a token, CPU, 14² / 128²"]
    assert cells[1] == ["`gla`", "2.3", "72.0 ± 2.0 (3)", "8,000", "2,000", "30.0 → 66.6", "50 / 50", "128", "50 / 50"]
    assert cells[2] == ["`mala`", "2.3", "65.0", "7,000", "1,750", "9.0 → ×", "× / –", "–", "–"]
    assert cells[3] == ["`softmax`", "2.3", "60.0", "9,000", "2,250", *"––––"]
    assert short_table(rows).endswith("Failed:\n\n- `mala`, time (14): Bad: x\n")

    placed = []
    cover = bench_mixers_plot._cover
    monkeypatch.setattr(bench_mixers_plot, "_cover", lambda a, b: placed.append((a, b, cover(a, b))) or cover(a, b))
    kinds = ("softmax", "scan", "other")
    points = {f"mixer{i}": (1000 + i % 5, 60 + (i // 5) / 10, 0.1 * (i % 2), kinds[i % 3]) for i in range(25)}
    bench_mixers_plot.draw(points, "images a second", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    boxes = {b for _, b, _ in placed}
    last = placed[-1][0]  # the box that was taken for the last label
    assert len(boxes) == 25 + 1 + 24  # points, the legend, and all labels but the last
    assert sum(cover(a, b) for a in [*boxes, last] for b in [*boxes, last] if a < b) == 0

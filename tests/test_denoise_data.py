"""The data of a denoiser: four ways to store it that give the same, shapes, the order of an epoch, what is refused."""

import dataclasses
import io
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from scanvas.train.denoise_config import PaintDataConfig
from scanvas.train.errors import ConfigError, DataError
from scanvas.train.paint_data import (
    Key,
    MemoryReader,
    Order,
    PixelItems,
    WorkerReader,
    assign_shapes,
    bucket_shapes,
    decoded_place,
    fit,
    fixed_order,
)
from scanvas.train.sources import check_label_range, open_source

SIZES = [(16, 16), (32, 16), (16, 32), (20, 20), (33, 17), (64, 64)]  # width, height
CAPTIONS = [f"picture {i}" for i in range(len(SIZES))]


def picture(i):
    rng = np.random.default_rng(i)
    width, height = SIZES[i]
    return Image.fromarray(rng.integers(0, 255, (height, width, 3)).astype("uint8"))


def png(i):
    file = io.BytesIO()
    picture(i).save(file, "PNG")
    return file.getvalue()


def write(root, form, *, label=lambda i: i % 3, caption=lambda i: CAPTIONS[i]):
    """The same six images in one of the forms; returns the config."""
    root.mkdir(parents=True)
    extra = {}
    if form == "classes":
        for i in range(len(SIZES)):
            (root / "train" / "abc"[label(i)]).mkdir(parents=True, exist_ok=True)
            (root / "train" / "abc"[label(i)] / f"{i}.png").write_bytes(png(i))
    elif form == "captions":
        (root / "train" / "inner").mkdir(parents=True)
        lines = []
        for i in range(len(SIZES)):
            (root / "train" / "inner" / f"{i}.png").write_bytes(png(i))
            lines.append(json.dumps({"file_name": f"inner/{i}.png", "text": caption(i)}))
        (root / "train" / "metadata.jsonl").write_text("\n".join(lines))
    elif form == "parquet":
        import datasets

        rows = {
            "image": [{"bytes": png(i), "path": None} for i in range(len(SIZES))],
            "label": [label(i) for i in range(len(SIZES))],
            "text": [caption(i) for i in range(len(SIZES))],
        }
        features = datasets.Features(
            image=datasets.Image(),
            label=datasets.ClassLabel(names=["a", "b", "c"]),
            text=datasets.Value("string"),
        )
        datasets.Dataset.from_dict(rows, features=features).to_parquet(root / "train.parquet")
        extra = {"format": "hfds", "cache_dir": str(root / "cache")}
    else:
        for shard in range(2):
            with tarfile.open(root / f"train-{shard:03d}.tar", "w") as tar:
                for i in range(3 * shard, 3 * shard + 3):
                    members = {"png": png(i), "cls": str(label(i)).encode(), "txt": (caption(i) or "").encode()}
                    for extension, content in members.items():
                        info = tarfile.TarInfo(f"inner/{i:04d}.{extension}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
        extra = {"format": "wds"}
    return PaintDataConfig(root=str(root), workers=0, size=16, hflip=0.0, **extra)


def by_number(source):
    """Images of a source by their first pixels, since class folders sort them otherwise."""
    found = {}
    for i in range(len(source)):
        with source.open(i) as file:
            found[np.array(Image.open(file).convert("RGB")).tobytes()] = i
    return [found[np.array(picture(i)).tobytes()] for i in range(len(SIZES))]


@pytest.mark.parametrize("form", ["classes", "parquet", "shards"])
def test_labels_come_with_their_images(tmp_path, form):
    source = open_source(write(tmp_path / "d", form), "train", captions=False)
    order = by_number(source)
    assert [source.labels[i] for i in order] == [0, 1, 2, 0, 1, 2]
    assert source.classes == (None if form == "shards" else ["a", "b", "c"])
    assert [source.sizes()[i] for i in order] == SIZES


@pytest.mark.parametrize("form", ["captions", "parquet", "shards"])
def test_captions_come_with_their_images(tmp_path, form):
    source = open_source(write(tmp_path / "d", form), "train", captions=True)
    assert [source.captions[i] for i in by_number(source)] == [[text] for text in CAPTIONS]


@pytest.mark.parametrize("form", ["captions", "parquet", "shards"])
def test_missing_captions_are_refused(tmp_path, form):
    config = write(tmp_path / "d", form, caption=lambda i: CAPTIONS[i] if i != 4 else "")
    with pytest.raises(DataError, match=r"1 of 6 image\(s\) have no caption: .*(4|row 4)"):
        open_source(config, "train", captions=True)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda lines: lines[:-1], r"1 image\(s\) have no caption in .*5.png"),
        (lambda lines: [*lines, '{"file_name": "gone.png", "text": "x"}'], r"1 image\(s\) that do not exist: .*gone"),
        (lambda lines: [line.replace("text", "caption") for line in lines], "no caption under 'text'"),
        (lambda lines: ["{", *lines], "line 1: not JSON with a file_name"),
    ],
)
def test_listings_that_do_not_match_the_folder_are_refused(tmp_path, spoil, said):
    config = write(tmp_path / "d", "captions")
    listing = tmp_path / "d" / "train" / "metadata.jsonl"
    listing.write_text("\n".join(spoil(listing.read_text().splitlines())))
    with pytest.raises(DataError, match=said):
        open_source(config, "train", captions=True)


def test_what_is_not_there_is_named(tmp_path):
    classes = write(tmp_path / "c", "classes")
    with pytest.raises(DataError, match=r"no metadata.jsonl"):
        open_source(classes, "train", captions=True)
    shards = write(tmp_path / "s", "shards")
    with pytest.raises(DataError, match=r"shard .*train-002.tar does not exist"):
        open_source(shards, "train-{000..002}.tar", captions=False)
    rows = write(tmp_path / "p", "parquet")
    rows.caption_key = "txt"
    with pytest.raises(DataError, match=r"data.caption_key='txt' is no column .*did you mean 'text'"):
        open_source(rows, "train", captions=True)


def test_labels_out_of_range_are_named(tmp_path):
    source = open_source(write(tmp_path / "d", "shards", label=lambda i: i), "train", captions=False)
    with pytest.raises(DataError, match=r"train-001.tar:inner/0004.* has label 4, and num_classes=4 allows 0 to 3"):
        check_label_range(source, 4, "train")


def test_shapes_have_one_area_and_whole_patches():
    config = PaintDataConfig(size=512, buckets=9)
    shapes = bucket_shapes(config, 16)
    assert (512, 512) in shapes
    assert len(shapes) == 9
    for height, width in shapes:
        assert height % 16 == width % 16 == 0
        assert height * width == pytest.approx(512**2, rel=0.05)
    assert shapes == [(w, h) for h, w in reversed(shapes)]
    assert shapes[-1][0] / shapes[-1][1] == pytest.approx(2, rel=0.05)
    with pytest.raises(ConfigError, match=r"data.size=500 must be divisible by 16.*496 and 512"):
        bucket_shapes(PaintDataConfig(size=500), 16)


def test_images_go_to_the_nearest_shape(tmp_path):
    source = open_source(write(tmp_path / "d", "captions"), "train", captions=True)
    shapes = bucket_shapes(PaintDataConfig(size=16, buckets=3), 4)
    assert shapes == [(12, 24), (16, 16), (24, 12)]
    order = by_number(source)
    assert assign_shapes(source, shapes)[order].tolist() == [1, 0, 2, 1, 0, 1]


def test_fit_covers_and_crops_the_centre():
    wide = Image.new("RGB", (400, 100), "blue")
    wide.paste("red", (150, 0, 250, 100))
    pixels = fit(wide, (50, 50), 3)
    assert pixels.shape == (3, 50, 50)
    assert (pixels[0, :, 2:-2] > 250).all(), "the middle fifth is red"
    assert fit(Image.new("RGB", (7, 9), "white"), (32, 16), 1).eq(255).all()


@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_has_every_image_in_batches_of_one_shape(world):
    shape_of = np.array([0] * 11 + [1] * 5 + [2])
    orders = [Order(shape_of, batch_size=2, seed=3, rank=r, world=world) for r in range(world)]
    plans = [order.epoch(7) for order in orders]
    for order, plan in zip(orders, plans):
        assert len(plan) == order.per_epoch
        assert plan[3:] == order.epoch(7, 3), "an epoch can be entered anywhere"
        assert plan != order.epoch(8)
    together = [[key for plan in plans for key in plan[b]] for b in range(len(plans[0]))]
    for batch in together:
        assert len({shape_of[key.index] for key in batch}) == 1
    keys = [key for batch in together for key in batch]
    assert {key.index for key in keys} == set(range(17))
    assert len({key.slot for key in keys}) == len(keys), "places differ, so chances do"
    assert max(np.bincount([key.index for key in keys if shape_of[key.index] == 0])) <= 2


def test_evaluation_sees_spread_images_once():
    shape_of = np.array([0, 1] * 10)
    parts = [fixed_order(shape_of, limit=9, batch_size=2, rank=rank, world=2) for rank in range(2)]
    keys = [key for part in parts for batch in part for key in batch]
    assert sorted(key.index for key in keys) == [i * 20 // 9 for i in range(9)]
    assert sorted(key.slot for key in keys) == list(range(9))
    assert {key.epoch for key in keys} == {-1}


def items(tmp_path, **options):
    source = open_source(write(tmp_path / "d", "captions"), "train", captions=True)
    options = {"channels": 3, "hflip": 0.0, "seed": 0} | options
    return PixelItems(source, np.zeros(6, dtype=np.int64), [(16, 16)], **options)


PLAN = [[Key(2, 4, 1), Key(2, 5, 3)], [Key(2, 6, 0), Key(2, 7, 5)]]


def test_memory_and_workers_read_the_same(tmp_path):
    data = items(tmp_path)
    memory = MemoryReader(data, torch.device("cpu"), workers=0)
    for a, b, c in zip(WorkerReader(data, 0).read(PLAN), memory.read(PLAN), WorkerReader(data, 2).read(PLAN)):
        assert torch.equal(a["pixels"], b["pixels"])
        assert torch.equal(a["pixels"], c["pixels"])
        for key in ("caption", "index", "slot"):
            assert a[key] == b[key] == c[key]


def test_decoded_images_are_kept_for_the_next_run(tmp_path, monkeypatch):
    data = items(tmp_path)
    config = PaintDataConfig(root="images", decoded=str(tmp_path / "kept"))
    place = decoded_place(config, "train", data)
    options = {"device": torch.device("cpu"), "workers": 0}
    wanted = [batch["pixels"] for batch in MemoryReader(data, **options, place=place).read(PLAN)]
    assert [place] == list((tmp_path / "kept").iterdir())
    monkeypatch.setattr(PixelItems, "__getitem__", None)  # nothing is decoded again
    got = [batch["pixels"] for batch in MemoryReader(data, **options, place=place).read(PLAN)]
    assert all(map(torch.equal, got, wanted))
    monkeypatch.undo()
    larger = PixelItems(data.source, data.shape_of, [(32, 32)], channels=3, hflip=0.0, seed=0)
    others = {decoded_place(config, "val", data), decoded_place(config, "train", larger)}
    others.add(decoded_place(dataclasses.replace(config, root="others"), "train", data))
    assert len(others | {place}) == 4
    config = dataclasses.replace(config, root=str(tmp_path / "d"))
    place = decoded_place(config, "train", data)
    assert decoded_place(config, "train", data) == place
    os.utime(next((tmp_path / "d" / "train").rglob("*.png")), ns=(1, 1))
    assert decoded_place(config, "train", data) != place
    (tmp_path / "d" / "train" / "inner" / "3.png").write_bytes(b"nonsense")
    place = place.with_name("other")
    assert len(MemoryReader(data, **options, place=place).skipped) == 1
    assert not place.exists(), "an image that can be read next time is not given up"


@pytest.mark.parametrize("memory", [False, True])
def test_flips_are_drawn_by_place(tmp_path, memory):
    plain, data = items(tmp_path), items(tmp_path / "flips", hflip=0.5)
    reader = MemoryReader(data, torch.device("cpu"), workers=0) if memory else WorkerReader(data, 0)
    plan = [[Key(0, 4 * b + i, i) for i in range(4)] for b in range(20)]
    (upright,) = WorkerReader(plain, 0).read([plan[0]])
    flips = []
    for batch in reader.read(plan):
        for i, image in enumerate(batch["pixels"]):
            mirrored = torch.equal(image, upright["pixels"][i].flip(-1))
            assert mirrored or torch.equal(image, upright["pixels"][i])
            flips.append(mirrored)
    assert 20 < sum(flips) < 60
    again = [batch["pixels"] for batch in reader.read(plan[10:])]
    assert torch.equal(again[0], list(reader.read(plan))[10]["pixels"]), "the same from any place"
    evaluated = [key._replace(epoch=-1) for key in plan[0]]
    assert torch.equal(next(iter(reader.read([evaluated])))["pixels"], upright["pixels"])


@pytest.mark.parametrize("memory", [False, True])
def test_an_unreadable_image_gives_way_to_the_next(tmp_path, memory):
    data = items(tmp_path)
    order = by_number(data.source)
    (tmp_path / "d" / "train" / "inner" / "3.png").write_bytes(b"nonsense")
    reader = MemoryReader(data, torch.device("cpu"), workers=0) if memory else WorkerReader(data, 0)
    (batch,) = reader.read([[Key(0, 0, order[3]), Key(0, 1, order[0])]])
    assert batch["index"] == [order[3] + 1, order[0]]
    assert batch["caption"][0] == CAPTIONS[4]
    assert [bad.name.endswith("3.png") for bad in batch["skipped"]] == [True]

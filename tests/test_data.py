"""The three kinds of data, and everything that can be wrong with them."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from scanvas.train.config import AugmentConfig, DataConfig
from scanvas.train.data import TrainBatches, eval_batches, eval_transform, open_pair, open_split, train_transform
from scanvas.train.errors import DataError
from scanvas.train.samples import BadImages

CLASSES = ("apple", "boat", "cup")
INPUTS = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 1.0,
}
STREAM = {"batch_size": 4, "seed": 0}


def shards(folder, images, *, splits=("train", "val"), per_shard=8):
    """The image folder ``images`` again as webdataset shards with an _info.json."""
    info = {"splits": {}}
    folder.mkdir()
    for split in splits:
        paths = sorted((images / split).glob("*/*.png"), key=lambda path: path.name)
        names, lengths = [], []
        for start in range(0, len(paths), per_shard):
            name = f"{split}-{start // per_shard:03d}.tar"
            with tarfile.open(folder / name, "w") as tar:
                for number, path in enumerate(paths[start : start + per_shard], start):
                    label = str(CLASSES.index(path.parent.name)).encode()
                    for suffix, content in (("png", path.read_bytes()), ("cls", label)):
                        member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
            names.append(name)
            lengths.append(len(paths[start : start + per_shard]))
        info["splits"][split] = {
            "name": split,
            "num_samples": len(paths),
            "filenames": names,
            "shard_lengths": lengths,
        }
    (folder / "_info.json").write_text(json.dumps(info))
    return folder


def parquet(folder, images):
    """The image folder as parquet files, which Hugging Face datasets reads offline."""
    datasets = pytest.importorskip("datasets")
    folder.mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    for split, name in (("train", "train"), ("val", "validation")):
        paths = sorted((images / split).glob("*/*.png"))
        rows = {
            "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
            "label": [CLASSES.index(path.parent.name) for path in paths],
        }
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture(params=["folder", "hfds", "wds"])
def config(request, images, tmp_path):
    if request.param == "folder":
        return DataConfig(root=str(images), workers=0)
    if request.param == "hfds":
        root = parquet(tmp_path / "parquet", images)
        cache = str(tmp_path / "cache")
        return DataConfig(format="hfds", root=str(root), val_split="validation", workers=0, cache_dir=cache)
    return DataConfig(format="wds", root=str(shards(tmp_path / "shards", images)), workers=0)


def batches(config, epoch, start=0, *, workers=0, seed=0, rank=0, world=1):
    augment = AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.5)
    config = DataConfig(**{**vars(config), "workers": workers})
    train, _, _ = open_pair(config, 3, **STREAM)
    made = TrainBatches(
        train, config, train_transform(augment, INPUTS), batch_size=4, seed=seed, rank=rank, world=world
    )
    return made, list(made.epoch(epoch, start))


def same(one, two):
    return len(one) == len(two) and all(
        torch.equal(a["image"], b["image"]) and torch.equal(a["target"], b["target"]) for a, b in zip(one, two)
    )


def test_batches_depend_on_the_place_alone(config):
    made, whole = batches(config, 1)
    assert len(whole) == made.per_epoch == 12
    state = torch.get_rng_state()
    assert same(whole, list(made.epoch(1))), "the same again"
    assert torch.equal(state, torch.get_rng_state()), "reading data must not draw from the training's random numbers"
    assert same(whole[5:], list(made.epoch(1, 5))), "from the middle"
    assert not same(whole, list(made.epoch(2))), "another epoch, another order"
    assert not same(whole, batches(config, 1, seed=1)[1])
    if config.format != "wds":  # shards are dealt out to the workers, so their number changes the order there
        assert same(whole, batches(config, 1, workers=2)[1])


def test_every_image_once(config):
    _, val, _ = open_pair(config, 3, **STREAM)
    targets = torch.cat([b["target"] for b in eval_batches(val, config, eval_transform(INPUTS), batch_size=5)])
    assert sorted(targets.tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    if config.format == "folder":
        seen = [batches(config, 0, rank=rank, world=2)[1] for rank in (0, 1)]
        indices = [index for batch in seen[0] + seen[1] for index in batch["index"]]
        assert sorted(indices) == list(range(48)), "two processes share the epoch out"


@pytest.mark.parametrize("on_error", ["skip", "stop"])
def test_unreadable_images(images, on_error):
    (images / "train/boat/003.png").write_bytes(b"no image")
    whole = (images / "train/cup/004.png").read_bytes()
    (images / "train/cup/004.png").write_bytes(whole[: len(whole) // 2])
    (images / "train/cup/005.png").unlink()
    (images / "train/cup/005.png").symlink_to("gone.png")
    _, read = batches(DataConfig(root=str(images), on_error=on_error), 0, workers=1)
    bad = BadImages(on_error)
    if on_error == "stop":
        first = next(batch for batch in read if batch["skipped"])
        with pytest.raises(DataError, match=r"cannot read image .*00[345]\.png: .* data\.on_error=skip"):
            bad.check(first)
    else:
        for batch in read:
            bad.check(batch)
            assert len(batch["index"]) == 4, "another image takes the place"
        assert sorted(Path(name).name for name in bad.seen) == ["003.png", "004.png", "005.png"]
        assert bad.summary().startswith("3 image(s) could not be read and were skipped:")


def test_unreadable_images_are_left_out_of_accuracy(images):
    (images / "val/boat/001.png").write_bytes(b"no image")
    config = DataConfig(root=str(images), workers=0)
    loader = eval_batches(open_split(config, "val"), config, eval_transform(INPUTS), batch_size=3)
    read = list(loader)
    assert sum(len(batch["index"]) for batch in read) == 11
    assert [bad.name for batch in read for bad in batch["skipped"]] == [str(images / "val/boat/001.png")]


def test_unreadable_shard_samples_are_counted(images, tmp_path):
    (images / "train/boat/003.png").write_bytes(b"no image")
    config = DataConfig(format="wds", root=str(shards(tmp_path / "shards", images)), workers=0)
    bad = BadImages("skip")
    for batch in batches(config, 0)[1]:
        bad.check(batch)
    assert bad.summary().startswith("1 image(s) could not be read")


def _empty(images, _):
    shutil.rmtree(images / "train")
    (images / "train" / "apple").mkdir(parents=True)


def _class_missing(images, _):
    shutil.rmtree(images / "val" / "boat")


def _class_unknown(images, write_images):
    write_images(images, {"val": 1}, classes=("dog",))


def _no_val(images, _):
    shutil.rmtree(images / "val")


@pytest.mark.parametrize(
    ("break_it", "num_classes", "said"),
    [
        (_empty, None, "no image in .*train: it must hold one folder per class"),
        (_class_missing, None, "lacks the folder of 1 class.* boat"),
        (_class_unknown, None, "1 class.* that the training split lacks: dog"),
        (_no_val, None, "no folder for the split 'val'; it holds train"),
        (lambda images, _: shutil.rmtree(images), None, "is not a folder"),
        (lambda images, _: None, 7, r"model.num_classes=7, but the training data has 3 classes \(apple, boat, cup\)"),
    ],
)
def test_bad_folders(images, write_images, break_it, num_classes, said):
    break_it(images, write_images)
    with pytest.raises(DataError, match=said):
        open_pair(DataConfig(root=str(images)), num_classes, **STREAM)


def test_an_empty_folder_of_a_class_is_no_missing_class(images):
    for path in (images / "val" / "boat").iterdir():
        path.unlink()
    _, val, names = open_pair(DataConfig(root=str(images)), None, **STREAM)
    assert names == list(CLASSES)
    assert {val.reader[i][1] for i in range(len(val))} == {0, 2}, "cup keeps the index it has in training"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_key": "imagee"}, "data.image_key='imagee' is no column .*did you mean 'image'"),
        ({"val_split": "tset"}, "cannot open the Hugging Face dataset .* split 'tset'"),
        ({"root": "/nowhere/at/all"}, "cannot open the Hugging Face dataset data.root='/nowhere/at/all'"),
    ],
)
def test_bad_hugging_face_datasets(images, tmp_path, change, said):
    options = {"root": str(parquet(tmp_path / "parquet", images)), "val_split": "validation"}
    config = DataConfig(format="hfds", cache_dir=str(tmp_path / "cache"), **{**options, **change})
    with pytest.raises(DataError, match=said):
        open_pair(config, None, **STREAM)


@pytest.mark.parametrize(
    ("change", "num_classes", "said"),
    [
        ({}, None, "shards do not say how many classes they have; set model.num_classes"),
        ({"train_split": "rain"}, 3, "cannot open the shards .* split 'rain'"),
        ({"train_split": "train-{000..009}.tar", "train_samples": 48}, 3, r"shard .*train-006\.tar does not exist"),
    ],
)
def test_bad_shards(images, tmp_path, change, num_classes, said):
    config = DataConfig(format="wds", root=str(shards(tmp_path / "shards", images)), **change)
    with pytest.raises(DataError, match=said):
        open_pair(config, num_classes, **STREAM)


def test_a_split_smaller_than_a_batch(images):
    config = DataConfig(root=str(images))
    with pytest.raises(DataError, match=r"48 image.* fewer than one batch of 64; lower train\.batch_size"):
        TrainBatches(open_split(config, "train"), config, None, batch_size=64, seed=0)

"""A checkpoint is whole or not there, and comes back bit by bit."""

import contextlib
import json
import random
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scanvas.train import checkpoint, state
from scanvas.train.checkpoint import CheckpointStore, load_tensors, load_weights, settle_directory, write_directory
from scanvas.train.errors import CheckpointError


@contextlib.contextmanager
def file_size_limit(size):
    """Every write beyond ``size`` bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_old_checkpoint_survives_a_write_that_fails(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    old = store.save(1, {"model": {"w": torch.arange(4.0)}}, {"step": 1})
    with file_size_limit(20_000), pytest.raises(CheckpointError, match=r"could not write .*step-00000002.*intact"):
        store.save(2, {"model": {"w": torch.zeros(10_000)}}, {"step": 2})
    assert store.steps() == [old]
    assert load_tensors(old / "model.safetensors")["w"].tolist() == [0, 1, 2, 3]
    assert store.load_state(old)["step"] == 1
    assert [p.name for p in store.folder.iterdir()] == [old.name]  # nothing half-written is left


def test_best_survives_a_write_that_fails(tmp_path):
    best = tmp_path / "best"
    write_directory(best, lambda folder: (folder / "a.txt").write_text("old") and None)
    with file_size_limit(1000), pytest.raises(CheckpointError, match=r"was at .* before is intact"):
        write_directory(best, lambda folder: (folder / "a.txt").write_text("x" * 5000) and None)
    assert (best / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("died", ["before the swap", "in the middle of the swap", "after the swap"])
def test_a_kill_while_replacing_leaves_one_whole_directory(tmp_path, died):
    place = tmp_path / "best"
    if died == "before the swap":
        layout = {"best": "old", ".new-best": "half"}
    elif died == "in the middle of the swap":
        layout = {".old-best": "old", ".new-best": "new"}
    else:
        layout = {"best": "new", ".old-best": "old"}
    for name, text in layout.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
    settle_directory(place)
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert (place / "a.txt").read_text() == ("new" if died == "after the swap" else "old")


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 20):
        store.save(step, {"model": {"w": torch.ones(1)}}, {"step": step})
    assert [p.name for p in store.steps()] == ["step-00000010", "step-00000020"]
    assert store.newest().name == "step-00000020"


@pytest.mark.parametrize("damage", ["cut short", "not safetensors", "missing", "state missing", "state cut short"])
def test_an_unreadable_checkpoint_is_named(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep=2)
    place = store.save(1, {"model": {"w": torch.ones(1000)}}, {"step": 1})
    weights, plain = place / "model.safetensors", place / "state.json"
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:500])
    elif damage == "not safetensors":
        weights.write_bytes(b"hello")
    elif damage == "missing":
        weights.unlink()
    elif damage == "state missing":
        plain.unlink()
    else:
        plain.write_text(plain.read_text()[:10])
    named = "state.json" if damage.startswith("state") else "model.safetensors"
    read = (lambda: store.load_state(place)) if damage.startswith("state") else (lambda: load_tensors(weights))
    with pytest.raises(CheckpointError, match=named):
        read()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"weight": torch.ones(2, 3)}, "lacks the tensor 'bias'"),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(5)}, r"'bias' of .* shape \(5,\), and the model's has \(2,\)"),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}, "'more' that the model lacks"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, tensors, said):
    with pytest.raises(CheckpointError, match=said):
        load_weights(torch.nn.Linear(3, 2), tensors, tmp_path)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_optimizer_state_goes_through_files_exactly(tmp_path, name):
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 3)
    kwargs = {"momentum": 0.9} if name == "SGD" else {"betas": (0.8, 0.95)}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1 / 3, **kwargs)
    for _ in range(3):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
    tensors, plain = state.pack_optimizer(optimizer.state_dict())
    checkpoint.save_tensors(tensors, tmp_path / "o.safetensors")
    back = state.unpack_optimizer(load_file(tmp_path / "o.safetensors"), json.loads(json.dumps(plain)))
    before = optimizer.state_dict()
    assert back["param_groups"] == before["param_groups"]
    assert set(back["state"]) == set(before["state"])
    for index, entries in before["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(back["state"][index][key]), torch.as_tensor(value))


def test_random_states_go_through_json_exactly():
    saved = json.loads(json.dumps(state.rng_state(torch.device("cpu"))))

    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(3).tolist()

    first = draw()
    assert draw() != first
    state.set_rng_state(saved, torch.device("cpu"))
    assert draw() == first

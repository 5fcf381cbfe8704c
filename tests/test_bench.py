"""What ``scanvas bench`` measures: memory known beforehand, and the table of models on models that take a moment."""

import json

import pytest
import torch

from scanvas.train import bench, measure

MB = 2**20


def _needs(first: int, second: int):
    """A function that holds ``first`` MiB, then both, then ``second`` alone."""

    def call():
        a = torch.ones(first * MB // 4)
        b = torch.ones(second * MB // 4)
        del a
        return b.sum()

    return call


@pytest.mark.parametrize(("first", "second"), [(40, 50), (50, 40)])
def test_peak_is_what_lives_at_once(first, second):
    tensors = measure.peak_memory(_needs(first, second), torch.device("cpu"))
    assert (first + second) * MB <= tensors < (first + second) * MB + 4096
    process = measure.process_peak(_needs(first, second))
    assert process == pytest.approx((first + second) * MB, rel=0.1)


def test_peak_leaves_out_what_is_held_and_what_was_freed():
    held = torch.ones(8 * MB)

    def call():
        for _ in range(5):
            held[: 2 * MB].clone()

    assert measure.peak_memory(call, torch.device("cpu")) == pytest.approx(8 * MB, rel=1e-3)


def test_table_of_models(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "MODEL_PEERS", ("test_vig", "test_vit"))
    monkeypatch.setattr(bench, "_IMAGES", {1024: 1})
    result = bench.bench_models(str(tmp_path), device="cpu")
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "models.json").read_text())["rows"] == result["rows"]
    for row in result["rows"]:
        # At least the tokens of all patches; the process holds the tensors, and little else.
        assert row["peak_mb"] > 0.5
        assert 0.7 * row["peak_mb"] < row["process_mb"] < 2 * row["peak_mb"] + 20
    what = [ratio["what"] for ratio in result["ratios"]]
    assert [any(word in line for line in what) for word in ("images/s", "of tensors", "of the process")] == [True] * 3
    assert "resident memory of a fresh process" in printed

"""``scanvas bench linearize`` on small transformers."""

import json

import pytest
import torch

from scanvas.train import bench_linearize
from scanvas.train.measure import peak_memory


def test_quick(command, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_linearize, "SMALL_SIDES", (64, 128))
    code, out, err = command("bench", "linearize", "--quick", "--device", "cpu", "--out", tmp_path)
    assert code == 0, err
    result = json.loads((tmp_path / "linearize.json").read_text())
    assert [(r["model"], r["attention"], r["side"], r["tokens"]) for r in result["rows"]] == [
        (model, attention, side, (side // 16) ** 2)
        for model in ("flux", "pixart")
        for attention in ("softmax", "lit")
        for side in (64, 128)
    ]
    for row in result["rows"]:
        assert row["ms"] > 0
        assert not row["failed"]
        assert (row["faster"] is None) == (row["attention"] == "softmax")
    assert [r["what"].split(",")[1:] for r in result["ratios"]] == [
        [f" {what}", f" {model}", " 128 px"] for model in ("flux", "pixart") for what in ("time", "peak memory")
    ]
    assert "softmax / lit, time, flux, 128 px" in out
    for arguments, message in (
        ((), "--device cpu: transformers of full size need a GPU; --quick"),
        (("--quick", "--models", "sdxl"), "--models must be among flux, pixart; got sdxl"),
        (("--quick", "--mixers", "litt"), "--mixers must be among lit, "),
        (("--quick", "--sides", "100"), "--sides are pixels, divisible by 16"),
    ):
        code, _, err = command("bench", "linearize", "--device", "cpu", "--out", tmp_path / "x", *arguments)
        assert code == 1
        assert message in err
    assert not (tmp_path / "x").exists()


def test_a_failure_is_a_row(monkeypatch):
    """What has no room, or no kernel, leaves the rest of the table alone."""

    def peak(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried …")

    monkeypatch.setattr(bench_linearize, "peak_memory", peak)
    rows = list(bench_linearize.linearize_rows(["pixart"], ["lit"], [64], torch.device("cpu"), small=True))
    assert [row["failed"] for row in rows] == ["OutOfMemoryError: CUDA out of memory."] * 2
    assert bench_linearize.linearize_ratios(rows) == []
    monkeypatch.setattr(bench_linearize, "peak_memory", peak_memory)


@pytest.mark.parametrize(("name", "billions"), [("flux", 11.9), ("pixart", 0.61)])
def test_full_size_is_the_published_one(name, billions):
    model = bench_linearize.build(name, torch.device("meta"), torch.bfloat16, small=False)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32

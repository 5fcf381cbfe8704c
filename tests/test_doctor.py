"""``scanvas doctor`` finds a wrong kernel and lets a right one pass."""

import pytest
import torch

from scanvas.kernels import glu
from scanvas.train import doctor


@pytest.fixture
def only_silu_product(monkeypatch):
    monkeypatch.setattr(doctor, "_cases", lambda: [case for case in doctor_cases() if case[0] == "silu_product"])


doctor_cases = doctor._cases


def test_all_is_well(only_silu_product, capsys):
    assert doctor.doctor()
    printed = capsys.readouterr().out
    assert torch.__version__.split("+")[0] in printed
    assert "silu_product" in printed
    assert "WRONG" not in printed


@pytest.mark.parametrize("fault", [lambda y: y * 1.1, lambda y: y * float("nan")])
def test_a_wrong_kernel_is_named(only_silu_product, monkeypatch, capsys, fault):
    right = glu.IMPLEMENTATIONS["torch"]
    monkeypatch.setitem(
        glu.IMPLEMENTATIONS, "torch", lambda x: right(x) if x.dtype == torch.float64 else fault(right(x))
    )
    assert not doctor.doctor()
    assert "WRONG" in capsys.readouterr().out

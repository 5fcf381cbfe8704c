"""The notebooks as they are stored: executed, small, without errors or places on somebody's machine. ``make notebooks``
runs them."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_five():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_backbone_in_timm", "02_attention_maps", "03_text_to_image", "04_linearize", "05_speed",
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 600_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells[0].cell_type == "markdown"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # run once, from top to bottom
    outputs = [output for cell in code for output in cell.outputs]
    assert any(kind.startswith("image/") for output in outputs for kind in output.get("data", {}))
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    text = "".join(cell.source for cell in notebook.cells)
    text += "".join(output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert not [place for place in ("/home/", "/root/", "/work/", "/tmp/") if place in text]
    for target in re.findall(r"\]\(([^)#]+)\)", "".join(c.source for c in notebook.cells if c.cell_type == "markdown")):
        assert "://" in target or (path.parent / target).exists()

"""Every Python block of the documentation runs, top to bottom, as a reader would paste it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not blocks(page):
        pytest.skip("no Python in it")
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in t]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    from scanvas.train.cli import COMMANDS

    text = page.read_text(encoding="utf-8")
    kinds = "classify|denoisers|denoise|distill|ops|models|linearize"
    used = set(re.findall(rf"(?:^|`)scanvas ([a-z-]+(?: (?:{kinds})\b)?)", text, flags=re.M))
    known = set(COMMANDS) | {name.split()[0] for name in COMMANDS}
    assert not used - known

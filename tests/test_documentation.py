"""The documentation says what is true: its examples run, its commands and options exist, its links lead somewhere.

There is no network here: of addresses elsewhere only the form is checked.
"""

import re
import shlex
from pathlib import Path

import diffusers
import linear_parts
import pytest
import teacher_parts
import torch

import scanvas
from scanvas.backbones.mixers import MIXERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SOURCES = [
    path
    for pattern in ("*.md", "*.toml", "*.yml", "docs/*", *(f"{d}/**/*" for d in ("backbones", "configs", "diffusion")))
    for path in ROOT.glob(pattern)
] + [path for d in ("kernels", "notebooks", "scanvas", "tests", "train") for path in ROOT.glob(f"{d}/**/*")]
SOURCES = [path for path in SOURCES if path.suffix in (".html", ".ipynb", ".md", ".py", ".toml", ".yaml", ".yml")]


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks that are marked as one of these."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [(language, text) for language, text in found if language in languages]


def put_small_models_in(monkeypatch):
    """In the place of published ones: pipelines of the same classes that are small, with random weights."""
    published = {
        "PixArtSigmaPipeline": "pixart_pipeline",
        "FluxPipeline": "flux_pipeline",
        "DiffusionPipeline": "sd_pipeline",
    }
    for name, small in published.items():
        cls = getattr(diffusers, name)
        load = cls.__dict__.get("from_pretrained", diffusers.DiffusionPipeline.__dict__["from_pretrained"])

        def from_pretrained(cls, path, *, torch_dtype=None, _load=load, _small=small, **parts):
            if Path(path).is_dir():
                return _load.__get__(None, cls)(path, torch_dtype=torch_dtype, **parts)
            pipeline = teacher_parts.PIPELINES[_small]()
            pipeline.register_modules(**parts)
            pipeline.set_progress_bar_config(disable=True)
            return pipeline.to(torch_dtype or torch.float32)

        monkeypatch.setattr(cls, "from_pretrained", classmethod(from_pretrained))
    unet, _ = scanvas.linearize(linear_parts.unet()[0], "linfusion")
    unet.save_pretrained("runs/linfusion-sd15/final/unet")


def made_small(block: str) -> str:
    block = re.sub(r"(height|width)=(\d)\d{3}\b", lambda m: f"{m[1]}={8 * int(m[2])}", block)
    return block.replace('.to("cuda")', '.to("cpu")')


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    """Blocks of ``python`` each by itself, as a reader would paste one. Those of ``py`` need published models, or
    what stands above them: they run after it, with small models in the place of those, and small images."""
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python", "py")
    if not found:
        pytest.skip("no Python in it")
    if any(language == "py" for language, _ in found):
        put_small_models_in(monkeypatch)
    above = {"__name__": "__main__"}
    for language, block in found:
        space = {"__name__": "__main__"} if language == "python" else above
        exec(compile(block if language == "python" else made_small(block), str(page), "exec"), space)
        above.update(space)


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in slugs(file), target


ADDRESSES = {  # what an address may look like, by host
    "arxiv.org": r"/abs/\d{4}\.\d{4,5}(v\d+)?",
    "github.com": r"/[\w-]+/[\w.-]+(/(blob|tree|issues|pull|releases)/[\w./#-]+)?",
    "huggingface.co": r"/[\w-]+/[\w.-]+",
    "keepachangelog.com": r"(/en/[\d.]+/?)?",
    "semver.org": r"/?",
}


def test_addresses_elsewhere_are_well_formed():
    wrong = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for scheme, host, rest in re.findall(r"(https?)://([\w.-]*\w)((?:/[^\s)>\]\"'`\\,]*)?)", text):
            known = re.fullmatch(ADDRESSES.get(host, r"(?!)"), rest.rstrip(".;:"))
            if (scheme != "https" or not known) and not host.startswith(("example.", "127.", "localhost")):
                wrong.append(f"{path.relative_to(ROOT)}: {scheme}://{host}{rest}")
    assert not wrong
    assert all(cls.paper.startswith("https://") for cls in MIXERS.values())


def test_papers_have_numbers_that_arxiv_gives():
    """YYMM.NNNNN, five digits from 2015 on, before that four; never a month that does not exist."""
    found = {}
    for path in SOURCES:
        for number in re.findall(r"arxiv(?:\.org/abs/|:\s?)([\d.]*\d)", path.read_text(encoding="utf-8"), re.I):
            found.setdefault(number, path)
    assert len(found) > 50
    for number, path in found.items():
        year, month, serial = int(number[:2]), int(number[2:4]), number[5:]
        assert number[4] == ".", (number, path)
        assert year >= 7, (number, path)
        assert 1 <= month <= 12, (number, path)
        assert len(serial) == (5 if year >= 15 else 4), (number, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    from scanvas.train.cli import COMMANDS

    text = page.read_text(encoding="utf-8")
    kinds = "classify|denoisers|denoise|distill|ops|models|linearize|mixers"
    used = set(re.findall(rf"(?:^|`)scanvas ([a-z-]+(?: (?:{kinds})\b)?)", text, flags=re.M))
    known = set(COMMANDS) | {name.split()[0] for name in COMMANDS}
    assert not used - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_can_be_parsed(page):
    """Options are those of the command, with values that it takes. Abbreviations would parse, so they are looked up."""
    from scanvas.train.cli import COMMANDS, _parser, _with_defaults

    fenced = "\n".join(text for _, text in blocks(page, "", "bash", "text"))
    for line in re.findall(r"^scanvas (.*)$", re.sub(r"\\\n", " ", fenced), re.M):
        words = _with_defaults(shlex.split(line, comments=True))
        arguments = COMMANDS[" ".join(words[:2])] if " ".join(words[:2]) in COMMANDS else COMMANDS[words[0]]
        options = {flag for flags, _ in arguments[2] for flag in flags}
        assert not {word.split("=")[0] for word in words if word.startswith("--")} - options, line
        try:
            _parser().parse_args(words)
        except SystemExit as stop:
            pytest.fail(f"{line}: {stop}")

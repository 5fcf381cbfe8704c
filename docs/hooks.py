"""What the documentation is built from beside its own pages (an mkdocs hook): a page for each mixer, drawn and measured
while the site is built, the notebooks with their stored pictures, the API pages, the guide for contributors."""

from __future__ import annotations

import base64
import inspect
import io
import re
import shutil
from pathlib import Path

import nbformat
import torch
from mkdocs.structure.files import File
from PIL import Image
from sklearn.datasets import load_sample_image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scanvas.backbones.mixers import MIXERS, TokenMixer
from scanvas.kernels.gated import api as gated
from scanvas.train.flops import scan_flops
from scanvas.train.maps.dependence import DependenceLayer
from scanvas.train.maps.layers import MixerLayer
from scanvas.train.maps.overlay import mark, overlay

ROOT = Path(__file__).resolve().parents[1]
QUERIES = ((7, 9), (10, 17), (4, 25))
API = {
    "attention_maps": ("Looking inside", ["scanvas.train.maps", "scanvas.train.maps.statistics"]),
    "mixers": ("Mixers", ["scanvas.backbones.mixers"]),
    "backbones": (
        "Backbones",
        [
            f"scanvas.backbones.{name}"
            for name in ("vig", "vig_h", "mlla", "pyramid", "pyramid_models", "linear_deit", "block", "norm")
        ],
    ),
    "operations": (
        "Operations",
        [
            *(f"scanvas.kernels.{path.parent.name}" for path in sorted(ROOT.glob("kernels/*/__init__.py"))),
            "scanvas.kernels.scan_order",
            "scanvas.kernels.dispatch",
        ],
    ),
    "denoisers": (
        "Denoisers",
        [f"scanvas.diffusion.{name}" for name in ("denoiser", "u_denoiser", "presets", "convert")],
    ),
    "pipelines": ("Pipelines", ["scanvas.diffusion.pipeline_text", "scanvas.diffusion.pipeline_class"]),
    "linearize": (
        "From softmax to linear",
        [f"scanvas.diffusion.{name}" for name in ("linearize", "linear_budget", "linear_report", "adapters")],
    ),
}


def on_startup(command, dirty):
    """Before the reader of docstrings looks for the package."""
    _put_together(ROOT / "build" / "source" / "scanvas")


def on_config(config):
    """Fill in what the navigation can not know before: the mixers and the notebooks there are."""
    for entry in config.nav:
        if "Mixers" in entry:
            entry["Mixers"] = ["mixers/index.md", *({name: f"mixers/{name}.md"} for name in sorted(MIXERS))]
        elif "Notebooks" in entry:
            notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
            entry["Notebooks"] = [{_title(path): f"notebooks/{path.stem}.md"} for path in notebooks]
        elif "API" in entry:
            entry["API"] = [{title: f"api/{name}.md"} for name, (title, _) in API.items()]
    return config


def _put_together(target: Path) -> None:
    """The sub-packages lie beside the package in the repository; readers of source look for them inside it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "scanvas", target, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "backbones", "diffusion", "train", "configs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "kernels" / "__init__.py").touch()


def on_files(files, config):
    """Add the generated pages and pictures."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    torch.manual_seed(0)
    rows = []
    for name in sorted(MIXERS):
        cost = _cost(name)
        rows.append((name, cost))
        add(f"mixers/{name}.md", _mixer_page(name, cost))
        add(f"mixers/{name}.png", _picture(name))
    add("mixers/index.md", _overview(rows))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = _notebook(path)
        add(f"notebooks/{path.stem}.md", text)
        for picture, content in pictures.items():
            add(f"notebooks/{picture}", content)
    for name, (title, modules) in API.items():
        blocks = "\n\n".join(f"::: {module}" for module in modules)
        add(f"api/{name}.md", f"# {title}\n\n{blocks}\n")
    add("recipes.md", _recipes())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    add("limits.md", "# Known limits\n\n" + _plain(re.search(r"^## Limits\n(.*?)(?=^## |\Z)", readme, re.M | re.S)[1]))
    add("contributing.md", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    add("changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown, page, config, files):
    """In the repository, pages name one another from its root; here they lie side by side."""
    return markdown.replace("[docs/", "[")


def _title(path: Path) -> str:
    first = nbformat.read(path, 4).cells[0].source
    return first.splitlines()[0].lstrip("# ")


def _build(name: str, dim: int = 96, heads: int = 3) -> TokenMixer:
    return MIXERS[name](dim, heads).eval().requires_grad_(False)


def _tokens(side: tuple[int, int], dim: int = 96) -> tuple[torch.Tensor, Image.Image]:
    """A photograph as tokens: 16×16 patches, projected at random, each channel with mean 0 and variance 1."""
    photo = Image.fromarray(load_sample_image("flower.jpg")).resize((16 * side[1], 16 * side[0]))
    pixels = torch.tensor(bytearray(photo.tobytes()), dtype=torch.float32).view(*photo.size[::-1], 3) / 255
    patches = pixels.view(side[0], 16, side[1], 16, 3).permute(0, 2, 1, 3, 4).flatten(2).flatten(0, 1)
    x = patches @ torch.randn(patches.shape[1], dim, generator=torch.Generator().manual_seed(0))
    return ((x - x.mean(0)) / x.std(0))[None], photo


@torch.no_grad()
def _picture(name: str) -> bytes:
    """What three patches of a photograph look at, in a mixer with fresh weights: mean over heads."""
    side = (18, 28)
    x, photo = _tokens(side)
    mixer = _build(name)
    layer = (MixerLayer if mixer.has_map else DependenceLayer)(name, mixer, x, side, 0, "raster")
    pictures = [
        mark(overlay(photo, layer.map(query)[0].mean(0), signed=layer.signed), query, side) for query in QUERIES
    ]
    width, height = 320, round(320 * photo.height / photo.width)
    sheet = Image.new("RGB", (3 * width + 16, height), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(picture.resize((width, height)), (i * (width + 8), 0))
    buffer = io.BytesIO()
    sheet.quantize(255, Image.Quantize.MAXCOVERAGE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


@torch.no_grad()
def _cost(name: str) -> dict[int, float]:
    """GFLOPs of one layer of 192 channels and 3 heads, projections included, by number of tokens."""
    costs = {}
    for side in (16, 32, 64):
        mixer = _build(name, 192)
        x = torch.zeros(1, side * side, 192)
        scans: list[int] = []
        saved = dict(gated.IMPLEMENTATIONS)

        def counted(q, k, v, decay, reverse=None, _scans=scans, **options):
            _scans.append(scan_flops(*q.shape, v.shape[-1], directions=1 if reverse is None else 2))
            return torch.zeros_like(v), None, None

        gated.IMPLEMENTATIONS.update(dict.fromkeys(saved, counted))
        try:
            # The counter knows the matrix products of a softmax, not the fused form of it on a CPU.
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                mixer(x, (side, side))
        finally:
            gated.IMPLEMENTATIONS.update(saved)
        costs[side * side] = (counter.get_total_flops() + sum(scans)) / 1e9
    return costs


def _source(cls: type) -> str:
    return str(Path(inspect.getsourcefile(cls)).resolve().relative_to(ROOT))


def _summary(cls: type) -> str:
    """The part of the docstring before the arguments."""
    return re.split(r"\n\s*(?:Args|Raises|Returns):", inspect.cleandoc(cls.__doc__ or ""))[0].replace("``", "`").strip()


def _mixer_page(name: str, cost: dict[int, float]) -> str:
    cls = MIXERS[name]
    yes = {True: "yes", False: "no"}
    facts = [
        f"- the result depends on the order of the tokens (`needs_scan`): {yes[cls.needs_scan]}",
        f"- parameters belong to one grid (`fixed_grid`): {yes[cls.fixed_grid]}",
        f"- rows of the map are weights that sum to one (`row_stochastic`): {yes[cls.row_stochastic]}",
        f"- source: `{_source(cls)}`" + (f", paper: <{cls.paper}>" if cls.paper else ""),
    ]
    ratio = cost[4096] / cost[1024]
    example = (
        f'import scanvas, timm\n\nmixer = scanvas.create_mixer("{name}", dim=192, num_heads=3)\n'
        f'model = timm.create_model("vig_tiny_patch16_224", mixer="{name}")\n'
    )
    exec(compile(example, f"mixers/{name}.md", "exec"), {})  # what a page shows has run
    lines = [
        f"# {name}",
        _summary(cls),
        f"```python\n{example}```",
        "## What it looks at",
    ]
    lines.append(
        f"![What three patches look at]({name}.png)\n\nThree patches of a photograph and what each looks at: one "
        "layer with fresh weights, the mean of three heads. Yellow is most weight, blue is negative weight."
    )
    if not cls.has_map:
        lines.append(
            "This mixer has no attention map: its result is not a product of a matrix and values. The picture shows "
            "how much each output depends on each value, the norm of its derivative."
        )
    lines += [
        "## Cost",
        "| tokens | " + " | ".join(f"{n:,}" for n in cost) + " |\n|---|" + "---|" * len(cost) + "\n| GFLOPs | "
        + " | ".join(f"{value:.3f}" for value in cost.values()) + " |",
        f"One layer of 192 channels and 3 heads, forward, its projections included. From 1,024 to 4,096 tokens the "
        f"cost grows {ratio:.1f} times; what is linear grows 4 times, a softmax 13 times.",
        "## Facts",
        "\n".join(facts),
        "## Class",
        f"::: {cls.__module__}.{cls.__name__}\n    options:\n      show_root_heading: true\n      members: false\n"
        "      show_docstring_description: false",
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _overview(rows: list[tuple[str, dict[int, float]]]) -> str:
    lines = [
        "# Mixers",
        "A mixer is the layer that lets tokens exchange information: attention, or what takes its place. Every "
        'backbone and every denoiser takes each of them, as `mixer="name"`.',
        "| mixer | GFLOPs at 1,024 tokens | at 4,096 | order matters | paper |\n|---|---|---|---|---|\n"
        + "\n".join(
            f"| [{name}]({name}.md) | {cost[1024]:.2f} | {cost[4096]:.2f} "
            f"| {'yes' if MIXERS[name].needs_scan else 'no'} "
            f"| {_paper(MIXERS[name].paper)} |"
            for name, cost in rows
        ),
        "One layer of 192 channels and 3 heads, forward, counted while this page was built.",
        "How to add one: [Contributing](../contributing.md#the-one-file-to-change).",
    ]
    return "\n\n".join(lines) + "\n"


def _paper(address: str) -> str:
    """A link that is short enough for a table."""
    return f"[{address.rstrip('/').rpartition('/')[2]}]({address})" if address else ""


def _plain(text: str) -> str:
    """Text of a page of the repository, its links to files written as their names."""
    text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*\.md)[^)]*\)", r"`\2`", text)
    return text.split("\n[CONTRIBUTING")[0]


def _recipes() -> str:
    """What the header of each recipe says."""
    parts = ["# Recipes", "Give `--config` the name; any key can be changed on the command line, as `optim.lr=1e-3`."]
    for kind in ("classify", "denoise", "distill"):
        parts.append(f"## scanvas train {kind}")
        for path in sorted((ROOT / "configs" / kind).glob("*.yaml")):
            header = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))[0]
            text = re.sub(r"^# ?", "", header, flags=re.M).rstrip()
            parts.append(f"### {path.stem}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures."""
    parts, pictures = [], {}
    for number, cell in enumerate(nbformat.read(path, 4).cells):
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for i, output in enumerate(cell.outputs):
            data = output.get("data", {})
            kind = next((k for k in ("image/gif", "image/jpeg", "image/png") if k in data), None)
            if kind:
                name = f"{path.stem}-{number}-{i}.{kind.split('/')[1]}"
                pictures[name] = base64.b64decode(data[kind])
                parts.append(f"![]({name})")
            else:
                text = output.get("text") or data.get("text/plain") or ""
                if output.get("name") != "stderr" and text:
                    parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures

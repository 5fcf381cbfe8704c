"""``scanvas attention-map``: on a photograph that is no square; the figure, and the page in a real browser."""

import base64
import gzip
import json
import re

import chromium
import matplotlib
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import scanvas
from scanvas.train.maps.overlay import mark, overlay


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "china.jpg"
    Image.fromarray(load_sample_image("china.jpg")).save(path)
    return path


def page_data(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def rows_of(data, number):
    """``(heads, queries, keys)`` of a layer, as the page decodes them."""
    layer = data["layers"][number]
    raw = gzip.decompress(base64.b64decode(data["maps"]))[layer["offset"] :]
    shape = layer["heads"], layer["ask"][0] * layer["ask"][1], layer["keys"][0] * layer["keys"][1]
    weights = np.frombuffer(raw, np.int8, np.prod(shape)).reshape(shape).astype(np.float32)
    top = np.frombuffer(raw, "<f4", shape[0] * shape[1], offset=np.prod(shape)).reshape(*shape[:2], 1)
    return weights * top / 127


@pytest.mark.parametrize("model", ["test_vig", "test_vit", "test_vig_h"])
def test_photographs_keep_their_shape(model, photo, tmp_path, command):
    out, page = tmp_path / "map.png", tmp_path / "map.html"
    code, text, error = command(
        "attention-map", photo, "--model", model, "--query", "3,11", "--size", 320, "--out", out, "--html", page
    )
    assert code == 0, error
    assert text.splitlines()[-2:] == [str(page), str(out)]
    assert "reach (patches)" in text
    assert "the weights are random" in error
    assert Image.open(out).width > 600
    data = page_data(page)
    stride = {"test_vig": 16, "test_vit": 16, "test_vig_h": 32}[model]
    height, width = (round(n / 2 / stride) * stride for n in (427, 640))
    assert data["size"] == [width, height]
    patch = 4 if model == "test_vig_h" else 16
    assert data["layers"][0]["grid"] == [height // patch, width // patch]
    assert "http" not in page.read_text(encoding="utf-8").replace("http-equiv", "")


def test_the_page_holds_the_maps(photo, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_vig", class_token=True, global_pool="token").eval()
    maps = scanvas.attention_maps(model, photo, size=160)
    data = page_data(maps.page(tmp_path / "all.html"))
    got = rows_of(data, 2)
    expected = maps[2].rows(maps[2].image_queries)[0, :, :, 1:]
    np.testing.assert_allclose(got, expected, atol=0.51 / 127 * expected.abs().max().item())
    # with little room only some patches can be asked, and their rows are their own
    small = page_data(maps.page(tmp_path / "small.html", limit=4000))
    layer = small["layers"][2]
    assert layer["ask"][2] > 1
    step, (H, W) = layer["ask"][2], layer["grid"]
    ask = [[min(i * step + step // 2, n - 1) for i in range(m)] for m, n in zip(layer["ask"], (H, W))]
    index = torch.tensor([1 + r * W + c for r in ask[0] for c in ask[1]])
    expected = maps[2].rows(index)[0, :, :, 1:]
    np.testing.assert_allclose(rows_of(small, 2), expected, atol=0.51 / 127 * expected.abs().max().item())
    assert (tmp_path / "small.html").stat().st_size < (tmp_path / "all.html").stat().st_size


def test_teacher_and_student_in_one_figure(photo, tmp_path, command):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=24, dynamic_img_size=True)
    student, _ = scanvas.linearize(model, "hedgehog")
    shapes = {"depth": 2, "embed_dim": 24, "dynamic_img_size": True, "img_size": 64}
    scanvas.save_linearized(student, tmp_path / "student", **shapes)
    options = ["--checkpoint", tmp_path / "student", "--beside", "test_vig", "--size", 96, "--query", "1,2"]
    code, _, error = command("attention-map", photo, *options, "--out", tmp_path / "both.png")
    assert code == 0, error
    size = Image.open(tmp_path / "both.png").size
    command("attention-map", photo, *options[:2], *options[4:], "--out", tmp_path / "one.png")
    assert size[1] > 1.8 * Image.open(tmp_path / "one.png").height
    teacher, maps = (scanvas.attention_maps(m, photo, size=96, query=(1, 2)) for m in (model, student))
    figure = maps.plot(beside=teacher, heads=False)
    assert [axes.get_title(loc="left") for axes in figure.axes[::2]] == [
        "blocks.0.attn: hedgehog", "blocks.0.attn: softmax", "blocks.1.attn: hedgehog", "blocks.1.attn: softmax",
    ]  # fmt: skip
    code, _, error = command("attention-map", photo, *options[:4], "--query", "class")
    assert code == 1
    assert "no class token" in error


def test_why_a_class_on_the_command_line(photo, tmp_path, command):
    out, page = tmp_path / "why.png", tmp_path / "page.html"
    options = ["--model", "test_vig", "--size", 96, "--why", out, "--target", 7, "--html", page]
    code, text, error = command("attention-map", photo, *options)
    assert code == 0, error
    assert re.search(r"class 7: probability 0\.0.*, not the class.*better than \d of 3 random orders", text, re.S)
    assert text.splitlines()[-2:] == [str(page), str(out)]
    image = np.asarray(Image.open(out).convert("RGB")).astype(int)
    assert image.shape[1] > 1000
    assert (abs(image - (214, 78, 12)).max(-1) < 12).sum() > 100  # the curve of what is taken away
    assert "class 7: probability" in command("attention-map", photo, *options[:-2])[1]


def test_titles_cannot_break_the_page(photo, tmp_path):
    maps = scanvas.attention_maps(timm.create_model("test_vig"), photo, -1, size=64)
    text = maps.page(tmp_path / "p.html", title="</script><b>&").read_text(encoding="utf-8")
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in text
    assert text.count("</script>") == 2


@pytest.mark.skipif(chromium.BROWSER is None, reason="no Chromium")
def test_the_page_in_a_browser(photo, tmp_path):
    """Moving over a patch shows its row; a click on a small map shows that head; nothing is fetched."""
    torch.manual_seed(0)
    model = timm.create_model("test_vig").eval()
    maps = scanvas.attention_maps(model, photo, size=320)  # 13 × 20 patches
    page = maps.page(tmp_path / "page.html")
    H, W = maps.grid
    with chromium.Page(page.as_uri(), tmp_path / "profile") as browser:
        browser.wait("document.body && document.body.dataset.ready === 'yes'")
        assert browser.evaluate("document.getElementById('error').textContent") == ""
        box = browser.evaluate(
            "(({left, top, width, height}) => [left, top, width, height])"
            "(document.getElementById('canvas').getBoundingClientRect())"
        )
        assert box[2] / box[3] == pytest.approx(W / H, rel=0.01)

        def over(row, column):
            return box[0] + (column + 0.5) * box[2] / W, box[1] + (row + 0.5) * box[3] / H

        pixels = "document.getElementById('canvas').toDataURL().length"
        seen = []
        for query in ((2, 3), (9, 15)):
            browser.mouse("mouseMoved", *over(*query))
            row = maps[3].map(query)[0].mean(0)
            strongest = divmod(int(row.abs().argmax()), W)
            assert browser.evaluate("document.body.dataset.query") == "{},{}".format(*query)
            assert browser.evaluate("document.body.dataset.strongest") == "{},{}".format(*strongest)
            seen.append(browser.evaluate(pixels))
        assert seen[0] != seen[1]
        browser.evaluate("document.querySelectorAll('button.map')[2].click()")  # layer 0: mean, head 1, head 2
        assert browser.evaluate("[document.body.dataset.layer, document.body.dataset.head].join()") == (
            "blocks.0.mixer,head 2"
        )
        row = maps[0].map((9, 15))[0, 1]
        strongest = "{},{}".format(*divmod(int(row.abs().argmax()), W))
        assert browser.evaluate("document.body.dataset.strongest") == strongest
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, *over(9, 15))
        browser.mouse("mouseMoved", *over(1, 1))
        assert browser.evaluate("document.body.dataset.query") == "9,15"  # kept
        assert browser.evaluate("document.querySelectorAll('button.map').length") == 4 * 3
        assert all(url.startswith(("file:", "data:", "blob:")) for url in browser.requests)
        browser.screenshot(tmp_path / "page.png")
    assert len(np.unique(np.asarray(Image.open(tmp_path / "page.png").convert("L")))) > 50


def test_a_notebook_keeps_its_backend(photo, tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "backend", "svg")
    maps = scanvas.attention_maps(timm.create_model("test_vig"), photo, -1, size=64, query=(1, 1))
    figure = maps.plot(tmp_path / "map.png")
    assert matplotlib.rcParams["backend"] == "svg"
    assert len(figure.axes) == 6  # the photograph, the mean of the heads, both directions, two heads


def test_overlay_and_mark():
    picture = Image.new("RGB", (60, 40), (200, 200, 200))
    values = torch.zeros(4, 6)
    values[1, 2], values[3, 5] = 2.0, -2.0
    pixels = np.asarray(overlay(picture, values, signed=True)).astype(int)
    assert pixels[15, 25, 0] > pixels[15, 25, 2] + 80  # warm
    assert pixels[35, 55, 2] > pixels[35, 55, 0] + 80  # cold
    assert np.ptp(pixels[5, 5]) == 0  # grey
    marked = np.asarray(mark(picture, (1, 2), (4, 6)))
    assert (marked[10, 20:30] == 255).all()
    assert (np.asarray(mark(picture, "mean", (4, 6))) == 200).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "test_vig", "--query", "99,0"], r"within 13×20 patches for blocks.0.mixer, got \(99, 0\)"),
        (["--model", "test_vig", "--query", "a"], "--query must be ROW,COLUMN in patches"),
        (["--model", "test_vig", "--layers", "7"], "layers: 7 is none of the 4 that ran"),
        (["--model", "test_vig", "--out", "map.txt"], "--out must end in .png"),
        (["--model", "test_vgi"], "'test_vgi' is no model of timm or scanvas; did you mean"),
        (["--model", "test_vig", "--target", "3"], "--target is for --why"),
        (["--model", "test_vig", "--why", "why.png", "--target", "1000"], "target must be a class from 0 to 999"),
        ([], "give either --model.*or --checkpoint"),
        (["--model", "test_convnext"], "no self-attention of ConvNeXt could be recorded"),
    ],
)
def test_what_cannot_be_shown_is_said(options, message, photo, command):
    code, _, error = command("attention-map", photo, "--size", 320, *options)
    assert code == 1
    assert re.search(message, error), error

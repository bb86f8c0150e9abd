"""The page of `quantize --html`: every figure and matrix of the document, any document that can be, in a browser."""

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.observe.quality_page.quality_page import page
from tests.compress.test_formats import SHAPES
from tests.compress.test_quantize import folder as folder  # a Hugging Face directory, and a text beside it
from tests.compress.test_quantize import words
from tests.planner.browser import CHROMIUM, Browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


def layer(name: str, error: float | None, weight: float = 0.05) -> dict[str, Any]:
    return {
        "name": name, "scheme": "int4-rtn", "bytes": 400, "weight_error": weight, "output_error": error,
        "outliers": 0.0, "uncalibrated": 0,
    }  # fmt: skip


def document(**changed: Any) -> dict[str, Any]:
    kinds = ("attention.q", "attention.o", "mlp.down")
    layers = [layer(f"layers.{n}.{kind}.weight", 1e-3 * (n + 1)) for n in range(3) for kind in kinds]
    return {
        "scheme": "int4-rtn", "format": "meshwright", "out": "/somewhere/q<b>", "bytes": 5000, "predicted_bytes": 5000,
        "bytes_before": 16_000, "kl": 0.01, "kl_error": 1e-4, "kl_p99": 0.04, "top1": 0.93, "perplexity_before": 4.0,
        "perplexity_after": 4.1, "tokens": 512, "kl_quantiles": [[0.0, 0.0], [0.5, 0.01], [1.0, 0.5]], "max_kl": 0.2,
        "passed": True, "outlier_share": 0.0, "layers": layers, "skipped": [], "calibration_tokens": 0,
        "calibration_text": "", "resumed_blocks": 0, "budget_bytes": None, "bits": {}, "note": "", **changed,
    }  # fmt: skip


def titles(text: str) -> list[str]:
    return [unescape(one) for one in re.findall(r"<title>(.*?)</title>", text)]


def test_every_figure_and_matrix_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "quality.html"
    assert main(words(folder, "int4-rtn", "--json", "--html", str(out))) == 0
    found, text = json.loads(capsys.readouterr().out), out.read_text()
    assert text == page(found) and "src=" not in text and "<script" not in text and str(folder) not in text
    for one in found["layers"]:
        begin = f"{one['name']}: output error {one['output_error']:.3g},"
        assert sum(said.startswith(begin) for said in titles(text)) == 1
    for figure in (f"{found['kl']:.3g}", f"{100 * found['top1']:.1f}%", f"{found['perplexity_after']:.4g}"):
        assert f">{figure}</b>" in text
    shares, nats = zip(*found["kl_quantiles"], strict=True)
    assert list(shares) == sorted(shares) and list(nats) == sorted(nats) and (shares[0], shares[-1]) == (0, 1)
    assert dict(found["kl_quantiles"])[0.99] == found["kl_p99"]
    assert len(re.findall("<circle", text)) == len(shares)
    assert main(words(folder, "int4-rtn", "--html", str(folder))) == 2
    assert "is a folder: name a file, as --html" in capsys.readouterr().err


def test_the_worst_is_the_darkest_and_the_first() -> None:
    found = document()
    found["layers"][4]["output_error"] = 0.5
    text = page(found)
    cells = re.findall(r"class='cell'.*?fill-opacity:([\d.]+)'><title>(.*?):", text)
    assert len(cells) == 9 and max(cells)[1] == "layers.1.attention.o.weight" and max(cells)[0] == "1.00"
    assert re.search(r"class='worst'.*?<title>(.*?):", text)[1] == "layers.1.attention.o.weight"  # type: ignore[index]


@pytest.mark.parametrize(
    "changed",
    [
        dict.fromkeys(
            ("kl", "kl_error", "kl_p99", "top1", "perplexity_before", "perplexity_after", "tokens", "kl_quantiles")
        ),
        {"kl": None, "kl_quantiles": [[0.0, None], [1.0, None]], "perplexity_after": None, "passed": False},
        {"kl": 0.0, "kl_quantiles": [[0.0, 0.0], [1.0, 0.0]], "max_kl": 0.0},
        {"kl_quantiles": [[0.0, -1e-9], [1.0, 3e5]]},
        {"layers": [layer("layers.0.mlp.experts.up", None), layer("a<b>", None, 0.0)]},
        {"layers": [layer("layers.7.mlp.up.weight", 0.0)], "skipped": ["layers.0.mlp.up.weight"], "note": "<i>"},
        {"layers": [layer(f"layers.{n}.mlp.up.weight", 1e-5) for n in range(128)]},
        {"predicted_bytes": 4999, "budget_bytes": 6000, "bits": {"4": 7, "8": 2}, "calibration_tokens": 9},
    ],
)  # fmt: skip
def test_any_document_has_a_page(changed: dict[str, Any]) -> None:
    found = document(**changed)
    text = page(found)
    assert "nan" not in text and "<b>.weight" not in text and "<i>" not in text and "q&lt;b&gt;" in text
    assert len(re.findall("class='cell'", text)) == len(found["layers"])
    for number in re.findall(r"(?: x| y|x1|y1|cx|cy|width|height)='([^']*)'", text):
        assert -1 <= float(number) < 10_000


@in_browser
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.long
def test_nothing_is_cut_or_asked_for(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "quality.html"
    names = list(SHAPES)  # as long as names are
    layers = [layer(f"layers.{n}.attention.latent_up_of_{name}.weight", 1e-3) for n in range(90) for name in names]
    file.write_text(page(document(layers=layers)), encoding="utf-8")
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(width, 1000, dark=dark)
    browser.open(file)
    assert browser.complaints == [] and [one for one in browser.requested if not one.startswith("file:")] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width

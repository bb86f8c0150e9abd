"""The page of `quantize --html`: every figure and matrix of the document, any document that can be, in a browser."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from meshwright.interface.answers.answer import write_page
from meshwright.model.quantized_weights import quantizable
from meshwright.spec import presets
from meshwright.verbs.main import main
from meshwright.verbs.quantize.page import page
from tests.compress.test_quantize import folder as folder  # a Hugging Face directory, and a text beside it
from tests.compress.test_quantize import words
from tests.planner.browser import CHROMIUM, Browser

CUT = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const box = svg.getBoundingClientRect(), all = [...svg.querySelectorAll("text")];
  const places = all.map((one) => one.getBoundingClientRect());
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  const bad = (a, n) => a.left < box.left - 1 || a.right > box.right + 1 || places.some((b, m) => m < n && over(a, b));
  return all.filter((_, n) => bad(places[n], n)).map((one) => one.textContent);
})"""
"""Words of pictures that reach out of them, or over others."""
SIDEWAYS = "[...document.querySelectorAll('.scroll:has(svg)')].filter((e) => e.scrollWidth > e.clientWidth).length"
"""Pictures that only scrolling shows whole."""
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


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
        "calibration_text": "", "resumed_blocks": 0, "budget_bytes": None, "bits": {}, "note": "", "histograms": [],
        **changed,
    }  # fmt: skip


def matrices(model: str) -> set[str]:
    return set(quantizable(replace(presets.model(model), layers=4)))


def titles(text: str) -> list[str]:
    return [unescape(title) for title in re.findall(r"<title>(.*?)</title>", text)]


def test_every_figure_and_matrix_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "quality.html"
    assert main(words(folder, "int4-rtn", "--json", "--html", str(out))) == 0
    report, text = json.loads(capsys.readouterr().out), out.read_text()
    assert text == page(report) and "src=" not in text and "<script" not in text and str(folder) not in text
    for layer_row in report["layers"]:
        begin = f"{layer_row['name']}: output error {layer_row['output_error']:.3g},"
        assert sum(title.startswith(begin) for title in titles(text)) == 1
    for figure in (f"{report['kl']:.3g}", f"{100 * report['top1']:.1f}%", f"{report['perplexity_after']:.4g}"):
        assert f">{figure}</b>" in text
    shares, nats = zip(*report["kl_quantiles"], strict=True)
    assert list(shares) == sorted(shares) and list(nats) == sorted(nats) and (shares[0], shares[-1]) == (0, 1)
    assert dict(report["kl_quantiles"])[0.99] == report["kl_p99"]
    assert len(re.findall("<circle", text)) == len(shares)
    assert main(words(folder, "int4-rtn", "--html", str(folder))) == 2
    assert "is a folder: name a file, as --html" in capsys.readouterr().err


def test_the_worst_is_the_darkest_and_the_first() -> None:
    report = document()
    report["layers"][4]["output_error"] = 0.5
    text = page(report)
    cells = re.findall(r"class='cell output'.*?fill-opacity:([\d.]+)'><title>(.*?):", text)
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
        {"kl": 0.0, "kl_quantiles": [[0.0, 0.0], [1.0, 0.0]], "max_kl": 0.1},
        {"kl": 0.01, "kl_quantiles": [[0.0, 0.01], [1.0, 0.01]], "max_kl": 0.01},
        {"max_kl": None},
        {"kl_quantiles": [[0.0, -1e-9], [1.0, 3e5]]},
        {"layers": [layer("layers.0.mlp.experts.up", None), layer("a<b>", None, 0.0)]},
        {"layers": [layer("layers.7.mlp.up.weight", 0.0)], "skipped": ["layers.0.mlp.up.weight"], "note": "<i>"},
        {"layers": [layer(f"layers.{n}.mlp.up.weight", 1e-5) for n in range(128)]},
        {"predicted_bytes": 4999, "budget_bytes": 6000, "bits": {"4": 7, "8": 2}, "calibration_tokens": 9},
    ],
)  # fmt: skip
def test_any_document_has_a_page(changed: dict[str, Any]) -> None:
    report = document(**changed)
    text = page(report)
    assert "nan" not in text and "<b>.weight" not in text and "<i>" not in text and "q&lt;b&gt;" in text
    assert len(re.findall("class='cell ", text)) == len(report["layers"])
    for number in re.findall(r"(?: x| y|x1|y1|cx|cy|width|height)='([^']*)'", text):
        assert -1 <= float(number) < 10_000


def test_what_is_not_finite_is_at_the_top() -> None:
    report = document(kl=None, kl_quantiles=[[0.0, 1e-4], [0.5, 1e-3], [1.0, None]], passed=False)
    heights = [float(height) for height in re.findall(r"cy='([\d.]+)'", page(report))]
    assert heights == sorted(heights, reverse=True) and "100.0% of tokens: not finite" in titles(page(report))


def test_errors_of_outputs_and_of_weights_are_not_compared() -> None:
    """GPTQ's weights move more than round-to-nearest's, and its outputs less."""
    experts = [layer(f"layers.{n}.mlp.experts.up", None, 0.1 + n / 10) for n in range(2)]
    text = page(
        document(layers=[*experts, *(layer(f"layers.{n}.attention.q.weight", 1e-4 + n / 1e4) for n in range(2))])
    )
    cells = re.findall(r"class='cell (\w+)'.*?fill-opacity:([\d.]+)", text)
    assert cells == [("weight", "0.08"), ("weight", "1.00"), ("output", "0.08"), ("output", "1.00")]
    assert "weight error, from 1.0e-01 (faint) to 2.0e-01 (strong), where outputs were not compared" in text


def test_nearly_equal_errors_look_so() -> None:
    text = page(document(layers=[layer(f"layers.{n}.mlp.up.weight", 1e-3 * (1 + n / 100)) for n in range(2)]))
    assert min(map(float, re.findall(r"fill-opacity:([\d.]+)", text))) > 0.9


def test_experts_that_the_text_hardly_reached_are_named() -> None:
    text = page(document(layers=[{**layer("layers.0.mlp.experts.up", None), "uncalibrated": 3}]))
    assert "3 experts of layers.0.mlp.experts.up, which the text hardly reached" in text


def test_the_page_is_no_danger_to_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a name that is no text, nor the folder's own, nor a disk that is full."""
    asked = [*words(folder, "int8", "--max-kl", "inf"), "--html"]
    assert main([*asked, str(folder / "quality.html"), "-o", str(folder / "q.html")]) == 0
    assert "limit inf" in capsys.readouterr().out and "no limit" in (folder / "quality.html").read_text()
    assert main([*asked, str(folder / "new.html"), "-o", f"{folder}/../{folder.name}/new.html"]) == 2
    assert "is the same file as --out: name another" in capsys.readouterr().err and not (folder / "new.html").exists()
    write_page(folder / "quality.html", page(document(out=os.fsdecode(b"q\xff"))))
    assert "Quantized: q?<" in (folder / "quality.html").read_text()

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.interface.answers.answer.replace_file", full)
    assert main([*asked, str(folder / "quality.html"), "--json"]) == 2
    printed = capsys.readouterr()
    assert (
        json.loads(printed.out)["scheme"] == "int8" and "quality.html: No space left on device; fix that" in printed.err
    )


@in_browser
@pytest.mark.parametrize("width", [400, 500, 1400])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.long
def test_nothing_is_cut_or_asked_for(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "quality.html"
    kinds = {re.sub(r"^layers\.\d+\.", "", name) for model in presets.model_names() for name in matrices(model)}
    layers = [layer(f"layers.{n}.{kind}", 1e-3) for n in range(90) for kind in sorted(kinds)]
    file.write_text(page(document(layers=layers, kl=1.23456e-4, max_kl=1.2e-4)), encoding="utf-8")
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(width, 1000, dark=dark)
    browser.open(file)
    assert browser.complaints == [] and [url for url in browser.requested if not url.startswith("file:")] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(CUT) == []
    if width >= 500:
        assert browser.evaluate(SIDEWAYS) == 0
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width

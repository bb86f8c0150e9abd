"""The report in a real browser: offline, every figure of the folders in it, runs overlaid, legible at 400 pixels."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.compare.finished_run import open_run
from meshwright.spec import Cluster
from meshwright.verbs.report.page import POINTS, curves, page
from tests.observe.folders import ALONE, PLAN, dry_run_json, metric_rows, profile_json, write_run
from tests.planner.browser import CHROMIUM, Browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """full: everything there; both: a second run over it, of one process; bare: metrics and no more."""
    folder = tmp_path_factory.mktemp("reports")
    full = write_run(folder / "full", dryrun=dry_run_json(PLAN), profile=profile_json(PLAN))
    alone = write_run(folder / "alone", replace(ALONE, cluster=Cluster()), loss=6.0)
    twin = write_run(folder / "twin", dryrun=dry_run_json(PLAN), profile=profile_json(PLAN))
    bare = write_run(folder / "<b>bare", ALONE, steps=1, ledger=None)
    profile_only = write_run(folder / "profile", PLAN, steps=0, profile=profile_json(PLAN), ledger=None)
    files = {}
    for name, runs in (
        ("full", [full]), ("both", [full, alone]), ("twins", [full, twin]),
        ("bare", [bare]), ("profile", [profile_only]), ("alone", [alone]),
    ):  # fmt: skip
        files[name] = folder / f"{name} page.html"
        files[name].write_text(page([open_run(run) for run in runs]), encoding="utf-8")
    return files


def opened(browser: Browser, path: Path, width: int = 1200, *, dark: bool = False) -> Browser:
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(width, 900, dark=dark)
    browser.open(path)
    return browser


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def count(browser: Browser, selector: str) -> int:
    return int(browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))


@in_browser
def test_everything_is_there_offline(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    assert browser.complaints == []
    assert [address for address in browser.requested if not address.startswith(("file:", "data:"))] == []
    assert count(browser, "[data-curve]") == 5 and count(browser, "[data-curve='loss'] circle") == 4
    assert count(browser, "#bars g.held") == 6 and count(browser, "[data-moments]") == 2
    assert count(browser, "[data-boxes]") == 2 and count(browser, "[data-sent]") == 3 * 5
    assert text(browser, "#verdict").startswith("All ")
    for word in ("llama", "small", "1f1b", "tp=2", "pp=2", "4 processes"):
        assert word in text(browser, "body"), word
    assert "schedule: 1f1b" in text(browser, "#yaml") and "NVIDIA H100" in text(browser, "#environment")


@in_browser
def test_held_out_text_of_a_distilled_run_is_beside_its_cross_entropy(browser: Browser, tmp_path: Path) -> None:
    """Its loss is a divergence, of another size."""
    run = write_run(tmp_path / "runs" / "distilled", ALONE, ledger=None)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("kind") != "eval":
            row |= {"cross_entropy": row["loss"], "loss": row["loss"] / 100}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "page.html").write_text(page([open_run(run)]), encoding="utf-8")
    opened(browser, tmp_path / "page.html")
    assert browser.complaints == []
    assert count(browser, "[data-curve='loss'] circle") == 0
    inside = browser.evaluate(
        "[...document.querySelectorAll(\"[data-curve='cross_entropy'] circle\")].map((dot) =>"
        " +dot.getAttribute('cy') >= 8 && +dot.getAttribute('cy') <= 168)"
    )
    assert inside == [True] * 4
    assert "meshwright compare runs/distilled makes it" in text(browser, "#moments")


@in_browser
def test_bars_are_as_long_as_the_bytes(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    widths = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('rect.part')].map((part) =>"
        " [part.dataset.bar, Number(part.getAttribute('width'))]))"
    )
    held = {held["kind"]: held["bytes"] for held in dry_run_json(PLAN)["ranks"][0]["memory"]}
    assert widths["0 dryrun parameters"] == pytest.approx(widths["0 planned parameters"])
    ratio = widths["0 measured activations"] / widths["0 measured parameters"]
    assert ratio == pytest.approx(held["activations"] / held["parameters"], rel=1e-6)


@in_browser
def test_the_step_as_executed_is_the_last_one_profiled(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    executed = browser.evaluate("RUNS[0].timelines.executed")
    assert [len(spans) for spans in executed["spans"]] == [9, 9]  # four micro-batches, F and BW, and the optimizer
    assert executed["spans"][0][0] == ["F", 0, 0, 0, pytest.approx(0.01)]
    assert executed["total"] == pytest.approx(0.085)
    planned = browser.evaluate("RUNS[0].timelines.planned")
    assert planned["unit"] == "seconds" and planned["bubble"] > 0
    order = [[span[:3] for span in spans if span[0] in ("F", "BW")] for spans in planned["spans"]]
    assert order == [[span[:3] for span in spans if span[0] != "optimizer"] for spans in executed["spans"]]
    words = browser.evaluate("boxWords(document.querySelector('[data-boxes=executed]'), 48, 5)")
    assert "forward pass" in words and "micro-batch 0, stage 0, rank 0" in words


@in_browser
def test_runs_are_overlaid_and_chosen(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["both"])
    assert count(browser, "[data-curve='loss'] g[data-run]") == 2 and count(browser, "[data-choose]") == 2
    assert "4 processes" in text(browser, "#subject")
    browser.evaluate("document.querySelector('[data-choose=\"1\"]').click()")
    assert "one process" in text(browser, "#subject")
    assert "it sends nothing" in text(browser, "#sent")
    assert "meshwright profile" in text(browser, "#boxes") and "meshwright compare" in text(browser, "#moments")
    assert "for H100-SXM-80" in text(browser, "#about"), "the plan names no device, and the run was on this one"
    for along in ("tokens", "seconds", "step"):
        browser.evaluate(
            f"(() => {{ const s = document.getElementById('along'); s.value = '{along}';"
            " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        assert count(browser, "[data-curve='loss'] path.line") == 4
    assert browser.complaints == []


@in_browser
def test_what_is_not_there_is_said(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["bare"])
    assert text(browser, "#title") == "<b>bare" and count(browser, "#title b") == 0
    assert "no ledger.json" in text(browser, "#environment")
    opened(browser, pages["profile"])
    assert "a profile only" in text(browser, "#curves") and count(browser, "[data-boxes]") == 2
    assert browser.complaints == []


@in_browser
def test_the_pointer_is_answered(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["both"])
    browser.evaluate("document.querySelector('[data-curve=loss]').scrollIntoView({block: 'center'})")
    box = browser.evaluate("document.querySelector('[data-curve=loss]').getBoundingClientRect().toJSON()")
    browser.point(box["x"] + box["width"] / 2, box["y"] + 60)
    shown = text(browser, "#training .help")
    assert "full, step" in shown and "alone, step" in shown
    browser.evaluate("document.querySelector('[data-curve=loss]').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    assert "full, step 2" in text(browser, "#training .help")
    browser.press("Tab")  # so that focus is shown
    browser.evaluate("document.querySelector('#rows [data-explain]').focus()")
    assert len(text(browser, "#table .help")) > 20 and browser.complaints == []


@in_browser
def test_keys_and_taps_reach_every_chart(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    for chart, section, words in (
        ("[data-moments=measured]", "#memory", "parameters"), ("[data-boxes=executed]", "#pipeline", "micro-batch 0"),
    ):  # fmt: skip
        browser.evaluate(f"document.querySelector('{chart}').focus()")
        browser.press("ArrowRight")
        assert words in text(browser, f"{section} .help")
    x, y = browser.evaluate(
        "(() => { const one = document.querySelector('[data-bar*=activations]'); one.scrollIntoView({block: 'center'});"
        " const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + 5]; })()"
    )
    browser.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert text(browser, "#memory .help").startswith("Rank 0")
    assert browser.complaints == []


@in_browser
def test_waiting_is_drawn_as_waiting(browser: Browser, pages: dict[str, Path]) -> None:
    """Both ranks of the profile begin at once, but the second one's first pass reads what the first one's makes."""
    opened(browser, pages["full"])
    first, second = browser.evaluate("RUNS[0].timelines.executed.spans")
    assert second[0][:3] == ["F", 1, 0] and second[0][5] == pytest.approx(0.01)
    assert all(len(span) == 5 for span in first if span[0] == "F")
    pixel = (
        "(() => { const one = document.querySelector('[data-boxes=executed]'), pen = one.getContext('2d');"
        " const left = 44, scale = (one.clientWidth - left) / Number(one.dataset.most);"
        " const at = (s, row) => [...pen.getImageData(left + s * scale, row * 26 + 5, 1, 1).data].join();"
        " return [at(0.002, 0), at(0.002, 1)]; })()"
    )
    computing, waiting = browser.evaluate(pixel)
    assert computing != waiting
    words = browser.evaluate("spanWords(RUNS[0].timelines.executed, 1, RUNS[0].timelines.executed.spans[1][0])")
    assert "10.0 ms of it waiting" in words


@in_browser
def test_coinciding_runs_are_said_and_runs_stand_side_by_side(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["twins"])
    assert "full and twin coincide" in text(browser, "#coincide").replace("twin and full", "full and twin")
    assert count(browser, "[data-run='1'] path[stroke-dasharray]") >= 2
    rows = browser.evaluate("[...document.querySelectorAll('#side tr')].map((row) => row.textContent)")
    assert len(rows) == 3 and "held out" in rows[0] and "full" in rows[1] and "twin" in rows[2]
    opened(browser, pages["both"])
    assert text(browser, "#coincide") == "" and count(browser, "[data-run='1'] path[stroke-dasharray]") == 0
    opened(browser, pages["full"])
    assert browser.evaluate("document.getElementById('compared').hidden")


@in_browser
def test_cards_say_where_they_are_from_and_rows_have_one_unit(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    titles = browser.evaluate("[...document.querySelectorAll('#tiles h2')].map((title) => title.textContent)")
    assert len(titles) == 2 and titles[0].startswith("Training: full")
    last = browser.evaluate("RUNS[0].curves.loss.at(-1)")
    assert f"{last:.4g}" in text(browser, "#tiles .tile b")
    question = "[101.4 * 2 ** 20, GIB / 10 * 99].map(formatterOf([101.4 * 2 ** 20, GIB * 9.9], 'bytes'))"
    assert browser.evaluate(question) == ["0.099 GiB", "9.9 GiB"]
    units = browser.evaluate(
        "[...document.querySelectorAll('#rows tbody tr')].map((row) => [...row.querySelectorAll('td')].map("
        "(cell) => cell.firstChild?.textContent.match(/ ([GMK]iB|B|h|min|s|ms|us)$/)?.[1]).filter(Boolean))"
    )
    assert len(units) > 10 and all(len(set(of_row)) <= 1 for of_row in units)
    opened(browser, pages["alone"])
    dashes = browser.evaluate(
        "[...document.querySelectorAll('#rows tbody tr:has(td)')].every((row) =>"
        " [...row.querySelectorAll('td')].some((cell) => !cell.matches('.unknown')))"
    )
    assert dashes


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 900, 1300, 1400])
@pytest.mark.long
def test_it_fits_every_width_in_light_and_dark(
    browser: Browser, pages: dict[str, Path], width: int, dark: bool
) -> None:
    opened(browser, pages["both"], width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelector('#rows').scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) > 384
    assert light != dark
    small = (
        "[...document.querySelectorAll('svg text')].filter((t) => t.getBoundingClientRect().right > innerWidth).length"
    )
    assert browser.evaluate(small) == 0
    cut = "[...document.querySelectorAll('.tile b, .tile small')].filter((t) => t.scrollWidth > t.clientWidth).length"
    assert browser.evaluate(cut) == 0
    assert len(browser.picture()) > 30_000 and browser.complaints == []


def test_a_page_is_one_small_file(pages: dict[str, Path]) -> None:
    for path in pages.values():
        content = path.read_text(encoding="utf-8")
        assert len(content) < 200_000
        assert not any(word in content for word in ("https:", "http:", "@import", "url(", "/*DATA*/", "/*SCRIPT*/"))
        assert content.count("<script") == 2 and str(path.parent) not in content


def test_many_steps_become_few_points_and_no_spike_is_lost() -> None:
    steps: list[dict[str, Any]] = [row for row in metric_rows(9000) if "kind" not in row]
    steps[4321]["loss"], steps[5000]["loss"] = 99.0, float("nan")
    series = curves(steps)
    assert {len(values) for values in series.values()} == {POINTS}
    assert max(value for value in series["loss_high"] if value is not None) == 99.0
    assert series["step"][-1] == 9000 and all(value is not None for value in series["loss"])
    few = curves(steps[4999:5002])
    assert few["loss"][1] is None and "loss_low" not in few and few["smooth"][1] is not None
    assert curves([])["step"] == []


@in_browser
def test_samples_of_any_step_are_shown(browser: Browser, tmp_path: Path) -> None:
    """The last ones first; text of a model is no HTML."""
    run = write_run(tmp_path / "run", ALONE, steps=2, ledger=None)
    lines = [
        {"step": step, "samples": [{"prompt": "say ", "text": f"<b>{step}</b>", "held_out": "it"}, "no sample"]}
        for step in range(1, 21)
    ]
    (run / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    file = tmp_path / "page.html"
    file.write_text(page([open_run(run)]), encoding="utf-8")
    opened(browser, file, 400)
    assert browser.complaints == [] and count(browser, ".answer") == 1 and count(browser, "#answers b") == 0
    assert text(browser, ".answer pre") == "say <b>20</b>" and count(browser, "#sample-step option") == 12
    browser.evaluate(
        "(() => { const choice = document.getElementById('sample-step'); choice.value = '15';"
        "choice.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    assert text(browser, ".answer pre") == "say <b>15</b>"
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400


@in_browser
def test_without_samples_there_is_no_section(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    assert browser.evaluate("document.getElementById('samples').hidden") is True

"""The explorer's page in a real browser: it opens from disk without a network, its sliders move its bars, keys work."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.explorer.explorer_page import page
from meshwright.planner.search.bounds import families
from meshwright.planner.search.landscape import Front, Point, counted, landscape, look
from meshwright.planner.search.ranking import usable_bytes
from meshwright.planner.step.predict import estimator, predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.replay import replay
from meshwright.spec.schedule import schedule
from tests.planner.browser import CHROMIUM, Browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
SMALL = Plan(
    model=presets.model("llama-3.2-1b"),
    recipe=Recipe(sequence=4096, global_batch=16, precision="bf16"),
    cluster=presets.cluster("h100x8", 1),
)
LARGE = replace(SMALL, model=presets.model("llama-3.1-405b"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("explorer")
    found = {}
    for name, plan in (("small", SMALL), ("large", LARGE)):
        found[name] = folder / f"{name} page.html"
        found[name].write_text(page(plan), encoding="utf-8")
    return found


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Browser:
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(1200, 900)
    browser.open(pages["small"])
    return browser


def turn(browser: Browser, knob: str, value: object) -> None:
    """As a hand would: the control's own value, then its event."""
    browser.evaluate(
        f"(() => {{ const knob = KNOBS.find((one) => one.name === {json.dumps(knob)});"
        " const input = knob.box.querySelector('input, select');"
        f" const value = {json.dumps(value)};"
        " if (knob.check) input.checked = value;"
        " else input.value = knob.options ? value : knob.values(state.layout).indexOf(value);"
        " input.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def bars(browser: Browser) -> list[list[float]]:
    """Heights of the parts of each bar."""
    found = browser.evaluate(
        "[...document.querySelectorAll('#bars g.rank')].map((rank) =>"
        " [...rank.querySelectorAll('rect.part')].map((part) => Number(part.getAttribute('height'))))"
    )
    assert isinstance(found, list)
    return found


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


@in_browser
def test_it_opens_offline_and_says_nothing_to_the_console(opened: Browser) -> None:
    assert opened.complaints == []
    assert [address for address in opened.requested if not address.startswith(("file:", "data:"))] == []
    assert text(opened, "#verdict").startswith("Fits:")
    assert len(bars(opened)) == opened.evaluate("state.layout.pp")
    assert "llama-3.2-1b" in str(opened.evaluate("document.title"))


@in_browser
def test_sliders_change_the_bars_to_what_python_predicts(opened: Browser) -> None:
    before = bars(opened)
    for knob, value in (
        ("tp", 2), ("sp", True), ("pp", 2), ("schedule", "interleaved"), ("vp", 4), ("micro_batch", 2), ("zero", 1),
        ("dp_shard", 2), ("recompute", "selective"), ("sequence", 8192), ("global_batch", 32),
    ):  # fmt: skip
        turn(opened, knob, value)
    assert opened.evaluate("wrong()") == []
    layout = Layout(
        tp=2, sp=True, pp=2, schedule="interleaved", vp=4, micro_batch=2, zero=1, dp_shard=2, recompute="selective"
    )
    found = predict(replace(SMALL, layout=layout, recipe=replace(SMALL.recipe, sequence=8192, global_batch=32)))
    assert opened.evaluate("ranks.map((rank) => rank.total)") == pytest.approx(
        [one.total_bytes for one in found.memory], rel=1e-6
    )
    after = bars(opened)
    assert len(after) == 2 and after != before
    assert all(height >= 0 for rank in after for height in rank)
    high, low = (sum(rank) for rank in after)
    assert high / low == pytest.approx(found.memory[0].total_bytes / found.memory[1].total_bytes, rel=1e-4)
    assert opened.complaints == []


@in_browser
def test_the_illegal_is_said_in_words(opened: Browser) -> None:
    for knob, value, said in (
        ("pp", 4, ""), ("schedule", "zb-v", "puts both ends of the model"), ("schedule", "1f1b", ""),
        ("tp", 8, "does not divide the 8 devices"), ("pp", 1, "shards over dp_shard"), ("zero", 0, ""),
        ("micro_batch", 32, ""), ("micro_batch", 3, "is not micro_batch=3 x accumulation"),
    ):  # fmt: skip
        turn(opened, knob, value)
        verdict = text(opened, "#verdict")
        assert said in verdict
        assert verdict.startswith("Not legal.") == bool(said), (knob, value, verdict)
    assert opened.complaints == []


@in_browser
def test_keys_and_pointer_reach_everything(opened: Browser) -> None:
    opened.evaluate("document.getElementById('knob-sequence').focus()")
    opened.press("ArrowRight")
    assert opened.evaluate("state.recipe.sequence") == 8192
    assert "not on this map" in text(opened, "#map-words")
    opened.press("Tab")
    assert "Global batch" in text(opened, "#tip")
    opened.press("Escape")
    assert opened.evaluate("document.getElementById('tip').hidden")
    opened.evaluate("document.getElementById('points').focus()")
    opened.press("ArrowLeft")
    assert "Pareto front" in text(opened, "#tip")
    opened.press("Enter")
    assert opened.evaluate("layoutOption(state.layout) === layoutOption(pointed.layout)")
    assert opened.evaluate("state.recipe.sequence") == 4096
    assert opened.complaints == []


@in_browser
def test_a_click_on_the_map_sets_the_sliders(opened: Browser) -> None:
    opened.evaluate("document.getElementById('points').scrollIntoView({block: 'center'})")
    spot = opened.evaluate(
        "(() => { const box = document.getElementById('points').getBoundingClientRect(), point = FRONT.at(-1);"
        " return [box.left + scale.x(point.peak), box.top + scale.y(point.step)]; })()"
    )
    opened.point(*spot, click=True)
    assert "a step, MFU" in text(opened, "#tip") and "compute" in text(opened, "#tip")
    assert opened.evaluate("layoutOption(state.layout)") == opened.evaluate("layoutOption(pointed.layout)")
    assert opened.evaluate("Math.abs(pointed.peak / FRONT.at(-1).peak - 1)") < 0.1
    assert text(opened, "#dp") == str(opened.evaluate("String(dpOf(state.layout))")) or "x" in text(opened, "#dp")


@in_browser
def test_timelines_follow_the_layout(opened: Browser) -> None:
    turn(opened, "zero", 0)
    turn(opened, "micro_batch", 1)
    turn(opened, "pp", 4)
    opened.evaluate("drawTimelines()")
    assert opened.evaluate("[shape.p, shape.m]") == [4, 8]
    for name, v in (("afab", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)):
        bubble = replay(schedule(name, 4, 8, v)).bubble
        shown = text(opened, f"[data-schedule='{name}'] h3").partition("bubble ")[2].partition(" %")[0]
        assert float(shown) == pytest.approx(100 * bubble, abs=0.051)
    drawn = "document.querySelector(\"[data-schedule='1f1b'] canvas\").clientWidth"
    narrow = opened.evaluate(drawn)
    turn_wide = "document.getElementById('knob-timeline_wide').click(); drawTimelines()"
    opened.evaluate(f"shape.m = 64; {turn_wide}")
    assert opened.evaluate(drawn) > 2 * narrow
    assert opened.complaints == []


@in_browser
def test_every_name_explains_itself(opened: Browser) -> None:
    asked = opened.evaluate("[...document.querySelectorAll('[data-explain]')].map((one) => one.dataset.explain)")
    known = opened.evaluate("Object.entries(EXPLAIN).map(([key, words]) => [key, words.length, words[1].length])")
    assert len(set(asked)) >= 30
    assert set(asked) <= {key for key, *_ in known}
    assert all(parts == 4 and length > 20 for _, parts, length in known)


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_it_fits_every_width_in_light_and_dark(opened: Browser, width: int, dark: bool) -> None:
    opened.look(width, 900, dark=dark)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    paper = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) > 384
    assert light != dark
    pixel = "[...document.querySelector('[data-schedule] canvas').getContext('2d').getImageData(3, 3, 1, 1).data]"
    forward = str(opened.evaluate("css('forward')")).removeprefix("#")
    assert opened.evaluate(pixel)[:3] == [int(forward[n : n + 2], 16) for n in (0, 2, 4)]
    assert len(opened.picture()) > 30_000
    assert opened.complaints == []


@in_browser
def test_where_nothing_fits_all_points_are_out_of_memory(browser: Browser, pages: dict[str, Path]) -> None:
    browser.complaints.clear()
    browser.open(pages["large"])
    assert text(browser, "#verdict").startswith("Does not fit:")
    assert "None of them fits." in text(browser, "#map-words")
    assert browser.evaluate("POINTS.every((point) => point.peak > capacity) && POINTS.length > 100")
    assert browser.complaints == []


def test_a_page_is_one_small_file(pages: dict[str, Path]) -> None:
    for path in pages.values():
        content = path.read_text(encoding="utf-8")
        assert len(content) < 2_000_000
        assert not any(word in content for word in ("https:", "http:", "@import", "url(", "/*DATA*/", "/*SCRIPT*/"))
        assert content.count("<script") == 2


@pytest.mark.parametrize("name", ["llama-3.2-1b", "mixtral-8x7b"])
def test_the_front_is_that_of_all_layouts(name: str) -> None:
    plan = replace(SMALL, model=replace(presets.model(name), layers=4), cluster=presets.cluster("h100x4", 1))
    of = estimator(plan)
    every = [point for least, family in families(of, plan, {}) for point in look(of, least, family)]
    whole, part = landscape(of, plan, most=10**6), landscape(of, plan, most=200)
    assert whole["legal"] == len(every) == len(whole["points"]) == part["legal"]
    assert len(part["points"]) <= 200 + part["front"] < len(every)
    assert whole["points"][: whole["front"]] == part["points"][: part["front"]]
    exact = Front()
    for point in every:
        exact.add(counted(of, point.layout))
    shown = [(sum(seconds), peak) for _, seconds, peak in part["points"][: part["front"]]]
    for point in exact.points:  # the page has four digits of each
        assert any(s <= point.step_s * 1.001 and b <= point.peak_bytes * 1.001 for s, b in shown), point


def test_points_of_a_front() -> None:
    front = Front()
    for step_s, peak in ((3.0, 5.0), (1.0, 9.0), (2.0, 7.0), (2.0, 6.0), (2.5, 6.0), (1.0, 9.0), (3.0, 4.0)):
        front.add(Point(step_s, peak, Layout(), None))  # type: ignore[arg-type]
    assert [point[:2] for point in front.points] == [(1.0, 9.0), (2.0, 6.0), (3.0, 4.0)]
    assert front.times == [1.0, 2.0, 3.0]
    assert front.beats(2.0, 6.0) and front.beats(9.0, 4.0) and not front.beats(1.5, 8.0) and not front.beats(0.5, 99.0)


def test_the_start_is_the_fastest_that_fits() -> None:
    found = landscape(estimator(SMALL), SMALL)
    room = usable_bytes(SMALL)
    times = [sum(seconds) for _, seconds, peak in found["points"] if peak <= room]
    assert sum(found["points"][found["best"]][1]) <= min(times) * 1.02

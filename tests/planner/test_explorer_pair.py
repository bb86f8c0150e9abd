"""Two halves of the explorer's page in a real browser: same sliders, differences in words, links and files that bring
both back, at all widths, in light and dark, by keys and by touch."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import Layout
from meshwright.verbs.explore.answer import ExploreAnswer, explore
from tests.planner.browser import CHROMIUM, Browser
from tests.planner.colours import contrast

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.long,
]
RECIPE = {"sequence": 4096, "global_batch": 16}


@pytest.fixture(scope="module")
def answer() -> ExploreAnswer:
    beside = {"cluster": "h200x4", "stack": "torchtitan", "price": 2.5}
    return explore("llama-3.2-1b", cluster="h100x8", recipe=RECIPE, beside=beside)


@pytest.fixture(scope="module")
def page(answer: ExploreAnswer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answer.write(tmp_path_factory.mktemp("explorer") / "pair.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(1400, 900)
    browser.ask("Page.navigate", url="about:blank")
    browser.open(page)
    return browser


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def states(browser: Browser) -> list[dict[str, Any]]:
    both = browser.evaluate("halves.map((half) => half.state)")
    assert isinstance(both, list)
    return both


def test_both_begin_with_their_best_and_say_how_they_differ(opened: Browser, answer: ExploreAnswer) -> None:
    assert opened.complaints == []
    assert [address for address in opened.requested if not address.startswith(("file:", "data:", "about:"))] == []
    a, b = rows = answer.rows()
    for row, state in zip(rows, states(opened), strict=True):
        assert state["layout"] == row["layout"]
    words = text(opened, "#differences-words")
    assert (
        f"{(1 - b['tokens_per_second'] / a['tokens_per_second']) * 100:.2g} % fewer tokens per second than A" in words
    )
    for row in rows:
        shown = [float(number) for number in re.findall(r"\d+", words.replace(",", ""))]
        assert any(number == pytest.approx(row["tokens_per_second"], rel=2e-3) for number in shown), (words, row)
        assert f"{row['peak_bytes'] / 2**30:.1f} GiB" in words
        usd = row["usd_per_billion_tokens"]
        assert f"${usd:#.3g}".rstrip(".") in words, (usd, words)
    assert "A: fits" in words or "Both: fits" in words
    assert "zero (A {}, B {})".format(*(row["layout"]["zero"] for row in rows)) in words


def test_controls_move_both_and_a_half_stays_where_it_has_no_such_layout(opened: Browser) -> None:
    opened.evaluate("change('sequence', 8192)")
    assert [state["recipe"]["sequence"] for state in states(opened)] == [8192, 8192]
    before = states(opened)[1]
    opened.evaluate("change('zero', 1)")
    a, b = states(opened)
    assert a["layout"]["zero"] == 1 and b == before
    assert "torchtitan has no zero=1: take 0, 3" in text(opened, "#verdict-2")
    opened.evaluate("change('zero', 0)")
    assert "under FSDP only" in text(opened, "#verdict-2")
    opened.evaluate("change('tp', 8)")
    a, b = states(opened)
    assert a["layout"]["tp"] == 8 and b == before
    assert "Stays as it was" in text(opened, "#verdict-2") and "no tp=8" in text(opened, "#verdict-2")
    assert opened.evaluate("halves.map((half) => violationsOf(half).length)") == [0, 0]
    opened.evaluate("document.getElementById('undo').click()")
    assert states(opened)[0]["layout"]["tp"] == 1
    assert "Stays" not in text(opened, "#verdict-2") and opened.complaints == []


def test_memory_of_both_halves_is_the_planners(opened: Browser, answer: ExploreAnswer) -> None:
    opened.evaluate("change('pp', 2); change('micro_batch', 2)")
    totals = opened.evaluate("halves.map((half) => half.ranks.map((rank) => rank.total))")
    for half, state, counted_bytes in zip(answer.halves, states(opened), totals, strict=True):
        recipe = replace(half.plan.recipe, **state["recipe"])
        counted = {"compile": "on", "cuda_graphs": "off"} if half.estimator.stack.is_meshwright else {}
        plan = replace(half.plan, layout=Layout(**state["layout"], **counted), recipe=recipe)
        expected = [rank.total_bytes for rank in half.estimator.with_recipe(recipe).predict(plan).memory]
        assert counted_bytes == pytest.approx(expected, rel=1e-6)
    options = text(opened, "#options-2 pre")
    assert "parallelism.pipeline_parallel_degree=2" in options
    assert "parallelism.pipeline_parallel_microbatch_size=2" in options
    assert opened.evaluate("document.getElementById('options').hidden") is True


def test_keys_choose_a_half_and_reach_everything(opened: Browser) -> None:
    opened.evaluate("document.querySelector('[name=chosen]:checked').focus()")
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    assert opened.evaluate("selection") == "B"
    before = states(opened)
    opened.evaluate("document.getElementById('knob-recompute').focus()")
    opened.evaluate("change('recompute', 'full')")
    a, b = states(opened)
    assert a == before[0] and b["layout"]["recompute"] == "full"
    opened.evaluate("document.getElementById('points-2').focus()")
    opened.press("ArrowLeft")
    opened.press("Enter")
    assert opened.evaluate("layoutOption(halves[1].state.layout) === layoutOption(halves[1].pointed.layout)")
    assert states(opened)[0] == before[0]
    opened.evaluate("document.querySelector('#bars [data-stage=\"1\"]').focus()")
    opened.press("Enter")
    assert states(opened)[0]["layout"]["zero"] == 1 and opened.evaluate("selection") == "B"
    reached, number = set(), opened.evaluate(
        "[...document.querySelectorAll('button, input, select, summary, canvas[tabindex], [tabindex]')].filter((one) =>"
        " one.checkVisibility() && !one.disabled && (one.type !== 'radio' || one.checked)).length"
    )  # fmt: skip
    opened.evaluate("document.activeElement.blur()")
    for _ in range(number + 5):
        opened.press("Tab")
        reached.add(opened.evaluate(
            "(() => { const one = document.activeElement, all = [...document.querySelectorAll('*')];"
            " return all.indexOf(one); })()"
        ))  # fmt: skip
    assert len(reached) >= number
    assert opened.complaints == []


def test_a_tap_takes_a_layout_of_the_second_map(opened: Browser) -> None:
    opened.evaluate("document.getElementById('points-2').scrollIntoView({block: 'center'})")
    x, y = opened.evaluate(
        "(() => { const box = document.getElementById('points-2').getBoundingClientRect(), half = halves[1],"
        " point = half.front.at(-1);"
        " return [box.left + half.scale.x(point.peak), box.top + half.scale.y(point.step)]; })()"
    )
    opened.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    opened.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    opened.evaluate("new Promise((done) => setTimeout(done, 400))")
    assert "per step, MFU" in text(opened, "#map-2 .help") and "per step, MFU" not in text(opened, "#map .help")
    before = states(opened)[0]
    opened.evaluate("document.querySelector('#map-2 [data-take]').click()")
    assert opened.evaluate("layoutOption(halves[1].state.layout) === layoutOption(halves[1].pointed.layout)")
    assert states(opened)[0] == before


def test_a_link_and_a_saved_file_bring_both_back(opened: Browser, page: Path) -> None:
    opened.evaluate("change('sequence', 8192); selection = 'A'; change('recompute', 'full')")
    there, address = states(opened), opened.evaluate("toFragment()")
    assert opened.evaluate("location.hash.slice(1)") == address and "b.sequence=8192" in address
    for bad in (address.replace("b.tp=1", "b.tp=3"), address.replace("b.", "c."), "move=B"):
        assert opened.evaluate(f"fromFragment({json.dumps(bad)})") is None
    saved = page.with_name("saved.html")
    saved.write_text(opened.evaluate("savedPage()"), encoding="utf-8")
    assert abs(saved.stat().st_size / page.stat().st_size - 1) < 0.01
    for url in (f"{page.resolve().as_uri()}#{address}", saved.resolve().as_uri()):
        opened.ask("Page.navigate", url="about:blank")
        opened.ask("Page.navigate", url=url)
        for _ in range(500):
            if opened.evaluate("document.readyState === 'complete' && typeof halves !== 'undefined'"):
                break
        assert states(opened) == there and opened.evaluate("selection") == "A"
    again = opened.evaluate("change('recompute', 'none'); savedPage()")
    assert again.count("data-state=") == saved.read_text(encoding="utf-8").count("data-state=")
    opened.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(page.parent))
    opened.evaluate("document.getElementById('save').click()")
    for _ in range(200):
        if downloads := list(page.parent.glob("llama*.html")):
            break
        opened.evaluate("new Promise((done) => setTimeout(done, 20))")
    assert downloads[0].stat().st_size == pytest.approx(page.stat().st_size, rel=0.01)
    assert opened.complaints == []


SEEN = """[...document.querySelectorAll('#differences *, #options-2 *, .choice *, .knob .other, #verdict-2 *, h2')]
  .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && one.checkVisibility())
  .map((one) => {
    let behind = one;
    while (behind && getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    const back = getComputedStyle(behind ?? document.body).backgroundColor;
    return [one.textContent.slice(0, 30), getComputedStyle(one).color, back];
  })"""


def hexadecimal(colour: str) -> str:
    return "#" + "".join(f"{int(part):02x}" for part in colour.partition("(")[2].rstrip(")").split(",")[:3])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 900, 1400])
def test_it_fits_every_width_and_its_text_has_contrast(opened: Browser, width: int, dark: bool) -> None:
    opened.look(width, 900, dark=dark)
    opened.evaluate("change('zero', 1)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    seen = opened.evaluate(SEEN)
    assert len(seen) > 20
    for words, ink, behind in seen:
        assert contrast(hexadecimal(ink), hexadecimal(behind)) >= 4.5, words
    low = opened.evaluate(
        "[...document.querySelectorAll('.choice label, summary, .actions button, [data-copy], #try button')].filter("
        "(one) => one.checkVisibility() && one.getBoundingClientRect().height < 24).map((one) => one.textContent)"
    )
    assert low == []
    tops = opened.evaluate(
        "['memory', 'memory-2'].map((id) => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert (tops[0] == tops[1]) == (width >= 860)
    assert len(opened.picture()) > 30_000
    assert opened.complaints == []


def test_two_halves_are_no_more_than_two_pages(answer: ExploreAnswer) -> None:
    alone = [replace(answer, halves=(half,)) for half in answer.halves]
    assert len(answer.html) <= sum(len(single.html) for single in alone)
    assert not any(word in answer.html for word in ("https:", "http:", "@import", "url(", "/*DATA*/", "/*SCRIPT*/"))

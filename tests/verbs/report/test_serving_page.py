"""The page of a record of serving, in a real browser: every step is what the record says, from any step and back."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.serving.engine.serving_record import read_record
from meshwright.spec.errors import DataError, MeshwrightError
from meshwright.verbs.report.answer import report
from meshwright.verbs.report.serving_page import MOST_BLOCKS, page
from tests.planner.browser import CHROMIUM, Browser
from tests.serving.engine.test_serving_record import load, replayed, tight

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "record.jsonl"
    load(tight(path))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as chromium:
        yield chromium


@in_browser
def test_each_step_is_that_of_the_record(browser: Browser, record: Path) -> None:
    target = report(record)
    assert target == record.with_suffix(".html")
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(1200, 900)
    browser.open(target)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    steps, states = [line for line in lines if "running" in line], replayed(lines)
    # Backwards too, and over the states that the page keeps.
    browser.evaluate("APART === 64 && STEPS.length")
    for index in (0, 5, len(steps) - 1, 11, 4, 12):
        browser.evaluate(f"go({index})")
        shown = browser.evaluate("Object.fromEntries([...document.querySelectorAll('#numbers > div')].map((each) => "
                                 "[each.children[0].textContent, each.children[1].textContent]))")  # fmt: skip
        held = Counter(block for table in states[index]["tables"].values() for block in table)
        free = states[index]["cached"] - held.keys()
        assert int(shown["running"]) == len(steps[index]["running"])
        assert int(shown["waiting"]) == len(steps[index].get("waiting", ()))
        assert int(shown["blocks held"]) == len(held) and int(shown["free, content cached"]) == len(free)
        shared = sum(holders > 1 for holders in held.values())
        assert int(shown["shared by prefix"]) + int(shown["by answers or beams"]) == shared
        assert int(shown["tokens computed"]) == sum(count for _, _, count in steps[index]["running"])
        tables = browser.evaluate("[...document.querySelectorAll('#tables code')].map((each) => each.textContent)")
        expected = [" ".join(map(str, states[index]["tables"][number])) for number, _, _ in steps[index]["running"]]
        assert tables == expected
    assert browser.complaints == []
    assert [address for address in browser.requested if not address.startswith(("file:", "data:"))] == []


@in_browser
def test_keys_step_and_play_and_nothing_is_wider_than_a_phone(browser: Browser, record: Path) -> None:
    for dark in (False, True):
        browser.look(360, 800, dark=dark)
        browser.open(report(record))
        for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", None), ("Home", 0)):
            browser.press(key)
            last = browser.evaluate("STEPS.length - 1")
            assert browser.evaluate("now") == (last if step is None else step)
        browser.press(" ")
        assert browser.evaluate("byId('play').textContent") == "Pause"
        browser.press(" ")
        assert browser.evaluate("byId('play').textContent") == "Play"
        assert browser.evaluate("document.documentElement.scrollWidth") <= 360
        ink = browser.evaluate("css('panel')")
        assert ink == ("#1c1f25" if dark else "#ffffff")


def test_what_has_no_page(record: Path, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="name one record"):
        report(record, tmp_path)
    with pytest.raises(MeshwrightError, match="html"):
        report(record, out=tmp_path / "page.txt")
    large = read_record(record)
    large.header["blocks"] = MOST_BLOCKS + 1
    with pytest.raises(DataError, match="smaller --cache-mib"):
        page(large, "large")
    damaged = read_record(record)
    damaged.steps[3]["tables"] = {"0": 5}
    with pytest.raises(DataError, match="step 3 of the record"):
        page(damaged, "damaged")

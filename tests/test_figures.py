"""The movable figures of the Learn pages: their numbers in another way, and how they look and move in a browser."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs import figures
from tests.planner.browser import CHROMIUM, Browser

PAGES = sorted((figures.ROOT / "docs").glob("**/*.md"))
WIDTHS = (360, 700, 1300)


def finite(shown: Any) -> bool:
    """Whether all numbers inside are finite."""
    if isinstance(shown, dict):
        return all(map(finite, shown.values()))
    if isinstance(shown, list | tuple):
        return all(map(finite, shown))
    return not isinstance(shown, float) or math.isfinite(shown)


def test_every_figure_is_on_one_page() -> None:
    asked = [name for page in PAGES for name in figures.FIGURE.findall(page.read_text(encoding="utf-8"))]
    written_about = figures.FIGURE.findall((figures.FOLDER / "README.md").read_text(encoding="utf-8"))
    for name in written_about:
        asked.remove(name)
    assert sorted(asked) == figures.names()


@pytest.mark.parametrize("name", figures.names())
def test_a_figure_has_finite_numbers_and_no_more_than_a_page_can_carry(name: str) -> None:
    title, shown = figures.numbers(name)
    assert title and finite(shown)
    assert len(json.dumps(shown)) < 400_000


def expected_after(name: str, ranks: int) -> list[list[int] | None]:
    """What ranks hold at the end, by the collective's definition: rank r starts with 10 (r + 1) + 1, + 2, ..."""
    inputs = [[10 * (rank + 1) + column + 1 for column in range(ranks)] for rank in range(ranks)]
    total = [sum(numbers) for numbers in zip(*inputs, strict=True)]
    diagonal = [inputs[rank][rank] for rank in range(ranks)]
    return {
        "broadcast": [inputs[0]] * ranks,
        "reduce": [total] + [None] * (ranks - 1),
        "all-reduce": [total] * ranks,
        "gather": [diagonal] + [None] * (ranks - 1),
        "scatter": [[number] for number in inputs[0]],
        "all-gather": [diagonal] * ranks,
        "reduce-scatter": [[number] for number in total],
        "all-to-all": [[inputs[source][rank] for source in range(ranks)] for rank in range(ranks)],
    }[name]  # type: ignore[return-value]


def test_collectives_end_as_defined_and_the_busiest_rank_sends_what_the_formula_says() -> None:
    _, shown = figures.numbers("collectives")
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1}
    for name, collective in shown.items():
        for ranks, run in collective["ranks"].items():
            assert run["after"] == expected_after(name, ranks), (name, ranks)
            sent = [0] * ranks
            for source, _, numbers in (send for step in run["steps"] for send in step):
                sent[source] += 4 * len(numbers)
            assert sent == run["sent"]
            assert max(sent) == pytest.approx(collective["shares"][ranks] * 4 * ranks)
            assert len(run["steps"]) == rounds.get(name, 1 / (ranks - 1)) * (ranks - 1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as entry:
        yield entry


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", figures.names())
def test_a_figure_fits_and_moves_by_keyboard(name: str, browser: Browser, tmp_path: Path) -> None:
    """At three widths, light and dark: no complaint, nothing outside of the window, every control changes the view."""
    file = tmp_path / f"{name}.html"
    file.write_text(figures.page(name), encoding="utf-8")
    browser.complaints.clear()
    for width in WIDTHS:
        for dark in (False, True):
            browser.look(width, 900, dark=dark)
            browser.open(file)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.querySelector('.stage').textContent.length") > 10
    controls = browser.evaluate("document.querySelectorAll('.controls :is(input[type=range], select)').length")
    assert controls > 0
    for control in range(controls):
        focus = f"document.querySelectorAll('.controls :is(input[type=range], select)')[{control}]"
        last = f"({focus}.max ?? {focus}.length - 1) - ({focus}.selectedIndex ?? {focus}.value)"
        before = browser.evaluate("document.querySelector('.movable').innerHTML")
        key = "ArrowDown" if browser.evaluate(f"{focus}.tagName") == "SELECT" else "ArrowRight"
        backwards = {"ArrowDown": "ArrowUp", "ArrowRight": "ArrowLeft"}[key]
        browser.evaluate(f"{focus}.focus()")
        browser.press(key if browser.evaluate(last) > 0 else backwards)
        assert browser.evaluate("document.querySelector('.movable').innerHTML") != before, f"control {control}"
    assert not browser.complaints
    assert not re.findall(r"https?://(?!www\.w3\.org)", file.read_text(encoding="utf-8"))

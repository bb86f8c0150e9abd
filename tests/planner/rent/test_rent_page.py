"""The page of `rent` in a real browser: it opens offline, is silent on the console, shows what Python counted."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.planner.rent.page import page
from tests.planner.browser import CHROMIUM, Browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rent")
    run = mw.rent("llama-3.2-1b", tokens="20B", nodes=[1, 2, 4], deadline="20d", budget=1e5, quick=True)
    served = mw.rent_serving("llama-3.2-1b", devices="h100,mi300x", nodes=[1, 2], latency=20.0)
    late = mw.rent("llama-3.2-1b", tokens="20B", nodes=1, deadline="1min", quick=True)
    files = {}
    for name, answer in (("run", run), ("served", served), ("late", late)):
        files[name] = folder / f"{name} page.html"
        files[name].write_text(page(answer.to_dict()), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def test_it_is_one_file_that_names_no_address_to_load(pages: dict[str, Path]) -> None:
    for file in pages.values():
        text = file.read_text(encoding="utf-8")
        assert "default-src 'none'" in text and "/*DATA*/" not in text and "/*SCRIPT*/" not in text
        assert not any(mark in text for mark in ('<link rel="stylesheet', 'src="http', "@import", "fetch("))


@in_browser
@pytest.mark.long
@pytest.mark.parametrize("name", ["run", "served", "late"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_opens_offline_and_says_nothing_to_the_console(
    name: str, width: int, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.complaints.clear()
    browser.requested.clear()
    for dark in (False, True):
        browser.look(width, 900, dark=dark)
        browser.open(pages[name])
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.look(1300, 900)
    browser.evaluate(
        "DATA.front.forEach((row) => { row.layout = 'dp_replicate=32 dp_shard=16 zero=1 tp=8 sp=true ' + row.layout })"
    )
    browser.evaluate("document.querySelector('#front').replaceChildren(node('thead', {}), node('tbody', {})); table()")
    assert browser.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.scroll'))")
    assert browser.complaints == []
    assert [address for address in browser.requested if not address.startswith(("file:", "data:"))] == []
    rows = browser.evaluate("document.querySelectorAll('#front tbody tr').length")
    assert (
        rows
        == browser.evaluate("DATA.front.length")
        == browser.evaluate("document.querySelectorAll('#map g.on-front').length")
    )


@in_browser
@pytest.mark.long
def test_a_click_and_a_key_choose_a_run(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(1200, 900)
    browser.open(pages["run"])
    browser.evaluate("document.querySelector('#front tbody tr:last-child').click()")
    shown = str(browser.evaluate("document.querySelector('#command code').textContent"))
    assert shown == browser.evaluate("DATA.front.at(-1).command") and shown.startswith("meshwright plan ")
    browser.evaluate("document.querySelector('#front tbody tr').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('#command code').textContent") == browser.evaluate(
        "DATA.front[0].command"
    )
    assert browser.evaluate("document.querySelectorAll('#map g.chosen').length") == 1
    facts = str(browser.evaluate("document.querySelector('#facts').textContent"))
    assert json.loads(json.dumps(browser.evaluate("DATA.front[0].layout"))) in facts

"""The site that `make docs` builds: nothing is fetched from elsewhere, pages fit their window, search finds ZeRO-2."""

import fcntl
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from docs import site
from tests.planner.browser import CHROMIUM, Browser

pytest.importorskip("zensical")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
PAGES = ("index.html", "learn/data-and-zero.html", "lookup/keys.html", "lectures.html")
SHADOW = "[...document.querySelectorAll('*')].find((one) => one.shadowRoot)"
"""The search window keeps its elements to itself."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a copy, made while no other process of the tests builds the site in the same place."""
    copied = tmp_path_factory.mktemp("site") / "site"
    site.SITE.parent.mkdir(exist_ok=True)
    with (site.SITE.parent / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert site.main([]) == 0
        shutil.copytree(site.SITE, copied)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(copied)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as entry:
        yield entry


def opened(browser: Browser, url: str) -> None:
    browser.ask("Page.navigate", url=url)
    until(browser, f"document.readyState === 'complete' && location.href === '{url}'")


def until(browser: Browser, expression: str) -> None:
    """Wait until it holds in the page."""
    limit = time.monotonic() + 60
    while not browser.evaluate(expression):
        assert time.monotonic() < limit, f"never: {expression}"
        time.sleep(0.05)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_its_window_and_fetches_nothing(browser: Browser, address: str, page: str) -> None:
    browser.requested.clear()
    browser.complaints.clear()
    for width in (400, 900, 1400):
        browser.look(width, 900, dark=width == 900)
        opened(browser, f"{address}/{page}")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, f"{width} pixels"
    assert not [url for url in browser.requested if not url.startswith((address, "data:", "blob:", "about:"))]
    assert not browser.complaints


def test_search_finds_zero_2(browser: Browser, address: str) -> None:
    browser.look(1400, 900)
    opened(browser, f"{address}/index.html")
    until(browser, "!!document.querySelector('.md-search button')")
    browser.evaluate("document.querySelector('.md-search button').click()")
    until(browser, f"!!{SHADOW}?.shadowRoot.activeElement")
    browser.ask("Input.insertText", text="ZeRO-2")
    until(browser, f"!!{SHADOW}.shadowRoot.querySelector('a[href*=html]')")
    first = browser.evaluate(f"{SHADOW}.shadowRoot.querySelector('a[href*=html]').href")
    assert "/learn/data-and-zero.html" in first


EXPLORER = "document.querySelector('iframe.explorer')"
ROOT = f"{EXPLORER}.contentDocument.documentElement"
PAPER = f"{EXPLORER}.contentWindow.getComputedStyle({ROOT}).getPropertyValue('--paper')"
"""The background of an embedded explorer."""


def test_an_embedded_explorer_follows_the_switch_of_the_site(browser: Browser, address: str) -> None:
    """Whatever the reader's system prefers: the page begins with that, and the switch turns both."""
    papers = []
    for dark in (False, True):
        browser.look(1200, 900, dark=dark)
        opened(browser, f"{address}/learn/memory.html")
        browser.evaluate(f"{EXPLORER}.scrollIntoView()")
        until(
            browser, f"{EXPLORER}.contentDocument.readyState === 'complete' && !!{EXPLORER}.contentWindow.followTheme"
        )
        before = browser.evaluate(PAPER)
        browser.evaluate("document.querySelector('label[for^=__palette]:not([hidden])').click()")
        until(browser, f"{PAPER} !== '{before}'")
        papers.append((before, browser.evaluate(PAPER)))
        browser.evaluate("localStorage.clear()")
    assert papers[0] == papers[1][::-1]


def test_a_picture_links_to_itself_in_full_size(browser: Browser, address: str) -> None:
    browser.look(400, 900)
    opened(browser, f"{address}/learn/memory.html")
    links = browser.evaluate(
        "[...document.querySelectorAll('article img')].map((one) => [one.src, one.parentElement.href])"
    )
    assert links and all(picture == link for picture, link in links)

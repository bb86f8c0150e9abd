"""The site that `make docs` builds: nothing is fetched from elsewhere, pages fit their window, search finds ZeRO-2."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from docs import site
from tests.planner.browser import CHROMIUM, Browser

pytest.importorskip("zensical")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
PAGES = (
    "index.html",
    "project.html",
    "learn/index.html",
    "learn/data-and-zero.html",
    "lookup/keys.html",
    "lectures.html",
)
SEARCH = """new Promise(async (done) => {
  const wait = (what) => new Promise((found) => {
    const look = () => what() ? found(what()) : setTimeout(look, 50);
    look();
  });
  document.querySelector('.md-search__button, [data-md-component=search] button')?.click();
  const field = await wait(() => document.querySelector('input[type=search], input[role=combobox], .md-search input'));
  field.value = WORDS;
  field.dispatchEvent(new Event('input', {bubbles: true}));
  field.dispatchEvent(new Event('keyup', {bubbles: true}));
  await wait(() => [...document.querySelectorAll('a')].some((one) => one.href.includes('data-and-zero') && one.href.includes('h=')));
  done(1);
})"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert site.main([]) == 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site.SITE)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


def opened(browser: Browser, url: str) -> None:
    browser.ask("Page.navigate", url=url)
    limit = time.monotonic() + 60
    while browser.evaluate("document.readyState") != "complete" or browser.evaluate("location.href") != url:
        assert time.monotonic() < limit, f"{url} does not load"
        time.sleep(0.02)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_its_window_and_fetches_nothing(browser: Browser, address: str, page: str) -> None:
    browser.requested.clear()
    browser.complaints.clear()
    for width in (400, 900, 1400):
        for dark in (False, True):
            browser.look(width, 900, dark=dark)
            opened(browser, f"{address}/{page}")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, f"{width} pixels"
    assert not [url for url in browser.requested if not url.startswith((address, "data:", "blob:", "about:"))]
    assert not browser.complaints


def test_search_finds_zero_2(browser: Browser, address: str) -> None:
    browser.look(1400, 900)
    opened(browser, f"{address}/index.html")
    browser.evaluate(SEARCH.replace("WORDS", "'ZeRO-2'"))

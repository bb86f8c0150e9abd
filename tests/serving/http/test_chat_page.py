"""The page at `/` in a real browser: a conversation, its stop button, its key; light and dark, 400 to 1,300 pixels."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from meshwright.serving.http.front.front import CONTENT_SECURITY_POLICY, chat_page
from meshwright.serving.http.server_options import ServerLimits
from tests.planner.browser import CHROMIUM, Browser
from tests.planner.colours import contrast
from tests.serving.http.running import KEYS, NAME, Running, letters, running, small

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
"""Text that the model of these tests repeats. None of it may become a part of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(limits=ServerLimits(drain_seconds=0.1)) as served:
        yield served


def until(holds: Callable[[], bool], seconds: float = 200.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.02)


def opened(browser: Browser, server: Running, width: int = 900, *, dark: bool = False, key: str = KEYS[0]) -> Browser:
    browser.look(width, 900, dark=dark)
    browser.complaints.clear()
    browser.requested.clear()
    browser.ask("Page.navigate", url=server.server.address + "/")
    until(lambda: browser.evaluate("document.readyState") == "complete" and shown_text(browser, "model") != "")
    if key:
        until(lambda: "asks for an API key" in shown_text(browser, "notice"))
        browser.complaints.clear()  # the refusal without a key is there by intent
        browser.evaluate(f"byId('key').value = {key!r}; byId('key').dispatchEvent(new Event('change'))")
        until(lambda: shown_text(browser, "model") == NAME)
    return browser


def shown_text(browser: Browser, id: str) -> str:
    return str(browser.evaluate(f"document.getElementById({id!r})?.textContent ?? ''"))


def turns(browser: Browser) -> list[str]:
    texts = browser.evaluate("[...document.querySelectorAll('.turn span')].map((one) => one.textContent)")
    return [str(text) for text in texts]


def write(browser: Browser, text: str) -> None:
    browser.evaluate("byId('said').focus()")
    browser.ask("Input.insertText", text=text)
    browser.press("Enter")


def idle(browser: Browser) -> bool:
    return bool(browser.evaluate("byId('stop').hidden && !byId('send').hidden"))


def test_the_page_is_one_file() -> None:
    page = chat_page()
    assert "/*S" not in page and page.count("<script>") == page.count("<style>") == 1
    assert "http://" not in page and "https://" not in page and "innerHTML" not in page and "localStorage" not in page
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "default-src 'none'" in CONTENT_SECURITY_POLICY


def test_the_page_comes_with_its_policy(server: Running) -> None:
    status, headers, content = server.ask("/", key=None)
    assert status == 200 and headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert content.decode() == chat_page() and headers["cache-control"] == "no-store"


@in_browser
def test_a_conversation(browser: Browser, server: Running) -> None:
    opened(browser, server)
    browser.evaluate("byId('temperature').value = 0; byId('tokens').value = 20")
    write(browser, "Hello.")
    until(lambda: len(turns(browser)) == 2 and idle(browser))
    messages = [{"role": "user", "content": "Hello."}]
    asked = {"messages": messages, "max_tokens": 20, "temperature": 0}
    right = server.ask("/v1/chat/completions", asked)[2]["choices"][0]["message"]["content"]
    assert turns(browser) == ["Hello.", right] and "tokens in" in shown_text(browser, "notice")
    write(browser, "Again.")
    until(lambda: len(turns(browser)) == 4 and idle(browser))
    messages += [{"role": "assistant", "content": right}, {"role": "user", "content": "Again."}]
    right = server.ask("/v1/chat/completions", {**asked, "messages": messages})[2]["choices"][0]["message"]["content"]
    assert turns(browser)[3] == right, "it remembers what was said"
    assert browser.complaints == []
    assert all(url.startswith((server.server.address, "data:")) for url in browser.requested)
    assert browser.evaluate("localStorage.length + sessionStorage.length") == 0 and not browser.evaluate(
        "document.cookie"
    )


@in_browser
def test_what_is_said_is_text(browser: Browser, server: Running) -> None:
    """User and model both send markup, the model token by token."""
    tokenizer = letters()
    ids = tokenizer.begin(MARKUP)
    model = small()
    endless = replace(model, end_ids=())  # what is drawn may be an end, before it is made the next of the markup
    with running(hosted=endless, limits=ServerLimits(drain_seconds=0.1)) as other:
        engine = other.engine
        engine_step = engine.step
        made: dict[int, int] = {}

        def step() -> list[object]:
            grown = engine_step()
            for answer in grown:
                index = made[id(answer)] = made.get(id(answer), -1) + 1
                answer.ids[-1] = ids[index % len(ids)]
                answer.text = MARKUP[: index + 1]
            return list(grown)

        engine.step = step  # type: ignore[method-assign,assignment]
        opened(browser, other)
        browser.evaluate(f"byId('tokens').value = {len(ids)}")
        write(browser, MARKUP)
        until(lambda: len(turns(browser)) == 2 and idle(browser))
        asked, answered = turns(browser)
        assert asked == MARKUP and MARKUP.startswith(answered) and "<img src=x onerror" in answered
        assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert browser.complaints == []


@in_browser
def test_all_of_it_is_reached_by_the_keyboard(browser: Browser, server: Running) -> None:
    opened(browser, server)

    def focused() -> str:
        return str(browser.evaluate("document.activeElement.id"))

    browser.press("Escape")  # the server asks for a key, and the page has opened its settings
    order = [focused()]
    while len(order) < 5:
        browser.press("Tab")
        order.append(focused())
    assert order == ["settings-open", "clear", "talk", "said", "send"]
    browser.press("Tab", shift=True)
    assert focused() == "said"
    browser.ask("Input.insertText", text="one")
    browser.press("Enter", shift=True)
    browser.ask("Input.insertText", text="two")
    assert browser.evaluate("byId('said').value") == "one\ntwo" and turns(browser) == []
    browser.evaluate("byId('settings-open').focus()")
    browser.press("Enter")
    assert browser.evaluate("!byId('settings').hidden && byId('settings-open').ariaExpanded") == "true"
    within = []
    for _ in range(5):
        browser.press("Tab")
        within.append(focused())
    assert within == ["clear", "key", "temperature", "tokens", "system"]
    browser.press("Escape")
    assert browser.evaluate("byId('settings').hidden") and focused() == "settings-open"
    unnamed = "[...document.querySelectorAll('input, textarea, button')].filter((one) => !(one.labels?.length || "
    assert browser.evaluate(f"{unnamed}one.ariaLabel || one.textContent.trim())).length") == 0


@in_browser
@pytest.mark.parametrize("by_key", [False, True])
def test_stop_ends_the_request(browser: Browser, monkeypatch: pytest.MonkeyPatch, by_key: bool) -> None:
    endless = replace(small(), end_ids=())  # ids are drawn: one of them could be an end, before anyone presses stop
    with running(hosted=endless, limits=ServerLimits(drain_seconds=0.1)) as server:
        engine_step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.03), engine_step())[1])
        opened(browser, server)
        browser.evaluate("byId('tokens').value = 200")
        write(browser, "Count.")
        until(lambda: len(turns(browser)) == 2 and len(turns(browser)[1]) > 3)
        assert browser.evaluate("byId('send').hidden && !byId('stop').hidden")
        if by_key:
            browser.press("Escape")
        else:
            browser.evaluate("byId('stop').click()")
        until(lambda: idle(browser))
        until(lambda: server.engine.idle)
        assert shown_text(browser, "notice") == "Stopped." and len(turns(browser)[1]) < 200
        browser.evaluate("byId('clear').click()")
        assert turns(browser) == []


@in_browser
def test_refusals_are_shown(browser: Browser, server: Running) -> None:
    opened(browser, server)
    browser.evaluate("byId('tokens').value = 100000")
    write(browser, "Too long.")
    until(lambda: "max_tokens=100,000" in shown_text(browser, "notice"))
    assert turns(browser) == [] and browser.evaluate("byId('said').value") == "Too long."
    browser.evaluate("byId('key').value = 'wrong'; byId('key').dispatchEvent(new Event('change'))")
    until(lambda: "asks for an API key" in shown_text(browser, "notice"))


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 500, 1300])
def test_it_fits(browser: Browser, server: Running, width: int, dark: bool) -> None:
    """No element is wider than the window, and all text is legible."""
    opened(browser, server, width, dark=dark)
    browser.evaluate("byId('temperature').value = 0; byId('tokens').value = 100")
    write(browser, "w" * 90)
    until(lambda: len(turns(browser)) == 2 and idle(browser))
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter((one) => one.offsetParent).map((one) => "
        "[one.tagName, one.getBoundingClientRect().left, one.getBoundingClientRect().right])"
    )
    assert [box for box in boxes if box[1] < -0.5 or box[2] > width + 0.5] == []
    pairs = browser.evaluate(
        "['.user', '.assistant', '#send', '#notice', '#settings label', 'h1', '#clear'].map((place) => {"
        "let one = document.querySelector(place), ink = getComputedStyle(one).color, ground = 'rgba(0, 0, 0, 0)';"
        "for (; one && ground === 'rgba(0, 0, 0, 0)'; one = one.parentElement)"
        "ground = getComputedStyle(one).backgroundColor; return [place, ink, ground]; })"
    )
    for element, ink, ground in pairs:
        assert contrast(*(_hex(colour) for colour in (ink, ground))) >= 4.5, element


def _hex(colour: str) -> str:
    parts = colour.removeprefix("rgba(").removeprefix("rgb(").rstrip(")").split(",")
    return "#" + "".join(f"{int(float(part)):02x}" for part in parts[:3])

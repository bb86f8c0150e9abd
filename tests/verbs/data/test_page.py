"""The page of `data show --html` in a real browser: every token of the rows, what becomes of it by pointer, click and
keys, light and dark, from 400 to 1400 pixels."""

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import prepare
from meshwright.data.report import DataView, view
from meshwright.spec import Data, Recipe
from meshwright.verbs.data.page import page, rows_of
from meshwright.verbs.main import main
from tests.planner.browser import CHROMIUM, Browser
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as chromium:
        yield chromium


@pytest.fixture
def chats(files: Path) -> DataView:
    asked = plan(files, "data.train_on=assistant,user", "recipe.sequence=48")
    return view(asked.data, asked.recipe, prepare(asked.data), rows=3)


@pytest.fixture
def texts(tmp_path: Path) -> DataView:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.py").write_text(f"def f{number}():\n\treturn '<b>&amp;</b>'\n" * 2, encoding="utf-8")
    data, recipe = Data(path=str(folder), validation=0.2), Recipe(sequence=32)
    return view(data, recipe, prepare(data, cache_root=tmp_path / "cache"), rows=2)


def spans(text: str) -> list[str]:
    """What the page shows of each token, without its marks of line ends."""
    marked = re.findall(r"<i class='k [^']*' data-p='\d+'>(.*?)</i>", text, re.DOTALL)
    return [unescape(content.replace("<u>\u21b5</u>", "")) for content in marked]


def test_every_token_of_every_row_is_there(chats: DataView, texts: DataView) -> None:
    for data in (chats, texts):
        rows = [data.tokens, *(row.tokens for row in data.more)]
        assert len(rows) == (3 if data is chats else 2)
        wanted = [token for row in rows for token in row]
        shown = spans(page(data))
        assert len(shown) == len(wanted) == len(rows) * data.sequence
        for content, token in zip(shown, wanted, strict=True):
            assert content == ("\u00b7" if token.mark == "padding" else token.text)


def test_rows_are_those_of_the_run(chats: DataView) -> None:
    assert [row.number for row in chats.more] == [chats.sample + 1, chats.sample + 2]
    assert {token.role for token in chats.tokens if token.mark == "trained"} == {"user", "assistant"}
    assert chats.samples is not None
    trained = sum(part.trained for part in chats.samples.roles)
    assert trained / sum(part.trained + part.masked for part in chats.samples.roles) == chats.samples.trained_share
    assert sum(part.count for part in chats.lengths) == chats.train.documents
    assert all(part.begin <= part.end < 2 * part.begin for part in chats.lengths)


def test_the_verb_writes_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model={files / 'hf'}", f"data={files / 'chat.jsonl'}", "data.form=samples", "recipe.sequence=32"]
    out = files / "page.html"
    assert main(["data", "show", *words, "--html", str(out)]) == 0
    assert f"{out}: 8 rows; open it in a browser" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>") and rows_of(32) == 8 and rows_of(2**20) == 1
    assert main(["data", "show", *words, "--html", str(files)]) == 2
    assert "is a folder: name a file, as --html" in capsys.readouterr().err
    assert main(["data", "show", *words, "--html", str(files / "page.txt")]) == 2
    assert main(["data", "show", *words, "--html", str(out), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["more"]) == 7


def opened(browser: Browser, folder: Path, data: DataView, width: int = 900, *, dark: bool = False) -> Browser:
    file = folder / "data.html"
    file.write_text(page(data), encoding="utf-8")
    browser.complaints.clear()
    browser.requested.clear()
    browser.look(width, 1000, dark=dark)
    browser.open(file)
    return browser


def help_text(browser: Browser) -> str:
    return str(browser.evaluate("document.getElementById('said').textContent"))


def place_of(browser: Browser, number: int) -> Any:
    return browser.evaluate(
        f"(() => {{ const span = document.querySelectorAll('.row')[0].querySelectorAll('.k')[{number}];"
        "span.scrollIntoView({block: 'center'}); const box = span.getClientRects()[0];"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )


@in_browser
def test_a_token_says_what_becomes_of_it(browser: Browser, tmp_path: Path, chats: DataView) -> None:
    """By pointing, by a click that stays, and by keys."""
    opened(browser, tmp_path, chats)
    assert browser.complaints == [] and [url for url in browser.requested if not url.startswith("file:")] == []
    first, second = chats.tokens[3], chats.tokens[6]
    browser.point(*place_of(browser, 3), click=True)
    assert f"token {first.id} " in help_text(browser) and f"place 3 of row {chats.sample}" in help_text(browser)
    browser.point(*place_of(browser, 6))
    assert f"token {second.id} " in help_text(browser)
    browser.point(2, 2)
    assert f"token {first.id} " in help_text(browser), "what was clicked stays"
    browser.evaluate("document.querySelector('.row').focus()")
    browser.press("ArrowRight")
    assert f"token {chats.tokens[4].id} " in help_text(browser) and "place 4 " in help_text(browser)
    browser.press("ArrowLeft")
    assert "place 3 " in help_text(browser)
    trained = next(number for number, token in enumerate(chats.tokens) if token.mark == "trained" and number)
    browser.point(*place_of(browser, trained), click=True)
    assert f"said by {chats.tokens[trained].role}; trained: the token before it predicts it" in help_text(browser)


@in_browser
@pytest.mark.parametrize("width", [400, 900, 1400])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.long
def test_nothing_is_cut_at_any_width(
    browser: Browser, tmp_path: Path, chats: DataView, texts: DataView, width: int, dark: bool
) -> None:
    for data in (chats, texts):
        opened(browser, tmp_path, data, width, dark=dark)
        assert browser.complaints == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = browser.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
        assert (brightness[0] > brightness[1]) == dark

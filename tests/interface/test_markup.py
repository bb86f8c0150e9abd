"""HTML for notebooks: well-formed, escaped, self-contained, with every figure also as text."""

from html.parser import HTMLParser

import pytest

import meshwright as mw
from meshwright.interface.answers import markup
from meshwright.interface.trained.trained_model import Generated

VOID = {"br", "img", "input"}


class Tags(HTMLParser):
    """A parser that fails when a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def parsed(html: str) -> Tags:
    """Parse HTML, and check that all tags are closed, nothing is loaded and there is no script."""
    parser = Tags()
    parser.feed(html)
    assert parser.open == [] and parser.references == []
    assert "<script" not in html and "url(" not in html and "http" not in html
    return parser


def test_a_plan_shows_verdict_figures_and_every_alternative() -> None:
    answer = mw.plan("llama-3.1-8b", cluster="h100x8", nodes=4)
    text = parsed(answer._repr_html_()).text
    assert text.index("Fits") < text.index("tokens/s per device")
    assert answer.best.words in text and all(
        layout.words in text for layout in answer.alternatives[: markup.LISTED - 1]
    )
    for kind, size in answer.best.memory.items():
        assert (kind in text) == (size > markup.SLIGHT * answer.best.peak_bytes), "a legend, not a colour alone"
    assert answer.best.words in parsed(answer.best._repr_html_()).text


def test_bars_add_up_to_their_length() -> None:
    html = markup.bar({"a": 3.0, "b": 1.0}, {"a": "3 GiB", "b": "1 GiB"}, 8.0)
    assert "width:37.500%" in html and "width:12.500%" in html
    assert "3 GiB" in parsed(html).text


def test_words_of_others_are_escaped() -> None:
    for html in (
        markup.table(["<b>"], [["<i>&"]]),
        markup.line("<b>"),
        markup.bar({"<b>": 1.0}, {"<b>": '"x"'}),
        Generated(prompt="<b>", prompt_ids=(1,), ids=(2,), logprobs=(0.0,), text="<script>")._repr_html_(),
    ):
        assert not {"b", "i", "script"} & set(_tags(html)) - {"i"}
    assert parsed(markup.table(["<b>"], [["<i>&"]])).text == "<b><i>&"


def _tags(html: str) -> list[str]:
    tags: list[str] = []

    class Collect(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)

    Collect().feed(html)
    return tags


def test_both_modes_have_a_colour_for_every_kind() -> None:
    """Dark follows the system, JupyterLab and VS Code."""
    style = markup.style()
    for kind in mw.plan("llama-3.1-8b", cluster="h100x8", nodes=4).best.memory:
        assert style.count(f"--{kind}:") == 4, kind
    for rule in ("prefers-color-scheme: dark", 'data-jp-theme-light="false"', "vscode-dark"):
        assert rule in style


@pytest.mark.parametrize(("points", "drawn"), [([], 0), ([(1.0, 2.0)], 0), ([(1.0, 2.0), (2.0, 2.0)], 1)])
def test_a_curve_needs_two_points(points: list[tuple[float, float]], drawn: int) -> None:
    html = markup.curve({"training": points}, "step", "loss")
    assert html.count("<polyline") == drawn
    parsed(html)

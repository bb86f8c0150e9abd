"""The answer of `rent` as one HTML page: a map of money against time, the front as a table, the assumptions.

The page's own files are package data. Here they become one file with the document in it, which opens from disk,
offline. Nothing in it is loaded from anywhere.
"""

import json
from collections.abc import Mapping
from importlib.resources import files


def page(document: Mapping[str, object]) -> str:
    """Return the page of the document that `rent --json` prints, of training or of serving."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = _read("rent/page_files/page.html")
    for mark, part in (
        ("/*STYLE*/", _read("explorer/colours.css") + _read("rent/page_files/page.css")),
        ("/*SCRIPT*/", _read("rent/page_files/page.js")),
        ("/*DATA*/", text),
    ):
        html = html.replace(mark, part, 1)
    return html


def _read(path: str) -> str:
    return (files("meshwright.planner") / path).read_text(encoding="utf-8")

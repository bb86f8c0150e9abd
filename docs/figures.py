"""Puts the movable figures of docs/learn/figures into pages of the site: `<!-- figure: NAME -->`.

    python -m docs.figures NAME ...    # each in a page of its own, build/figures/NAME.html
    python -m docs.figures             # all of them

How to add one is said in docs/learn/figures/README.md.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHELF = Path("learn/figures")
FOLDER = ROOT / "docs" / SHELF
BUILT = ROOT / "build" / "figures"
FIGURE = re.compile(r"<!-- figure: (?P<name>\w+) -->")


def names() -> list[str]:
    """Every figure that can be drawn."""
    return sorted(path.stem for path in FOLDER.glob("*.js") if path.with_suffix(".py").exists())


@cache
def numbers(name: str) -> tuple[str, Any]:
    """The title of a figure and what it shows."""
    module = importlib.import_module(f"docs.learn.figures.{name}")
    return module.TITLE, module.data()


def markup(name: str, shelf: str) -> str:
    """A figure as one block of HTML. `shelf`: address of the folder of figures, as seen from the page."""
    title, shown = numbers(name)
    # "</" would end the element early.
    written = json.dumps(shown, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return (
        f'<div class="movable" data-figure="{name}" data-title="{title}">'
        f'<script type="application/json">{written}</script>'
        f"<noscript>This figure moves where JavaScript is on.</noscript></div>\n"
        f'<script src="{shelf}/{name}.js" defer></script>'
    )


def embedded(text: str, here: Path) -> str:
    """A page with its figures in place of the comments that ask for them. `here`: its folder in the site."""
    shelf = os.path.relpath(SHELF, here).replace(os.sep, "/")
    return FIGURE.sub(lambda match: markup(match["name"], shelf), text)


def page(name: str) -> str:
    """A page with nothing but a figure, everything inside it. Light or dark, as the reader's system is."""
    library, drawing = (FOLDER / file for file in ("figure.js", f"{name}.js"))
    block = re.sub(r"<script src=.*", "", markup(name, ""))
    scheme = 'if (matchMedia("(prefers-color-scheme: dark)").matches) document.body.dataset.mdColorScheme = "slate";'
    style = (
        "html { font: 20px system-ui, sans-serif } body { margin: 8px }"
        "body[data-md-color-scheme] { background: #101216 }" + (FOLDER / "figure.css").read_text(encoding="utf-8")
    )
    scripts = "\n".join((scheme, library.read_text(encoding="utf-8"), drawing.read_text(encoding="utf-8")))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{style}</style><body>{block}<script>{scripts}</script>"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Write the figures that are named, or all."""
    reader = argparse.ArgumentParser(prog="python -m docs.figures", description="Write figures as pages of their own.")
    reader.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names())}")
    options = reader.parse_args(words)
    BUILT.mkdir(parents=True, exist_ok=True)
    for name in options.names or names():
        (BUILT / f"{name}.html").write_text(page(name), encoding="utf-8")
        print(BUILT / f"{name}.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws docs/pictures/architecture.svg: the packages of src/meshwright, from the imports that their modules have.

python -m docs.architecture            # write the picture
python -m docs.architecture --check    # exit code 1 if it is stale

A package stands above all packages that it imports. An arrow is left out where a chain of arrows says the same.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

from docs.packages import BELOW, PACKAGE, holds

PICTURE = Path(__file__).resolve().parent / "pictures" / "architecture.svg"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 176, 58, 22, 44, 14
"""Sizes of a box and of the gaps between boxes, in pixels."""
CAPTION_COLUMNS, CAPTION_LINES = 29, 2
COLOURS = {"plain": ("#e9f0f9", "#1f5fa8"), "torch": ("#eaf4ee", "#3a8f5c")}
"""Fill and border of packages without torch, and of those that import it."""


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the packages that the modules of each package import, lazy imports included."""
    edges: dict[str, set[str]] = {name: set() for name in BELOW}
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshwright."):
                imported = node.module.split(".")[1]
                if package in edges and imported in edges and imported != package:
                    edges[package].add(imported)
    return {name: frozenset(below) for name, below in edges.items()}


@cache
def uses_torch(package: str) -> bool:
    """Return True if a module of the package imports torch."""
    texts = (path.read_text(encoding="utf-8") for path in (PACKAGE / package).rglob("*.py"))
    return any(re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE) for text in texts)


@cache
def below(package: str) -> frozenset[str]:
    """Return every package that can be reached by imports."""
    direct = imports()[package]
    return direct.union(*(below(name) for name in direct))


@cache
def level(package: str) -> int:
    """Return the row of a package, counted from the bottom."""
    return 1 + max((level(name) for name in imports()[package]), default=-1)


def arrows() -> list[tuple[str, str]]:
    """List the imports that no chain of other imports implies."""
    return [
        (upper, lower)
        for upper, direct in imports().items()
        for lower in sorted(direct)
        if not any(lower in below(other) for other in direct - {lower})
    ]


def positions() -> dict[str, tuple[float, float]]:
    """Return the upper left corner of each box. Rows are centred; within a row boxes stand above what they import."""
    rows = [[name for name in BELOW if level(name) == number] for number in range(1 + max(map(level, BELOW)))]
    widest = max(map(len, rows))
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        centres = {name: [places[lower][0] for upper, lower in arrows() if upper == name] for name in row}
        row.sort(key=lambda name: sum(centres[name]) / max(1, len(centres[name])))
        left = MARGIN + (widest - len(row)) * (WIDTH + GAP_X) / 2
        top = MARGIN + (len(rows) - 1 - number) * (HEIGHT + GAP_Y)
        places |= {name: (left + column * (WIDTH + GAP_X), top) for column, name in enumerate(row)}
    return places


def caption(package: str) -> list[str]:
    """Return what the package holds, in at most CAPTION_LINES lines."""
    text = re.split(r"[.:;](?:\s|$)", holds(package).replace("`", ""))[0]
    return textwrap.wrap(text, CAPTION_COLUMNS, max_lines=CAPTION_LINES, placeholder=" ...")


def svg() -> str:
    """Return the picture as text."""
    places = positions()
    width = max(x for x, _ in places.values()) + WIDTH + MARGIN
    height = max(y for _, y in places.values()) + HEIGHT + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
        "<title>Packages of Meshwright: each imports those below it that its arrows reach</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#888"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for upper, lower in arrows():
        (x1, y1), (x2, y2) = places[upper], places[lower]
        start, end = (x1 + WIDTH / 2, y1 + HEIGHT), (x2 + WIDTH / 2, y2)
        bend = (end[1] - start[1]) / 2
        lines.append(
            f'<path d="M{start[0]:g} {start[1]:g}C{start[0]:g} {start[1] + bend:g} {end[0]:g} {end[1] - bend:g} '
            f'{end[0]:g} {end[1]:g}" fill="none" stroke="#999" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in places.items():
        fill, border = COLOURS["torch" if uses_torch(name) else "plain"]
        middle = x + WIDTH / 2
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="{border}"/>'
        )
        lines.append(f'<text x="{middle:g}" y="{y + 19:g}" text-anchor="middle" font-weight="bold">{name}</text>')
        lines += [
            f'<text x="{middle:g}" y="{y + 34 + 13 * number:g}" text-anchor="middle" font-size="11" fill="#333">'
            f"{escape(text)}</text>"
            for number, text in enumerate(caption(name))
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(words: Sequence[str]) -> int:
    """Write the picture, or with --check return 1 if it is stale."""
    if "--check" in words:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != svg())
    PICTURE.write_text(svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

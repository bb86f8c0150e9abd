"""HTML that stands alone in a notebook: tables, bars and curves, in the light and dark colours of the pages."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from meshwright.spec.units import duration, gib

COLOURS = {
    "compute": "forward", "exchange": "weight", "bubble": "idle", "weights": "both", "optimizer": "moments",
    "other": "counters", "communication": "weight",
}  # fmt: skip
"""Part of a step -> name of its colour. Kinds of memory have colours of their own names."""
LISTED = 8
"""Rows of a table here, of those that `rows` has."""
SLIGHT = 5e-4
"""Share of a bar below which a part is omitted."""
RULES = """
.meshwright { font: 13px/1.5 system-ui, sans-serif; max-width: 64rem; overflow-x: auto; }
.meshwright p { margin: .3em 0; }
.meshwright table { font: inherit; border-collapse: collapse; margin: .5em 0; font-variant-numeric: tabular-nums; }
.meshwright th, .meshwright td { padding: .15em .8em .15em 0; text-align: right; white-space: nowrap; border: 0;
  border-bottom: 1px solid color-mix(in srgb, currentColor 18%, transparent); background: none; }
.meshwright th:first-child, .meshwright td:first-child { text-align: left; }
.meshwright .track { display: flex; position: relative; width: 100%; min-width: 16rem; height: 14px; background: none;
  outline: 1px solid color-mix(in srgb, currentColor 35%, transparent); }
.meshwright .track i { display: block; height: 100%; }
.meshwright .legend { display: flex; flex-wrap: wrap; gap: .1em 1.2em; margin: .3em 0 .6em; }
.meshwright .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  outline: 1px solid color-mix(in srgb, currentColor 35%, transparent); }
.meshwright .good { color: var(--good); font-weight: 600; }
.meshwright .alarm { color: var(--alarm); font-weight: 600; }
.meshwright .prompt { opacity: .7; }
.meshwright pre { white-space: pre-wrap; margin: .3em 0; background: none; color: inherit; }
.meshwright svg { display: block; max-width: 100%; }
"""
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
"""


@cache
def style() -> str:
    """Return rules and colours. Dark follows the notebook, or else the system."""
    from meshwright.planner.explorer.explorer_page import source

    bright, _, dim = source("colours.css").partition("@media")
    light, dark = (" ".join(re.findall(r"--[\w-]+:[^;]+;", text)) for text in (bright, dim))
    return (
        f"<style>.meshwright {{ {light} }} @media (prefers-color-scheme: dark) {{ .meshwright {{ {dark} }} }}"
        f' [data-jp-theme-light="true"] .meshwright, .vscode-light .meshwright {{ {light} }}'
        f' [data-jp-theme-light="false"] .meshwright, .vscode-dark .meshwright {{ {dark} }}{RULES}</style>'
    )


def whole(*parts: str) -> str:
    """Return the HTML that a notebook shows."""
    # A notebook shows each output on its own, so each carries the style.
    return f'<div class="meshwright">{style()}{"".join(parts)}</div>'


def line(text: str, kind: str = "") -> str:
    """Return a sentence. `kind`: good or alarm."""
    return f"<p{_kind(kind)}>{escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text cells, with the first column left-aligned."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def bar(parts: Mapping[str, float], texts: Mapping[str, str], room: float = 0.0) -> str:
    """Return a bar with a legend of the texts of its parts, without slight ones. `room`: shortest length of the bar."""
    total = sum(parts.values())
    length = max(room, total) or 1.0
    shown = {name: size for name, size in parts.items() if size > SLIGHT * total}
    pieces = "".join(
        f'<i style="width:{100 * size / length:.3f}%;background:{_colour(name)}"></i>' for name, size in shown.items()
    )
    words = "".join(
        f'<span><i style="background:{_colour(name)}"></i>{escape(name)} {escape(texts[name])}</span>' for name in shown
    )
    label = escape(", ".join(f"{name} {texts[name]}" for name in shown), quote=True)
    return f'<div class="track" role="img" aria-label="{label}">{pieces}</div><div class="legend">{words}</div>'


def memory_bar(kinds: Mapping[str, float], room: float = 0.0) -> str:
    """Return a bar of bytes by kind."""
    return bar(kinds, {kind: gib(size) for kind, size in kinds.items()}, room)


def step_length(seconds: float) -> str:
    """Return a time, with four digits from a second on, since neighbouring layouts differ by a hundredth."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.4g} s" if seconds < 1000 else duration(seconds)


def time_bar(parts: Mapping[str, float]) -> str:
    """Return a bar of seconds by part of a step."""
    return bar(parts, {part: duration(seconds) for part, seconds in parts.items()})


def curve(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Return lines over one pair of axes, with the ends of both labelled. Empty = fewer than two points."""
    # All lines share one scale, else their heights could not be compared.
    points = [point for line in lines.values() for point in line]
    if len({x for x, _ in points}) < 2:
        return ""
    width, height, left, under = 560.0, 180.0, 56.0, 34.0
    least_x, most_x = min(x for x, _ in points), max(x for x, _ in points)
    least_y, most_y = min(y for _, y in points), max(y for _, y in points)

    def coordinates(x: float, y: float) -> str:
        right = left + (width - left - 8) * (x - least_x) / (most_x - least_x)
        down = 8 + (height - under - 8) * (most_y - y) / ((most_y - least_y) or 1.0)
        return f"{right:.1f},{down:.1f}"

    strokes = ("var(--accent)", "var(--moments)", "var(--activations)")
    drawn = "".join(
        f'<polyline fill="none" stroke="{stroke}" stroke-width="1.6" '
        f'points="{" ".join(coordinates(*xy) for xy in line)}"/>'
        for stroke, line in zip(strokes, lines.values(), strict=False)
    )
    words = [
        f'<text x="{left - 6}" y="16" text-anchor="end">{most_y:.4g}</text>',
        f'<text x="{left - 6}" y="{height - under}" text-anchor="end">{least_y:.4g}</text>',
        f'<text x="{left}" y="{height - under + 18}">{least_x:g}</text>',
        f'<text x="{width - 8}" y="{height - under + 18}" text-anchor="end">{across} {most_x:g}</text>',
    ]
    legend = "".join(
        f'<span><i style="background:{stroke}"></i>{escape(name)}</span>'
        for stroke, name in zip(strokes, lines, strict=False)
    )
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return (
        f'<svg {size} role="img" aria-label="{escape(up, quote=True)}" fill="currentColor" font-size="12">{drawn}'
        f'{"".join(words)}</svg><div class="legend">{escape(up)}: {legend}</div>'
    )


def _colour(name: str) -> str:
    return f"var(--{COLOURS.get(name, name)}, #8a8a8a)"


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def report_style() -> str:
    """Return the style of all pages about runs."""
    return (files("meshwright.interface.answers") / "page.css").read_text(encoding="utf-8")


def section(title: str, inner: str) -> str:
    """Return a titled section of a page."""
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"

"""The page of a record of serving: an animation of its steps, and what its memory was used for. No torch."""

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files

from meshwright.interface.answers.markup import HEAD, report_style
from meshwright.planner.explorer.explorer_page import source
from meshwright.serving.engine.serving_record import MemoryUse, ServingRecord, memory_use
from meshwright.spec.errors import DataError
from meshwright.spec.units import many

MOST_STEPS = 4000
"""Steps that the page shows. Its figures are of all."""
MOST_BLOCKS = 8192
"""Blocks that a screen can show as cells."""


def page(record: ServingRecord, name: str) -> str:
    """Return the HTML page. Raises DataError for a record that is damaged, or of too many blocks to draw."""
    blocks = record.header["blocks"]
    if blocks > MOST_BLOCKS:
        raise DataError(
            f"the engine had {blocks:,} blocks and the page can draw {MOST_BLOCKS:,}: record with a smaller --cache-mib"
        )
    use, shown = memory_use(record), record.steps[:MOST_STEPS]
    content = {
        "header": record.header, "requests": record.requests, "steps": shown,
        "cut": record.cut or len(shown) < len(record.steps),
    }  # fmt: skip
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    subject = (
        f"{many(len(record.requests), 'request')} in {many(len(record.steps), 'step')}, over {blocks:,} blocks of "
        f"{many(record.header['block'], 'position')}"
    )
    body = (
        f"<header><h1>{escape(f'Serving: {name}')}</h1><p>{subject}</p></header>"
        f"<main><div id='tiles'>{''.join(_tiles(use, record))}</div>{_read_part('serving.html')}</main>"
        f'<script type="application/json" id="data">{text}</script><script>{_read_part("serving.js")}</script>'
    )
    style = source("colours.css") + report_style() + _read_part("serving.css")
    head = f"{HEAD}<title>{escape(name)}</title>\n<style>{style}</style>\n</head>\n"
    return f"{head}<body>{body}</body></html>\n"


def _read_part(name: str) -> str:
    return (files("meshwright.verbs.report") / "page_files" / name).read_text(encoding="utf-8")


def _tiles(use: MemoryUse, record: ServingRecord) -> Iterator[str]:
    longest = f"{record.header['longest']:,}"
    figures = (
        (f"{use.blocks:.1%}", "of held block positions have a token", "paged, as it ran"),
        (f"{use.longest:.1%}", f"if each request reserved {longest} positions", "contiguous, longest"),
        (f"{use.power_of_two:.1%}", "if each reserved the next power of two", "contiguous, length guessed"),
        (f"{use.final:.1%}", "if each reserved its final length at once", "contiguous, length known"),
        (f"{use.holders:.2f}x", "tokens of sequences per token in memory", "sharing"),
        (f"{sum(len(step.get('preempted', ())) for step in record.steps):,}", "preemptions", "blocks ran out"),
    )
    for figure, words, small in figures:
        yield f"<div class='tile'><b>{figure}</b><span>{escape(words)}</span><small>{escape(small)}</small></div>"

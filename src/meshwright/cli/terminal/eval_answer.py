"""What `eval` prints of tasks, or of two models: what changed beyond noise, then every figure with its error."""

from collections.abc import Iterator

from meshwright.api.evaluation import EvaluationAnswer, cells
from meshwright.cli.terminal.screen_text import coloured, plus_minus, width, wrapped

COLOURS = {"better": "green", "worse": "red", "changed": "yellow"}
GAP = "  "


def answer(found: EvaluationAnswer) -> Iterator[str]:
    """All lines."""
    if found.against is not None:
        word = "BETTER" if found.counted("better") else "NOT BETTER"
        colour = "red" if found.counted("worse") else "green" if found.counted("better") else "yellow"
        yield f"{coloured(word, colour)}  {found.headline}"
        alone = found.run != found.against
        yield f"after {found.run}, before {found.against}" if alone else f"before {found.run}, after with each adapter"
        yield ""
    yield from _table(found)
    yield ""
    noise = "± is the standard error over items."
    if found.against is not None:
        noise += " Differences are paired by item; one is within noise where its 95% interval holds 0."
    yield from wrapped(plus_minus(noise), width())


def _table(found: EvaluationAnswer) -> Iterator[str]:
    rows = [found.head, *(tuple(cells(one)) for one in found.figures)]
    texts = rows[0].index("metric") + 1
    rows = [tuple(map(plus_minus, row)) for row in rows]
    wide = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for number, row in enumerate(rows):
        left = [text.ljust(size) for text, size in zip(row[:texts], wide[:texts], strict=True)]
        right = [text.rjust(size) for text, size in zip(row[texts:], wide[texts:], strict=True)]
        line = GAP.join([*left, *right])
        verdict = found.figures[number - 1].verdict if number else None
        colour = COLOURS.get(verdict or "")
        yield line.replace(str(verdict), coloured(str(verdict), colour)) if colour else line

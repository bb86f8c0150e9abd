"""Answer of `eval` for tasks or two models: what changed beyond noise, then every figure with its error."""

from collections.abc import Iterator

from meshwright.interface.terminal.screen_text import coloured, plus_minus, width, wrapped
from meshwright.verbs.eval.answer import EvaluationAnswer, cells

COLOURS = {"better": "green", "worse": "red", "changed": "yellow"}
GAP = "  "


def lines(answer: EvaluationAnswer) -> Iterator[str]:
    """Yield all lines."""
    if answer.against is not None:
        word = "BETTER" if answer.counted("better") else "NOT BETTER"
        colour = "red" if answer.counted("worse") else "green" if answer.counted("better") else "yellow"
        yield f"{coloured(word, colour)}  {answer.headline}"
        alone = answer.run != answer.against
        yield (
            f"after {answer.run}, before {answer.against}" if alone else f"before {answer.run}, after with each adapter"
        )
        yield ""
    yield from _table(answer)
    yield ""
    noise = "± is the standard error over items."
    if answer.against is not None:
        noise += " Differences are paired by item; one is within noise if its 95% interval contains 0."
    yield from wrapped(plus_minus(noise), width())


def _table(answer: EvaluationAnswer) -> Iterator[str]:
    rows = [answer.head, *(tuple(cells(figure)) for figure in answer.figures)]
    texts = rows[0].index("metric") + 1
    rows = [tuple(map(plus_minus, row)) for row in rows]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        left = [text.ljust(size) for text, size in zip(row[:texts], wide[:texts], strict=True)]
        right = [text.rjust(size) for text, size in zip(row[texts:], wide[texts:], strict=True)]
        line = GAP.join([*left, *right])
        verdict = answer.figures[number - 1].verdict if number else None
        colour = COLOURS.get(verdict or "")
        yield line.replace(str(verdict), coloured(str(verdict), colour)) if colour else line

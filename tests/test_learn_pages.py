"""Figures in the sentences of the Learn pages follow from the tables beside them, which `make pages` writes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

LEARN = Path(__file__).resolve().parent.parent / "docs" / "learn"
Cell = Callable[[str, str], float]
"""(row, column) of a table."""


def table(text: str, name: str) -> Cell:
    """A generated table of a page, by the words that its rows begin with."""
    block = text.partition(f"<!-- generated: table {name} -->\n")[2].partition("<!-- /generated -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]

    def cell(row: str, column: str) -> float:
        first = next(line for line in lines[2:] if re.match(rf"`?{re.escape(row)}\b", line[0]))
        return float(first[lines[0].index(column)].replace(",", "").removesuffix(" %"))

    return cell


def more(cell: Cell, row: str, base: str) -> str:
    """How much longer a step takes."""
    return f"{100 * (cell(row, 'step, s') / cell(base, 'step, s') - 1):.0f} %"


def part(share: float) -> str:
    """A share in words, if it is near one of them."""
    names = {"a fifth": 1 / 5}
    return next((name for name, exact in names.items() if abs(share / exact - 1) < 0.1), f"{share:.2f}")


SENTENCES: dict[tuple[str, str], Callable[[Cell], str]] = {
    ("memory", "recompute"): lambda cell: f"Here `full` makes a step {more(cell, 'full', 'none')} longer.",
    ("memory", "sequence"): lambda cell: (
        f"with flash attention: {cell('8,192', 'activations, GiB')} GiB at 8,192 tokens, "
        f"or {cell('8,192', 'activations, GiB') / 32:.2f} GiB per layer"
    ),
    ("data-and-zero", "zero"): lambda cell: (
        f"So ZeRO-2 takes the peak from {cell('0', 'peak, GiB'):.0f} GiB to {cell('2', 'peak, GiB')} GiB, "
        f"and ZeRO-3 to {cell('3', 'peak, GiB')} GiB, for "
    ),
    ("tensor-and-sequence", "tensor"): lambda cell: (
        "At `tp=16` the group spans two nodes, and MFU falls by "
        f"{100 * (1 - cell('tp=16 sp=true', 'MFU (full)') / cell('tp=8 sp=true', 'MFU (full)')):.0f} %"
    ),
    ("experts", "experts"): lambda cell: (
        "With `ep=8` a rank gathers only its own, and sends "
        f"{part(cell('8', 'sent, GB') / cell('1', 'sent, GB'))} as much."
    ),
}
"""(page, table) -> what the page says of it."""


@pytest.mark.parametrize(("page", "name"), SENTENCES)
def test_a_sentence_says_what_its_table_shows(page: str, name: str) -> None:
    text = (LEARN / f"{page}.md").read_text(encoding="utf-8")
    assert SENTENCES[page, name](table(text, name)) in " ".join(text.split())


def test_the_gathers_of_zero_3_are_those_of_the_formula() -> None:
    """What a GPU sends, by the row of the formula: 16-bit weights twice and fp32 gradients once, 16 times."""
    text = (LEARN / "data-and-zero.md").read_text(encoding="utf-8")
    parameters, head, rows = 8_030_261_248, 128_256 * 4096, 31 / 32 * 16 / 1e9
    formula, again = (2 + 2 + 4) * parameters * rows, 2 * head * rows
    assert f"{formula:.0f} GB for the model below is {formula - again:.0f} GB in the table" in " ".join(text.split())
    assert f"second gather would be {again:.1f} GB" in text
    assert table(text, "zero")("3", "sent, GB") == round(formula - again)


def test_the_price_of_zero_is_what_the_command_prints() -> None:
    text = " ".join((LEARN / "data-and-zero.md").read_text(encoding="utf-8").split())
    second, third = (re.search(rf"layout.zero={stage} \(\+(\d+)% time", text) for stage in (2, 3))
    assert second is not None and third is not None
    assert f"for {second[1]} and {third[1]} % more time than without ZeRO." in text

"""Held-out text: about the share asked for, by content alone, with a border at a line."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.text import sources
from meshwright.data.text.rows import cut
from meshwright.data.text.sources import Document

SHARES = st.sampled_from([0.0, 0.01, 0.02, 0.1, 0.5, 0.9])


def made(texts: list[str], size: int = 150) -> list[Document]:
    return [Document(name=str(number), pieces=cut(text, size)) for number, text in enumerate(texts)]


def run(texts: list[str], share: float) -> list[sources.SplitPart]:
    chosen = sources.choose(sources.survey(made(texts)), share)
    reading = sources.Reading()
    parts = list(sources.parts(made(texts), chosen, reading))
    assert reading.survey().digest == sources.survey(made(texts)).digest
    return parts


def side(parts: list[sources.SplitPart], stream: int) -> list[str]:
    """The documents of one stream, put together again."""
    texts_of_side: list[str] = []
    for part in parts:
        if part.stream == stream:
            if part.first:
                texts_of_side.append("")
            texts_of_side[-1] += part.text
    assert sum(p.first for p in parts) == sum(p.last for p in parts)
    return texts_of_side


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=60), share=SHARES)
def test_nothing_is_lost_and_nothing_is_twice(texts: list[str], share: float) -> None:
    parts = run(texts, share)
    assert "".join(part.text for part in parts) == "".join(texts)
    held = sum(len(text.encode()) for text in side(parts, sources.HELD_OUT))
    whole = sum(len(text.encode()) for text in texts)
    assert held == 0 if share == 0 else held <= max(share * whole + 400, 0.5)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), share=st.sampled_from([0.01, 0.02, 0.1, 0.5]))
def test_many_documents_are_held_out_whole_and_by_content(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    texts = [f"{seed} {number} " + "x" * int(rng.integers(1, 400)) for number in range(300)]
    held = side(run(texts, share), sources.HELD_OUT)
    assert set(held) <= set(texts)
    assert sum(map(len, held)) == pytest.approx(share * sum(map(len, texts)), rel=0.1)
    shuffled = [texts[i] for i in rng.permutation(len(texts))]
    assert sorted(side(run(shuffled, share), sources.HELD_OUT)) == sorted(held)


def test_equal_documents_are_on_one_side() -> None:
    texts = [f"text {number % 50} " * 5 for number in range(400)]
    parts = run(texts, 0.1)
    assert not set(side(parts, sources.HELD_OUT)) & set(side(parts, sources.TRAIN))
    assert side(parts, sources.HELD_OUT)


@pytest.mark.parametrize("documents", [1, 3, 19])
def test_of_few_documents_the_end_is_held_out_from_a_line_on(documents: int) -> None:
    texts = ["".join(f"line {n} of {number}\n" for n in range(200)) for number in range(documents)]
    parts = run(texts, 0.1)
    train, held = (side(parts, stream) for stream in (sources.TRAIN, sources.HELD_OUT))
    assert "".join(train) + "".join(held) == "".join(texts)
    assert "".join(train).endswith("\n") and held[0].startswith("line ")
    assert len("".join(held)) == pytest.approx(0.1 * len("".join(texts)), abs=20)


def test_documents_too_large_to_be_held_out_whole() -> None:
    texts = [f"{number}\n" + "some line\n" * 100 for number in range(25)]
    held = side(run(texts, 0.02), sources.HELD_OUT)
    assert "".join(texts).endswith("".join(held))
    assert len("".join(held)) == pytest.approx(0.02 * len("".join(texts)), abs=20)


def test_a_single_line_is_cut_too() -> None:
    parts = run(["a" * 1000], 0.1)
    assert [len("".join(side(parts, stream))) for stream in (sources.TRAIN, sources.HELD_OUT)] == [900, 100]

"""Purpose of memory: declared by the innermost function that runs, in its own thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.spec.memory.held import KINDS, Purpose, purpose, takes


@takes("buffers")
def moved() -> Purpose:
    return purpose()


@takes("logits")
def lost() -> list[Purpose]:
    with ThreadPoolExecutor(1) as other:
        elsewhere = other.submit(purpose).result()
    return [purpose(), moved(), purpose(), elsewhere]


def test_the_innermost_part_says_what_its_memory_is_for() -> None:
    assert lost() == ["logits", "buffers", "logits", ""]
    assert purpose() == "" and {"logits", "buffers"} <= set(KINDS)


def test_it_ends_with_an_error_too() -> None:
    @takes("buffers")
    def broken() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        broken()
    assert purpose() == ""

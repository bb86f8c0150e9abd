"""Bits of each matrix, chosen so that the files of a model stay within a budget of bytes.

Matrices that read the same inputs share their bits. Each choice has a cost in bytes and a divergence; the divergence
of the model is approximated by their sum. Bits are raised wherever a byte saves the most divergence, until nothing
fits. With diminishing returns this greedy choice is optimal, except for the unused rest of the budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.spec.errors import ArgumentError
from meshwright.spec.model.quantization_schemes import Scheme

RUNGS = (3, 4, 5, 6, 8)
"""Bit widths to choose from."""
WORDS = {"zero-point": "rtn", "absmax": "sym"}
"""Method names in scheme names, where the two differ."""


@dataclass(frozen=True, slots=True)
class BitChoice:
    """One way to store the matrices of a group."""

    bytes: int
    divergence: float
    """KL divergence of the predictions when only this group is rounded, in nats per token."""


def ladder(scheme: Scheme) -> tuple[Scheme, ...]:
    """Return variants of the scheme for all RUNGS, fewest bits first. Raises ArgumentError for a fixed width."""
    if scheme.codes != "integer" or not scheme.packed or scheme.outliers != "none":
        raise ArgumentError(
            "budget", rule=f"chooses how many bits weights have, and {scheme.name} has {scheme.bits} for all"
        )
    word = WORDS.get(scheme.method, scheme.method)
    return tuple(
        replace(scheme, bits=bits, name=f"int{bits}-{word}", zeros="fixed" if bits == 8 else scheme.zeros)
        for bits in RUNGS
    )


def choose_within(groups: Sequence[Sequence[BitChoice]], budget: int) -> list[int]:
    """Return the index of the choice taken for each group, with at most `budget` bytes in total.

    Choices are ordered by bytes. The first of each group is taken when even these exceed the budget.
    """
    choices = [0] * len(groups)
    remaining = budget - sum(group[0].bytes for group in groups)
    while True:
        # Greedy: the step that gains most per byte, wherever it is. Steps may skip a choice.
        best: tuple[float, int, int] | None = None
        for number, group in enumerate(groups):
            current = group[choices[number]]
            for other in range(choices[number] + 1, len(group)):
                cost, gain = group[other].bytes - current.bytes, current.divergence - group[other].divergence
                if 0 < cost <= remaining and gain > 0 and (best is None or gain / cost > best[0]):
                    best = gain / cost, number, other
        if best is None:
            return choices
        _, number, other = best
        remaining -= groups[number][other].bytes - groups[number][choices[number]].bytes
        choices[number] = other


def bits_of(schemes: Mapping[str, Scheme]) -> dict[int, int]:
    """Count the matrices of each bit width."""
    counts: dict[int, int] = {}
    for scheme in schemes.values():
        counts[scheme.bits] = counts.get(scheme.bits, 0) + 1
    return dict(sorted(counts.items()))

"""How many bits each matrix has, so that the files of a model stay within a budget of bytes.

Matrices that read the same inputs have the same bits. Each choice has a cost in bytes and a divergence; that of the
model is taken for their sum. Bits are raised where that saves the most divergence for a byte, until none fits: with
divergences that fall ever more slowly this is the best choice but for what is left of the budget at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.spec.errors import ArgumentError
from meshwright.spec.quantization_schemes import Scheme

RUNGS = (3, 4, 5, 6, 8)
"""Bits that are chosen from."""
WORDS = {"zero-point": "rtn", "absmax": "sym"}
"""Of methods, where they are not those of schemes."""


@dataclass(frozen=True, slots=True)
class BitChoice:
    """One way to hold the matrices of a group."""

    bytes: int
    divergence: float
    """Of the model's predictions with that group alone rounded so, in nats per token."""


def ladder(scheme: Scheme) -> tuple[Scheme, ...]:
    """The scheme with other bits, fewest first. ArgumentError where it has one width only."""
    if scheme.codes != "integer" or not scheme.packed or scheme.outliers != "none":
        raise ArgumentError(f"budget= chooses how many bits weights have, and {scheme.name} has {scheme.bits} for all")
    word = WORDS.get(scheme.method, scheme.method)
    return tuple(
        replace(scheme, bits=bits, name=f"int{bits}-{word}", zeros="fixed" if bits == 8 else scheme.zeros)
        for bits in RUNGS
    )


def chosen(groups: Sequence[Sequence[BitChoice]], budget: int) -> list[int]:
    """For each group the number of one of its choices, which are ordered by bytes; their bytes together are at most
    `budget`. The first of each is taken where even those are more."""
    found = [0] * len(groups)
    left = budget - sum(group[0].bytes for group in groups)
    while True:
        best: tuple[float, int, int] | None = None
        for number, group in enumerate(groups):
            now = group[found[number]]
            for other in range(found[number] + 1, len(group)):
                cost, gain = group[other].bytes - now.bytes, now.divergence - group[other].divergence
                if 0 < cost <= left and gain > 0 and (best is None or gain / cost > best[0]):
                    best = gain / cost, number, other
        if best is None:
            return found
        _, number, other = best
        left -= groups[number][other].bytes - groups[number][found[number]].bytes
        found[number] = other


def bits_of(schemes: Mapping[str, Scheme]) -> dict[int, int]:
    """How many matrices have how many bits."""
    counts: dict[int, int] = {}
    for scheme in schemes.values():
        counts[scheme.bits] = counts.get(scheme.bits, 0) + 1
    return dict(sorted(counts.items()))

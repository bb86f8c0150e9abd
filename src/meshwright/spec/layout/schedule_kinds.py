"""Pipeline schedules, one entry each: the only list of their names, stages and orders of passes.

Read by the engine, the planner, the search, the matrices of `verify` and `doctor`, and the explorer's page.

Letters: p ranks, m micro-batches, v stages of one rank, r a rank. The order of a rank's passes is written in words
(`Words`) or as rounds (`Rounds`). spec/layout/schedule.py expands both into lists of actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

ScheduleName = Literal["afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
"""Words of layout.schedule: the keys of KINDS."""


class Repeats(NamedTuple):
    """Number of repeats: base + p * ranks + m * micro-batches + r * rank."""

    base: int = 0
    p: int = 0
    m: int = 0
    r: int = 0

    def times(self, ranks: int, micro_batches: int, rank: int) -> int:
        """Return the number. Below 1 the word is omitted."""
        return self.base + self.p * ranks + self.m * micro_batches + self.r * rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Sequence of words with repeats, in which a word is a list of passes: F0, B1, W0 or BW1.

    The digit is the index among the rank's stages. W alone completes the oldest B whose weight gradients are still
    missing. `~` in place of a digit is 1, then 0, then 1. Each pass takes the next micro-batch of its stage.
    """

    phrases: tuple[tuple[str, Repeats], ...]
    fewest: Repeats = field(default_factory=Repeats)
    """Fewest micro-batches of the order. For fewer, passes of the surplus ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Forward passes until the first gradient is back, then one of each, then the remaining backward passes.

    Micro-batches go in rounds of about p. A round passes all stages of the rank before the next begins.
    """

    hop: int = 1
    """Additional early forward passes per rank towards the front."""
    late: bool = False
    """W follows B after r others. Every rank then holds at most p micro-batches and has weight gradients left for its
    bubble. Otherwise backward passes are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """Declaration of a schedule."""

    order: Words | Rounds
    stages: int = 1
    """Stages of a rank, unless layout.vp gives another number."""
    deeper: bool = False
    """layout.vp may give another number."""
    in_v: bool = False
    """Rank r holds the stages r and 2p-1-r. Otherwise stages go round and round."""
    splits: Literal["none", "some", "all"] = "none"
    """Backward passes that separate gradients of weights from those of the input."""
    holds_all: bool = False
    """Every micro-batch is in flight at once, without repeating rounds."""
    fewest: int = 0
    """Fewest micro-batches per pipeline rank."""
    title: str
    """Name in its paper."""
    meaning: str
    """Description in a sentence or two."""
    formula: str
    """Bubble, with F, B and W for the seconds of passes."""
    source: str


KINDS: Mapping[str, ScheduleKind] = {
    "afab": ScheduleKind(
        order=Words(phrases=(("F0", Repeats(m=1)), ("BW0", Repeats(m=1)))),
        holds_all=True,
        title="All forward, all backward (GPipe)",
        meaning="All micro-batches go forward before the first comes back: every one is in flight.",
        formula="bubble (p - 1) / m; m in flight",
        source="Huang et al. 2019, arXiv:1811.06965",
    ),
    "1f1b": ScheduleKind(
        order=Rounds(),
        title="One forward, one backward",
        meaning="The bubble of afab, but a rank keeps at most p - rank micro-batches.",
        formula="bubble (p - 1) / m; p - rank in flight",
        source="Narayanan et al. 2020, arXiv:2006.09503",
    ),
    "interleaved": ScheduleKind(
        order=Rounds(hop=2),
        stages=2,
        deeper=True,
        title="Interleaved 1F1B",
        meaning="Each rank holds v stages that are not neighbours: the pipeline fills v times faster and sends v times "
        "as often.",
        formula="bubble (p - 1) / (v m)",
        source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2",
    ),
    "zb-h1": ScheduleKind(
        order=Rounds(late=True),
        deeper=True,
        splits="all",
        title="Zero bubble H1",
        meaning="Weight gradients wait, and fill the bubble; the memory of 1f1b.",
        formula="bubble (p - 1)(F + B - W) / (m (F + B + W))",
        source="Qi et al. 2023, arXiv:2401.10241, section 2.2",
    ),
    "zb-v": ScheduleKind(
        order=Words(
            phrases=(
                ("F0", Repeats(-1, p=2, r=-2)),
                ("F1 F0", Repeats(r=1)),
                ("F1 B1 W1", Repeats(p=1, r=-1)),
                ("F0 B0 W0 F1 B1 W1", Repeats(1, p=-2, m=1, r=1)),
                ("B0 W0 F1 B1 W1", Repeats(-1, p=1, r=-1)),
                ("B0 B1", Repeats(r=1)),
                ("B0 W0", Repeats(p=1, r=-1)),
                ("W1", Repeats(r=1)),
                ("W0", Repeats(r=1)),
            ),
            fewest=Repeats(-1, p=2),
        ),
        stages=2,
        in_v=True,
        splits="all",
        title="Zero bubble V",
        meaning="Two stages a rank, placed like a V: the last stage is beside the first, so gradients return at once.",
        formula="no bubble from 2p - 1 micro-batches on, where F, B and W take equally long",
        source="Qi et al. 2024, arXiv:2405.15362",
    ),
    "dualpipe-v": ScheduleKind(
        # The eight steps of github.com/deepseek-ai/DualPipe; where it overlaps F with BW, they follow one another. Of
        # the last 2 (r + 1) backward passes before the tail the second half is split.
        order=Words(
            phrases=(
                ("F0", Repeats(-2, p=2, r=-2)),
                ("F0 F1", Repeats(1, r=1)),
                ("B1 W F1", Repeats(-1, p=1, r=-1)),
                ("F0 BW1 F1 BW0", Repeats(1, p=-2, m=1, r=1)),
                ("BW1 F1 BW0", Repeats(-1, p=1, r=-1)),
                ("BW~", Repeats(1, r=1)),
                ("B~", Repeats(1, r=1)),
                ("W B0", Repeats(-1, p=1, r=-1)),
                ("W", Repeats(1, r=1)),
            )
        ),
        stages=2,
        in_v=True,
        splits="some",
        fewest=2,
        title="DualPipe, cut in half",
        meaning="A V as well; forward of one micro-batch and backward of another are meant to overlap. Played here one "
        "after the other.",
        formula="wants 2p micro-batches",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.2.1",
    ),
}

NAMES = tuple(KINDS)
assert get_args(ScheduleName) == NAMES
V_PLACED = tuple(name for name, kind in KINDS.items() if kind.in_v)
"""Schedules whose rank r holds the stages r and 2p-1-r."""
SPLIT = tuple(name for name, kind in KINDS.items() if kind.splits != "none")
"""Schedules that separate weight gradients from those of the input, in some or all passes."""
SPLIT_ALWAYS = tuple(name for name, kind in KINDS.items() if kind.splits == "all")


def stage_numbers(name: str, ranks: int, layers: int) -> tuple[int, ...]:
    """Return the possible numbers of stages per rank for a model of `layers` layers, the usual one first."""
    kind = KINDS[name]
    return (kind.stages, *range(kind.stages + 1, layers // ranks + 1)) if kind.deeper else (kind.stages,)

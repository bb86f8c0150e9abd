"""Random cases beside one device: which differ, and in what first.

Processes are reused: those of one number of processes run a batch of cases. A batch in which a rank fails, or does not
answer, is run again case by case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from time import monotonic

from meshwright.kernels.linear import SAME
from meshwright.observe.ranks import RankError
from meshwright.observe.verify.bands import BANDS, Band
from meshwright.observe.verify.case_text import Drawn
from meshwright.observe.verify.feature_matrix import BATCH, on_ranks_of
from meshwright.observe.verify.one_device import (
    GROWTH_STEPS,
    OVERFLOWING_SCALE,
    SCALE,
    Case,
    RankOutcome,
    begins_large,
    distance,
    first_difference,
    outcome,
)
from meshwright.observe.verify.shrinking import shrunk
from meshwright.spec.layout import Layout

NEAR_TIE = 1e-5
"""Of scores that sum to 1. Layouts differ by less than a tenth of it in fp32."""
ROUNDING = 4e-6
"""Of the largest element of a tensor in fp32. Where one device differs from itself by more, a layout may differ from it
by the whole tolerance and be right."""
MOST_REDRAWS = 30
LIMIT_S = 120.0
"""For one case; a batch has as much for each of its cases."""
COMPILING_S = 480.0
"""Beside it, where blocks are compiled: code for each kind of block and of pass, on every rank."""
SHRINK_S = 60.0
ALONE = Layout(compile="off")
OTHER_WAYS = replace(ALONE, kernels="reference"), replace(ALONE, micro_batch=1)
"""In which one device rounds otherwise."""
OWN_ROUNDING, WIDEST, WIDEST_FP8, WIDEST_FP32 = 2.0, 0.2, 0.4, 1e-4
"""See wider_band. Layouts were at most 1.7 times as far from one device in 16 bits as that is from itself in fp32; a
sum that is doubled is off by 1, a mean instead of a sum by a half or more. The fixed band of fp8 is 0.3 already."""
LOSS_OF_FP16 = 0.1
"""How far the loss of fp16 may be from that of fp32, of which a step may not be skipped; a wrong scale is a factor of
two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """How a case ended."""

    index: int
    drawn: Drawn
    """With the seed that was taken in the end."""
    difference: str | None
    """None = equal to one device."""
    redrawn: int = 0
    """How many times weights and tokens were drawn again, since rounding decided too much on one device: which of two
    experts a token goes to, or the last digits of a small difference."""


def verdicts(cases: Sequence[Drawn], device: str = "cpu") -> Iterator[CaseVerdict]:
    """Each case with its first difference from one device, the smallest worlds first."""
    for world in sorted({drawn.layout.world for drawn in cases}):
        indices = [index for index, drawn in enumerate(cases) if drawn.layout.world == world]
        for start in range(0, len(indices), BATCH):
            some = {index: cases[index] for index in indices[start : start + BATCH]}
            yield from _of_batch(world, some, device)


def verdict(drawn: Drawn, device: str = "cpu", *, settle: bool = False) -> CaseVerdict:
    """Of one case, with its tokens as they are unless `settle`."""
    alone, redrawn = _settled(drawn.case, device) if settle else (outcome(drawn.case, ALONE, device=device), 0)
    drawn = replace(drawn, case=replace(drawn.case, seed=drawn.case.seed + redrawn))
    return CaseVerdict(index=0, drawn=drawn, difference=_alone_or(drawn, alone, device), redrawn=redrawn)


def _of_batch(world: int, cases: dict[int, Drawn], device: str) -> Iterator[CaseVerdict]:
    settled = {}
    for index, drawn in cases.items():
        alone, redrawn = _settled(drawn.case, device)
        case = replace(drawn.case, seed=drawn.case.seed + redrawn)
        settled[index] = replace(drawn, case=case), alone, redrawn
    try:
        together = _run(world, [drawn for drawn, _, _ in settled.values()], device)
    except RankError:
        together = None
    for place, (index, (drawn, alone, redrawn)) in enumerate(settled.items()):
        found = _alone_or(drawn, alone, device) if together is None else difference(drawn.case, alone, together[place])
        yield CaseVerdict(index=index, drawn=drawn, difference=found, redrawn=redrawn)


def _settled(case: Case, device: str) -> tuple[RankOutcome, int]:
    """What one device finds with the first seed, from that of the case on, on which rounding decides nothing, and how
    many were passed over. Where there is none among MOST_REDRAWS the case stays as it is."""
    for redrawn in range(MOST_REDRAWS):
        one = replace(case, seed=case.seed + redrawn)
        alone = outcome(one, ALONE, device=device)
        if alone.margin >= NEAR_TIE and (case.precision != "fp32" or _rounding(one, alone, device) <= ROUNDING):
            return alone, redrawn
    return outcome(case, ALONE, device=device), 0


def _rounding(case: Case, alone: RankOutcome, device: str) -> float:
    """How far one device is from itself when the same sums are taken in another order: the largest of all tensors."""
    several = replace(ALONE, kernels="reference", micro_batch=1)
    other = outcome(case, several, device=device)
    whole = {name: tensor for name, (_, tensor) in other.tensors.items()}
    return max(distance(name, alone, whole, BANDS["fp32"]) for name in alone.tensors)


def _alone_or(drawn: Drawn, alone: RankOutcome, device: str) -> str | None:
    """The difference of a case that is run in processes of its own; what a rank raised counts as one."""
    try:
        [ranks] = _run(drawn.layout.world, [drawn], device)
    except RankError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{lines[0].rstrip(':')}: {lines[-1]}" if len(lines) > 1 else lines[0]
    return difference(drawn.case, alone, ranks)


def _run(world: int, cases: Sequence[Drawn], device: str) -> list[list[RankOutcome]]:
    """For each case what its ranks found."""
    limit_s = sum(LIMIT_S + COMPILING_S * (drawn.layout.compile == "on") for drawn in cases)
    return on_ranks_of(world, [(drawn.case, drawn.layout) for drawn in cases], device, limit_s)


def difference(case: Case, alone: RankOutcome, ranks: Sequence[RankOutcome]) -> str | None:
    """What differs first, or what one device itself has wrong."""
    found = first_difference(alone, ranks, case.band)
    finite = all(map(isfinite, (*alone.losses, *alone.norms)))
    if found and finite and case.precision != "fp32" and not case.overflow:
        found = first_difference(alone, ranks, wider_band(case, alone))
    elif found and finite and case.precision == "fp32":
        found = first_difference(alone, ranks, unsettled_band(case, alone))
    return found or wrong_alone(case, alone)


def unsettled_band(case: Case, alone: RankOutcome) -> Band:
    """The band of an fp32 case on which rounding decides much with every seed, as where Muon has gradients of few
    targets: twice as far as one device is from itself in another order of sums, and never beyond WIDEST_FP32."""
    own, fixed = min(WIDEST_FP32, OWN_ROUNDING * _rounding(case, alone, "cpu")), case.band
    return replace(fixed, gradient=max(fixed.gradient, own), weight=max(fixed.weight, own))


def wider_band(case: Case, alone: RankOutcome) -> Band:
    """The band of a 16-bit case whose own rounding is large: so many times as far as one device is from itself in fp32,
    and never so far that a doubled or a missing part of a sum would lie within."""
    exact, fixed = outcome(case.unrounded, ALONE), case.band
    widest = WIDEST if case.products == SAME else WIDEST_FP8
    selves = alone, *(outcome(case, way) for way in OTHER_WAYS)  # one loss alone may be near by chance
    whole = {name: tensor for name, (_, tensor) in exact.tensors.items()}
    apart = {name: distance(name, alone, whole, fixed) for name in alone.tensors}

    def numbers(some: Sequence[float], others: Sequence[float]) -> float:
        return max(abs(a - b) / abs(a) for a, b in zip(some, others, strict=True))

    def widened(least: float, own: float) -> float:
        return max(least, min(widest, OWN_ROUNDING * own))

    def all_gradients(step: int) -> float:
        """A norm is as far off as the length of the difference at most, and by chance much nearer."""
        names = [name for name in apart if name.startswith(f"step {step} gradient of ")]
        squares = [float((whole[name] - alone.tensors[name][1]).square().sum()) for name in names]
        return sqrt(sum(squares)) / exact.norms[step - 1]

    return replace(
        fixed,
        loss=widened(fixed.loss, max(numbers(one.losses, exact.losses) for one in selves)),
        norm=widened(fixed.norm, max(map(all_gradients, range(1, case.steps + 1)))),
        gradient=widened(fixed.gradient, max(apart[name] for name in apart if not begins_large(name))),
        weight=widened(fixed.weight, max(apart[name] for name in apart if begins_large(name))),
    )


def wrong_alone(case: Case, alone: RankOutcome) -> str | None:
    """What is wrong with fp16 on one device itself, with which every layout would agree: the loss scale after a step,
    or the loss beside that of fp32."""
    if case.precision != "fp16":
        return None
    scale, good = SCALE, 0
    for step, found in enumerate(alone.scales, start=1):
        if step == case.overflow:
            scale, good = OVERFLOWING_SCALE / 2, 0
        else:
            good += 1
            scale = (SCALE if step == case.overflow + 1 else scale) * (2 if good == GROWTH_STEPS else 1)
        if found != scale:
            return f"one device: step {step}: loss scale is {found:g} after the step, must be {scale:g}"
    exact = outcome(case.unrounded, ALONE)
    for step, (found, expected) in enumerate(zip(alone.losses, exact.losses, strict=True), start=1):
        if not abs(found / expected - 1) <= LOSS_OF_FP16:
            return f"one device: step {step}: loss is {found!r} in fp16, {expected!r} in fp32"
    return None


def smallest(found: CaseVerdict, device: str = "cpu", *, limit_s: float = SHRINK_S) -> CaseVerdict:
    """The smallest case near one that differs which differs in the same way, as far as the time goes."""
    end, best = monotonic() + limit_s, found

    def failing(drawn: Drawn) -> Drawn | None:
        nonlocal best
        one = verdict(drawn, device, settle=True)
        if one.difference is None or _kind(one.difference) != _kind(best.difference or ""):
            return None
        best = replace(one, index=found.index)
        return one.drawn

    shrunk(found.drawn, failing, lambda: monotonic() < end)
    return best


def _kind(difference: str) -> str:
    """Wrong on one device already, a failed rank (with its error), or another number."""
    if difference.startswith("one device"):
        return " ".join(difference.split()[4:6])
    return difference.split(": ", 1)[1] if difference.startswith("rank") else "number"

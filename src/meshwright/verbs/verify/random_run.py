"""`verify --random` and `--case`: cases against one device, their first difference, and the smallest failing case.

Processes are reused: one set runs a batch of cases of its world size. A batch in which a rank fails or does not answer
is run again case by case.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from time import monotonic
from typing import Any

from meshwright.interface.terminal.screen_text import print_json
from meshwright.kernels.linear.linear import SAME
from meshwright.observe.oracle.feature_matrix import BATCH, run_on_ranks
from meshwright.observe.oracle.one_device import (
    BANDS,
    GROWTH_STEPS,
    OVERFLOWING_SCALE,
    SCALE,
    Band,
    Case,
    RankOutcome,
    begins_large,
    distance,
    first_difference,
    outcome,
    relative,
)
from meshwright.observe.ranks import RankError
from meshwright.spec.errors import OutsideTolerance, PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.units import many
from meshwright.verbs.verify.cases import (
    DrawnCase,
    Settings,
    build_case,
    format_case,
    parse_case,
    random_case,
    settings_of,
)

NEAR_TIE = 1e-5
"""Near tie of scores that sum to 1. Layouts differ by less than a tenth of it in fp32."""
ROUNDING = 4e-6
"""Share of the largest element in fp32. Beyond it, a correct layout may use up the whole tolerance."""
MOST_REDRAWS = 30
LIMIT_S = 120.0
"""Time limit of one case in seconds; a batch has the sum."""
COMPILING_S = 480.0
"""Additional limit for compiled blocks: code for each kind of block and pass, on every rank."""
SHRINK_S = 60.0
ALONE = Layout(compile="off")
VARIANTS = replace(ALONE, kernels="reference"), replace(ALONE, micro_batch=1)
"""Layouts in which one device rounds differently."""
ROUNDING_FACTOR, WIDEST, WIDEST_FP8, WIDEST_FP32 = 4.0, 0.2, 0.4, 1e-4
"""Limits of `wider_band`.

In 16 bits layouts were at most 2.8 times as far from one device as that is from itself in fp32, where six ranks sum
rounded parts. A doubled sum is off by 1, a mean instead of a sum by a half or more. The fixed band of fp8 is 0.3.
"""
LOSS_OF_FP16 = 0.1
"""Largest relative error of the loss in fp16 against fp32. A wrong scale is a factor of two."""

PARTS = ("teacher.", "moe.", "mla.", "rope_scaling.")
TOGETHER = (
    ("pp", "vp", "schedule", "stages", "micro_batch"),
    ("cp", "context", "context_split"),
    ("dp_replicate",),
    ("dp_shard",),
    ("tp", "sp", "tp_chunks"),
    ("tp_chunks",),
    ("ep", "ep_chunks"),
    ("pp", "vp", "schedule", "stages"),
    ("vp", "schedule", "stages"),
    ("precision", "overflow", "overflow_sequence"),
    ("precision", "products", "overflow", "overflow_sequence", "master_weights"),
    ("overflow", "overflow_sequence"),
    ("window", "window_from_layer"),
    ("batches", "empty"),
    ("micro_batch", "global_batch", "batches", "empty"),
    ("global_batch", "batches"),
    ("heads", "kv_heads"),
    ("layers", "stages"),
    ("layers", "stages", "moe.first_dense"),
    ("positions", "head_dim"),
)
"""Settings that are left out together, since leaving out one alone would break a rule."""
ALSO_LEFT_OUT = ((), ("zero",), ("ep",), ("ep", "zero"), ("ep", "sp"), ("ep", "sp", "zero"))
"""Settings that may have to be left out as well, smallest set first: they use ranks of those left out."""
LEFT_OUT_WITH_SMALLER = {
    "tp": ((), ("heads",), ("heads", "kv_heads"), ("sequence",), ("ep",)),
    "pp": ((), ("layers", "stages"), ("layers", "stages", "moe.first_dense"), ("global_batch", "batches")),
    "cp": ((), ("sequence",), ("ep",)),
    "dp_shard": ((), ("global_batch", "batches"), ("global_batch", "batches", "ep"), ("ep",)),
    "dp_replicate": ((), ("global_batch", "batches"), ("global_batch", "batches", "empty")),
    "vp": ((), ("layers", "stages"), ("stages",)),
    "moe.experts": ((), ("ep",), ("moe.top_k",), ("moe.groups", "moe.top_groups")),
}
"""Settings that may have to be left out when a number gets smaller."""
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
PROPORTIONAL = (*DEGREES, "heads", "kv_heads", "sequence", "global_batch", "batches", "layers", "moe.experts")
"""Numbers that a degree divides: they get smaller in proportion with it."""
UNORDERED = ("seed", "overflow", "overflow_sequence", "zero")
"""Numbers of which a smaller one is not simpler."""
Change = Callable[[Settings], Settings | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """Verdict on one case."""

    index: int
    drawn: DrawnCase
    """The case with its final seed."""
    difference: str | None
    """First difference from one device. None = equal."""
    redrawn: int = 0
    """Times that weights and tokens were drawn again, since rounding decided too much on one device."""


def judge_cases(cases: Sequence[DrawnCase], device: str = "cpu") -> Iterator[CaseVerdict]:
    """Yield the verdict on each case, smallest worlds first."""
    # Small worlds start fastest, so a fault that all cases share is seen within seconds.
    for world in sorted({drawn.layout.world for drawn in cases}):
        indices = [index for index, drawn in enumerate(cases) if drawn.layout.world == world]
        for start in range(0, len(indices), BATCH):
            batch = {index: cases[index] for index in indices[start : start + BATCH]}
            yield from _judge_batch(world, batch, device)


def judge_case(drawn: DrawnCase, device: str = "cpu", *, settle: bool = False) -> CaseVerdict:
    """Return the verdict on one case. Its tokens are drawn again only with `settle`."""
    alone, redrawn = _settle_case(drawn.case, device) if settle else (outcome(drawn.case, ALONE, device=device), 0)
    # The verdict carries the final seed: printed as a command, it repeats exactly this case.
    drawn = replace(drawn, case=replace(drawn.case, seed=drawn.case.seed + redrawn))
    return CaseVerdict(index=0, drawn=drawn, difference=_run_and_compare(drawn, alone, device), redrawn=redrawn)


def _judge_batch(world: int, cases: dict[int, DrawnCase], device: str) -> Iterator[CaseVerdict]:
    settled = {}
    for index, drawn in cases.items():
        alone, redrawn = _settle_case(drawn.case, device)
        case = replace(drawn.case, seed=drawn.case.seed + redrawn)
        settled[index] = replace(drawn, case=case), alone, redrawn
    # Processes take seconds to start and cases little more, so all cases of one world share a group.
    try:
        together = _run_ranks(world, [drawn for drawn, _, _ in settled.values()], device)
    except RankError:
        together = None
    for position, (index, (drawn, alone, redrawn)) in enumerate(settled.items()):
        if together is None:
            # A rank of some case failed and ended the group. Alone, each case shows its own outcome.
            first_difference_of_case = _run_and_compare(drawn, alone, device)
        else:
            first_difference_of_case = difference(drawn.case, alone, together[position])
        yield CaseVerdict(index=index, drawn=drawn, difference=first_difference_of_case, redrawn=redrawn)


def _settle_case(case: Case, device: str) -> tuple[RankOutcome, int]:
    """Draw seeds until rounding decides nothing on one device. Return its outcome and the number of seeds skipped."""
    for redrawn in range(MOST_REDRAWS):
        drawn = replace(case, seed=case.seed + redrawn)
        alone = outcome(drawn, ALONE, device=device)
        # Rounding decides which expert or code wins a near tie, and layouts may then differ without an error.
        if alone.margin >= NEAR_TIE and (case.precision != "fp32" or _rounding(drawn, alone, device) <= ROUNDING):
            return alone, redrawn
    # Some cases never settle, such as Muon with few targets: they are judged with the wider band below.
    return outcome(case, ALONE, device=device), 0


def _rounding(case: Case, alone: RankOutcome, device: str) -> float:
    """Return the largest distance of one device from itself with sums in another order."""
    # Other kernels and single-sequence micro-batches change the order of nearly every sum.
    several = replace(ALONE, kernels="reference", micro_batch=1)
    other = outcome(case, several, device=device)
    whole_tensors = {name: tensor for name, (_, tensor) in other.tensors.items()}
    return max(distance(name, alone, whole_tensors, BANDS["fp32"]) for name in alone.tensors)


def _run_and_compare(drawn: DrawnCase, alone: RankOutcome, device: str) -> str | None:
    """Return the difference of a case in new processes. An exception of a rank counts as one."""
    try:
        [ranks] = _run_ranks(drawn.layout.world, [drawn], device)
    except RankError as error:
        # The first line names the rank, and the last one of a traceback is the exception itself.
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{lines[0].rstrip(':')}: {lines[-1]}" if len(lines) > 1 else lines[0]
    return difference(drawn.case, alone, ranks)


def _run_ranks(world: int, cases: Sequence[DrawnCase], device: str) -> list[list[RankOutcome]]:
    limit_s = sum(LIMIT_S + COMPILING_S * (drawn.layout.compile == "on") for drawn in cases)
    return run_on_ranks(world, [(drawn.case, drawn.layout) for drawn in cases], device, limit_s)


def difference(case: Case, alone: RankOutcome, ranks: Sequence[RankOutcome]) -> str | None:
    """Return the first difference, or an error of one device itself."""
    message = first_difference(alone, ranks, case.band)
    # A band computed from NaN or infinity would accept anything, so such cases keep the fixed band.
    norms = [norm for step, norm in enumerate(alone.norms, start=1) if step != case.overflow]
    finite = all(map(isfinite, (*alone.losses, *norms)))
    # Wider bands cost more runs on one device, so they are made only where the fixed one is broken.
    if message and finite and case.precision != "fp32":
        message = first_difference(alone, ranks, wider_band(case, alone))
    elif message and finite and case.precision == "fp32":
        message = first_difference(alone, ranks, unsettled_band(case, alone))
    return message or wrong_alone(case, alone)


def unsettled_band(case: Case, alone: RankOutcome) -> Band:
    """Return the band of an fp32 case in which rounding decides much with every seed.

    Muon with gradients of few targets is such a case. The band is twice the distance of one device from itself with
    sums in another order, and never beyond WIDEST_FP32.
    """
    rounding, fixed = min(WIDEST_FP32, ROUNDING_FACTOR * _rounding(case, alone, "cpu")), case.band
    return replace(fixed, gradient=max(fixed.gradient, rounding), weight=max(fixed.weight, rounding))


def wider_band(case: Case, alone: RankOutcome) -> Band:
    """Return the band of a 16-bit case whose own rounding is large.

    It is ROUNDING_FACTOR times the distance of one device from itself in fp32, and never so wide that a doubled or
    missing part of a sum would pass. A step that overflows is skipped in fp16 alone: there the distance is from one
    device in 16 bits.
    """
    exact, fixed = alone if case.overflow else outcome(case.unrounded, ALONE), case.band
    widest = WIDEST if case.products == SAME else WIDEST_FP8
    selves = alone, *(outcome(case, way) for way in VARIANTS)  # one of them alone may be near by chance
    infinite = f"step {case.overflow} gradient of "
    whole_tensors = {name: tensor for name, (_, tensor) in exact.tensors.items() if not name.startswith(infinite)}
    gaps = {
        name: max(distance(name, one_device, whole_tensors, fixed) for one_device in selves) for name in whole_tensors
    }

    def numbers(ours: Sequence[float], others: Sequence[float]) -> float:
        return max(relative(abs(a - b), abs(a)) for a, b in zip(ours, others, strict=True))

    def widened(least: float, distance_to_fp32: float) -> float:
        return max(least, min(widest, ROUNDING_FACTOR * distance_to_fp32))

    def all_gradients(step: int) -> float:
        """Return the relative length of the difference, which bounds the error of the norm."""
        names = [name for name in gaps if name.startswith(f"step {step} gradient of ")]
        # The norm of a difference bounds the difference of norms, by the triangle inequality.
        squares = [
            sum(float((whole_tensors[name] - other.tensors[name][1]).square().sum()) for name in names)
            for other in (selves if case.overflow else (alone,))
        ]
        return relative(sqrt(max(squares)), exact.norms[step - 1])

    return replace(
        fixed,
        loss=widened(fixed.loss, max(numbers(variant.losses, exact.losses) for variant in selves)),
        norm=widened(
            fixed.norm, max(all_gradients(step) for step in range(1, case.steps + 1) if step != case.overflow)
        ),
        gradient=widened(fixed.gradient, max(gaps[name] for name in gaps if not begins_large(name))),
        weight=widened(fixed.weight, max(gaps[name] for name in gaps if begins_large(name))),
    )


def wrong_alone(case: Case, alone: RankOutcome) -> str | None:
    """Return an error that all layouts share: a wrong loss scale in fp16, or a loss far from that of fp32."""
    # Only fp16 has a loss scale, and bf16 has the exponent range of fp32.
    if case.precision != "fp16":
        return None
    # The scale is followed by hand here: ranks and one device share the code that could be wrong.
    scale, good = SCALE, 0
    for step, actual in enumerate(alone.scales, start=1):
        # The planted overflow skips the step and halves the scale that caused it.
        if step == case.overflow:
            scale, good = OVERFLOWING_SCALE / 2, 0
        else:
            good += 1
            scale = (SCALE if step == case.overflow + 1 else scale) * (2 if good == GROWTH_STEPS else 1)
        if actual != scale:
            return f"one device: step {step}: loss scale is {actual:g} after the step, must be {scale:g}"
    exact = outcome(case.unrounded, ALONE)
    for step, (actual, expected) in enumerate(zip(alone.losses, exact.losses, strict=True), start=1):
        if not abs(actual - expected) <= LOSS_OF_FP16 * abs(expected):
            return f"one device: step {step}: loss is {actual!r} in fp16, {expected!r} in fp32"
    return None


def smallest(failed: CaseVerdict, device: str = "cpu", *, limit_s: float = SHRINK_S) -> CaseVerdict:
    """Return the smallest case that differs in the same way, found within the time limit."""
    end, best = monotonic() + limit_s, failed

    def failing(drawn: DrawnCase) -> DrawnCase | None:
        nonlocal best
        attempt = judge_case(drawn, device, settle=True)
        # Another kind of difference is another fault, and would hide the one to be found.
        wanted = _difference_kind(best.difference or "")
        if attempt.difference is None or _difference_kind(attempt.difference) != wanted:
            return None
        best = replace(attempt, index=failed.index)
        return attempt.drawn

    # The deadline is asked before each try, so the last try may end after it.
    shrink_case(failed.drawn, failing, lambda: monotonic() < end)
    return best


def _difference_kind(difference: str) -> str:
    """Classify a difference: wrong on one device already, a failed rank (with its error), or another number."""
    if difference.startswith("one device"):
        # The fifth and sixth word name the quantity ("loss scale"): step numbers must not make two kinds of one fault.
        return " ".join(difference.split()[4:6])
    return difference.split(": ", 1)[1] if difference.startswith("rank") else "number"


def shrink_case(
    drawn: DrawnCase, failing: Callable[[DrawnCase], DrawnCase | None], in_time: Callable[[], bool]
) -> DrawnCase:
    """Return the smallest failing case.

    Args:
        failing: Returns the failing case as it was run, or None if it passes.
        in_time: Returns True while there is time for another try.
    """
    progress = True
    tried: set[str] = set()
    while progress:
        progress = False
        for change in list(_changes(settings_of(drawn))):
            # Changes were listed for an earlier, larger case: some no longer apply, or lead to a case tried before.
            candidate = _build_or_none(change(settings_of(drawn)))
            if candidate is None or _size(candidate) >= _size(drawn) or repr(candidate) in tried:
                continue
            if not in_time():
                return drawn
            tried.add(repr(candidate))
            failing_case = failing(candidate)
            if failing_case is not None:
                # Continue with the case as it failed: its seed may have changed while it was settled.
                drawn, progress = failing_case, True
    return drawn


def _size(drawn: DrawnCase) -> tuple[int, int, int, float]:
    """Return the size of a case: processes, then settings, then their numbers."""
    settings = settings_of(drawn)
    # type() instead of isinstance: True is an int, and a switch is no size.
    numbers = [value for key, value in settings.items() if type(value) in (int, float) and key not in UNORDERED]
    return drawn.layout.world, len(settings), sum(len(v) for v in settings.values() if type(v) is tuple), sum(numbers)


def _build_or_none(settings: Settings | None) -> DrawnCase | None:
    try:
        return None if settings is None else build_case(settings)
    except PlanError:
        return None


def _changes(settings: Settings) -> Iterator[Change]:
    """Yield every change to try, largest first."""
    # Whole parts go first: one success there saves a try for each of their settings.
    groups = [tuple(key for key in settings if key.startswith(part)) for part in PARTS]
    groups += [keys for keys in TOGETHER if set(keys) & settings.keys()]
    groups += [(key,) for key in settings if not any(key.startswith(part) for part in PARTS)]
    groups += [(key,) for key in settings if any(key.startswith(part) for part in PARTS)]
    for keys in filter(None, groups):
        yield _leave_out(keys)
    # A degree of 2 cannot shrink and stay parallel; leaving it out was tried above.
    for degree in sorted({settings.get(key, 1) for key in DEGREES} - {1, 2}):
        for smaller in range(2, degree):
            yield _scale_down(degree, smaller)
    for key, setting in settings.items():
        if type(setting) is int and key not in UNORDERED:
            # Least numbers first. A half and one less remain for faults that need a certain size.
            for smaller in sorted({1, 2, 3, setting // 2, setting - 1} - {0}):
                if smaller < setting:
                    yield _reduce(key, smaller)
        if type(setting) is tuple:
            for index in range(len(setting)):
                yield _shorten(key, index)


def _leave_out(keys: tuple[str, ...]) -> Change:
    def change(settings: Settings) -> Settings | None:
        # The smallest extra set that gives a legal case wins, so that as much as possible stays comparable.
        for more in ALSO_LEFT_OUT:
            rest = {key: value for key, value in settings.items() if key not in (*keys, *more)}
            if len(rest) < len(settings) and _build_or_none(rest) is not None:
                return rest
        return None

    return change


def _reduce(key: str, number: int) -> Change:
    def change(settings: Settings) -> Settings | None:
        if settings.get(key, 0) <= number:
            return None
        for more in LEFT_OUT_WITH_SMALLER.get(key, ((),)):
            smaller = {name: old for name, old in settings.items() if name not in more} | {key: number}
            if _build_or_none(smaller) is not None:
                return smaller
        return None

    return change


def _scale_down(degree: int, smaller: int) -> Change:
    def scaled(number: int) -> int:
        return number // degree * smaller if number % degree == 0 else number

    def change(settings: Settings) -> Settings | None:
        changed = dict(settings)
        for key in set(PROPORTIONAL) & settings.keys():
            setting = settings[key]
            changed[key] = tuple(map(scaled, setting)) if isinstance(setting, tuple) else scaled(setting)
        return changed

    return change


def _shorten(key: str, index: int) -> Change:
    def change(settings: Settings) -> Settings | None:
        setting = settings.get(key, ())
        # The last element stays, since an empty tuple means the default and not a shorter list.
        if len(setting) <= index + (len(setting) == 1):
            return None
        return settings | {key: setting[:index] + setting[index + 1 :]}

    return change


def verify_random(number: int, seed: int, *, processes: int, device: str, json: bool, compiled: bool) -> None:
    """Try cases 0 .. number - 1 of a seed, and print a line each. Those that differ are shrunk."""
    cases = [random_case(seed, index, processes, compiled=compiled) for index in range(number)]
    verdicts = []
    for verdict in judge_cases(cases, device):
        verdicts.append(verdict)
        if not json:
            print(_line(verdict), flush=True)
    _end(verdicts, device=device, json=json, seed=seed)


def verify_case(text: str, *, device: str, json: bool, processes: int) -> None:
    """Try one case, with exactly the tokens that it names."""
    drawn = parse_case(text)
    if drawn.layout.world > processes:
        raise PlanError(f"--case: the layout has {drawn.layout.world} processes, and at most {processes} are allowed")
    verdict = judge_case(drawn, device)
    if not json:
        print(_line(verdict), flush=True)
    _end([verdict], device=device, json=json, seed=None)


def _line(verdict: CaseVerdict) -> str:
    ranks = many(verdict.drawn.layout.world, "rank")
    return f"{verdict.index}  {ranks}  {format_case(verdict.drawn)}: {verdict.difference or 'equal'}"


def _end(verdicts: Sequence[CaseVerdict], *, device: str, json: bool, seed: int | None) -> None:
    """Shrink what differs, and print the document or the commands. Raises OutsideTolerance if anything differs."""
    failed = [verdict for verdict in verdicts if verdict.difference]
    commands: dict[int, str] = {}
    for verdict in failed:
        # Only random cases are shrunk: a case that was named is the one to look at.
        small = smallest(verdict, device) if seed is not None else verdict
        commands[verdict.index] = f"meshwright verify --case '{format_case(small.drawn)}'"
        if not json and seed is not None:
            print(f"case {verdict.index}, made small: {small.difference}\n    {commands[verdict.index]}", flush=True)
    redrawn = sum(verdict.redrawn for verdict in verdicts)
    if json:
        print_json(
            {
                "layouts": len(verdicts),
                "different": len(failed),
                "seed": seed,
                "redrawn": redrawn,
                "results": [
                    _as_json(verdict, commands) for verdict in sorted(verdicts, key=lambda verdict: verdict.index)
                ],
            }
        )
    if failed:
        raise OutsideTolerance(
            f"{len(failed)} of {many(len(verdicts), 'case')} differ from one device; {failed[0].difference}"
        )
    if not json:
        redraws = (
            f"; drawn again {many(redrawn, 'time')}, since rounding decided too much on one device" if redrawn else ""
        )
        print(f"{many(len(verdicts), 'case')} equal one device{redraws}")


def _as_json(verdict: CaseVerdict, commands: dict[int, str]) -> dict[str, Any]:
    return {
        "index": verdict.index,
        "case": format_case(verdict.drawn),
        "ranks": verdict.drawn.layout.world,
        "difference": verdict.difference,
        "redrawn": verdict.redrawn,
        "command": commands.get(verdict.index),
    }

"""Answer of `plan` on the terminal: does it fit, how fast, what else is possible, why. --details adds all parts."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from meshwright.cli.terminal.screen_text import bar, dot, marked, width, wrapped
from meshwright.planner import explain
from meshwright.planner.caveats import caveats
from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.recommend import is_bold, merge_alike
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.error_ranges import LIKELY, ranges
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.plan.plan import Plan
from meshwright.spec.units import GIB, MIB, count, short_gib, step_time

RANGE = "    90%      "
"""Label of the range that nine of ten published runs lie in."""
ALTERNATIVES = 4
"""Rows shown besides the recommended layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Printing options, and what the user has fixed."""

    fixed: Fixed
    tokens: float = 0.0
    price: float = 0.0
    details: bool = False
    top: int | None = None
    saved: str = ""
    """The file that --save wrote. Empty = none."""
    own_batch: bool = False
    """The planner chose the sequences per step, since the user gave none."""
    stack: str = ""
    """Other training software, which has its own files and no --save."""


def answer(estimator: Estimator, ranking: Ranking, asked: Asked) -> Iterator[str]:
    """Yield all lines for layouts that fit."""
    best, columns = ranking.best[0], width()
    chosen = ranking.legal > 1
    yield from headline(best.plan)
    yield ""
    rows = merge_alike(ranking.best)
    notes = [_recommended(ranking.best)] if chosen else []
    yield from _verdict(best, ", ".join([*notes, *([_same_speed(rows[0][1])] if rows[0][1] else [])]))
    on_batch = explain.batch_note(best.plan) if asked.own_batch else ()
    for line in (*on_batch, *caveats(best), *explain.caution(estimator, ranking, asked.fixed)):
        yield from _marked(line)
    shown = rows[1 : None if asked.details and asked.top is None else 1 + (asked.top or ALTERNATIVES)]
    if shown:
        yield ""
        yield from _alternatives(shown, bubble=asked.details)
    yield ""
    yield from _why(estimator, best, asked)
    if chosen:
        yield from wrapped(explain.searched(ranking), columns, "  ")
    if asked.details:
        yield ""
        yield from details(estimator, ranking)
        for sentence in (
            () if asked.fixed else explain.half_machine(estimator, best)
        ):  # only a free search answers for half the machine
            yield from wrapped(sentence, columns, "  ", "    ")
    if not asked.saved and not asked.stack:
        yield ""
        yield from wrapped(_next(asked, chosen), columns, "  Next:  ")


def unfit(nearest: Prediction) -> Iterator[str]:
    """Yield the lines before an error: the nearest layout, and by how much it is too large."""
    yield from headline(nearest.plan)
    yield ""
    yield from _verdict(nearest, "")


def configuration(prediction: Prediction) -> Iterator[str]:
    """Yield the verdict on the layout of a configuration file."""
    yield from _verdict(prediction, "")


def headline(plan: Plan) -> Iterator[str]:
    """Yield the question: model, machine, precision, batch."""
    cluster, recipe = plan.cluster, plan.recipe
    nodes = f"{cluster.nodes} nodes x " if cluster.nodes > 1 else ""
    parts = [
        plan.model.name if plan.online_teacher is None else f"{plan.model.name}, taught by {plan.online_teacher.name}",
        f"{nodes}{cluster.devices_per_node} {cluster.device.name}",
        recipe.precision,
        f"{recipe.global_batch:,} x {recipe.sequence:,} tokens per step",
    ]
    yield from wrapped(dot().join(parts), width(), "", "  ")


def _recommended(listed: list[Prediction]) -> str:
    """Describe the first layout, also when bolder ones are faster."""
    faster = [layout for layout in listed if layout.step_s < listed[0].step_s]
    free = faster and not is_bold(listed[0]) and all(map(is_bold, faster))
    return f"recommended: the fastest that fits with {LIKELY:.0%}" if free else "recommended"


def _same_speed(vps: list[int]) -> str:
    """Name the values of vp that differ from a row in nothing else, and have no row."""
    return f"same speed with vp={_runs(vps)}"


def _runs(numbers: list[int]) -> str:
    """Return numbers as `14 to 18 or 20`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " or ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _verdict(best: Prediction, note: str) -> Iterator[str]:
    columns, room = width(), usable_bytes(best.plan)
    fits = best.peak_bytes <= room
    word, colour = ("TIGHT", "yellow") if is_bold(best) else ("FITS", "green")
    if not fits:
        word, colour = "DOES NOT FIT", "red"
    words = explain.words_of(best.plan) + (f" ({note})" if note else "")
    yield from marked(wrapped(words, columns, f"  {word}  "), word, colour)
    rate = best.tokens_per_s_per_device
    speed = f"{rate:,.0f}" if 10 <= rate < 1e5 else count(rate)
    device = "GPU" if best.plan.cluster.device.is_gpu else "device"
    yield (
        f"    step     {step_time(best.step_s):<10} {speed} tokens/s per {device}   MFU {best.mfu(causal=False):.1%}"
    )
    likely_ranges, ms = ranges(best), best.step_s < 0.9995
    rates = explain.between(likely_ranges.tokens_per_second_per_device)
    step = f"{explain.between(likely_ranges.step_seconds, 1e-3 if ms else 1.0)} {'ms' if ms else 's'}"
    yield from wrapped(
        f"{step}, {rates} tokens/s, MFU {explain.between(likely_ranges.mfu_full, 0.01)}%", columns, RANGE
    )
    peak, where = best.peak_bytes, best.worst
    if room < float("inf"):
        left = f"{short_gib(room - peak)} free" if fits else f"{short_gib(peak - room)} too much"
        used = f"{_number(peak, room)} of {_number(room, room)} {_unit(room)}"
        yield f"    memory   {used}  {bar(peak / room, 20 if columns >= 80 else 10)}  {left}"
        likely = explain.probability(likely_ranges.fit_probability)
        unit = GIB if _unit(peak) == "GiB" else MIB
        most = f"{explain.between(likely_ranges.peak_bytes, unit)} {_unit(peak)}"
        yield from wrapped(f"{most}; fits with {likely}", columns, RANGE)
    else:
        yield f"    memory   {short_gib(peak)} per device"
    parts = dot().join(f"{name} {_number(size, peak)}" for name, size in explain.groups(best) if size)
    at = f"pipeline rank {where.pp_rank}, {where.when}" if best.plan.layout.pp > 1 else where.when
    yield from wrapped(f"{parts} {_unit(peak)} ({at})", columns, "    peak is  ")
    if best.executions is not None and not best.executions.best.plain:
        yield from wrapped(best.executions.best.name, columns, "    blocks   ")
    if best.host_bytes:
        each = f"{short_gib(best.host_bytes)} of a rank's activations, {short_gib(best.node_bytes)} of a node's at most"
        yield from wrapped(f"{each}: whether the node has as much free is not known", columns, "    host     ")


def _number(size: float, whole: float) -> str:
    """Return a size in the unit of `whole`."""
    if whole < GIB / 10:
        return f"{size / MIB:.1f}"
    return f"{size / GIB:,.1f}" if whole >= 9.995 * GIB else f"{size / GIB:.2f}"


def _unit(whole: float) -> str:
    return "GiB" if whole >= GIB / 10 else "MiB"


def _alternatives(rows: list[tuple[Prediction, list[int]]], *, bubble: bool) -> Iterator[str]:
    columns = width()
    yield "  Also possible"
    yield f"  {'step':>10} {'MFU':>6} {'memory':>10}    {' bubble  ' if bubble else ''}layout"
    for layout, vps in rows:
        memory = f"{_number(layout.peak_bytes, layout.peak_bytes)} {_unit(layout.peak_bytes)}"
        idle = f"{layout.time.bubble_s / layout.step_s:7.1%}  " if bubble else ""
        mark = "!" if is_bold(layout) else " "
        lead = f"  {step_time(layout.step_s):>10} {layout.mfu(causal=False):6.1%} {memory:>10} {mark}  {idle}"
        words = explain.words_of(layout.plan) + (f" ({_same_speed(vps)})" if vps else "")
        below = " " * min(len(lead), columns - max(map(len, words.split())))
        yield from marked(wrapped(words, columns, lead, below), "!", "yellow")
    if any(is_bold(layout) for layout, _ in rows):
        yield from _marked(f"is bolder: it fits with a probability below {LIKELY:.0%}.")


def _marked(sentence: str) -> Iterator[str]:
    yield from marked(wrapped(sentence, width(), "  ! "), "!", "yellow")


def _why(estimator: Estimator, best: Prediction, asked: Asked) -> Iterator[str]:
    columns = width()
    for sentence in explain.reasons(estimator, best):
        yield from wrapped(sentence, columns, "  Why: ")
    if sentence := explain.limit(estimator, best):
        yield from wrapped(sentence, columns, "  Limit of this layout: ")
    for sentence in explain.scale_warnings(estimator, best, asked.tokens):
        yield from _marked(sentence)
    if asked.tokens:
        yield from wrapped(explain.bill(best, asked.tokens, asked.price), columns, "  ")


def _next(asked: Asked, chosen: bool) -> list[str]:
    words = ["--save plan.yaml"]
    words += [] if asked.details else ["--details (memory, time, rejected)"]
    words += ["--top 20"] if chosen and asked.top is None and not asked.details else []
    return words


def details(estimator: Estimator, ranking: Ranking) -> Iterator[str]:
    """Yield memory and time of the recommended layout by part, and the rejected layouts."""
    best, columns = ranking.best[0], width()
    whole = best.peak_bytes
    yield f"  Memory at the peak, {_unit(whole)}"
    for kind, size in best.worst.kinds.items():
        if size:
            yield f"    {explain.kind_name(kind):<37}{_number(size, whole):>9}"
    if best.host_bytes:
        yield f"    {'in host memory':<37}{_number(best.host_bytes, whole):>9}"
    yield "  Time of a step"
    for part in fields(best.time):
        seconds = getattr(best.time, part.name)
        if seconds > 0:
            yield f"    {part.name.removesuffix('_s'):<26}{step_time(seconds):>12}  {seconds / best.step_s:6.1%}"
    yield f"    MFU {best.mfu(causal=False):.1%} (attention in full), {best.mfu(causal=True):.1%} (causal by half)"
    if best.executions is not None:
        yield "  Blocks"
        for sentence in best.executions.why:
            yield from wrapped(sentence, columns, "    ", "      ")
    yield from wrapped(explain.range_words(best), columns, "  ", "    ")
    if ranking.legal > 1:
        yield "  Rejected"
        for sentence in explain.rejected(ranking):
            yield from wrapped(sentence, columns, "    ", "      ")

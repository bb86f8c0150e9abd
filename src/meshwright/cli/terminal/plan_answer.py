"""What `plan` prints: does it fit, how fast, what else is possible, why; with --details all that it was made of."""

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
from meshwright.spec.plan import Plan
from meshwright.spec.units import GIB, MIB, count, short_gib, step_time

RANGE = "    90%      "
"""Before what nine of ten published runs lie within."""
ALTERNATIVES = 4
"""Rows that are shown besides the recommended layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be printed besides the verdict."""

    fixed: Fixed
    tokens: float = 0.0
    price: float = 0.0
    details: bool = False
    top: int | None = None
    saved: str = ""
    """The file that --save wrote."""
    own_batch: bool = False
    """Whether nobody said how many sequences a step has."""
    stack: str = ""
    """Other training software, which has files of its own and no --save."""


def answer(of: Estimator, found: Ranking, asked: Asked) -> Iterator[str]:
    """All lines for layouts that fit."""
    best, columns = found.best[0], width()
    chosen = found.legal > 1
    yield from headline(best.plan)
    yield ""
    rows = merge_alike(found.best)
    yield from _verdict(best, _note(rows[0][1], _recommended(found.best) if chosen else ""))
    own = explain.own_batch(best.plan) if asked.own_batch else ()
    for line in (*own, *caveats(best), *explain.caution(of, found, asked.fixed)):
        yield from _marked(line)
    shown = rows[1 : None if asked.details and asked.top is None else 1 + (asked.top or ALTERNATIVES)]
    if shown:
        yield ""
        yield from _alternatives(shown, bubble=asked.details)
    yield ""
    yield from _why(of, best, asked)
    if chosen:
        yield from wrapped(explain.searched(found), columns, "  ")
    if asked.details:
        yield ""
        yield from details(of, found)
        for sentence in () if asked.fixed else explain.half_machine(of, best):  # whose layout is searched freely
            yield from wrapped(sentence, columns, "  ", "    ")
    if not asked.saved and not asked.stack:
        yield ""
        yield from wrapped(_next(asked, chosen), columns, "  Next:  ")


def unfit(nearest: Prediction) -> Iterator[str]:
    """The lines before an error: the layout that comes nearest, and by how much it is too large."""
    yield from headline(nearest.plan)
    yield ""
    yield from _verdict(nearest, "")


def configuration(one: Prediction) -> Iterator[str]:
    """The verdict on a layout that was given."""
    yield from _verdict(one, "")


def headline(plan: Plan) -> Iterator[str]:
    """Which question this answers: model, machine, precision, batch."""
    cluster, recipe = plan.cluster, plan.recipe
    nodes = f"{cluster.nodes} nodes x " if cluster.nodes > 1 else ""
    parts = [
        plan.model.name if plan.beside is None else f"{plan.model.name}, taught by {plan.beside.name}",
        f"{nodes}{cluster.devices_per_node} {cluster.device.name}",
        recipe.precision,
        f"{recipe.global_batch:,} x {recipe.sequence:,} tokens per step",
    ]
    yield from wrapped(dot().join(parts), width(), "", "  ")


def _recommended(listed: list[Prediction]) -> str:
    """Why the first is, where others are faster: they are bolder."""
    faster = [one for one in listed if one.step_s < listed[0].step_s]
    free = faster and not is_bold(listed[0]) and all(map(is_bold, faster))
    return f"recommended: the fastest that fits with {LIKELY:.0%}" if free else "recommended"


def _note(vps: list[int], recommended: str) -> str:
    words = [recommended] if recommended else []
    return ", ".join(words + ([_same_speed(vps)] if vps else []))


def _same_speed(vps: list[int]) -> str:
    """Of layouts that differ from a row in vp only, and are not listed themselves."""
    return f"same speed with vp={_runs(vps)}"


def _runs(numbers: list[int]) -> str:
    """`14 to 18 or 20`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return " or ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found)


def _verdict(best: Prediction, note: str) -> Iterator[str]:
    """The verdict, the layout, and its three figures."""
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
    said, ms = ranges(best), best.step_s < 0.9995
    rates = explain.between(said.tokens_per_second_per_device)
    step = f"{explain.between(said.step_seconds, 1e-3 if ms else 1.0)} {'ms' if ms else 's'}"
    yield from wrapped(f"{step}, {rates} tokens/s, MFU {explain.between(said.mfu_full, 0.01)}%", columns, RANGE)
    peak, where = best.peak_bytes, best.worst
    if room < float("inf"):
        left = f"{short_gib(room - peak)} free" if fits else f"{short_gib(peak - room)} too much"
        yield f"    memory   {_of(peak, room)}  {bar(peak / room, 20 if columns >= 80 else 10)}  {left}"
        likely = explain.probability(said.fit_probability)
        unit = GIB if _unit(peak) == "GiB" else MIB
        most = f"{explain.between(said.peak_bytes, unit)} {_unit(peak)}"
        yield from wrapped(f"{most}; fits with {likely}", columns, RANGE)
    else:
        yield f"    memory   {short_gib(peak)} per device"
    parts = dot().join(f"{name} {_number(size, peak)}" for name, size in explain.groups(best) if size)
    at = f"pipeline rank {where.pp_rank}, {where.when}" if best.plan.layout.pp > 1 else where.when
    yield from wrapped(f"{parts} {_unit(peak)} ({at})", columns, "    peak is  ")
    if best.executions is not None and not best.executions.best.plain:
        yield from wrapped(best.executions.best.name, columns, "    blocks   ")
    if best.host_bytes:
        yield from wrapped(_in_host_memory(best), columns, "    host     ")


def _in_host_memory(best: Prediction) -> str:
    each = f"{short_gib(best.host_bytes)} of a rank's activations, {short_gib(best.node_bytes)} of a node's at most"
    return f"{each}: whether the node has as much free is not known"


def _of(part: float, whole: float) -> str:
    return f"{_number(part, whole)} of {_number(whole, whole)} {_unit(whole)}"


def _number(size: float, whole: float) -> str:
    """In the unit of the whole."""
    if whole < GIB / 10:
        return f"{size / MIB:.1f}"
    return f"{size / GIB:,.1f}" if whole >= 9.995 * GIB else f"{size / GIB:.2f}"


def _unit(whole: float) -> str:
    return "GiB" if whole >= GIB / 10 else "MiB"


def _alternatives(rows: list[tuple[Prediction, list[int]]], *, bubble: bool) -> Iterator[str]:
    columns = width()
    yield "  Also possible"
    yield f"  {'step':>10} {'MFU':>6} {'memory':>10}    {' bubble  ' if bubble else ''}layout"
    for one, vps in rows:
        memory = f"{_number(one.peak_bytes, one.peak_bytes)} {_unit(one.peak_bytes)}"
        idle = f"{one.time.bubble_s / one.step_s:7.1%}  " if bubble else ""
        mark = "!" if is_bold(one) else " "
        lead = f"  {step_time(one.step_s):>10} {one.mfu(causal=False):6.1%} {memory:>10} {mark}  {idle}"
        words = explain.words_of(one.plan) + (f" ({_same_speed(vps)})" if vps else "")
        below = " " * min(len(lead), columns - max(map(len, words.split())))
        yield from marked(wrapped(words, columns, lead, below), "!", "yellow")
    if any(is_bold(one) for one, _ in rows):
        yield from _marked(f"is bolder: it fits with a probability below {LIKELY:.0%}.")


def _marked(sentence: str) -> Iterator[str]:
    """A caution."""
    yield from marked(wrapped(sentence, width(), "  ! "), "!", "yellow")


def _why(of: Estimator, best: Prediction, asked: Asked) -> Iterator[str]:
    columns = width()
    for sentence in explain.reasons(of, best):
        yield from wrapped(sentence, columns, "  Why: ")
    if sentence := explain.limit(of, best):
        yield from wrapped(sentence, columns, "  Limit of this layout: ")
    for sentence in explain.scale_warnings(of, best, asked.tokens):
        yield from _marked(sentence)
    if asked.tokens:
        yield from wrapped(explain.bill(best, asked.tokens, asked.price), columns, "  ")


def _next(asked: Asked, chosen: bool) -> list[str]:
    words = ["--save plan.yaml"]
    words += [] if asked.details else ["--details (memory, time, rejected)"]
    words += ["--top 20"] if chosen and asked.top is None and not asked.details else []
    return words


def details(of: Estimator, found: Ranking) -> Iterator[str]:
    """The recommended layout's memory and time by part, and the layouts that were rejected."""
    best, columns = found.best[0], width()
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
    if found.legal > 1:
        yield "  Rejected"
        for sentence in explain.rejected(found):
            yield from wrapped(sentence, columns, "    ", "      ")

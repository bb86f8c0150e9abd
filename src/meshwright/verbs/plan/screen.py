"""Answer of `plan` on the terminal: does it fit, how fast, what else is possible, why. --details adds all parts."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.interface.terminal.screen_text import marked, width, wrapped
from meshwright.interface.terminal.verdict import caution_lines, headline, size_number, size_unit, verdict
from meshwright.planner import explain
from meshwright.planner.explain import caveats
from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.recommend import is_bold, merge_alike
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import LIKELY, Prediction
from meshwright.spec.units import GB, step_time

if TYPE_CHECKING:
    from meshwright.verbs.plan.answer import PlanAnswer

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
    weeks: str = ""
    """A sentence on failures and saves of the whole run. Empty = its length is not known."""


def answer(estimator: Estimator, ranking: Ranking, asked: Asked) -> Iterator[str]:
    """Yield all lines for layouts that fit."""
    best, columns = ranking.best[0], width()
    chosen = ranking.legal > 1
    yield from headline(best.plan)
    yield ""
    rows = merge_alike(ranking.best)
    notes = [_recommended(ranking.best)] if chosen else []
    yield from verdict(best, ", ".join([*notes, *([_same_speed(rows[0][1])] if rows[0][1] else [])]))
    on_batch = explain.batch_note(best.plan) if asked.own_batch else ()
    for line in (*on_batch, *caveats(best), *explain.caution(estimator, ranking, asked.fixed)):
        yield from caution_lines(line)
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


def unfit(nearest: Prediction, *, details: bool = False) -> Iterator[str]:
    """Yield the lines before an error: the nearest layout, and by how much it is too large."""
    yield from headline(nearest.plan)
    yield ""
    yield from verdict(nearest, "")
    if details:
        yield ""
        yield from _parts(nearest)


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


def _alternatives(rows: list[tuple[Prediction, list[int]]], *, bubble: bool) -> Iterator[str]:
    columns = width()
    yield "  Also possible"
    yield f"  {'step':>10} {'MFU':>6} {'memory':>10}    {' bubble  ' if bubble else ''}layout"
    for layout, vps in rows:
        memory = f"{size_number(layout.peak_bytes, layout.peak_bytes)} {size_unit(layout.peak_bytes)}"
        idle = f"{layout.time.bubble_s / layout.step_s:7.1%}  " if bubble else ""
        mark = "!" if is_bold(layout) else " "
        lead = f"  {step_time(layout.step_s):>10} {layout.mfu(causal=False):6.1%} {memory:>10} {mark}  {idle}"
        words = explain.words_of(layout.plan) + (f" ({_same_speed(vps)})" if vps else "")
        below = " " * min(len(lead), columns - max(map(len, words.split())))
        yield from marked(wrapped(words, columns, lead, below), "!", "yellow")
    if any(is_bold(layout) for layout, _ in rows):
        yield from caution_lines(f"is bolder: it fits with a probability below {LIKELY:.0%}.")


def _why(estimator: Estimator, best: Prediction, asked: Asked) -> Iterator[str]:
    columns = width()
    for sentence in explain.reasons(estimator, best):
        yield from wrapped(sentence, columns, "  Why: ")
    if sentence := explain.limit(estimator, best):
        yield from wrapped(sentence, columns, "  Limit of this layout: ")
    for sentence in explain.scale_warnings(estimator, best, asked.tokens):
        yield from caution_lines(sentence)
    if asked.tokens:
        yield from wrapped(explain.bill(best, asked.tokens, asked.price), columns, "  ")
    if asked.weeks:
        yield from wrapped(asked.weeks, columns, "  ")


def _next(asked: Asked, chosen: bool) -> list[str]:
    words = ["--save plan.yaml"]
    words += [] if asked.details else ["--details (memory, time, traffic, rejected)"]
    words += ["--top 20"] if chosen and asked.top is None and not asked.details else []
    return words


def details(estimator: Estimator, ranking: Ranking) -> Iterator[str]:
    """Yield memory, traffic and time of the recommended layout by part, and the rejected layouts."""
    best, columns = ranking.best[0], width()
    yield from _parts(best)
    if best.executions is not None:
        yield "  Blocks"
        for sentence in best.executions.why:
            yield from wrapped(sentence, columns, "    ", "      ")
    yield from wrapped(explain.range_words(best), columns, "  ", "    ")
    if ranking.legal > 1:
        yield "  Rejected"
        for sentence in explain.rejected(ranking):
            yield from wrapped(sentence, columns, "    ", "      ")


def _parts(best: Prediction) -> Iterator[str]:
    """Yield memory, time and traffic of one layout by part."""
    whole = best.peak_bytes
    yield f"  Memory at the peak, {size_unit(whole)}"
    for kind, size in best.worst.kinds.items():
        if size:
            yield f"    {explain.kind_name(kind):<37}{size_number(size, whole):>9}"
    if best.host_bytes:
        yield f"    {'in host memory':<37}{size_number(best.host_bytes, whole):>9}"
    yield "  Time of a step"
    for part in fields(best.time):
        seconds = getattr(best.time, part.name)
        if seconds > 0:
            yield f"    {part.name.removesuffix('_s'):<26}{step_time(seconds):>12}  {seconds / best.step_s:6.1%}"
    yield f"    MFU {best.mfu(causal=False):.1%} (attention in full), {best.mfu(causal=True):.1%} (causal by half)"
    if sent := best.traffic():
        yield "  Sent by the first rank in a step, GB"
        for axis, collective, calls, sent_bytes in sent:
            calls_text = f"{calls:,} {'call' if calls == 1 else 'calls'}"
            yield f"    {axis:<14}{collective:<16}{calls_text:>14}{sent_bytes / GB:>11.3f}"


def after_plan(answer: "PlanAnswer", written: list[Path]) -> Iterator[str]:
    """Yield what follows the layouts of another software: errors of its figures, and the files written."""
    assert answer.software is not None
    yield ""
    yield f"  Counted as {answer.software.title}"
    for sentence in answer.known_errors or ("No published row of it was scored.",):
        yield from wrapped(sentence, width(), "    ")
    if not answer.software.files:
        return
    if not written:
        yield ""
        yield from wrapped("-o FOLDER (its configuration, launch.sh, launch.sbatch)", width(), "  Next:  ")
        return
    folder, launch = written[0].parent, answer.software.launch(answer.plan)
    yield ""
    yield from wrapped(f"Written to {folder}: {', '.join(path.name for path in written)}.", width(), "  ")
    if launch.yours:
        yield from wrapped(f"Yours to set: {', '.join(launch.yours)}.", width(), "  ")
    yield f"  Command: cd {shlex.quote(str(folder))} && sbatch launch.sbatch, or on each node bash launch.sh"

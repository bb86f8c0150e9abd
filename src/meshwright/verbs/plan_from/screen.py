"""Answer of `plan --from` on the terminal: does a configuration fit, what makes it fit, what is faster."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.interface.terminal.screen_text import width, wrapped
from meshwright.interface.terminal.verdict import headline, verdict
from meshwright.planner import explain
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.units import short_gib, step_time
from meshwright.stacks.declaration.software import error_sentences

if TYPE_CHECKING:
    from meshwright.verbs.plan_from.answer import ConfigAnswer


def config_lines(answer: "ConfigAnswer", *, details: bool) -> Iterator[str]:
    """Yield all lines: verdict, changes that make it fit, the fastest layout, settings that are not counted."""
    columns, prediction = width(), answer.prediction
    yield from headline(answer.plan)
    yield ""
    yield from verdict(prediction)
    yield ""
    if not answer.fits:
        kind, _ = explain.largest_kind(prediction)
        need, room = short_gib(prediction.peak_bytes), short_gib(usable_bytes(answer.plan))
        most = "at most " * bool(answer.config.bounds)
        yield from wrapped(f"This will need {most}{need} of {room} (most of it {kind}).", columns, "  ")
        for change in answer.fixes:
            cost = change.prediction.step_s / prediction.step_s - 1
            paid = f"costs {cost:.0%}" if cost >= 0.005 else "is as fast" if cost > -0.005 else f"is {-cost:.0%} faster"
            options = answer.options(change.prediction.plan)
            yield from wrapped(
                f"`{options}` fits ({short_gib(change.prediction.peak_bytes)}) and {paid}.", columns, "  "
            )
        if not answer.fixes:
            yield "  No single change of the layout makes it fit."
    yield from _better(answer)
    for sentence in error_sentences(answer.software):
        yield from wrapped(sentence, columns, "  ")
    for sentence in (*answer.config.bounds, *answer.config.uncounted):
        yield from wrapped(sentence, columns, "  ! ")
    if answer.config.unknown:
        yield from wrapped(f"Not known here, and may matter: {', '.join(answer.config.unknown)}.", columns, "  ! ")
    if details and answer.config.ignored:
        yield from wrapped(
            f"Ignored, changes neither memory nor time: {', '.join(answer.config.ignored)}.", columns, "  "
        )


def _better(answer: "ConfigAnswer") -> Iterator[str]:
    best = answer.best
    if best is None:
        yield f"  No layout of {answer.software.word} fits these devices."
        return
    ratio = answer.prediction.step_s / best.step_seconds
    if not answer.fits:
        fastest = f"The fastest layout that fits takes {step_time(best.step_seconds)} per step"
        lead = f"{fastest} ({short_gib(best.peak_bytes)}): "
        yield from wrapped(f"{lead}{answer.options(best.plan)}", width(), "  ")
        return
    if best.plan.layout == answer.plan.layout or (ratio < 1.005):
        yield f"  No layout of {answer.software.word} on these devices is predicted to be faster."
        return
    lead = f"The best layout on the same devices is {ratio:.2f} times as fast ({short_gib(best.peak_bytes)}): "
    yield from wrapped(f"{lead}{answer.options(best.plan)}", width(), "  ")

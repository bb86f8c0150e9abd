"""Verdict on a layout on the terminal: does it fit, how fast, what fills the memory."""

from collections.abc import Iterator

from meshwright.interface.terminal.screen_text import bar, dot, marked, width, wrapped
from meshwright.planner import explain
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.prediction import Prediction, ranges, usable_bytes
from meshwright.spec.plan.plan import Plan
from meshwright.spec.units import GIB, MIB, count, short_gib, step_time

RANGE = "    90%      "
"""Label of the range that nine of ten published runs lie in."""


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


def verdict(best: Prediction, note: str = "") -> Iterator[str]:
    """Yield fit, step time and memory of a layout, each with its likely range. `note` follows the layout."""
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
    # From 0.9995 s on step_time prints seconds, and the range below must have the same unit.
    likely_ranges, ms = ranges(best), best.step_s < 0.9995
    rates = explain.between(likely_ranges.tokens_per_second_per_device)
    step = f"{explain.between(likely_ranges.step_seconds, 1e-3 if ms else 1.0)} {'ms' if ms else 's'}"
    yield from wrapped(
        f"{step}, {rates} tokens/s, MFU {explain.between(likely_ranges.mfu_full, 0.01)}%", columns, RANGE
    )
    peak, where = best.peak_bytes, best.worst
    if room < float("inf"):
        spare = f"{short_gib(room - peak)} free" if fits else f"{short_gib(peak - room)} too much"
        used = f"{size_number(peak, room)} of {size_number(room, room)} {size_unit(room)}"
        yield f"    memory   {used}  {bar(peak / room, 20 if columns >= 80 else 10)}  {spare}"
        likely = explain.probability(likely_ranges.fit_probability)
        unit = GIB if size_unit(peak) == "GiB" else MIB
        most = f"{explain.between(likely_ranges.peak_bytes, unit)} {size_unit(peak)}"
        yield from wrapped(f"{most}; fits with {likely}", columns, RANGE)
    else:
        yield f"    memory   {short_gib(peak)} per device"
    parts = dot().join(f"{name} {size_number(size, peak)}" for name, size in explain.groups(best) if size)
    at = f"pipeline rank {where.pp_rank}, {where.when}" if best.plan.layout.pp > 1 else where.when
    yield from wrapped(f"{parts} {size_unit(peak)} ({at})", columns, "    peak is  ")
    if best.executions is not None and not best.executions.best.plain:
        yield from wrapped(best.executions.best.name, columns, "    blocks   ")
    if best.host_bytes:
        sizes = (
            f"{short_gib(best.host_bytes)} of a rank's activations, {short_gib(best.node_bytes)} of a node's at most"
        )
        yield from wrapped(f"{sizes}: whether the node has as much free is not known", columns, "    host     ")


def size_number(size: float, whole: float) -> str:
    """Return a size in the unit of `whole`."""
    if whole < GIB / 10:
        return f"{size / MIB:.1f}"
    return f"{size / GIB:,.1f}" if whole >= 9.995 * GIB else f"{size / GIB:.2f}"


def size_unit(whole: float) -> str:
    """Return the unit in which `whole` bytes are shown."""
    return "GiB" if whole >= GIB / 10 else "MiB"


def caution_lines(sentence: str) -> Iterator[str]:
    """Yield a caution, led by a yellow exclamation mark."""
    yield from marked(wrapped(sentence, width(), "  ! "), "!", "yellow")

"""What `plan --serve` prints: does it fit, how fast, for how many at once; other layouts; the load varied."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.api.serve_planning import ServingAnswer
from meshwright.cli.terminal.screen_text import bar, dot, marked, width, wrapped
from meshwright.planner.serving.serving_plan import CurvePoint, ServingLayout
from meshwright.spec.units import GIB, MIB

if TYPE_CHECKING:
    from meshwright.api.serving_load import ServingColumns

ALTERNATIVES = 6
"""Layouts that are shown besides the recommended one."""


def serving_answer(answer: ServingAnswer, *, details: bool = False, top: int | None = None) -> Iterator[str]:
    """All lines."""
    asked = answer.asked
    nodes = f"{asked.cluster.nodes} nodes x " if asked.cluster.nodes > 1 else ""
    parts = [
        f"{asked.model.shape.name}, served by {asked.framework.name}",
        f"{nodes}{asked.cluster.devices_per_node} {asked.cluster.device.name}",
        f"{answer.quantization} weights, {answer.kv_dtype} cache",
        f"{asked.input_tokens:,} tokens in, {asked.output_tokens:,} out",
        f"{asked.concurrency:,} in flight",
    ]
    yield from wrapped(dot().join(parts), width(), "", "  ")
    yield ""
    yield from _verdict(answer)
    others = answer.fitting[1:]
    shown = others if details and top is None else others[: top or ALTERNATIVES]
    if shown:
        yield ""
        yield from _table(shown)
    for one in answer.layouts[len(answer.fitting) :][:2]:
        lacking = one.memory.sequence_bytes - one.memory.cache_bytes
        yield f"    {one.words}: {lacking / GIB:,.1f} GiB per GPU too much for one sequence"
    yield ""
    yield from _curve(answer.best, answer.curve)
    yield ""
    yield from wrapped(_bytes(answer), width(), "  ")


def _verdict(answer: ServingAnswer) -> Iterator[str]:
    best = answer.best
    served, memory = best.served, best.memory
    assert served is not None
    word, colour = ("WAITS", "yellow") if best.waits else ("FITS", "green")
    engines = "1 engine" if best.engines == 1 else f"{best.engines} engines"
    note = f" ({engines} of {best.degrees.gpus}{', recommended' if len(answer.layouts) > 1 else ''})"
    yield from marked([f"  {word}  {best.words}{note}"], word, colour)
    yield (
        f"    speed    first token {_ms(served.first_token_s)}   per token {_ms(served.per_token_s)}   "
        f"{best.tokens_per_s:,.0f} tokens/s"
    )
    if memory.usable_bytes < float("inf"):
        held = memory.weights_bytes + memory.activations_bytes
        yield (
            f"    memory   weights {memory.weights_bytes / GIB:.1f}   activations "
            f"{memory.activations_bytes / GIB:.1f}   cache {memory.cache_bytes / GIB:.1f} of "
            f"{memory.usable_bytes / GIB:.1f} GiB   {bar(held / memory.usable_bytes, 10)}"
        )
    yield (
        f"    cache    {memory.position_bytes / 1024:,.0f} KiB per token and GPU, "
        f"{memory.sequence_bytes / GIB:,.2f} GiB per sequence; {_requests(best)}"
    )
    if best.waits:
        yield (
            f"    {answer.asked.concurrency:,} requests in flight are more than fit; the rest waits: lower "
            "--concurrency or narrow --kv-dtype"
        )


def measured_columns(found: "ServingColumns") -> Iterator[str]:
    """Planned, dry run and measured; a dry run knows no time."""
    planned, measured = found.planned, found.measured
    yield ""
    yield f"    {'this load, run here':<22}  planned  dry run  measured"
    for name, *sizes in (
        ("weights, MiB", found.planned_weights_bytes, found.dry_weights_bytes, found.measured_weights_bytes),
        ("cache, MiB", found.planned_cache_bytes, found.dry_cache_bytes, found.measured_cache_bytes),
    ):
        first, dry, last = (f"{size / MIB:,.1f}" for size in sizes)
        yield f"    {name:<22}  {first:>7}  {dry:>7}  {last:>8}"
    for name, a, b in (
        ("first token, ms", planned.first_token_s * 1e3, measured.first_token_s * 1e3),
        ("per token, ms", planned.per_token_s * 1e3, measured.per_token_s * 1e3),
        ("tokens/s", planned.output_tokens_per_s, measured.output_tokens_per_s),
    ):
        yield f"    {name:<22}  {a:>7,.3g}  {'':>7}  {b:>8,.3g}   {a / b - 1:+.1%}"


def _requests(one: ServingLayout) -> str:
    if one.most_requests == float("inf"):
        return "this device's memory is not known"
    return f"{one.most_requests:,.0f} sequences at most"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _table(rows: tuple[ServingLayout, ...]) -> Iterator[str]:
    length = max(20, *(len(one.words) for one in rows))
    yield f"    {'Also possible':<{length}}  first token  per token  tokens/s  weights GiB  most"
    for one in rows:
        assert one.served is not None
        most = "" if one.most_requests == float("inf") else f"{one.most_requests:,.0f}"
        yield (
            f"    {one.words:<{length}}  {_ms(one.served.first_token_s):>11}  {_ms(one.served.per_token_s):>9}  "
            f"{one.tokens_per_s:>8,.0f}  {one.memory.weights_bytes / GIB:>11.1f}  {most:>4}"
        )


def _curve(best: ServingLayout, points: tuple[CurvePoint, ...]) -> Iterator[str]:
    yield f"    {best.words + ', in flight':<20}  first token  per token  tokens/s"
    for one in points:
        yield (
            f"    {one.concurrency:>20,}  {_ms(one.first_token_s):>11}  {_ms(one.per_token_s):>9}  "
            f"{one.tokens_per_s:>8,.0f}"
        )


def _bytes(answer: ServingAnswer) -> str:
    weights = answer.best.memory.weights_bytes * answer.best.degrees.gpus / answer.parameters
    return (
        f"{answer.parameters / 1e9:.2f} billion parameters: {weights:.1f} bytes per parameter in weights, "
        f"{answer.bytes_per_parameter:.1f} with the cache of these requests."
    )

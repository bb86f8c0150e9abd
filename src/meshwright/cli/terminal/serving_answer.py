"""What `plan --serve` prints: does it fit, how fast, for how many at once; other layouts; the load varied."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from meshwright.api.serve_planning import ServingAnswer
from meshwright.cli.terminal.screen_text import dot, marked, width, wrapped
from meshwright.planner.serving.engine_kernels import EngineKernels
from meshwright.planner.serving.serving_memory import quantized
from meshwright.planner.serving.serving_plan import CurvePoint, ServingLayout
from meshwright.planner.serving.step_times import prompt_kernel_of
from meshwright.spec.units import GIB, short_gib

if TYPE_CHECKING:
    from meshwright.api.serving_comparison import ServingComparison
    from meshwright.observe.compare.judge import ComparedRow

ALTERNATIVES = 6
"""Layouts that are shown besides the recommended one."""
NAMES = 22
"""Letters of the names of rows."""


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
    if asked.framework.sequences:
        parts.append(f"a step: {asked.framework.budget:,} tokens, {asked.framework.sequences} answers at most")
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
    first, each = f"first token {_ms(served.first_token_s)}", f"per token {_ms(served.per_token_s)}"
    yield from wrapped([first, each, f"{_rate(best.tokens_per_s)} tokens/s"], width(), "    speed    ")
    if memory.usable_bytes < float("inf"):
        graphs = [f"CUDA graphs {short_gib(memory.graphs_bytes)}"] if memory.graphs_bytes else []
        cache = f"cache {short_gib(memory.cache_bytes)} of {short_gib(memory.usable_bytes)}"
        states = f"weights {short_gib(memory.weights_bytes)}", f"activations {short_gib(memory.activations_bytes)}"
        copies = [f"copies of matrices {short_gib(memory.copies_bytes)}"] if memory.copies_bytes else []
        yield from wrapped([*states, *graphs, *copies, cache], width(), "    memory   ")
    adapter = answer.asked.adapter
    if adapter is not None:
        yield (
            f"    adapters {answer.asked.adapters:,} of rank {adapter.rank} on {adapter.targets}: "
            f"{short_gib(memory.adapters_bytes)}"
        )
    device = "GPU" if best.deployment.device.is_gpu else "device"
    each = f"{memory.position_bytes / 1024:,.0f} KiB per token and {device}"
    cache = f"{each}, {short_gib(memory.sequence_bytes)} per sequence; {_requests(best)}"
    yield from wrapped(cache, width(), "    cache    ")
    if isinstance(answer.timed(best.deployment).kernels, EngineKernels) and quantized(best.deployment):
        yield "    times    those of fp32 products: calibrate measures none with codes"
    attending = prompt_kernel_of(best.deployment)
    if attending:
        kernel = "FlashAttention 4" if attending[0].kernel == "flash-4" else "FlashAttention 2"
        yield from wrapped(f"{kernel} ({attending[0].reason})", width(), "    prompts  ")
    if best.waits:
        yield (
            f"    {answer.asked.concurrency:,} requests in flight are more than fit; the rest waits: lower "
            "--concurrency or narrow --kv-dtype"
        )


def served_rows(rows: "Iterable[ComparedRow]") -> Iterator[str]:
    """Planned, dry run and measured of a load that was run here."""
    from meshwright.cli.terminal.compare_answer import heads, row_line  # loads torch, which a plan does without

    yield heads(NAMES)
    for row in rows:
        yield from row_line(row, row.what, NAMES)


def served_load(found: "ServingComparison") -> Iterator[str]:
    """All lines of `compare --serve`."""
    asked = found.plan.asked
    word, colour = ("AGREES", "green") if found.agrees else ("DIFFERS", "red")
    yield from marked(wrapped(repr(found), width(), f"{word}  "), word, colour)
    parts = [f"{asked.input_tokens:,} tokens in", f"{asked.output_tokens:,} out", f"{asked.concurrency:,} in flight"]
    yield "  " + dot().join(parts)
    yield ""
    yield from served_rows(found.compared)


def _requests(one: ServingLayout) -> str:
    if one.most_requests == float("inf"):
        return "this device's memory is not known"
    return f"{one.most_requests:,.0f} sequences at most"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _table(rows: tuple[ServingLayout, ...]) -> Iterator[str]:
    length = max(20, *(len(one.words) for one in rows))
    yield f"    {'Also possible':<{length}}  first token  per token  tokens/s  weights GiB  most"
    for one in rows:
        assert one.served is not None
        most = "" if one.most_requests == float("inf") else f"{one.most_requests:,.0f}"
        yield (
            f"    {one.words:<{length}}  {_ms(one.served.first_token_s):>11}  {_ms(one.served.per_token_s):>9}  "
            f"{_rate(one.tokens_per_s):>8}  {one.memory.weights_bytes / GIB:>11.1f}  {most:>4}"
        )


def _curve(best: ServingLayout, points: tuple[CurvePoint, ...]) -> Iterator[str]:
    yield f"    {best.words + ', in flight':<20}  first token  per token  tokens/s"
    for one in points:
        yield (
            f"    {one.concurrency:>20,}  {_ms(one.first_token_s):>11}  {_ms(one.per_token_s):>9}  "
            f"{_rate(one.tokens_per_s):>8}"
        )


def _parameters(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _bytes(answer: ServingAnswer) -> str:
    weights = answer.best.memory.weights_bytes * answer.best.degrees.gpus / answer.parameters
    return (
        f"{_parameters(answer.parameters)} parameters: {weights:.1f} bytes per parameter in weights, "
        f"{answer.bytes_per_parameter:.1f} with the cache of these requests."
    )

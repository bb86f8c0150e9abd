"""Answer of `plan --serve` on the terminal: does it fit, how fast, for how many at once; other layouts and loads."""

from collections.abc import Iterator

from meshwright.interface.terminal.screen_text import dot, marked, width, wrapped
from meshwright.planner.serving.measured_kernels import EngineKernels
from meshwright.planner.serving.serving_memory import quantized
from meshwright.planner.serving.serving_plan import CurvePoint, ServingLayout
from meshwright.planner.serving.step_times import prompt_kernel_of
from meshwright.spec.units import GIB, short_gib
from meshwright.verbs.plan_serve.answer import ServingAnswer

ALTERNATIVES = 6
"""Layouts shown besides the recommended one."""


def serving_answer(answer: ServingAnswer, *, details: bool = False, top: int | None = None) -> Iterator[str]:
    """Yield all lines."""
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
    for layout in answer.layouts[len(answer.fitting) :][:2]:
        lacking = layout.memory.sequence_bytes - layout.memory.cache_bytes
        yield f"    {layout.words}: {lacking / GIB:,.1f} GiB per GPU too much for one sequence"
    yield ""
    yield from _curve(answer.best, answer.curve)
    yield ""
    yield from wrapped(_bytes_per_parameter(answer), width(), "  ")


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
    # A device without a known memory has nothing to divide; its rows of memory would be infinite.
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
    each += f" ({answer.asked.model.shape.attention_words})"
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


def _requests(layout: ServingLayout) -> str:
    if layout.most_requests == float("inf"):
        return "this device's memory is not known"
    return f"{layout.most_requests:,.0f} sequences at most"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _table(rows: tuple[ServingLayout, ...]) -> Iterator[str]:
    length = max(20, *(len(layout.words) for layout in rows))
    yield f"    {'Also possible':<{length}}  first token  per token  tokens/s  weights GiB  most"
    for layout in rows:
        assert layout.served is not None
        most = "" if layout.most_requests == float("inf") else f"{layout.most_requests:,.0f}"
        yield (
            f"    {layout.words:<{length}}  {_ms(layout.served.first_token_s):>11}  "
            f"{_ms(layout.served.per_token_s):>9}  {_rate(layout.tokens_per_s):>8}  "
            f"{layout.memory.weights_bytes / GIB:>11.1f}  {most:>4}"
        )


def _curve(best: ServingLayout, points: tuple[CurvePoint, ...]) -> Iterator[str]:
    yield f"    {best.words + ', in flight':<20}  first token  per token  tokens/s"
    for point in points:
        yield (
            f"    {point.concurrency:>20,}  {_ms(point.first_token_s):>11}  {_ms(point.per_token_s):>9}  "
            f"{_rate(point.tokens_per_s):>8}"
        )


def _bytes_per_parameter(answer: ServingAnswer) -> str:
    weights = answer.best.memory.weights_bytes * answer.best.degrees.gpus / answer.parameters
    number = answer.parameters
    size = f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"
    return (
        f"{size} parameters: {weights:.1f} bytes per parameter in weights, "
        f"{answer.bytes_per_parameter:.1f} with the cache of these requests."
    )

"""Start of an engine: size of its cache, runners of its models, and CUDA graphs of their steps.

A GPU's cache is sized by the largest steps that the engine will make, before it is allocated. A step takes its
activations and what attention gathers, and no formula knows the workspaces of libraries. So two steps run on a cache of
one block, which every sequence's table names. One is a prompt chunk at the end of the longest sequence. The other is a
token of as many sequences as the engine takes, which are then sampled. Both also run while tokens of the latter are
unread, since logits are kept until then. The cache gets a share of what is free after that, less the peak of such a
step and the pool of CUDA graphs.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, final

import torch

from meshwright.kernels.quantized import device_products
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import CachedSequence, Phase
from meshwright.serving.engine.cache.paged_cache import bytes_per_block
from meshwright.serving.engine.engine_options import GRAPHS, EngineOptions
from meshwright.serving.engine.rows.request_adapters import RequestAdapters
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.runner import Runner, RunnerSetup
from meshwright.serving.engine.sampler import DrawnTokens, SampledRow, draw
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.step_graphs import StepMemory, reason_without
from meshwright.spec.errors import ArgumentError, DoesNotFit, argument
from meshwright.spec.plan.execution import CACHE_FORMS, GRAPH_POOLS
from meshwright.spec.units import gib

SMALLER = "a smaller longest, most_tokens or most_sequences, or quantized weights"


class DeviceMemory(Protocol):
    """Memory of the device that an engine runs on."""

    def free_bytes(self) -> int:
        """Return what a program can still allocate, with the allocator's reserve released."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run the work. Return the peak of tensors beyond those that existed before."""


@final
class CudaMemory:
    """Memory of a CUDA device, as the driver and torch's allocator report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """Return the driver's free bytes once the allocator has released its reserve."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run the work, and return the peak of tensors beyond those that existed before."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """Memory of a GPU for keys and values, in bytes."""

    free_bytes: int
    """Left free by weights and libraries."""
    step_bytes: int
    """Peak of the largest step."""
    graphs_bytes: int
    """CUDA graphs, which hold the steps' sizes a second time."""
    share: float
    """Share of the rest that the cache takes."""

    @property
    def cache_bytes(self) -> int:
        """Bytes for keys and values. 0 = steps and graphs alone do not fit."""
        return max(0, int(self.share * (self.free_bytes - self.step_bytes - self.graphs_bytes)))

    def __str__(self) -> str:
        return (
            f"the weights leave {gib(self.free_bytes)} free; the largest step takes {gib(self.step_bytes)} and "
            f"CUDA graphs {gib(self.graphs_bytes)}; keys and values have {gib(self.cache_bytes)}, {self.share:.0%} of "
            "the rest"
        )


@torch.no_grad()
def measure_room(
    memory: DeviceMemory, makers: Sequence[Callable[[RunnerSetup], Runner]], setup: RunnerSetup, share: float,
    ranks: int = 1,
) -> CacheRoom:  # fmt: skip
    """Run the largest steps of all models of an engine: the answering one, and its draft model.

    Args:
        makers: Return a runner for each model.
        setup: The engine's, apart from its blocks.
        ranks: Number of ranks that share the model.
    """
    off = GRAPHS.index("off")
    probe = replace(setup, blocks=1, slots=0, graphs=off)
    steps, graphs = list[int](), list[int]()
    for make in makers:
        runner = make(probe)
        try:
            peaks = _largest_steps(memory, runner, setup)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(f"the largest step does not fit next to the weights: take {SMALLER} ({error})") from None
        steps.append(max(peaks))
        if setup.graphs != off and not reason_without(runner.model, runner.cache, ranks):
            blocks = 1 + setup.sequences * _blocks(setup, setup.longest)
            step_memory = StepMemory.bytes_of(setup.graph_rows, blocks, runner.model.shape.vocab)
            graphs.append(int(GRAPH_POOLS * peaks[1]) + step_memory)
        del runner
    return CacheRoom(free_bytes=memory.free_bytes(), step_bytes=max(steps), graphs_bytes=sum(graphs), share=share)


def _largest_steps(memory: DeviceMemory, runner: Runner, setup: RunnerSetup) -> list[int]:
    """Return peaks of a prompt step, a decoding step, and either one behind a decoding step with unread tokens."""
    prompts, decoding = _prompt_step(setup), _decoding_step(setup, _count_decoding_rows(memory, runner, setup))
    peaks = list[int]()
    for _ in range(2):  # the first pass compiles kernels and allocates workspaces, which stay
        peaks = [
            memory.peak_bytes(lambda: runner.run(prompts)),
            memory.peak_bytes(lambda: runner.run(decoding)),
            memory.peak_bytes(lambda: _run_and_draw(runner, (decoding, decoding, prompts))),
        ]
    return peaks


def check_room(room: CacheRoom, block_bytes: int, block: int, longest: int, asked: bool) -> int:
    """Return how many positions a sequence can have in the cache, at most `longest`.

    Raises DoesNotFit when the cache holds no block, or not the positions that the user `asked` for.
    """
    held = room.cache_bytes // block_bytes * block
    if held >= longest:
        return longest
    if not held or asked:
        remedy = f"longest={held}" if held else SMALLER
        raise DoesNotFit(
            f"the cache holds {held:,} positions and one sequence has {argument('longest', longest)}: take "
            f"{remedy}. {room}"
        )
    return held


def _blocks(setup: RunnerSetup, positions: int) -> int:
    return -(-positions // setup.block)


def _sequence(setup: RunnerSetup, tokens: int, computed: int) -> CachedSequence:
    """Return a sequence with that many computed tokens. All of its blocks are block 0."""
    sequence = CachedSequence(number=0, tokens=[0] * tokens, limit=tokens, first=b"", phase=Phase.RUNNING)
    sequence.computed, sequence.table = computed, [0] * _blocks(setup, tokens)
    return sequence


def _prompt_step(setup: RunnerSetup) -> StepPlan:
    """Return chunks at the ends of the longest prompts, as many tokens as a step may have."""
    budget, step = setup.most_tokens, StepPlan()
    while budget and len(step.chunks) < setup.sequences:
        count = min(budget, setup.longest)
        step.chunks[_sequence(setup, setup.longest, setup.longest - count)] = count
        budget -= count
    return step


def _count_decoding_rows(memory: DeviceMemory, runner: Runner, setup: RunnerSetup) -> int:
    """Return how many of the longest sequences the largest decoding step reads.

    If rows read blocks in place, their length costs next to nothing. If attention gathers keys and values, a step never
    reads more than the cache can hold, which is less than what is free now.
    """
    if runner.cache.by_rows:
        return setup.graph_rows
    held = memory.free_bytes() // bytes_per_block(runner.model, setup.block, CACHE_FORMS[setup.form])
    return max(1, min(setup.graph_rows, held // _blocks(setup, setup.longest)))


def _decoding_step(setup: RunnerSetup, rows: int) -> StepPlan:
    """Return a step with one token of each of so many of the longest sequences, or of their guesses."""
    return StepPlan({_sequence(setup, setup.longest, setup.longest - 1): 1 for _ in range(rows)})


def _run_and_draw(runner: Runner, steps: Sequence[StepPlan]) -> None:
    """Run steps and draw a token per row. Each is launched before the tokens of the one before are read."""
    options, drawn = RequestOptions(temperature=1.0, top_p=0.5), list[DrawnTokens]()
    for step in steps:
        owners, logits = runner.run(step)
        drawn.append(draw(logits, [SampledRow(options, 0, (), ()) for _ in owners]))
        if len(drawn) > 1:
            drawn.pop(0).read()
    drawn.pop().read()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory that an engine may measure and fill. None = on a CPU, which it shares."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """Parts with which an engine computes steps."""

    runners: list[Runner]
    """Runner of the model, then of the draft model if there is one."""
    blocks: int
    """Blocks of the cache."""
    slots: int
    """Slots of host memory, one block each."""
    longest: int
    """Most positions of a sequence."""
    memory: str
    """A line for people about the cache."""


def times_products(device: torch.device, ranks: ServingRanks | None) -> bool:
    """Return whether an engine times ways to multiply: not if ranks, or runs, must choose the same ones."""
    return device.type == "cuda" and ranks is None and not torch.are_deterministic_algorithms_enabled()


def start(
    model: Transformer, options: EngineOptions, adapters: RequestAdapters, ranks: ServingRanks | None
) -> StartedEngine:
    """Measure memory if the options leave the cache's size open, and make runners.

    Raises ArgumentError, or DoesNotFit when the cache cannot hold the requested longest sequence.
    """
    device, size = model.embed.weight.device, options.block
    draft = options.speculation and options.speculation.draft
    models = [model, *([draft.eval()] if draft else [])]
    bytes_each = sum(bytes_per_block(part, size, options.cache_dtype) for part in models)
    longest = options.longest or model.shape.max_positions
    slots = options.host_cache_bytes // bytes_each
    if options.host_cache_bytes and not slots:
        raise ArgumentError(
            "host_cache_bytes",
            options.host_cache_bytes,
            f"is less than a block of {bytes_each:,} bytes",
            "give more, or 0 for none",
        )

    def make_runner(setup: RunnerSetup) -> Runner:
        if ranks is not None:
            ranks.send(RankCommand.SETUP, setup.words)
        return setup.runner(model, adapters, ranks)

    def make_draft_runner(drafting: Transformer, setup: RunnerSetup) -> Runner:
        off = GRAPHS.index("off")
        return replace(setup, exact=False, graphs=off if setup.graphs == off else 0).runner(drafting)

    say = options.on_progress or (lambda _: None)
    contest = device_products.open_contest(options.second_layouts, say) if times_products(device, ranks) else None
    makers: list[Callable[[RunnerSetup], Runner]] = [
        make_runner,
        *(partial(make_draft_runner, part) for part in models[1:]),
    ]
    cache_bytes, memory = options.cache_bytes, device_memory(device)
    description = f"{gib(cache_bytes)} at most"
    if not cache_bytes and memory is None:
        raise ArgumentError("cache_bytes", 0, f"is for a GPU, and this is a {device.type}", "give a number of bytes")
    if not cache_bytes and memory is not None:
        setup = RunnerSetup.for_model(options, 1, 0, longest)
        room = measure_room(memory, makers, setup, options.memory_share, 1 if ranks is None else ranks.size)
        longest = check_room(room, bytes_each, size, longest, asked=bool(options.longest))
        cache_bytes, description = room.cache_bytes, str(room)
    most = options.most_sequences * -(-longest // size)
    blocks = max(1, min(most, cache_bytes // bytes_each))
    setup = RunnerSetup.for_model(options, blocks, slots, longest)
    description = f"{blocks * size:,} tokens of keys and values in {gib(blocks * bytes_each)} ({description})"
    if memory is not None:
        say(f"cache: {description}")
    runners = [make(setup) for make in makers]
    if contest is not None:  # the contest holds codes and their second layouts
        weakref.finalize(runners[0], device_products.close_contest, contest)
    for runner in runners if options.warm_start else ():
        runner.capture(say)
    return StartedEngine(runners=runners, blocks=blocks, slots=slots, longest=longest, memory=description)

"""Start of an engine: size of its cache, runners of its models, and CUDA graphs of their steps."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from meshwright.kernels.quantized import device_products
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.cache.paged_cache import bytes_per_block
from meshwright.serving.engine.engine_options import GRAPHS, EngineOptions
from meshwright.serving.engine.gpu_memory import CudaMemory, DeviceMemory, check_room, measured_room
from meshwright.serving.engine.rows.request_adapters import RequestAdapters
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.runner_setup import RunnerSetup
from meshwright.spec.errors import ArgumentError
from meshwright.spec.units import gib


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
            f"host_cache_bytes={options.host_cache_bytes} is less than a block of {bytes_each:,} bytes: give more, "
            "or 0 for none"
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
        raise ArgumentError(f"cache_bytes=0 is for a GPU, and this is a {device.type}: give a number of bytes")
    if not cache_bytes and memory is not None:
        setup = RunnerSetup.for_model(options, 1, 0, longest)
        room = measured_room(memory, makers, setup, options.memory_share, 1 if ranks is None else ranks.size)
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

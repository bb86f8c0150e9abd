"""What the host of a GPU does for a step of decoding whose model is one CUDA graph: copies, operations, Python calls.

    python -m benchmarks.host_step [--model llama-3.2-1b] [--json]

The engine's own loop runs on CUDA tensors without values, so no GPU is needed. The graph itself is left out:
`benchmarks.decode_step` counts it, and so the size of the model does not matter. Steps are launched ahead, as on a GPU.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.decode_step import BLOCK, Counting, StepCounts, WithoutDriver, _calls, fake_gpu, fake_model
from meshwright import compat
from meshwright.parallel.pipeline.pass_graphs import WARM, NoCapture
from meshwright.serving.engine import sampler, step_loop
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache import paged_cache
from meshwright.serving.engine.cache.blocks import BlockPool, BlockTables
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.rows import packed_step
from meshwright.serving.engine.rows.prepared_layers import PreparedLayers
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.sampler import SampledRow
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.serving.engine.served_request import ServedAnswer, ServedRequest
from meshwright.serving.engine.step_graphs import StepGraphs
from meshwright.serving.engine.step_loop import StepLoop
from meshwright.spec import presets
from meshwright.spec.model.shape import ModelShape

SAMPLINGS = {
    "greedy": RequestOptions(max_new_tokens=64, ignore_end=True),
    "sampled": RequestOptions(max_new_tokens=64, ignore_end=True, temperature=0.7),
    "top_p": RequestOptions(max_new_tokens=64, ignore_end=True, temperature=0.7, top_p=0.95),
}


@dataclass(slots=True)
class HostCounts:
    """Of one step."""

    to_device: int = 0
    """Copies of the host's numbers."""
    to_host: int = 0
    """Copies of the device's."""
    step: StepCounts | None = None
    """Operations, kernels and calls beside the graph."""


class GraphOfNothing(NoCapture):
    """A graph whose launch is not counted."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """As Capture."""
        return lambda: None


class Zeros:
    """In place of numbers that the host reads."""

    def __init__(self, like: Tensor) -> None:
        self._sizes = like.shape

    def tolist(self) -> list[Any]:
        """As of a tensor; all are 1, which as a flag says yes."""
        nested: list[Any] = [1] * self._sizes[-1]
        for size in reversed(self._sizes[:-1]):
            nested = [list(nested) for _ in range(size)]
        return nested


@contextmanager
def counted_copies(counts: HostCounts) -> Iterator[None]:
    """Count copies between the host and a fake device, in both directions."""

    def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        counts.to_device += 1
        sizes = list[int]()
        inside: Any = numbers
        while isinstance(inside, Sequence):
            sizes.append(len(inside))
            inside = inside[0] if inside else 0
        dtype = dtype or (torch.float32 if isinstance(inside, float) else torch.int64)
        return torch.empty(sizes, dtype=dtype, device="cuda")

    class Reading:
        def __init__(self, tensors: Sequence[Tensor]) -> None:
            counts.to_host += len(tensors)
            self._tensors = tensors

        def read(self) -> list[Zeros]:
            return [Zeros(tensor) for tensor in self._tensors]

    with ExitStack() as changed:
        for module in (packed_step, paged_cache, sampler, step_loop):
            changed.enter_context(patch.object(module, "to_device", to_device))
        changed.enter_context(patch.object(sampler, "HostReading", Reading))
        yield


def counted_host(shape: ModelShape, batch: int, context: int, sampling: str) -> HostCounts:
    """Count a step of `batch` answers behind prompts of `context` tokens."""
    ignored, counts = HostCounts(), HostCounts(step=StepCounts())
    assert counts.step is not None
    with compat.fake_tensors(), torch.no_grad(), WithoutDriver(), fake_gpu(StepCounts(), context):
        model = fake_model(shape, "bf16")
        longest, blocks = context + 64, batch * (-(-(context + 64) // BLOCK) + 1)
        cache = PagedCache(model, blocks, BLOCK)
        graphs = StepGraphs(model, cache, GraphOfNothing(), rows=batch, sequences=batch, longest=longest)
        layers = PreparedLayers(model, packed=True, head="model")
        runner = Runner(
            model, cache, layers, longest=longest, most_tokens=batch * context + 1, exact=False, copies_bytes=0,
            graphs=graphs,
        )  # fmt: skip
        scheduler = Scheduler(
            BlockTables(BlockPool(blocks), BLOCK), most_tokens=batch * context + 1, most_sequences=batch
        )  # fmt: skip
        loop = StepLoop(runner, scheduler, draft=None, guesser=None, run_ahead=True)
        for number in range(batch):
            options, ids = SAMPLINGS[sampling], list[int]()
            prompt = tuple(1 + (number + position) % 7 for position in range(context))
            answer = ServedAnswer(options, SampledRow(options, number, prompt, ids), frozenset(), None, ids)
            sequence = scheduler.add(prompt, context + 64, salt=None)
            loop.begin(sequence, ServedRequest(prompt, options, [answer], sequence=sequence))
        with counted_copies(ignored):
            for _ in range(WARM + 3):
                loop.step()
        assert graphs.launched, "the step is a graph by now"
        with counted_copies(counts), fake_gpu(counts.step, context), Counting(counts.step), _calls(counts.step):
            loop.step()
    return counts


def main(words: Sequence[str] | None = None) -> int:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    rows = []
    for sampling in SAMPLINGS:
        for batch in (1, 64):
            counts = counted_host(presets.model(asked.model), batch, asked.context, sampling)
            assert counts.step is not None
            rows.append({
                "sampling": sampling, "batch": batch, "to_device": counts.to_device, "to_host": counts.to_host,
                "launches": len(counts.step.launches), "dispatches": counts.step.dispatches,
                "calls": counts.step.calls, "waits": len(counts.step.waits),
            })  # fmt: skip
    if asked.json:
        print(json.dumps({"model": asked.model, "context": asked.context, "rows": rows}))
        return 0
    print(f"{asked.model}, the host's part of a decode step at {asked.context} positions, beside one graph")
    print("| tokens | rows | copies to the device | to the host | kernels | host operations | Python calls | waits |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(str(number) for number in row.values())} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

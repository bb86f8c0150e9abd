"""Memory of a rank under each parallelism beside what others wrote for it, to the byte.

    python -m benchmarks.parallel_memory [--json]

Every tensor's memory comes from torch's CPU allocator, which reports each block it gives and takes back to torch's
profiler (profile_memory=True) with the sum of all that live; the profiler runs from before the model is made, so the
sum is whole. The figure is its peak in a training step. Message buffers inside Gloo are not tensors and not in
it. Activations are the bytes of all tensors that autograd keeps for the backward pass, parameters left out
(torch.autograd.graph.saved_tensors_hooks).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.parallel_work import Contestant, Ours, Work
from benchmarks.torch_peers import TorchDDP, TorchFSDP2
from meshwright.observe.ranks import on_ranks
from meshwright.spec.layout.replay import replay
from meshwright.spec.layout.schedule import schedule
from meshwright.training.step.batches import Batch, select

STEPS = 4
WORK = Work()
LONG = Work(rows=1, sequence=1024)
PIPELINE = Work(rows=8, sequence=512, micro_rows=1)
"""Eight micro-batches, long enough that activations outweigh everything else."""

MAKERS: dict[str, Callable[[Work], Contestant]] = {
    "ours zero=0": lambda work: Ours(work, dp_shard=torch.distributed.get_world_size()),
    "ours zero=1": lambda work: Ours(work, dp_shard=torch.distributed.get_world_size(), zero=1),
    "ours zero=2": lambda work: Ours(work, dp_shard=torch.distributed.get_world_size(), zero=2),
    "ours zero=3": lambda work: Ours(work, dp_shard=torch.distributed.get_world_size(), zero=3),
    "torch DDP": TorchDDP,
    "torch FSDP2": TorchFSDP2,
    "ours afab": lambda work: Ours(work, pp=torch.distributed.get_world_size(), schedule="afab"),
    "ours 1f1b": lambda work: Ours(work, pp=torch.distributed.get_world_size(), schedule="1f1b"),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Sums of live bytes in the order of time, and the spans of the marks by name, in the profiler's clock."""

    sums: list[tuple[float, int]]
    marks: dict[str, tuple[float, float]]

    def peak(self, mark: str) -> int:
        """Within a span, what is alive at its start included."""
        start, end = self.marks[mark]
        return max([self.at(start), *(live for when, live in self.sums if start <= when <= end)])

    def at(self, when: float) -> int:
        """What is alive at a time."""
        return next((live for then, live in reversed(self.sums) if then <= when), 0)


def traced(run: Callable[[], None]) -> Trace:
    """Runs under the profiler; spans of record_function whose names begin with "mark" are the marks."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sums = [(e["ts"], int(e["args"]["Total Allocated"])) for e in events if e.get("name") == "[memory]"]
    spans = [e for e in events if str(e.get("name")).startswith("mark") and "dur" in e]
    return Trace(sorted(sums, key=lambda s: s[0]), {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in spans})


def peak_bytes(label: str, work: Work) -> int:
    """The most that live tensors of this rank take together in a step: the least of the steps after the first, since
    Gloo's threads may let go of a tensor a moment later than they need."""

    def run() -> None:
        contestant = MAKERS[label](work)
        for step in range(STEPS):
            with record_function(f"mark {step}"):
                contestant.step(*work.batch(step))

    trace = traced(run)
    return min(trace.peak(f"mark {step}") for step in range(1, STEPS))


@contextmanager
def saved_tensors(parameters: list[nn.Parameter]) -> Iterator[list[int]]:
    """Bytes of the storages that autograd keeps of what is computed inside, each counted once; filled at the end."""
    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    alive: dict[int, Tensor] = {}
    saved_bytes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved_bytes
    saved_bytes.append(
        sum(t.untyped_storage().nbytes() for address, t in alive.items() if address not in parameter_storages)
    )


def context_bytes(degree: int, work: Work) -> int:
    """Activations that a rank keeps of the blocks' pass over its part of one sequence."""
    ours = Ours(work, cp=degree)
    tokens, targets = work.batch(0)
    batch = select(Batch(tokens=tokens, targets=targets), ours.share)
    model = ours.engine.model
    x = torch.zeros(*batch.tokens.shape, work.shape.hidden, requires_grad=True)
    positions = torch.arange(batch.tokens.shape[1])[None] if batch.positions is None else batch.positions
    with saved_tensors(list(model.parameters())) as saved_bytes:
        out, _ = model.run_layers(x, model.attention_metadata(positions, batch.tokens.shape[1], None))
    del out
    return saved_bytes[0]


def stage_bytes(work: Work) -> tuple[int, int]:
    """(what this rank's stage of a pipeline keeps of one micro-batch between its passes, bytes of its gradients): the
    second of two forward passes, graph, received input and the loss's ready gradients included."""
    ours = Ours(work, pp=torch.distributed.get_world_size())
    tokens, targets = (part[: work.micro_rows] for part in work.batch(0))
    graphs: list[Any] = []

    def forward() -> None:
        model = ours.engine.model
        x = None if model.first else torch.zeros(*tokens.shape, work.shape.hidden, requires_grad=True)
        out, loss = model.stage(x, tokens, targets, scale=torch.tensor(1.0 / work.tokens))
        graphs.append((x, get_gradient_edge(loss.cross_entropy if model.last else out)))

    def run() -> None:
        for number in range(2):
            with record_function(f"mark {number}"):
                forward()

    trace = traced(run)
    start, end = trace.marks["mark 1"]
    return trace.at(end) - trace.at(start), sum(p.nbytes for p in ours.engine.parameters.values())


def against(world: int, ours: str, theirs: str) -> dict[str, Any]:
    """Peaks of the ranks of both, and the ratio of the largest."""
    peaks = {label: on_ranks(world, peak_bytes, label, WORK) for label in (ours, theirs)}
    return {"peak_bytes": peaks, "ours_over_theirs": max(peaks[ours]) / max(peaks[theirs])}


def context() -> dict[str, Any]:
    """Kept bytes for 1, 2 and 4 ranks; times the degree, over those of one rank: 1 = a c-th of the activations."""
    kept_bytes = {degree: max(on_ranks(degree, context_bytes, degree, LONG)) for degree in (1, 2, 4)}
    most = max(degree * held / kept_bytes[1] for degree, held in kept_bytes.items())
    return {"kept_bytes": kept_bytes, "degree_times_kept_over_one": most}


def pipeline(world: int = 2) -> dict[str, Any]:
    """What 1f1b saves over afab on each rank, beside what it should: (micro-batches in flight, simulated) x bytes of
    one, less the gradients, which are there when 1f1b holds the most and not yet when afab does."""
    peaks = {name: on_ranks(world, peak_bytes, f"ours {name}", PIPELINE) for name in ("afab", "1f1b")}
    kept_bytes = on_ranks(world, stage_bytes, PIPELINE)
    flights = {name: replay(schedule(name, world, PIPELINE.micro_batches)).in_flight for name in peaks}
    ranks = []
    for rank in range(world):
        saved = peaks["afab"][rank] - peaks["1f1b"][rank]
        activations, gradients = kept_bytes[rank]
        should = (flights["afab"][rank] - flights["1f1b"][rank]) * activations - gradients
        ranks.append({"saved_bytes": saved, "simulated_bytes": should, "off": abs(saved / should - 1)})
    return {
        "peak_bytes": peaks,
        "micro_batch_bytes": [activations for activations, _ in kept_bytes],
        "ranks": ranks,
        "off_simulated": max(rank["off"] for rank in ranks),
        "1f1b_over_afab": max(peaks["1f1b"]) / max(peaks["afab"]),
    }


def measure() -> dict[str, Any]:
    """Everything the claims read."""
    figures: dict[str, Any] = {}
    for world in (2, 4):
        figures[f"zero0-{world}"] = against(world, "ours zero=0", "torch DDP")
        figures[f"zero3-{world}"] = against(world, "ours zero=3", "torch FSDP2")
    figures["zero"] = {zero: max(on_ranks(2, peak_bytes, f"ours zero={zero}", WORK)) for zero in (1, 2)}
    return {**figures, "context": context(), "pipeline": pipeline()}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure()
    if options.json:
        print(json.dumps(figures))
        return
    for name in ("zero0-2", "zero3-2", "zero0-4", "zero3-4"):
        peaks = {label: f"{max(each) / 2**20:.1f} MiB" for label, each in figures[name]["peak_bytes"].items()}
        print(f"{name}: {peaks}, ours over theirs {figures[name]['ours_over_theirs']:.3f}")
    print("peak by ZeRO stage, 2 ranks:", {zero: f"{peak / 2**20:.1f} MiB" for zero, peak in figures["zero"].items()})
    print("context:", figures["context"])
    print("pipeline:", json.dumps(figures["pipeline"], indent=1))


if __name__ == "__main__":
    main()

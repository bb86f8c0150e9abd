"""One rank's program under a StorageWatch: memory at its peak, by kind and by tensor, and traffic.

The kind of a piece of memory (spec.memory.held.KINDS) follows from what its maker declares (spec.purpose), when it was
made, and how long it lived:

    parameters, shards, masters, moments, counters   named by `training.optimizer.optimizer` once the model was built
    gradients       named by it before an update; left by a backward pass with the shape of a parameter
    buffers         made by FSDP's gathers and reductions, or by a collective and gone when its pass ends
    logits          made inside the loss over the vocabulary
    activations     made in a forward pass and still there after it, or left by B for W
    temporaries     made and gone within one pass, such as a gradient that is added to another; widened by the optimizer
    tokens          the batch, and the next one that is read ahead
    staging         on a CPU, the copy of the state from which a thread writes a checkpoint
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.observe.dryrun.storage_tracker import StorageRecord, StorageWatch
from meshwright.observe.program import TrainingProgram
from meshwright.observe.shared_document import LargeTensor
from meshwright.observe.spans import Inner, Span, replaced, report_spans
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.group import Counts
from meshwright.parallel.pipeline.pass_graphs import NoCapture, PassGraphs
from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.held import KINDS, takes
from meshwright.training.objectives.teacher import teacher_tensors
from meshwright.training.optimizer.optimizer import frozen_code_tensors, tensors_by_kind
from meshwright.training.step.state import TrainState

CODES = "codes"
"""Provisional kind of parameters that are never sharded, until all others have their kind."""
FORWARD, BACKWARD = ("F", "evaluate"), ("B", "BW", "W")
"""First words of phases."""
LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPart:
    """A part of the program at its peak."""

    name: str
    peak_bytes: int
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """Memory and traffic of one rank's program."""

    rank: int
    peak_bytes: int
    when: str
    """Part of the program and the pass in it: `step 2, BW 0 3`."""
    kinds: dict[str, int]
    where: dict[str, int]
    """Bytes of activations at the peak by module and operation."""
    largest: tuple[LargeTensor, ...]
    sent: tuple[Counts, ...]
    parts: tuple[ProgramPart, ...]
    """Parts of the program: build, tokens, step 1, update 1 ..."""
    passes: tuple[ProgramPart, ...]
    """Every pass and the parts between them, in order: the memory timeline."""
    staging_bytes: int = 0
    """Host memory of the copy from which a thread writes checkpoints. It is part of a CPU's peak, not of a GPU's."""


class Watched:
    """A program that is watched; `run` does it all."""

    def __init__(self, program: TrainingProgram, watch: StorageWatch) -> None:
        self.program, self.watch = program, watch
        self.parts: list[tuple[str, int]] = []
        self.sent: list[Counts] = []

    def run(self, counts: Sequence[int]) -> WatchedRank:
        """Run build, steps of so many micro-batches, evaluation and state."""
        program, watch = self.program, self.watch
        program.on_part = self._part

        def resize_(inner: Inner, storage: torch.UntypedStorage, size: int) -> object:
            resized = inner(storage, size)
            watch.resized(storage)
            return resized

        with ExitStack() as stack:
            stack.enter_context(watch)
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", resize_))
            stack.enter_context(report_spans(self._pass))
            program.build()
            # States are known by their owners, so they are labelled before steps make other tensors.
            label_states(watch, program.state, teacher_tensors(program.objective))
            hold_pool(program.state.engine.graphs, watch)
            self._name_modules(stack)
            for number, count in enumerate(counts, start=1):
                before = program.mesh.traffic.snapshot()
                program.step(number, count)
                self.sent.append(program.mesh.traffic.since(before))
                # A thread writes the first checkpoint during the second step.
                if number == 1:
                    program.copy()
            program.rest()
            # Again, for states that the optimizer made in its last step.
            label_states(watch, program.state)
        watch.close()
        label_rest(watch, self._parameter_shapes(), program.plan.layout)
        return self._summarize()

    def _part(self, name: str) -> None:
        if name.startswith("update"):
            label_states(self.watch, self.program.state)
        self.parts.append((name, self.watch.now))
        self.watch.enter(name)

    def _pass(self, span: Span | None) -> None:
        self.watch.enter(str(span) if span else self.parts[-1][0])

    def _name_modules(self, stack: ExitStack) -> None:
        """Tell the watch inside which module of the model it is.

        The hooks are on all modules: a hook on one linear layer would have it computed apart from those with the same
        input.
        """
        watch, outer = self.watch, [""]
        names = {module: name for model in self.program.state.engine.stages for name, module in model.named_modules()}

        def enter(module: Module, inputs: object) -> None:
            # What a hook reads, the compiler takes for a constant of the block.
            if not torch.compiler.is_compiling():
                outer.append(watch.module)
                watch.module = names.get(module) or watch.module

        def leave(module: Module, inputs: object, output: object) -> None:
            if not torch.compiler.is_compiling():
                watch.module = outer.pop()

        for handle in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)):
            stack.callback(handle.remove)

    def _parameter_shapes(self) -> set[tuple[int, ...]]:
        engine = self.program.state.engine
        shapes = {tuple(local(p).shape) for p in engine.parameters.values()}
        return shapes | {tuple(box.sizes) for box in engine.boxes.values()}

    def _summarize(self) -> WatchedRank:
        watch = self.watch
        phases = [(phase.name, phase.start) for phase in watch.phases]
        totals = list(accumulate(size for _, size in watch.events()))
        of_parts, of_phases = _highest(totals, self.parts), _highest(totals, phases)
        peak_at = self._peak_event(totals)
        # One pass over the events adds up kinds, and copies the sums only where some part has its peak.
        wanted = {*of_parts, *of_phases, peak_at}
        kinds, alive, kinds_at = dict.fromkeys(KINDS, 0), dict[int, int](), dict[int, dict[str, int]]()
        at_peak: dict[int, int] = {}
        for at, (number, size) in enumerate(watch.events()):
            kinds[watch.records[number].kind] += size
            alive[number] = alive.get(number, 0) + size
            if at in wanted:
                kinds_at[at] = {kind: held for kind, held in kinds.items() if held}
            if at == peak_at:
                at_peak = {number: held for number, held in alive.items() if held}

        def peaks(starts: Sequence[tuple[str, int]], highest: Sequence[int]) -> tuple[ProgramPart, ...]:
            busy = [(name, at) for (name, _), at in zip(starts, highest, strict=True) if at >= 0]
            return tuple(ProgramPart(name=name, peak_bytes=totals[at], kinds=kinds_at[at]) for name, at in busy)

        largest = nlargest(LISTED, at_peak, key=at_peak.__getitem__)
        names = [_name_at(self.parts, peak_at), _name_at(phases, peak_at)]
        return WatchedRank(
            rank=self.program.mesh.rank,
            peak_bytes=totals[peak_at],
            when=", ".join(dict.fromkeys(names)),
            kinds=kinds_at[peak_at],
            where=self._activations_by_module(at_peak),
            staging_bytes=self.program.staging_bytes,
            largest=tuple(self._large_tensor(watch.records[number], at_peak[number]) for number in largest),
            sent=tuple(self.sent),
            parts=peaks(self.parts, of_parts),
            passes=peaks(phases, of_phases),
        )

    def _peak_event(self, totals: Sequence[int]) -> int:
        """Return the first event with the highest total, tensors before workspaces that end with their operation."""
        highest = max(totals)
        equal = [(at, number) for at, (number, _) in enumerate(self.watch.events()) if totals[at] == highest]
        lasting = (at for at, number in equal if self.watch.records[number].died != at + 1)
        return next(lasting, equal[0][0])

    def _activations_by_module(self, alive: dict[int, int]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for number, size in alive.items():
            record = self.watch.records[number]
            if record.kind == "activations" and size:
                key = f"{generic(record.module)} {record.operation}"
                sizes[key] = sizes.get(key, 0) + size
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def _large_tensor(self, record: StorageRecord, size: int) -> LargeTensor:
        return LargeTensor(
            bytes=size, kind=record.kind, shape=record.shape, dtype=record.dtype, line=record.line,
            operation=record.operation, module=record.module, phase=self.watch.phases[record.phase].name,
        )  # fmt: skip


def _highest(totals: Sequence[int], starts: Sequence[tuple[str, int]]) -> list[int]:
    """Return the event with the highest total in each part. -1 = nothing happens there."""
    ends = [*(start for _, start in starts[1:]), len(totals)]
    stretches = [range(start, end) for (_, start), end in zip(starts, ends, strict=True)]
    return [max(stretch, key=totals.__getitem__) if stretch else -1 for stretch in stretches]


def _name_at(starts: Sequence[tuple[str, int]], event: int) -> str:
    return next((name for name, start in reversed(starts) if start <= event), "")


def generic(module: str) -> str:
    """Replace layer numbers: `layers.3.mlp.up` -> `layers.*.mlp.up`."""
    return ".".join("*" if word.isdigit() else word for word in module.split("."))


class GraphPool(NoCapture):
    """Memory that CUDA graphs keep between passes (layout.cuda_graphs).

    The most that a pass takes is held while none runs: all graphs share one pool, and nothing else may use it. Passes
    run without capture, in memory that is released for them.
    """

    def __init__(self, watch: StorageWatch) -> None:
        self.watch, self.size_bytes = watch, 0
        self._held: Tensor | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run a pass inside."""
        self._held = None
        before = self.watch.now
        yield
        self.size_bytes = max(self.size_bytes, self.watch.rise(before))
        self._held = _allocate(self.size_bytes)


@takes("buffers")
def _allocate(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def hold_pool(graphs: PassGraphs | None, watch: StorageWatch) -> None:
    """Make graphs keep the memory of their passes, as on a GPU."""
    if graphs is not None:
        graphs.capture = GraphPool(watch)


def label_states(watch: StorageWatch, state: TrainState, beside: Iterable[Tensor] = ()) -> None:
    """Set the kind of lasting storages and of present gradients. `beside` holds parameters of a teacher."""
    for record in _records(watch, beside):
        record.kind = record.kind or "parameters"
    # Codes never are shards, so they must not become any in `label_rest`.
    for record in _records(watch, frozen_code_tensors(state.engine)):
        record.kind = CODES
    for kind, tensors in tensors_by_kind(state.engine, state.optimizer).items():
        for record in _records(watch, tensors):
            record.kind = record.kind or kind


def _records(watch: StorageWatch, tensors: Iterable[Tensor]) -> list[StorageRecord]:
    records = [watch.see(local(tensor.detach())) for tensor in tensors]
    return [record for record in records if record is not None]


def label_rest(watch: StorageWatch, shapes: set[tuple[int, ...]], layout: Layout) -> None:
    """Set the kind of all other storages. `shapes` are those of parameters as this rank computes with them."""
    # Below ZeRO-3, and in a pipeline, a rank gathers each parameter once and holds it until the update.
    stays_whole = bool(layout.zero) and (layout.zero < 3 or layout.pp > 1)
    for record in watch.records:
        if stays_whole and record.kind == "parameters":
            record.kind = "shards"
        if record.kind == CODES:
            record.kind = "parameters"
        if not record.kind:
            record.kind = _kind(watch, record, shapes, stays_whole)


def _kind(watch: StorageWatch, record: StorageRecord, shapes: set[tuple[int, ...]], stays_whole: bool) -> str:
    phase = watch.phases[record.phase].name.partition(" ")[0]
    ends_in_its_phase = record.died >= 0 and record.death_phase == record.phase
    if phase == "tokens":
        return "tokens"
    if phase == "copy":
        return "staging" if record.died < 0 else "temporaries"
    # FSDP calls torch without declaring a purpose. An empty tensor there becomes a gathered parameter.
    if record.outer == "fsdp":
        return "parameters" if record.operation == "empty" and stays_whole else "buffers"
    if record.purpose == "logits":
        return "logits"
    if phase in FORWARD:
        if not ends_in_its_phase:
            return "activations"
    elif phase in BACKWARD:
        if record.shape in shapes and not ends_in_its_phase:
            return "gradients"
        if not ends_in_its_phase and not record.purpose:
            return "activations"
    return record.purpose or "temporaries"

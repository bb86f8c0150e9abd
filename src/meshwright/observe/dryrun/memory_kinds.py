"""The kind of each piece of memory (spec.memory.held.KINDS).

It follows from what its maker declares (spec.purpose), when it was made, and how long it lived:

    parameters, shards, masters, moments, counters   found by `training.optimizer.optimizer` once the model was built
    gradients       found by it before an update; left by a backward pass with the shape of a parameter
    buffers         made by FSDP's gathers and reductions, or by a collective and gone when its pass ends
    logits          made inside the loss over the vocabulary
    activations     made in a forward pass and still there after it, or left by B for W
    temporaries     made and gone within one pass, such as a gradient that is added to another; widened by the optimizer
    tokens          the batch, and the next one that is read ahead
    staging         on a CPU, the copy of the state from which a thread writes a checkpoint
"""

from collections.abc import Iterable

from torch import Tensor

from meshwright.observe.dryrun.storage_tracker import StorageRecord, StorageWatch
from meshwright.parallel.axes.data import local
from meshwright.spec.layout.layout import Layout
from meshwright.training.optimizer.optimizer import frozen_code_tensors, tensors_by_kind
from meshwright.training.step.state import TrainState

CODES = "codes"
"""Provisional kind of parameters that are never sharded, until all others have their kind."""
FORWARD, BACKWARD = ("F", "evaluate"), ("B", "BW", "W")
"""First words of phases."""


def label_states(watch: StorageWatch, state: TrainState, beside: Iterable[Tensor] = ()) -> None:
    """Set the kind of lasting storages and of present gradients. `beside` holds parameters of a teacher."""
    for record in _records(watch, beside):
        record.kind = record.kind or "parameters"
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
    here = record.died >= 0 and record.death_phase == record.phase
    if phase == "tokens":
        return "tokens"
    if phase == "copy":
        return "staging" if record.died < 0 else "temporaries"
    if record.outer == "fsdp":
        return "parameters" if record.operation == "empty" and stays_whole else "buffers"
    if record.purpose == "logits":
        return "logits"
    if phase in FORWARD:
        if not here:
            return "activations"
    elif phase in BACKWARD:
        if record.shape in shapes and not here:
            return "gradients"
        if not here and not record.purpose:
            return "activations"
    return record.purpose or "temporaries"

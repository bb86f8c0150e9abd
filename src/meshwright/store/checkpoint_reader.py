"""What is in a checkpoint, and its tensors one after another, whichever ranks wrote them.

A tensor is put together from the boxes that ranks wrote; a model need not fit into memory for it to be exported.
"""

import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.spec.errors import CheckpointError
from meshwright.store import commit as commits

Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Whole shape and dtype of a tensor."""

RUN_BYTES = 256 * 2**20
"""What `stream` reads at once."""
ONE_PROCESS = r"torch\.distributed is disabled, unavailable or uninitialized"
"""Begins the warning of torch that it saves or loads in one process, which is meant."""


class Reader(dcp.HuggingFaceStorageReader):
    """Reads the heads of the files once, however often tensors are asked for."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self._found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """What is in the checkpoint, and where."""
        if self._found is None:
            self._found = super().read_metadata()
        return self._found

    def kinds(self) -> dict[str, Kind]:
        """Name -> (whole shape, dtype) of every tensor. CheckpointError."""
        try:
            entries = self.read_metadata().state_dict_metadata
        except Exception as error:  # safetensors raises classes of its own for a bad header
            raise CheckpointError(f"checkpoint {self.path} cannot be read: {error}".splitlines()[0]) from None
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }

    def fill(self, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None, *, alone: bool) -> None:
        """Read tensors in place, all ranks of `group` together, or this process `alone`."""
        with raised_as_is(), quiet():
            dcp.load(
                dict(tensors),
                storage_reader=self,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=alone,
            )


def names(checkpoint: Path) -> dict[str, Kind]:
    """Name -> (whole shape, dtype) of every tensor; reads the head of each file only. CheckpointError."""
    commits.check_sizes(checkpoint, commits.read(checkpoint))
    return Reader(checkpoint).kinds()


def stream(checkpoint: Path, names: Iterable[str], *, verified: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, in this order, whole, for this process alone.

    Everything is verified once, before the first; not if it was (`checkpoint.verify`). No more than RUN_BYTES, or one
    tensor, are read ahead. CheckpointError as of checkpoint.load, and for a name that is not there.
    """
    if not verified:
        commit = commits.read(checkpoint)
        commits.check_sizes(checkpoint, commit)
        commits.check_hashes(checkpoint, commit.files)
    reader = Reader(checkpoint)
    kinds = reader.kinds()
    for run in _runs(checkpoint, names, kinds):
        tensors = {name: torch.empty(kinds[name][0], dtype=kinds[name][1]) for name in run}
        reader.fill(tensors, alone=True)
        for name in run:
            yield name, tensors.pop(name)


def _runs(checkpoint: Path, names: Iterable[str], kinds: Mapping[str, Kind]) -> Iterator[list[str]]:
    """Names in runs of at most RUN_BYTES; a larger tensor is alone."""
    run: list[str] = []
    left = RUN_BYTES
    for name in names:
        if name not in kinds:
            raise CheckpointError(f"checkpoint {checkpoint} has no '{name}': it is of another model")
        size_bytes = math.prod(kinds[name][0]) * kinds[name][1].itemsize
        if run and size_bytes > left:
            yield run
            run, left = [], RUN_BYTES
        run.append(name)
        left -= size_bytes
    if run:
        yield run


@contextmanager
def raised_as_is() -> Iterator[None]:
    """torch wraps what a rank raised (Ctrl-C too) in a CheckpointException of many lines: raise the cause itself."""
    try:
        yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
    else:
        return
    raise cause


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns that it runs in one process; that is meant. Every other warning is let through.

    Filters belong to the process: only its main thread may change them for a while (store.saver knows).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ONE_PROCESS)
        yield

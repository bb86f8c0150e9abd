"""Reading of checkpoints: list their tensors, fill tensors in place, or stream them in one process.

Each tensor is assembled from the boxes that the ranks wrote. Streaming exports a model larger than memory.
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
"""Global shape and dtype of a tensor."""

RUN_BYTES = 256 * 2**20
"""Most bytes that `stream` reads at once."""
ONE_PROCESS = r"torch\.distributed is disabled, unavailable or uninitialized"
"""Start of the torch warning about single-process saves and loads, which are intended here."""


class Reader(dcp.HuggingFaceStorageReader):
    """Storage reader that reads the file headers once and reuses them."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return which tensors the checkpoint holds and where they are stored."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata

    def kinds(self) -> dict[str, Kind]:
        """Return {name: (global shape, dtype)} of every tensor. Raises CheckpointError."""
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
        """Fill tensors in place: all ranks of `group` together, or this process `alone`."""
        with raised_as_is(), quiet():
            dcp.load(
                dict(tensors),
                storage_reader=self,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=alone,
            )


def names(checkpoint: Path) -> dict[str, Kind]:
    """Return {name: (global shape, dtype)} of every tensor, from the file headers. Raises CheckpointError."""
    commits.check_sizes(checkpoint, commits.read(checkpoint))
    return Reader(checkpoint).kinds()


def stream(checkpoint: Path, names: Iterable[str], *, verified: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) in the given order, for this process alone.

    All files are verified before the first tensor unless `verified` is set. At most RUN_BYTES, or one tensor, are read
    ahead. Raises CheckpointError as `checkpoint.load` does, and for an unknown name.
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
    """Split names into runs of at most RUN_BYTES. A larger tensor forms its own run."""
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
    """Raise the cause itself in place of torch's many-line CheckpointException, which also wraps Ctrl-C."""
    try:
        yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
    else:
        return
    raise cause


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warning about single-process use, which is intended. Other warnings pass."""
    # Warning filters are global to the process, so only the main thread may change them temporarily. `store.saver`
    # installs one of its own for the thread that saves.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ONE_PROCESS)
        yield

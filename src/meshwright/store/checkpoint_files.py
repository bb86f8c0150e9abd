"""Files of a checkpoint: written by all ranks, listed, filled into tensors, or streamed in one process.

Each tensor is assembled from the boxes that the ranks wrote. Streaming exports a model larger than memory.

torch's HuggingFaceStorageWriter builds each file twice in memory before writing it. `CheckpointWriter` writes the same
files (a test compares them; HuggingFaceStorageReader reads them) straight from the tensors and hashes them on the way.
A save therefore reads the state once and copies none of it; from a GPU, each thread holds one piece at a time.
"""

import dataclasses
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from meshwright.formats.safetensors import CODES, Planned, header, pieces
from meshwright.spec.errors import CheckpointError
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_folder import FileRecord, new_hash

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
        with unwrap_errors(), silence_warnings():
            dcp.load(
                dict(tensors),
                storage_reader=self,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=alone,
            )


def names(checkpoint: Path) -> dict[str, Kind]:
    """Return {name: (global shape, dtype)} of every tensor, from the file headers. Raises CheckpointError."""
    checkpoint_folder.check_sizes(checkpoint, checkpoint_folder.read_commit(checkpoint))
    return Reader(checkpoint).kinds()


def stream(checkpoint: Path, names: Iterable[str], *, verified: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) in the given order, for this process alone.

    All files are verified before the first tensor unless `verified` is set. At most RUN_BYTES, or one tensor, are read
    ahead. Raises CheckpointError as `checkpoint.load` does, and for an unknown name.
    """
    if not verified:
        commit = checkpoint_folder.read_commit(checkpoint)
        checkpoint_folder.check_sizes(checkpoint, commit)
        checkpoint_folder.check_hashes(checkpoint, commit.files)
    reader = Reader(checkpoint)
    kinds = reader.kinds()
    for run in _split_runs(checkpoint, names, kinds):
        tensors = {name: torch.empty(kinds[name][0], dtype=kinds[name][1]) for name in run}
        reader.fill(tensors, alone=True)
        for name in run:
            yield name, tensors.pop(name)


def _split_runs(checkpoint: Path, names: Iterable[str], kinds: Mapping[str, Kind]) -> Iterator[list[str]]:
    """Split names into runs of at most RUN_BYTES. A larger tensor forms its own run."""
    run: list[str] = []
    room = RUN_BYTES
    for name in names:
        if name not in kinds:
            raise CheckpointError(f"checkpoint {checkpoint} has no '{name}': it is of another model")
        size_bytes = math.prod(kinds[name][0]) * kinds[name][1].itemsize
        if run and size_bytes > room:
            yield run
            run, room = [], RUN_BYTES
        run.append(name)
        room -= size_bytes
    if run:
        yield run


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Raise the cause itself in place of torch's many-line CheckpointException, which also wraps Ctrl-C."""
    try:
        yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
    else:
        return
    raise cause


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Suppress torch's warning about single-process use, which is intended. Other warnings pass."""
    # Warning filters are global to the process, so only the main thread may change them temporarily. `store.saver`
    # installs one of its own for the thread that saves.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ONE_PROCESS)
        yield


FILE_BYTES = 256 * 2**20
"""Most bytes in one file, unless one tensor is larger. Small files are written and verified in parallel."""
THREADS = 4


class CheckpointWriter(StorageWriter):
    """Writes each rank's shards to `path`, in files named after the rank.

    The coordinator calls `begin` before any rank writes, and `end` with all FileRecords after every rank has written.
    Each rank calls `check` before each tensor. An exception in any of them reaches every rank.
    """

    def __init__(
        self,
        path: Path,
        begin: Callable[[], None],
        end: Callable[[list[FileRecord]], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self._begin, self._end, self._check = path, begin, end, check

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save, to `checkpoint_id` if it is a path."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ranks need no preparation of their own."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its number, from 1, for its file names."""
        self._begin()
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans, start=1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Each WriteResult carries the FileRecord of its file."""
        files = _files(plan.items)
        # The coordinator has made it, but perhaps on another machine.
        self.path.mkdir(exist_ok=True)
        paths = [
            self.path / f"shard-{plan.storage_data:05d}-model-{i:05d}-of-{len(files):05d}.safetensors"
            for i in range(1, len(files) + 1)
        ]

        def resolve(wanted: WriteItem) -> Any:
            self._check()
            return planner.resolve_data(wanted)

        def write(path: Path, items: list[WriteItem]) -> list[WriteResult]:
            written = write_safetensors(path, items, resolve)
            return [WriteResult(item.index, _size_bytes(item), written) for item in items]

        # Threads write side by side, since hashing releases the interpreter's lock.
        with ThreadPoolExecutor(max(1, min(THREADS, os.cpu_count() or 1, len(files)))) as pool:
            writes = [write for per_file in pool.map(write, paths, files) for write in per_file]
        return _ended(writes)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Pass the records of all files to `end`, once every rank has written."""
        # Every tensor of a file carries the same record.
        self._end(sorted({result.storage_data for rank in results for result in rank}, key=lambda file: file.name))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a path rather than a URL."""
        return "://" not in str(checkpoint_id)


class Assignment(CheckpointWriter):
    """Writer that only records the names of the tensors that this rank would write."""

    def __init__(self) -> None:
        super().__init__(Path(), lambda: None, lambda files: None)
        self.names: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Record the names of the items."""
        self.names = {item.index.fqn for item in plan.items}
        return _ended([])


def _ended(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


def write_safetensors(path: Path, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]) -> FileRecord:
    """Write one safetensors file, hash it on the way, and fsync it. Raises OSError."""
    digest, size_bytes = new_hash(), 0
    with path.open("wb") as file:
        for piece in _stream(items, resolve):
            digest.update(piece)
            file.write(piece)
            size_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name=path.name, size_bytes=size_bytes, sha256=digest.hexdigest())


def _stream(items: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes. Shard offsets are in the header's metadata, where torch's reader expects them."""
    offsets = {item.index.fqn: {"saved_offsets": list(_data(item).chunk.offsets)} for item in items}
    planned = [Planned(name=item.index.fqn, size=tuple(_data(item).chunk.sizes), dtype=_dtype(item)) for item in items]
    yield header(planned, DCP_SHARDING_INFO=json.dumps(offsets), DCP_VERSION="1.0")
    for tensor in items:
        yield from pieces(resolve(tensor))


def _files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Split items into files. Wide dtypes come first, so every tensor starts at a multiple of its element size."""
    files: list[list[WriteItem]] = []
    names: set[str] = set()
    room = 0
    for tensor in sorted(items, key=lambda item: -_dtype(item).itemsize):
        # A name may come twice, as two boxes of one tensor, and a file has each name once.
        if not files or room < _size_bytes(tensor) or tensor.index.fqn in names:
            files.append([])
            names, room = set(), FILE_BYTES
        files[-1].append(tensor)
        names.add(tensor.index.fqn)
        room -= _size_bytes(tensor)
    return files


def _dtype(item: WriteItem) -> torch.dtype:
    dtype = None if item.tensor_data is None else item.tensor_data.properties.dtype
    if dtype is None or dtype not in CODES:
        raise CheckpointError(f"'{item.index.fqn}' cannot be saved: it is {dtype or 'no tensor'}")
    return dtype


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _size_bytes(item: WriteItem) -> int:
    return _data(item).chunk.sizes.numel() * _data(item).properties.dtype.itemsize

"""Checkpoint saves: at once, or in a background thread from a copy in host memory while training continues.

    step n  |copy|  step n+1     step n+2     ...           training waits for the copy only
                 |write, hash, sync, commit|                the thread, with a Gloo group of its own

At most one save is in flight; the next waits for it. An error in the thread is raised at the next step, on all ranks
at the same one.

A piece is a rank's box of a global tensor, in the form that torch's distributed checkpoint reads and writes.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright import compat
from meshwright.parallel.groups.group import Group, broadcast_object
from meshwright.spec.errors import CheckpointError, MeshwrightError, StoreError
from meshwright.spec.weights.boxes import Box
from meshwright.store import checkpoint
from meshwright.store.checkpoint_files import ONE_PROCESS
from meshwright.store.checkpoint_folder import step_of

if TYPE_CHECKING:
    from meshwright.store.folder_ranks import FolderRanks
    from meshwright.store.mirror import Mirror

UPLOADED = ".uploaded"
"""File next to the checkpoints, as old as the last upload. launch.sh looks at it."""
SLAB_BYTES = 256 * 2**20
"""Size of the slabs in which memory is taken; a larger tensor gets its own. torch rounds pinned memory up to a power of
two, which could otherwise double its size."""
ALIGNMENT_BYTES = 64
GRACE_S = 30.0
"""Longest wait for a save in flight after a crash. Other ranks of the save may be waiting for a dead one."""

log = logging.getLogger(__name__)


class Piece(Tensor):
    """Tensor with the shape and dtype of the global one that holds only this rank's box, `held`. No arithmetic.

    torch.distributed.checkpoint calls the four double-underscored methods of a tensor whose parts lie on several
    ranks. Ranks with the same box all offer it; it is written once.
    """

    held: Tensor
    box: Box

    @staticmethod
    def __new__(cls, held: Tensor, box: Box) -> "Piece":
        """Wrap `held`, which has the sizes of the box. Its memory is shared."""
        assert tuple(held.shape) == box.sizes, (held.shape, box)
        piece = compat.wrapper(cls, box.whole, held)
        assert isinstance(piece, Piece)
        piece.held, piece.box = held, box
        return piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function that is not a class method
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{operation} on a piece of a tensor: take .held")

    def __repr__(self) -> str:  # type: ignore[override]  # torch has an option more
        """Return box and dtype. Tensor's own representation would compute."""
        return f"Piece({self.box}, {self.held.dtype})"

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))

    def __create_write_items__(self, name: str, tensor: Tensor) -> list[WriteItem]:
        """Return one write item, or none for an empty box."""
        if not self.held.numel():
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.held),
            size=torch.Size(self.box.whole),
        )
        index = MetadataIndex(name, torch.Size(self.box.offsets))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the box to be read, or none for an empty one."""
        return [self._chunk()] if self.held.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the local memory that is read or written."""
        return self.held


def piece(held: Tensor, box: Box | None) -> Tensor:
    """Return a Piece, or the tensor itself when this rank holds all of it."""
    return held if box is None or box.sizes == box.whole else Piece(held, box)


class Staging:
    """Host memory for a copy of the training state, which is written while training changes the original.

    It is taken once and reused. For tensors on a GPU it is pinned, so that they cross the bus at full speed.
    """

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors and pieces to host memory and wait for completion. The next copy overwrites them."""
        held = {name: tensor.held if isinstance(tensor, Piece) else tensor.detach() for name, tensor in tensors.items()}
        copies = self._views(held)
        for name, copy in copies.items():
            copy.copy_(held[name], non_blocking=True)
        if any(tensor.is_cuda for tensor in held.values()):
            torch.cuda.current_stream().synchronize()
        return {
            name: Piece(copies[name], tensor.box) if isinstance(tensor, Piece) else copies[name]
            for name, tensor in tensors.items()
        }

    def _views(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return consecutive views of the slabs, one per tensor. Slabs are added as needed."""
        pinned = any(tensor.is_cuda for tensor in held.values())
        remaining = sum(map(_aligned_bytes, held.values()))
        views, slab, used = {}, 0, 0
        for name, tensor in held.items():
            room = _aligned_bytes(tensor)
            # What does not fit into the rest of a slab begins the next.
            while slab < len(self.slabs) and used + room > len(self.slabs[slab]):
                slab, used = slab + 1, 0
            if slab == len(self.slabs):
                size_bytes = max(room, min(SLAB_BYTES, remaining))
                self.slabs.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned))
            size_bytes = tensor.numel() * tensor.element_size()
            views[name] = self.slabs[slab][used : used + size_bytes].view(tensor.dtype).view(tensor.shape)
            used, remaining = used + room, remaining - room
        return views


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the host memory in bytes that a copy of these tensors and pieces needs."""
    return sum(_aligned_bytes(tensor.held if isinstance(tensor, Piece) else tensor) for tensor in tensors)


def _aligned_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor rounded up to ALIGNMENT_BYTES."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Saver:
    """Saves checkpoints into one folder. A context manager whose exit waits for the save in flight.

    A background save needs host memory for what this rank writes. It is taken at the first save and reused.

    Args:
        group: A group of all ranks used for nothing else (`mesh.saving_group`). None = write at once.
        saved: Called with (step, path) after each commit, by the thread that calls the methods.
        stored: Called with the step of the newest checkpoint in the store, by the same thread. One that another soon
            follows may be left out.
        begun: Called before each tensor is written, by the threads that write.
        mirror: Uploads what was saved. None = checkpoints stay in `folder`.
        sharing: The ranks that see `folder`, where machines share none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        group: Group | None,
        saved: Callable[[int, Path], None],
        stored: Callable[[int], None] = lambda step: None,
        begun: Callable[[], None] = lambda: None,
        mirror: "Mirror | None" = None,
        sharing: "FolderRanks | None" = None,
    ) -> None:
        self.folder, self.keep_last, self.group, self.saved, self.begun = folder, keep_last, group, saved, begun
        self.stored, self.mirror, self.sharing = stored, mirror, sharing
        self.blocked_s = 0.0
        """Seconds that callers have waited, for copies, writes and earlier saves."""
        self.newest: Path | None = None
        """The last checkpoint that this process saved."""
        self._committed: int | None = None
        """Step of the last upload that all ranks know of."""
        self._reported: int | None = None
        """Step of the last upload that was reported."""
        self._staging = Staging()
        self._assigned: set[str] | None = None
        self._flight: _Flight | None = None
        self._process_group = None if group is None else group.process_group
        if group is not None:
            # Filters are global to the process and other threads may change them, so this one is not scoped to a save.
            warnings.filterwarnings("ignore", message=ONE_PROCESS)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, checkpoint.Json],
        score: float | None,
        *,
        last: bool = False,
    ) -> None:
        """Save as `checkpoint.save` does. `last`: training has ended, so write at once and skip the copy.

        Raises CheckpointError of this save when it is written at once, else of the previous one.
        """
        started = time.perf_counter()
        self._join()
        flight = _Flight(step, self.begun)
        uploading = (lambda: None) if (mirror := self.mirror) is None else lambda: mirror.step

        def write(written: Mapping[str, Tensor]) -> Path:
            path = checkpoint.save(
                self.folder, step=step, tensors=written, values=values, score=score, keep_last=self.keep_last,
                group=self._process_group, check=flight.check, uploading=uploading, sharing=self.sharing,
            )  # fmt: skip
            self._upload(step, path, last=last)
            return path

        if self.group is None or last:
            self._report(step, write(tensors))
        else:
            # Of identical pieces on several ranks, one rank writes.
            if self._assigned is None:
                self._assigned = checkpoint.assign_tensors(tensors, self._process_group)
            assigned = {name: tensor for name, tensor in tensors.items() if name in self._assigned}
            # The copy is made before this returns: the next step changes the tensors.
            flight.start(partial(write, self._staging.copy(assigned)))
            self._flight = flight
        self.blocked_s += time.perf_counter() - started

    def upload_resumed(self, step: int, stored_step: int | None) -> None:
        """Upload the local checkpoint of a step unless the store has it, as after a failed upload. All ranks together.

        `stored_step`: newest step in the store when the process began, on rank 0. None = it had none.
        """
        path = self.folder / f"step-{step:06d}"
        is_missing = self.sharing is None and path.is_dir() and (stored_step is None or stored_step < step)
        self._upload(step, path, is_missing=is_missing)

    def go_back(self, path: Path) -> None:
        """Make a checkpoint the newest, in the store too, after the run has gone back to it. All ranks together.

        It is uploaded even where the store has it: its COMMIT ends the course that was left, whose checkpoints go. This
        waits for it, since what is killed later shall not be resumed from them. Raises StoreError.
        """
        self.newest = path
        if (mirror := self.mirror) is None:
            return
        self._upload(step_of(path), path, last=True)
        mirror.wait()
        problem = str(mirror.error or "")
        if mirror.writers > 1:
            problem = broadcast_object(0, problem, self._process_group)
        if problem:
            raise StoreError(f"the run went back to {path.name}, and its store has later checkpoints: {problem}")

    def _end_uploads(self) -> None:
        """Upload the last checkpoint if it was left out, and wait until the store has it. All ranks together."""
        if (mirror := self.mirror) is None:
            return
        if self.newest is not None:
            step = step_of(self.newest)
            self._upload(step, self.newest, last=True, is_missing=mirror.skipped_step == step)
        mirror.wait()
        # All ranks learn that the last upload is committed.
        self._agree("", mirror)
        self._report_upload()

    def _upload(self, step: int, path: Path, *, last: bool = False, is_missing: bool = True) -> None:
        """Begin an upload if rank 0 decides so. `is_missing`: the store lacks the checkpoint, on rank 0."""
        if (mirror := self.mirror) is None:
            return
        name = mirror.choose(step, last=last) if mirror.rank == 0 and is_missing else ""
        if name := self._agree(name, mirror):
            mirror.begin(step, path, name)

    def _agree(self, name: str, mirror: "Mirror") -> str:
        """Return rank 0's name of an upload, on all ranks. Touches UPLOADED if another checkpoint is committed."""
        committed = mirror.committed
        if mirror.writers > 1:
            name, committed = broadcast_object(0, (name, committed), self._process_group)
        if committed != self._committed:
            self._committed = committed
            with suppress(OSError):
                (self.folder / UPLOADED).touch()
        return name

    def failed(self) -> bool:
        """Return whether the save in flight has failed on this rank, or another process has taken over.

        Reports a save that succeeded to `saved`, and an upload to `stored`.
        """
        if self.mirror is not None and self.mirror.superseded is not None:
            return True
        if self._flight is not None and not self.busy:
            if self._flight.outcome.exception() is not None:
                return True
            self._join()
        self._report_upload()
        return False

    @property
    def busy(self) -> bool:
        """True while a save is in flight."""
        return self._flight is not None and not self._flight.outcome.done()

    def wait(self, *, uploads: bool = False) -> None:
        """Wait for the save in flight and raise its error. `uploads`: then also for the upload on its way."""
        started = time.perf_counter()
        self._join()
        if uploads and self.mirror is not None:
            self.mirror.wait()
        self.blocked_s += time.perf_counter() - started

    def give_up(self) -> None:
        """Raise on every rank after some rank's save failed, with the reason where it is known."""
        self.wait()
        if self.mirror is not None and (superseded := self.mirror.superseded) is not None:
            raise superseded
        raise CheckpointError(f"another rank could not save in {self.folder}, or lost the run: see what it says")

    def settle(self, limit_s: float | None = None) -> None:
        """Wait for the save in flight for at most `limit_s`. Its error is only logged: the caller raises another."""
        try:
            self._join(limit_s)
        except Exception as error:
            log.warning("%s", error)

    def __enter__(self) -> "Saver":
        if self.mirror is not None:
            self.mirror.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.wait()
                self._end_uploads()
            finally:
                if self.mirror is not None:
                    self.mirror.abandon()
            if self.mirror is not None and self.mirror.error is not None:
                # The store has an older state than this disk.
                raise self.mirror.error
            return
        if self._flight is not None and not issubclass(kind, Exception):
            self._flight.is_abandoned.set()  # second Ctrl-C: abandon the save now
        # After an error that all ranks share the save can end; after any other a rank may be dead.
        is_shared = issubclass(kind, MeshwrightError | KeyboardInterrupt)
        self.settle(None if is_shared else GRACE_S)
        if self.mirror is not None:
            # A second Ctrl-C ends at once.
            self.mirror.abandon(GRACE_S if issubclass(kind, Exception) else 0.0)

    def _join(self, limit_s: float | None = None) -> None:
        flight = self._flight
        if flight is None or wait([flight.outcome], limit_s).not_done:
            return
        self._flight = None
        self._report(flight.step, flight.outcome.result())

    def _report(self, step: int, path: Path) -> None:
        self.newest = path
        self.saved(step, path)

    def _report_upload(self) -> None:
        step = None if self.mirror is None else self.mirror.committed
        # A save in a thread is reported when its flight is joined, and its upload may have ended before.
        is_in_flight = self._flight is not None and self._flight.step == step
        if step is not None and step != self._reported and not is_in_flight:
            self._reported = step
            self.stored(step)


@dataclass(slots=True)
class _Flight:
    """One save that may run in a thread."""

    step: int
    begun: Callable[[], None]
    outcome: Future[Path] = field(default_factory=Future)
    is_abandoned: Event = field(default_factory=Event)

    def start(self, save: Callable[[], Path]) -> None:
        # A daemon thread, so that the process can exit when nobody waits for the save any longer.
        Thread(target=self._run, args=(save,), name="checkpoint", daemon=True).start()

    def _run(self, save: Callable[[], Path]) -> None:
        try:
            self.outcome.set_result(save())
        except BaseException as error:
            self.outcome.set_exception(error)

    def check(self) -> None:
        """Raise CheckpointError if the save was interrupted. Called before each tensor is written."""
        self.begun()
        if self.is_abandoned.is_set():
            raise CheckpointError(f"the checkpoint of step {self.step} was interrupted; earlier ones are kept")

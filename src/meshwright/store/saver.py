"""When checkpoints are written: at once, or by a thread behind the back of the training.

    step n  |copy|  step n+1     step n+2     ...           the training waits for the copy only
                 |write, hash, sync, commit|                the thread, with a Gloo group of its own

One save is in flight at most: the next waits for it. What goes wrong in the thread is raised at the next step, on all
ranks at the same one.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.spec.errors import CheckpointError, MeshwrightError
from meshwright.store import checkpoint
from meshwright.store.checkpoint_reader import ONE_PROCESS
from meshwright.store.staging import Staging

GRACE_S = 30.0
"""How long an unforeseen end waits for a save under way: its ranks may wait for one that is dead."""

log = logging.getLogger(__name__)


class Saver:
    """Saves into one folder; within `with`, whose end waits for what is under way.

    `group` is None to write at once, else a group of all ranks that nothing else uses (`mesh.saving_group`). `saved`
    is told (step, path) of every checkpoint once it is committed, by the thread that calls the methods; `begun` of
    every tensor that is about to be written, by the threads that write. In the background a save needs host memory for
    what this rank writes, taken at the first and kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        group: Group | None,
        saved: Callable[[int, Path], None],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.keep_last, self.group, self.saved, self.begun = folder, keep_last, group, saved, begun
        self.blocked_s = 0.0
        """Seconds that callers waited, for copies, writing and saves before theirs."""
        self._staging = Staging()
        self._own: set[str] | None = None
        self._flight: _Flight | None = None
        if group is not None:
            # Here and not around the save: filters belong to the process, and its other threads may change them.
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
        """As checkpoint.save; `last`: nothing is computed meanwhile, so that a copy would gain nothing.

        CheckpointError of this save where it is written at once, else of the one before.
        """
        started = time.perf_counter()
        self._join()
        flight = _Flight(step, self.begun)
        write = partial(
            checkpoint.save, self.folder, step=step, values=values, score=score, keep_last=self.keep_last,
            group=None if self.group is None else self.group.process_group, check=flight.check,
        )  # fmt: skip
        if self.group is None or last:
            flight.path = write(tensors=tensors)
        else:
            flight.start(partial(write, tensors=self._staging.copy(self._to_write(tensors, self.group))))
        self._flight = flight
        if self.group is None or last:
            self._join()
        self.blocked_s += time.perf_counter() - started

    def failed(self) -> bool:
        """Whether the save under way has failed on this rank. One that has ended well is told of here."""
        if self._flight is None or not self._flight.landed:
            return False
        if self._flight.error is not None:
            return True
        self._join()
        return False

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._flight is not None and not self._flight.landed

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong."""
        started = time.perf_counter()
        self._join()
        self.blocked_s += time.perf_counter() - started

    def give_up(self) -> None:
        """Some rank's save has failed: raises on every rank, the reason where it is known."""
        self.wait()
        raise CheckpointError(f"a checkpoint in {self.folder} could not be saved by another rank: see what it says")

    def settle(self, limit_s: float | None = None) -> None:
        """Until nothing is under way, or `limit_s` have passed; what went wrong is only logged, since something else is
        about to be raised."""
        try:
            self._join(limit_s)
        except Exception as error:
            log.warning("%s", error)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
            return
        if self._flight is not None and not issubclass(kind, Exception):
            self._flight.ended.set()  # Ctrl-C a second time: now
        self.settle(None if issubclass(kind, MeshwrightError | KeyboardInterrupt) else GRACE_S)

    def _to_write(self, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Those of which this rank writes its part: what several ranks hold is copied by one."""
        if self._own is None:
            self._own = checkpoint.assigned(tensors, group.process_group)
        return {name: tensor for name, tensor in tensors.items() if name in self._own}

    def _join(self, limit_s: float | None = None) -> None:
        flight = self._flight
        if flight is None or not flight.join(limit_s):
            return
        self._flight = None
        if flight.error is not None:
            raise flight.error
        assert flight.path is not None
        self.saved(flight.step, flight.path)


@dataclass(slots=True)
class _Flight:
    """One save, here or in a thread."""

    step: int
    begun: Callable[[], None]
    ended: Event = field(default_factory=Event)
    path: Path | None = None
    error: BaseException | None = None
    _thread: Thread | None = None

    def start(self, save: Callable[[], Path]) -> None:
        # A daemon: whoever stops waiting for it wants the process to end.
        self._thread = Thread(target=self._run_and_keep, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def landed(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self, limit_s: float | None) -> bool:
        """Whether it has landed in time."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return self.landed

    def _run_and_keep(self, save: Callable[[], Path]) -> None:
        try:
            self.path = save()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        """Before each tensor that is written."""
        self.begun()
        if self.ended.is_set():
            raise CheckpointError(f"the checkpoint of step {self.step} was interrupted; earlier ones are kept")

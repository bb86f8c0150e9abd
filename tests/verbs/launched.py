"""`meshwright` on several processes without torchrun's start of seconds: forked from a server that has torch loaded,
with the environment and the store that torchrun gives, and its ways: where one fails, others get SIGTERM, then SIGKILL.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.observe.ranks import SERVER

KILL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Outcome of a run on several processes."""

    codes: list[int]
    errors: str
    """What all ranks wrote to stderr."""
    seconds: float
    """From the first death, or the first failure, to the end of the last rank."""

    @property
    def line(self) -> str:
        """The one line that was written, beside the notice of the process that compiles the C loops first."""
        lines = [line for line in self.errors.splitlines() if not line.startswith("compiling C loops ")]
        assert len(lines) == 1 and lines[0].startswith("meshwright: "), self.errors
        return lines[0]


def launch(
    world: int,
    words: Sequence[str] | Sequence[Sequence[str]],
    folder: Path,
    *,
    fault: Callable[[int], None] | None = None,
    store: dist.TCPStore | None = None,
    **changes: str,
) -> Ended:
    """Run the words (or each rank's own) on `world` processes; `fault`, told the rank, disturbs it before it starts.

    `store`: of a former attempt, as torchrun keeps it; `changes` are to the environment, an empty one takes away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = store or new_store()
    each = [list(words) if isinstance(words[0], str) else list(words[rank]) for rank in range(world)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks: list[Any] = []
    for rank in range(world):
        mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), **changes}
        mine = {name: value for name, value in mine.items() if value}
        ranks.append(SERVER.Process(target=_rank, args=(rank, each[rank], mine, str(folder / f"{rank}.err"), fault)))
        ranks[-1].start()
    seconds = _attend(ranks)
    errors = "".join((folder / f"{rank}.err").read_text() for rank in range(world))
    return Ended(codes=[process.exitcode for process in ranks], errors=errors, seconds=seconds)


def new_store() -> dist.TCPStore:
    """Return the store that torchrun keeps for all attempts of a run."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _attend(ranks: list[Any]) -> float:
    try:
        while not any(process.exitcode for process in ranks) and any(process.exitcode is None for process in ranks):
            time.sleep(0.05)
        began = time.monotonic()
        for process in ranks:
            if process.exitcode is None:
                process.terminate()
        for process in ranks:
            process.join(max(0.0, began + KILL_S - time.monotonic()))
        return time.monotonic() - began
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(rank: int, words: list[str], environment: dict[str, str], errors: str, fault: Any) -> None:
    import torch

    from meshwright.verbs.main import main

    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    if fault is not None:
        fault(rank)
    sys.exit(main(words))

"""Under torchrun: join the other processes of a run, or say in one sentence, from one of them, why not."""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from meshwright.spec.errors import MeshwrightError, PlanError, RunError

if TYPE_CHECKING:
    import torch.distributed as dist

    from meshwright.parallel.health.heartbeat import Heartbeat
    from meshwright.parallel.health.watchdog import Watchdog

REACH_S, MEET_S = 40.0, 600.0
"""For the launcher's store, which is there before any rank; for the slowest rank to import torch."""
LAST_WORDS_S = 20.0
"""For other ranks to come where this one has failed before it met them."""
HOST_LIMIT = timedelta(days=1)
"""How long a collective on the host may take: others wait in one while the first rank encodes the text."""
SHOW_CURSOR = b"\x1b[?25h"

_watchdog: "Watchdog | None" = None
"""Of this process: whatever ends it, from the first line of a verb to its last, is told through it."""


class Unreachable(RunError):
    """There is no store to meet the other ranks at: each speaks for itself."""


def rank() -> int:
    """This process's number among those that torchrun started; 0 when alone."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many processes torchrun started; 1 when alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def nodes() -> int:
    """Machines of which torchrun started equally many processes each; 1 where nothing says so."""
    found = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return found if processes() % found == 0 else 1


TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Where launchers that know nothing of torch write how many processes they started."""


def refuse_unnumbered(environ: Mapping[str, str]) -> None:
    """Refuse processes that a launcher started without the numbers that torchrun gives: each would train by itself,
    all into one folder. PlanError."""
    for name, launcher in TASKS.items() if "WORLD_SIZE" not in environ else ():
        if environ.get(name, "1") not in ("", "0", "1"):
            raise PlanError(
                f"{launcher} started {environ[name]} processes without RANK and WORLD_SIZE, so each would train "
                "alone. Start one torchrun per node: srun --ntasks-per-node=1 torchrun --nproc-per-node=8 ... "
                "(`meshwright plan MODEL --for meshwright -o FOLDER` writes the job), or set RANK and WORLD_SIZE"
            )


@contextmanager
def joined(hang_after_s: float | None = None) -> Iterator["Heartbeat"]:
    """Within, this process is one rank of a watched world: NCCL on GPUs (one each), Gloo on CPUs; alone, nothing.

    `hang_after_s`: see parallel.health.blame.Limits. RunError: a backend is absent, there are fewer GPUs than
    processes, an address is in use or unreachable, a rank does not come.
    """
    global _watchdog
    from meshwright.parallel.health.heartbeat import Heartbeat

    if processes() == 1:
        yield Heartbeat()
        return
    import torch.distributed as dist

    backend = _backend()
    _watchdog = _meet(MEET_S, hang_after_s)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", _watchdog.main_store),
            rank=rank(),
            world_size=processes(),
            timeout=HOST_LIMIT,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"rank {rank()} cannot join the others: {_first_line(error)}") from None
    yield _watchdog.pulse
    dist.destroy_process_group()
    _watchdog.close()
    _watchdog = None


def fail(error: BaseException, line: str, code: int) -> None:
    """Print the line of an error. Of many processes one prints it, all end with its exit code: no return then."""
    watchdog = _watchdog
    if watchdog is None and processes() > 1 and not isinstance(error, Unreachable):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another rank was quicker: this one ends by itself, too
        try:
            watchdog = _meet(LAST_WORDS_S, None)
        except Exception:  # nobody to talk to: the first rank speaks, the launcher ends the others
            if rank() > 0:
                time.sleep(1)
    if watchdog is None:
        _say(line)
        return
    from meshwright.parallel.health.lost_connection import is_lost_connection

    if is_lost_connection(error):
        watchdog.lost(_first_line(error), error.__traceback__)
    if not isinstance(error, (MeshwrightError, KeyboardInterrupt)) and code == 1:
        line = f"rank {rank()} failed at {watchdog.watch.after(error.__traceback__).place}: {line}"
    watchdog.failed(line, code)


def _backend() -> str:
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = ["gloo", "nccl"] if gpus else ["gloo"]
    absent = [
        name for name in needed if not (dist.is_available() and getattr(dist, f"is_{name}_available", lambda: True)())
    ]
    if absent:
        raise RunError(f"this torch was built without {' and '.join(absent)}, which {processes()} processes need")
    if not gpus:
        return "gloo"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= gpus:
        raise RunError(f"process {local} of this node has no GPU: it has {gpus}; take --nproc_per_node {gpus}")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def _meet(limit_s: float, hang_after_s: float | None) -> "Watchdog":
    """Find the other ranks and watch them from now on."""
    import torch.distributed as dist

    from meshwright.parallel.health.blame import Limits
    from meshwright.parallel.health.heartbeat import Heartbeat
    from meshwright.parallel.health.rendezvous import meet
    from meshwright.parallel.health.watchdog import RankPlace, Watchdog
    from meshwright.training.phases import PHASES, READS

    reach_s = min(REACH_S, limit_s)
    store = _store(hosts=rank() == 0 and not _is_agents_store(), limit_s=reach_s)
    attempt = f"meshwright/{meet(store, rank(), processes(), limit_s)}"
    place = RankPlace(
        rank=rank(),
        world=processes(),
        neighbours=_neighbours(),
        host=socket.gethostname() if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 else "",
    )
    watchdog = Watchdog(
        dist.PrefixStore(attempt, _store(hosts=False, limit_s=reach_s)),
        dist.PrefixStore(attempt, store),
        place,
        pulse=Heartbeat(),
        phases=PHASES,
        reads=READS,
        limits=Limits(hang_s=hang_after_s),
        say=_say,
        end=os._exit,
        queues=_has_gpu(),
    )
    watchdog.start()
    return watchdog


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _is_agents_store() -> bool:
    """torchrun keeps the store; started by hand, the first rank does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(*, hosts: bool, limit_s: float) -> "dist.TCPStore":
    import torch.distributed as dist

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise RunError("WORLD_SIZE is above 1 without MASTER_ADDR and MASTER_PORT: start with torchrun") from None

    def connect() -> dist.TCPStore:
        return dist.TCPStore(
            host, port, is_master=hosts, wait_for_workers=False, multi_tenant=hosts, timeout=timedelta(seconds=limit_s)
        )

    try:
        return _within(limit_s, connect)
    except (RuntimeError, ValueError, OSError) as error:
        if hosts:
            advice = "take another MASTER_PORT" if "EADDRINUSE" in str(error) else "is MASTER_ADDR this machine?"
            raise Unreachable(f"rank 0 cannot listen on {host}:{port}: {_first_line(error)}; {advice}") from None
        raise Unreachable(
            f"rank {rank()} cannot reach {host}:{port}: {_first_line(error)}; is the port free and rank 0 started?"
        ) from None


def _within(limit_s: float, connect: "Callable[[], dist.TCPStore]") -> "dist.TCPStore":
    """In a thread that may be left behind: whatever listens on the port may accept and never speak, and the library has
    no limit for that. The main thread goes on hearing signals."""
    found: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(connect())
        except Exception as error:
            found.put(error)

    threading.Thread(target=run, name="connect", daemon=True).start()
    try:
        result = found.get(timeout=limit_s)
    except queue.Empty:
        raise OSError(f"no answer within {limit_s:.0f} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def _neighbours() -> tuple[int, ...]:
    """Ranks of the same launcher on this machine: torchrun numbers them one after another."""
    if not os.environ.keys() >= {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
        return ()
    first = rank() - int(os.environ["LOCAL_RANK"])
    return tuple(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def _say(line: str) -> None:
    """Past all buffers: whoever holds one may stand still. Also for torchrun, which repeats it in its report."""
    cursor = SHOW_CURSOR if sys.stdout.isatty() else b""
    os.write(2, cursor + f"meshwright: {line}\n".encode())
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        began = int(time.time()) - 1  # whole seconds: the cause is before the ends it causes
        found = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(began)}}
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"message": found}, file)

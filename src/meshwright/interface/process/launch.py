"""Launch under torchrun: join the other processes of a run, or fail with one sentence from one of them.

Also the commands that a message tells users to run: the program by the name or path that starts it. PHASES names what a
rank does when it hangs: the outermost of these functions on its stack.
"""

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.interface.process.environment import processes, rank
from meshwright.spec.errors import MeshwrightError, RunError

if TYPE_CHECKING:
    import torch.distributed as dist

    from meshwright.parallel.health.heartbeat import Heartbeat
    from meshwright.parallel.health.watchdog import Watchdog


PHASES = {
    "meshwright.data.preparation:prepare": "prepare the text",
    "meshwright.training.loop:find_checkpoint": "verify the checkpoint",
    "meshwright.training.loop:new_state": "build the model",
    "meshwright.training.loop:load_checkpoint": "load",
    "meshwright.training.step.batches:Feed.take": "data",
    "meshwright.training.step.step:MicroPass.__call__": "forward",
    "meshwright.parallel.pipeline.executor:Passes._forward": "forward",
    "meshwright.parallel.pipeline.executor:Passes._backward": "backward",
    "meshwright.kernels.linear.weight_gradients:WeightGradients.run": "backward",
    "torch._tensor:Tensor.backward": "backward",
    "meshwright.parallel.engine:Engine.finish_gradients": "gradients",
    "meshwright.parallel.engine:Engine.gradient_norm": "gradients",
    "meshwright.training.optimizer.optimizer:Optimizer.step": "optimizer",
    "meshwright.training.trainer:Trainer._read_numbers": "loss",
    "meshwright.training.trainer:Trainer._roll_back": "load",
    "meshwright.training.trainer:Trainer._evaluate": "evaluate",
    "meshwright.training.objectives.reference:log_probabilities": "reference",
    "meshwright.training.run_samples:RunSamples.take": "sample",
    "meshwright.training.trainer:Trainer._save": "save",
    "meshwright.store.saver:Saver.__exit__": "upload",
    "meshwright.training.trainer:Trainer._notify": "report",
    "meshwright.training.trainer:Trainer._finish": "finish",
}
"""module:function -> phase. The outermost on a stack counts: a forward pass within an evaluation is "evaluate"."""

READS = frozenset(
    {
        "meshwright.model.seams:counts_on_host",
        "meshwright.kernels.experts.experts:_on_host",
        "meshwright.training.step.evaluate:evaluate",
        "meshwright.training.objectives.reference:_add_to_table",
        "meshwright.training.run_samples:RunSamples._answer_over_ranks",
        "meshwright.training.records:Readback.read",
        "meshwright.training.step.interrupt:StopAgreement.reached",
        "meshwright.training.records:name_non_finite_rank",
    }
)
"""Functions that read numbers off a device.

A rank inside one of them waits for what the device has to compute first, and so for other ranks.
"""


REACH_S, MEET_S = 40.0, 600.0
"""Seconds to reach the launcher's store, which exists before any rank; for the slowest rank to import torch."""
LAST_WORDS_S = 20.0
"""Seconds to wait for other ranks when this one failed before it met them."""
SPARE_S, DISMISSED_S = 1.0, 60.0
"""Seconds between two looks of a spare rank at the store; for spare ranks that start late to hear of the end."""
HOST_LIMIT = timedelta(days=1)
"""Timeout of host collectives. Other ranks wait in one while the first rank encodes the text."""
SHOW_CURSOR = b"\x1b[?25h"

_watchdog: "Watchdog | None" = None
"""The watchdog of this process. Whatever ends a verb is reported through it."""


class Unreachable(RunError):
    """No store to meet the other ranks at, so each rank reports for itself."""


def stand_by() -> None:
    """Wait on a spare node until the run ends: a node that is gone when another fails could not replace it.

    A signal ends the wait, since there is nothing to save. Raises RunError when the launcher's store is gone.
    """
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        signal.signal(getattr(signal, name), lambda number, frame: os._exit(0))
    # Keys of earlier attempts stay in the store, so only an answer to this very word counts.
    word, store = secrets.token_hex(8), _store(hosts=False, limit_s=REACH_S)
    try:
        store.set(f"spare/{rank()}", word)
        while not store.check([f"dismissed/{word}"]):
            time.sleep(SPARE_S)
        store.set(f"left/{word}", "")
    except RuntimeError:
        raise RunError(
            "the launcher's store does not answer: torchrun, its machine, or the rank that kept the store is gone"
        ) from None


def _dismiss(store: "dist.TCPStore", spares: range) -> None:
    """Tell spare ranks that the run has ended. Those that an earlier attempt left behind never answer."""
    waiting = set(spares)
    end_s = time.monotonic() + DISMISSED_S
    while waiting and time.monotonic() < end_s:
        for spare in sorted(waiting):
            if store.check([f"spare/{spare}"]):
                word = store.get(f"spare/{spare}").decode()
                store.set(f"dismissed/{word}", "")
                if store.check([f"left/{word}"]):
                    waiting.discard(spare)
        time.sleep(SPARE_S / 2)


@contextmanager
def joined(hang_after_s: float | None = None, spares: range = range(0)) -> Iterator["Heartbeat"]:
    """Make this process one rank of a watched world: NCCL on GPUs (one each), Gloo on CPUs. Alone, do nothing.

    `hang_after_s`: as `Limits.hang_s` of the watchdog. `spares`: ranks that stand by until the end. Raises RunError
    when a backend is missing, there are fewer GPUs than processes, an address is taken or unreachable, or a rank does
    not come.
    """
    global _watchdog
    from meshwright.parallel.health.heartbeat import Heartbeat

    began = _process_began()
    if processes() == 1:
        store = _store(hosts=not has_agent_store(), limit_s=REACH_S) if spares else None
        yield Heartbeat(begun=began)
        if store is not None:
            _dismiss(store, spares)
        return
    import torch.distributed as dist

    # Watch first: a rank that fails or hangs while the group is made is reported, too.
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
    _watchdog.pulse.begun = began
    yield _watchdog.pulse
    # Not in a `finally`: after an error the group may be blocked, and `fail` still needs the watchdog.
    dist.destroy_process_group()
    _watchdog.close()
    _watchdog = None
    if spares and rank() == 0:
        _dismiss(_store(hosts=False, limit_s=REACH_S), spares)


def _process_began() -> float:
    """Return the seconds since 1970 at which this process began: now, where the system has no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))


def fail(error: BaseException, line: str, code: int) -> None:
    """Print the line of an error.

    With many processes one rank prints, all end with the exit code, and this never returns.
    """
    watchdog = _watchdog
    if watchdog is None and processes() > 1 and not isinstance(error, Unreachable):
        # Another rank may have failed first, and torchrun then sends SIGTERM: this rank ends by itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            watchdog = _meet(LAST_WORDS_S, None)
        except Exception:
            # No other rank can be reached. The launcher ends all once one has ended, so rank 0 gets time to print.
            if rank() > 0:
                time.sleep(1)
    if watchdog is None:
        _say(line)
        return
    from meshwright.parallel.groups.group import is_lost_connection

    # A lost connection is the result of another rank's failure, which should be the one that is reported.
    if is_lost_connection(error):
        watchdog.report_loss(_first_line(error), error.__traceback__)
    if not isinstance(error, (MeshwrightError, KeyboardInterrupt)) and code == 1:
        line = f"rank {rank()} failed at {watchdog.watch.after(error.__traceback__).position}: {line}"
    watchdog.report_failure(line, code)


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
    # One GPU per process, chosen before any group is made on it.
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= gpus:
        raise RunError(f"process {local} of this node has no GPU: it has {gpus}; take --nproc_per_node {gpus}")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def _meet(limit_s: float, hang_after_s: float | None) -> "Watchdog":
    import torch
    import torch.distributed as dist

    from meshwright.parallel.health.heartbeat import Heartbeat, HeartbeatWatch
    from meshwright.parallel.health.judgement import Limits
    from meshwright.parallel.health.watchdog import RankPlace, Watchdog, meet

    reach_s = min(REACH_S, limit_s)
    # torchrun hosts the store itself; in processes started by hand, the first rank does.
    store = _store(hosts=rank() == 0 and not has_agent_store(), limit_s=reach_s)
    attempt = f"meshwright/{meet(store, rank(), processes(), limit_s)}"
    home = RankPlace(
        rank=rank(),
        world=processes(),
        neighbours=_neighbours(),
        host=socket.gethostname() if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 else "",
    )
    watchdog = Watchdog(
        # A connection of its own: a request of the main thread may block for as long as a rank is late.
        dist.PrefixStore(attempt, _store(hosts=False, limit_s=reach_s)),
        dist.PrefixStore(attempt, store),
        home,
        HeartbeatWatch(Heartbeat(), PHASES, READS, queues=torch.cuda.is_available()),
        limits=Limits(hang_s=hang_after_s),
        say=_say,
        end=os._exit,
    )
    watchdog.start()
    return watchdog


def has_agent_store() -> bool:
    """Return whether torchrun itself keeps the store at MASTER_PORT. Otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(*, hosts: bool, limit_s: float) -> "dist.TCPStore":
    import torch.distributed as dist

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise RunError("WORLD_SIZE is above 1 without MASTER_ADDR and MASTER_PORT: start with torchrun") from None

    limit, connected = timedelta(seconds=limit_s), Future[dist.TCPStore]()

    def connect() -> None:
        try:
            connected.set_result(
                dist.TCPStore(host, port, is_master=hosts, wait_for_workers=False, multi_tenant=hosts, timeout=limit)
            )
        except Exception as error:
            connected.set_exception(error)

    # Whatever listens on the port may accept and never answer, for which the library has no timeout. So the thread may
    # be left behind, and the main thread handles signals meanwhile.
    threading.Thread(target=connect, name="connect", daemon=True).start()
    try:
        return connected.result(timeout=limit_s)
    except (RuntimeError, ValueError, OSError) as error:
        reason = f"no answer within {limit_s:.0f} s" if isinstance(error, TimeoutError) else _first_line(error)
        if hosts:
            advice = "take another MASTER_PORT" if "EADDRINUSE" in str(error) else "is MASTER_ADDR this machine?"
            raise Unreachable(f"rank 0 cannot listen on {host}:{port}: {reason}; {advice}") from None
        raise Unreachable(
            f"rank {rank()} cannot reach {host}:{port}: {reason}; is the port free and rank 0 started?"
        ) from None


def _neighbours() -> tuple[int, ...]:
    """Return the ranks of the same launcher on this machine, which torchrun numbers consecutively."""
    if not os.environ.keys() >= {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
        return ()
    first = rank() - int(os.environ["LOCAL_RANK"])
    return tuple(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def _say(line: str) -> None:
    """Write a line past all buffers, whose locks another thread may hold, and into torchrun's report."""
    cursor = SHOW_CURSOR if sys.stdout.isatty() else b""
    os.write(2, cursor + f"meshwright: {line}\n".encode())
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        # torchrun names the earliest failure as the cause, and compares whole seconds.
        began = int(time.time()) - 1
        failure = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(began)}}
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"message": failure}, file)


def command(words: Sequence[str]) -> str:
    """Return `meshwright WORDS`, with a path where the shell would not find this very `meshwright`."""
    called = Path(sys.argv[0])
    # `python -m meshwright` puts the path of __main__.py there, which cannot be run as a command.
    is_module = called.name == "__main__.py" or not called.exists()
    return " ".join([_module("meshwright") if is_module else _script(called), *map(shlex.quote, words)])


def launched(words: Sequence[str], *, nodes: int, per_node: int, host: str = "", elastic: str = "") -> str:
    """Return `torchrun ... -m meshwright WORDS` for all processes.

    `host`: the rendezvous host of several nodes. `elastic`: MIN:MAX nodes.
    """
    number = elastic or str(nodes)
    rendezvous = ["--nnodes", number, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host or 'HOST'}:29500"]
    options = [*(rendezvous if number != "1" else []), "--nproc_per_node", str(per_node)]
    beside = Path(sys.executable).with_name("torchrun")
    torchrun = _script(beside) if beside.exists() else _module("torch.distributed.run")
    return " ".join([torchrun, *map(shlex.quote, [*options, "-m", "meshwright", *words])])


def _module(name: str) -> str:
    return f"{shlex.quote(_short_path(Path(sys.executable)))} -m {name}"


def _script(path: Path) -> str:
    """Return the name of a program, or its path where a shell finds another of the same name first, or none."""
    on_path = shutil.which(path.name)
    return path.name if on_path and os.path.samefile(on_path, path) else shlex.quote(_short_path(path))


def _short_path(path: Path) -> str:
    """Return a path relative to the current folder if it lies below."""
    # Not Path.resolve: an environment's python is a link, and its target would start without the environment.
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)

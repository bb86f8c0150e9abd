"""What the child processes of the checkpoint tests do. Forked from one server that has torch loaded: quick to start."""

import ctypes
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from meshwright.spec.errors import CheckpointError, RunError
from meshwright.store import checkpoint
from meshwright.store.run_folder import RunLock

SKIPPED = 77


def start(target: Callable[..., None], *inputs: object) -> BaseProcess:
    """A child process running `target`; `given` must be picklable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.training.loop", "torch.distributed.tensor", "torch._dynamo"])
    process = context.Process(target=_guarded, args=(target, *inputs))
    process.start()
    return process


def finish(*processes: BaseProcess, timeout: float = 60) -> list[int | None]:
    """Exit codes; a process that does not end in time is killed and counts as None."""
    codes = []
    for process in processes:
        process.join(timeout)
        codes.append(process.exitcode)
        process.kill()
        process.join()
        process.close()
    return codes


def _guarded(target: Callable[..., None], *inputs: object) -> None:
    torch.set_num_threads(1)
    try:
        target(*inputs)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)


def tensors_of(step: int, megabytes: float = 1.0) -> dict[str, torch.Tensor]:
    """A state whose every number tells its step."""
    rows = max(1, int(megabytes * 2**20 / 4 / 64))
    return {
        "model.w": torch.full((rows, 64), float(step)),
        "model.b": torch.full((7,), float(step), dtype=torch.bfloat16),
        "step": torch.tensor(step),
    }


def save_step(folder: Path, step: int, megabytes: float = 1.0, keep_last: int = 2) -> Path:
    """Save the state of a step; its score falls, so that the newest is the best."""
    tensors = tensors_of(step, megabytes)
    return checkpoint.save(
        folder, step=step, tensors=tensors, values={"step": step}, score=1 / step, keep_last=keep_last
    )


def save_for_ever(folder: Path, first: int) -> None:
    """To be killed."""
    step = first
    while True:
        save_step(folder, step, keep_last=1)
        step += 1


def die_at(folder: Path, step: int, event: int) -> None:
    """Save, and drop dead before the `event`-th look at or change of the file system; exit code 0 = lived on."""
    left = event

    def count(name: str, inputs: object) -> None:
        nonlocal left
        if name in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            left -= 1
            if left < 0:
                os._exit(9)

    sys.addaudithook(count)
    save_step(folder, step, megabytes=0.01, keep_last=1)


def small_disk(folder: Path) -> None:
    """A disk of one MiB of our own at `folder`; where mounting is not allowed, the process ends with SKIPPED."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS: the mount is seen by this process alone and dies with it
        os._exit(SKIPPED)
    private = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False).returncode
    if private or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        os._exit(SKIPPED)


def fill_disk(folder: Path) -> None:
    """The third save does not fit."""
    small_disk(folder)
    _fails_and_recovers(folder, "No space left on device", megabytes=2.0)


def limit_file_size(folder: Path) -> None:
    """The system refuses files beyond 256 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
    _fails_and_recovers(folder, "File too large", megabytes=1.0)


def _fails_and_recovers(folder: Path, reason: str, megabytes: float) -> None:
    first = save_step(folder, 1, megabytes=0.1)
    save_step(folder, 2, megabytes=0.1)
    try:
        save_step(folder, 3, megabytes=megabytes)
        raise AssertionError("the save should have failed")
    except CheckpointError as error:
        text = str(error)
        assert reason in text and "\n" not in text, text
        assert f"needs {megabytes:.1f} MiB" in text and "earlier checkpoints are kept" in text, text
        assert (" are free" in text) == ("No space" in reason) != ("ulimit -f" in text), text
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]
    assert checkpoint.load(first, tensors_of(9, 0.1)) == {"step": 1}
    save_step(folder, 4, megabytes=0.1)
    assert checkpoint.find_latest(folder) == folder / "step-000004"


def measure_memory(folder: Path, report: Path) -> None:
    """Peak of resident memory while saving and while loading, beyond what the tensors take."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

    save_step(folder, 1, megabytes=0.01)
    tensors = {f"w{i}": torch.full((8, 2**18), float(i)) for i in range(12)}  # 96 MiB
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    checkpoint.save(folder, step=2, tensors=tensors, values={}, score=None, keep_last=1)
    report.write_text(json.dumps({"state": 12 * 2**23, "extra": status("VmHWM") - before}))


def hold_lock(folder: Path, ready: Path) -> None:
    """Lock a run folder, say so, and stay."""
    RunLock.take(folder)
    ready.write_text(str(os.getpid()))
    multiprocessing.Event().wait(60)


def try_lock(folder: Path, report: Path) -> None:
    """Write down what happens when the folder is to be locked."""
    try:
        RunLock.take(folder)
        report.write_text("taken")
    except RunError as error:
        report.write_text(str(error))


def ranks(work: Callable[[int, Path], None], folder: Path, world: int = 2) -> list[int | None]:
    """Run `work(rank, folder)` on `world` Gloo processes; their exit codes."""
    return finish(*(start(_rank, work, rank, world, folder) for rank in range(world)))


def _rank(work: Callable[[int, Path], None], rank: int, world: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.FileStore(str(folder / "store"), world)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    work(rank, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

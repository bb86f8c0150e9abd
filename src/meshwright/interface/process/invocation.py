"""Commands that work when a user copies them: the program by the name or path that starts it."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def command(words: Sequence[str]) -> str:
    """Return `meshwright WORDS`, with a path where the shell would not find this very `meshwright`."""
    return " ".join([_program(), *map(shlex.quote, words)])


def launched(words: Sequence[str], *, nodes: int, per_node: int, host: str = "") -> str:
    """Return `torchrun ... -m meshwright WORDS` for all processes. `host`: the rendezvous host of several nodes."""
    rendezvous = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host or 'HOST'}:29500"]
    options = [*(rendezvous if nodes > 1 else []), "--nproc_per_node", str(per_node)]
    return " ".join([_torchrun(), *map(shlex.quote, [*options, "-m", "meshwright", *words])])


def _torchrun() -> str:
    beside = Path(sys.executable).with_name("torchrun")
    if not beside.exists():
        return f"{shlex.quote(_short_path(Path(sys.executable)))} -m torch.distributed.run"
    on_path = shutil.which("torchrun")
    return "torchrun" if on_path and os.path.samefile(on_path, beside) else shlex.quote(_short_path(beside))


def _program() -> str:
    called = Path(sys.argv[0])
    if called.name == "__main__.py" or not called.exists():
        return f"{shlex.quote(_short_path(Path(sys.executable)))} -m meshwright"
    on_path = shutil.which(called.name)
    if on_path and Path(on_path).resolve() == called.resolve():
        return called.name
    return shlex.quote(_short_path(called))


def _short_path(path: Path) -> str:
    """Return a path relative to the current folder if it lies below. Links stay: an environment's python is one."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)

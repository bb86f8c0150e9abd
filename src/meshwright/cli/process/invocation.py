"""How this program was called, so that the commands it proposes work when they are copied."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def command(words: Sequence[str]) -> str:
    """`meshwright WORDS`, with the path in front where a shell would not find this very `meshwright`."""
    return " ".join([_program(), *map(shlex.quote, words)])


def launched(words: Sequence[str], *, nodes: int, per_node: int, host: str = "") -> str:
    """`torchrun ... -m meshwright WORDS` on as many processes; of several nodes `host` keeps the meeting place."""
    meeting = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host or 'HOST'}:29500"]
    options = [*(meeting if nodes > 1 else []), "--nproc_per_node", str(per_node)]
    return " ".join([_torchrun(), *map(shlex.quote, [*options, "-m", "meshwright", *words])])


def _torchrun() -> str:
    """The one of this very environment."""
    beside = Path(sys.executable).with_name("torchrun")
    if not beside.exists():
        return f"{shlex.quote(_near(Path(sys.executable)))} -m torch.distributed.run"
    found = shutil.which("torchrun")
    return "torchrun" if found and os.path.samefile(found, beside) else shlex.quote(_near(beside))


def _program() -> str:
    called = Path(sys.argv[0])
    if called.name == "__main__.py" or not called.exists():
        return f"{shlex.quote(_near(Path(sys.executable)))} -m meshwright"
    found = shutil.which(called.name)
    if found and Path(found).resolve() == called.resolve():
        return called.name
    return shlex.quote(_near(called))


def _near(path: Path) -> str:
    """Relative to the current folder where it lies below it; never resolved: an environment's python is a link."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)

"""From an exception to one line on stderr and an exit code."""

import errno
from collections.abc import Sequence

from meshwright.cli.process.usage import usage
from meshwright.cli.terminal.help import VERBS
from meshwright.spec.errors import MeshwrightError, is_out_of_memory

FAILED, USAGE, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130


def explain(error: BaseException) -> tuple[str, int]:
    """(one line, exit code) for whatever ended a verb; what nobody foresaw is 1 and points to --debug."""
    if isinstance(error, MeshwrightError):
        return _one_line(str(error)), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if is_out_of_memory(error):
        return (
            "out of memory: take a smaller layout.micro_batch, layout.recompute=full or a smaller model",
            DOES_NOT_FIT,
        )
    if isinstance(error, OSError) and error.strerror:
        return _system(error), USAGE
    return f"{type(error).__name__}: {_one_line(str(error))} (run with --debug for the traceback)", FAILED


def refused(error: BaseException, words: Sequence[str]) -> tuple[str, int]:
    """The same for what the parser refused."""
    return usage(error, words, VERBS), USAGE


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _system(error: OSError) -> str:
    place = f" ({error.filename})" if error.filename else ""
    line = f"{error.strerror}{place}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        line += ": free some space"
    return _one_line(line)

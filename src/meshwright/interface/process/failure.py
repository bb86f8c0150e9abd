"""Exceptions as one line on stderr and an exit code."""

import errno
import re
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.interface.terminal.help import VERBS
from meshwright.spec.errors import MeshwrightError, Writer, is_out_of_memory, write_in_python

FAILED, USAGE, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130
KINDS = (
    (r"valid int", "a whole number"),
    (r"valid (?:number|float)", "a number"),
    (r"(?:greater than or equal to |x>=)([-\d.]+)", r"at least \1"),
)
"""Complaint of typer or click about a value -> what the value must be."""
EXTRA_SETTING = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((\w+\.)?(\w+=[^ )]+)")
UNITS = {"GIB": "GiB, as 40", "HOURS": "hours", "SECONDS": "seconds", "USD": "dollars", "GB/s": "GB/s"}
"""Name of a value in help -> its unit."""
SUGGESTIONS = (
    (r"\. Did you mean ('[^']+')\?$", r". Did you mean \1?"),
    (r" \(Possible options: ([^)]+)\)$", r". Did you mean \1?"),
)
"""Suggestions of typer and click -> one wording."""


def explain(error: BaseException, write: Writer = write_in_python) -> tuple[str, int]:
    """Return (line, exit code) for the exception that ended a verb, its arguments written by `write`.

    Unforeseen exceptions give 1 and point to --debug.
    """
    if isinstance(error, MeshwrightError):
        return _one_line(error.written(write)), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if is_out_of_memory(error):
        return (
            "out of memory: take a smaller layout.micro_batch, layout.recompute=full or a smaller model",
            DOES_NOT_FIT,
        )
    # The system's own words say more than the name of the exception.
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        remedy = ": free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return _one_line(f"{error.strerror}{where}{remedy}"), USAGE
    return f"{type(error).__name__}: {_one_line(str(error))} (run with --debug for the traceback)", FAILED


def _one_line(text: str) -> str:
    return " ".join(text.split())


def explain_usage(error: Any, words: Sequence[str]) -> str:
    """Explain in one line what the parser rejected: the option, its value, and where help is."""
    verb = next((f"{word} " for word in words if word in VERBS), "")
    message = " ".join(error.format_message().split()).rstrip(".")
    message = _explain_value(message, getattr(error, "param", None), words) or message
    for pattern, replacement in SUGGESTIONS:
        message = re.sub(pattern, replacement, message)
    if verb == "generate " and message.startswith("Got unexpected extra argument"):
        message = f"A prompt is given as --prompt TEXT, in quotes where it has spaces ({message.partition(' ')[2]})"
    # Verbs that train take keys as words.
    if verb == "plan " and (setting := EXTRA_SETTING.match(message)):
        section, words_of_section = setting.groups()
        option = "--recipe" if section == "recipe." else "--layout"
        message = f"{section or ''}{words_of_section} is given as {option} {words_of_section}"
    # Other programs have such an option on every command.
    if message.startswith("No such option: --dry-run"):
        message = f"{verb}has no --dry-run: `meshwright dryrun` makes a dry run alone"
    if verb == "tune " and (flag := re.match("No such option: --([a-z]+_[a-z0-9_]+)", message)):
        message = f'TRL\'s flags go in one pair of quotes: --from-trl "--{flag[1]} ..."'
    see = f"see meshwright {verb}--help"
    return f"{message} S{see[1:]}" if message.endswith("?") else f"{message}: {see}"


def _explain_value(message: str, option: Any, words: Sequence[str]) -> str:
    """Return `--nodes abc must be a whole number`, or an empty text for any other complaint."""
    kind = next((match.expand(kind) for pattern, kind in KINDS if (match := re.search(pattern, message))), "")
    if kind and (unit := UNITS.get(getattr(option, "metavar", None) or "")):
        kind += f" of {unit}"
    names = [name for name in getattr(option, "opts", ()) if name.startswith("-")]
    typed = next(_typed_values(names, words), "") if kind else ""
    return f"{typed} must be {kind}" if typed else ""


def _typed_values(names: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yield an option with its value as typed, the last one first, since the parser reads that one."""
    for index in reversed(range(len(words))):
        name, equals, text = words[index].partition("=")
        if name in names and (equals or index + 1 < len(words)):
            yield f"{name} {text if equals else words[index + 1]}"

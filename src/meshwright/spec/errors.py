"""Tree of errors. Each carries the exit code of the command line.

MeshwrightError                 2
├── PlanError                   a plan file, an override, an unknown or impossible value
│   ├── ArgumentError           an argument: its name, its value, the rule, the remedy
│   └── IllegalLayout           a layout that breaks a rule: rule, clashing numbers, nearest legal change
├── DataError                   text, tokenizer or token cache
│   └── MalformedRowError       a row that is malformed under any tokenizer and template
├── CheckpointError             missing, foreign or newer checkpoint
│   └── DamagedCheckpoint       incomplete: skipped when Meshwright chooses, refused when the user named it
├── StoreError                  an object store, or another file system behind a URL
├── HubError                    a Hugging Face directory that cannot be read or written
├── RunError                    a run folder that is taken, missing or damaged
│   └── NonFiniteLoss           the loss or the gradient is not a number any more
├── DoesNotFit                  3  no legal layout, or not enough memory
├── OutsideTolerance            4  a comparison beyond its bar
└── UnsafeCommunication         4  ranks that could wait for each other, or disagree on what they exchange

A message is one line: what is wrong, where, and what to do. Arguments in it are marked by `argument`, so that each
interface writes them as its users do: tokens=15T in Python, --tokens 15T on the command line.
"""

import copy
from collections.abc import Callable
from os import PathLike, fspath
from typing import Self

UNSET = object()
"""No value after the name of an argument."""
START, BETWEEN, END = "\x02", "\x1f", "\x03"
"""Marks around an argument in a message. Control characters: text of users cannot hold them, see `printable`."""
Writer = Callable[[str, str, str], str]
"""Function that writes (name, Python literal, plain text) of an argument. The last two are empty without a value."""


def printable(text: str) -> str:
    """Return a user's words for a one-line message, escaped where a terminal would act on them."""
    return text if text.isprintable() else ascii(text)


def argument(name: str, setting: object = UNSET) -> str:
    """Return an argument, marked, for the message of an error. `name`: that of Python, or a key of a plan."""
    if setting is UNSET:
        return f"{START}{name}{BETWEEN}{BETWEEN}{END}"
    if isinstance(setting, PathLike):
        setting = fspath(setting)
    if isinstance(setting, float):
        setting = f"{setting:g}"
        return f"{START}{name}{BETWEEN}{setting}{BETWEEN}{setting}{END}"
    text = printable(str(setting))
    # Capitals stand for the user's own word, as in data=PATH, which quotes would make a word of ours.
    is_placeholder = text.partition(".")[0].isupper() and not any(letter.isdigit() for letter in text)
    literal = repr(setting) if isinstance(setting, str) and not is_placeholder else text
    return f"{START}{name}{BETWEEN}{literal}{BETWEEN}{text}{END}"


def write_in_python(name: str, literal: str, text: str) -> str:
    """Return an argument as a keyword of Python."""
    return f"{name}={literal}"


class MeshwrightError(Exception):
    """Base of all errors that a user can cause and fix."""

    exit_code = 2
    reported_elsewhere = False
    """Another rank prints the message. This rank exits silently with the same code."""

    def __init__(self, message: str = "") -> None:
        # Exception keeps the arguments of the call, by which a copy and a pickle call it again.
        self.message = message
        """The message with marked arguments."""

    def __str__(self) -> str:
        return self.written(write_in_python)

    def written(self, write: Writer) -> str:
        """Return the message with its arguments written by one interface."""
        text, *marked = self.message.split(START)
        for part in marked:
            fields, _, rest = part.partition(END)
            text += write(*fields.split(BETWEEN)) + rest
        return text

    def reworded(self, before: str = "", after: str = "") -> Self:
        """Return the same error with more words around its message."""
        error = copy.copy(self)
        error.message = f"{before}{self.message}{after}"
        return error


class PlanError(MeshwrightError):
    """A plan that cannot be read or does not make sense."""


class ArgumentError(PlanError):
    """An argument with an impossible value or of another type.

    The message is `argument=value rule: remedy`, or `sentence: remedy` where a sentence names several arguments.
    """

    def __init__(
        self, name: str, value: object = UNSET, rule: str = "", remedy: str = "", *, sentence: str = ""
    ) -> None:
        self.argument, self.value, self.rule, self.remedy = name, value, rule, remedy
        text = sentence or f"{argument(name, value)} {rule}".rstrip()
        super().__init__(f"{text}: {remedy}" if remedy else text)


class IllegalLayout(PlanError):
    """A layout that breaks a rule."""


class DataError(MeshwrightError):
    """Text, tokenizer or token cache that cannot be used."""


class MalformedRowError(DataError):
    """A row that is malformed by itself. data.malformed decides its fate."""


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, truncated, tampered with or of another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that differs from what was committed: a file missing, truncated or changed, or no COMMIT."""


class StoreError(MeshwrightError):
    """A file system behind a URL that cannot be reached, read or written."""

    may_pass = True
    """False: another attempt would fail, too."""
    is_damage = False
    """True: the file was read, and holds other bytes than recorded."""


class HubError(MeshwrightError):
    """A Hugging Face directory that cannot be read or written."""


class RunError(MeshwrightError):
    """A run folder that is taken, missing or damaged."""


class NonFiniteLoss(RunError):
    """The loss or the gradient stopped being a number."""


class DoesNotFit(MeshwrightError):
    """Not enough memory, or no legal layout."""

    exit_code = 3
    answer: object = None
    """Partial answer, such as the nearest layout. None = nothing."""
    document: dict[str, object] | None = None
    """The same answer as the JSON document of the verb."""


class OutsideTolerance(MeshwrightError):
    """A comparison beyond its bar."""

    exit_code = 4


class UnsafeCommunication(MeshwrightError):
    """Ranks that could deadlock, disagree on an operation, or use a buffer while it is exchanged."""

    exit_code = 4


FULL = ("can't allocate memory", "Unable to allocate")
"""Messages of torch's and numpy's allocators, also from another process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    torch's own class is recognized by name, to avoid importing torch here. CPU allocators raise a RuntimeError.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)

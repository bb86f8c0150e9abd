"""Tree of errors. Each carries the exit code of the command line.

MeshwrightError                 2
├── PlanError                   a plan file, an override, an unknown or impossible value
│   ├── ArgumentError           an argument of a Python function, named in it; the command line names its option
│   └── IllegalLayout           a layout that breaks a rule: rule, clashing numbers, nearest legal change
├── DataError                   text, tokenizer or token cache
│   └── MalformedRowError       a row that is malformed under any tokenizer and template
├── CheckpointError             missing, foreign or newer checkpoint
│   └── DamagedCheckpoint       incomplete: skipped when Meshwright chooses, refused when the user named it
├── HubError                    a Hugging Face directory that cannot be read or written
├── RunError                    a run folder that is taken, missing or damaged
│   └── NonFiniteLoss           the loss or the gradient is not a number any more
├── DoesNotFit                  3  no legal layout, or not enough memory
├── OutsideTolerance            4  a comparison beyond its bar
└── UnsafeCommunication         4  ranks that could wait for each other, or disagree on what they exchange

A message is one line: what is wrong, where, and what to do.
"""


class MeshwrightError(Exception):
    """Base of all errors that a user can cause and fix."""

    exit_code = 2
    reported_elsewhere = False
    """Another rank prints the message. This rank exits silently with the same code."""


class PlanError(MeshwrightError):
    """A plan that cannot be read or does not make sense."""


class ArgumentError(PlanError):
    """An argument with an impossible value or of another type."""


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


def printable(text: str) -> str:
    """Return a user's words for a one-line message, escaped where a terminal would act on them."""
    return text if text.isprintable() else ascii(text)


FULL = ("can't allocate memory", "Unable to allocate")
"""Messages of torch's and numpy's allocators, also from another process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    torch's own class is recognized by name, to avoid importing torch here. CPU allocators raise a RuntimeError.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)

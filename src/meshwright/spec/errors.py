"""What can go wrong, as a tree; each carries the exit code of the command line.

MeshwrightError                 2
├── PlanError                   a plan file, an override, an unknown or impossible value
│   ├── ArgumentError           an argument of a Python function, which it names; the command line says its option
│   └── IllegalLayout           a layout that breaks a rule: rule, clashing numbers, nearest legal change
├── DataError                   text, tokenizer or token cache
│   └── MalformedRowError       a row that is at fault by itself, whatever the tokenizer and its template
├── CheckpointError             missing, foreign or newer checkpoint
│   └── DamagedCheckpoint       not whole: passed over where the choice is ours, refused where it was named
├── HubError                    a Hugging Face directory that cannot be read or written
├── RunError                    a run folder that is taken, missing or damaged
│   └── NonFiniteLoss           the loss or the gradient is no number any more
├── DoesNotFit                  3  no legal layout, or not enough memory
├── OutsideTolerance            4  a comparison beyond its bar
└── UnsafeCommunication         4  ranks that could wait for each other, or disagree on what they exchange

A message is one line: what is wrong, where, and what to do.
"""


class MeshwrightError(Exception):
    """Base of every error a user can cause and mend."""

    exit_code = 2
    said_elsewhere = False
    """Another rank says it: this one ends with the same exit code and no words."""


class PlanError(MeshwrightError):
    """A plan that cannot be read or does not make sense."""


class ArgumentError(PlanError):
    """An argument that makes no sense, or is of another type."""


class IllegalLayout(PlanError):
    """A layout that breaks a rule."""


class DataError(MeshwrightError):
    """Text, tokenizer or token cache that cannot be used."""


class MalformedRowError(DataError):
    """A row that is at fault by itself: data.malformed says what becomes of it."""


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, truncated, tampered with or of another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not what was once committed: a file missing, truncated or changed, or no COMMIT."""


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
    """What was found all the same, as the nearest layout; None = nothing."""
    document: dict[str, object] | None = None
    """The same as the JSON document of the verb."""


class OutsideTolerance(MeshwrightError):
    """A comparison that ended beyond its bar."""

    exit_code = 4


class UnsafeCommunication(MeshwrightError):
    """Ranks that could deadlock, disagree on an operation, or use a buffer while it is exchanged."""

    exit_code = 4


def printable(text: str) -> str:
    """A user's words in a sentence of one line: as they are, or with escapes where a terminal would act on them."""
    return text if text.isprintable() else ascii(text)


FULL = ("can't allocate memory", "Unable to allocate")
"""What torch's and numpy's allocators say, also of another process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. torch's own class is known by name, so that this file needs no torch; CPU allocators have
    a message alone."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)

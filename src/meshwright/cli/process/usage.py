"""What the parser refused, in one line of our own words: the option, the value it got, and where help is."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

KINDS = (
    (r"valid int", "a whole number"),
    (r"valid (?:number|float)", "a number"),
    (r"(?:greater than or equal to |x>=)([-\d.]+)", r"at least \1"),
)
"""What typer or click says of a value it cannot take -> what it must be."""
CLOSE = (
    (r"\. Did you mean ('[^']+')\?$", r". Did you mean \1?"),
    (r" \(Possible options: ([^)]+)\)$", r". Did you mean \1?"),
)


def usage(error: Any, words: Sequence[str], verbs: Iterable[str]) -> str:
    """One line; `verbs`: by which the one that was called is found among the words."""
    verb = next((f"{word} " for word in words if word in verbs), "")
    message = " ".join(error.format_message().split()).rstrip(".")
    message = _of_value(message, getattr(error, "param", None), words) or message
    for pattern, instead in CLOSE:
        message = re.sub(pattern, instead, message)
    if verb == "generate " and message.startswith("Got unexpected extra argument"):
        message = f"A prompt is given as --prompt TEXT, in quotes where it has spaces ({message.partition(' ')[2]})"
    if message.startswith("No such option: --dry-run"):
        message = f"{verb}has no --dry-run: `meshwright dryrun` makes a dry run alone"
    see = f"see meshwright {verb}--help"
    return f"{message} S{see[1:]}" if message.endswith("?") else f"{message}: {see}"


def _of_value(message: str, option: Any, words: Sequence[str]) -> str:
    """`--nodes abc must be a whole number`; empty where this is about something else."""
    kind = next((found.expand(kind) for pattern, kind in KINDS if (found := re.search(pattern, message))), "")
    names = [name for name in getattr(option, "opts", ()) if name.startswith("-")]
    given = next(_given(names, words), "") if kind else ""
    return f"{given} must be {kind}" if given else ""


def _given(names: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """The option with its value as it was typed, the last first: of several the parser reads that one."""
    for at in reversed(range(len(words))):
        name, equals, value = words[at].partition("=")
        if name in names and (equals or at + 1 < len(words)):
            yield f"{name} {value if equals else words[at + 1]}"

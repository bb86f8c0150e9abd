"""URLs among the words of a command: inputs become local copies, outputs are uploaded when the verb has ended."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from meshwright.remote.locations import EXTRAS, Location, is_url, scheme

OUTPUTS = frozenset({"-o", "--out", "--output", "--html", "--record"})
"""Options that name what is written."""
OUTPUT_ARGUMENTS = {"export": 2}
"""Verb -> which of its arguments names what is written, from 1."""
URL_KEYS = frozenset({"run", "store", "store.url", "resume"})
"""Keys of a plan whose URLs are not copied: the engine writes and reads there itself."""
OWN_URLS = frozenset({"runs", "data prepare"})
"""Verbs that read URLs themselves."""
STREAMED_KEYS = frozenset({"data", "data.path"})
"""Keys whose URLs are read while training. `tune` reads rows of local files."""


def has_urls(words: Sequence[str]) -> bool:
    """Return whether a word, or the value of a KEY=VALUE word, is a URL of a file system."""
    return any(_is_store_url(word) or _is_store_url(word.partition("=")[2]) for word in words)


def _is_store_url(text: str) -> bool:
    return is_url(text) and scheme(text) in EXTRAS


@contextmanager
def with_local_paths(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words with local paths in place of URLs. Outputs are uploaded when the block ends without an error.

    Raises StoreError, PlanError.
    """
    from meshwright.store.local_copies import copy_to_cache, upload_afterwards

    verb, local = words[0], [words[0]]
    uncopied = URL_KEYS if verb == "tune" else URL_KEYS | STREAMED_KEYS
    number = 0
    with ExitStack() as outputs:
        for before, word in pairwise(words):
            is_argument = not word.startswith("-") and not before.startswith("-")
            number += is_argument
            key, equals, setting = word.partition("=")
            if verb in OWN_URLS or " ".join(words[:2]) in OWN_URLS:
                local.append(word)
            elif _is_store_url(word):
                is_output = before in OUTPUTS or (is_argument and OUTPUT_ARGUMENTS.get(verb) == number)
                path = outputs.enter_context(upload_afterwards(word)) if is_output else copy_to_cache(word)
                local.append(str(path))
            elif equals and _is_store_url(setting) and key not in uncopied:
                is_output = key in OUTPUTS
                path = outputs.enter_context(upload_afterwards(setting)) if is_output else copy_to_cache(setting)
                local.append(f"{key}={path}")
            else:
                if equals and _is_store_url(setting):
                    # Only a missing library is refused here, before torch is loaded.
                    Location.open(setting)
                local.append(word)
        yield local

"""URLs among the words of a command: inputs become local copies, outputs are uploaded when the verb has ended."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from meshwright.planfile.keys import is_known
from meshwright.remote.locations import EXTRAS, Location, scheme
from meshwright.spec.errors import printable

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
    return any(scheme(text) in EXTRAS for word in words for text in (word, word.partition("=")[2]))


@contextmanager
def with_local_paths(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words with local paths in place of URLs. Outputs are uploaded when the block ends without an error.

    Raises StoreError, PlanError.
    """
    from meshwright.interface.terminal.screen_text import URL_OF
    from meshwright.store.local_copies import copy_to_cache, upload_afterwards

    if words[0] in OWN_URLS or " ".join(words[:2]) in OWN_URLS:
        yield list(words)
        return
    uncopied = URL_KEYS if words[0] == "tune" else URL_KEYS | STREAMED_KEYS
    which = next((word for before, word in pairwise(words) if before == "--checkpoint"), "last")
    local, number, uploaded = [words[0]], 0, list[str]()
    with ExitStack() as outputs:
        for before, word in pairwise(words):
            is_argument = not word.startswith("-") and not before.startswith("-")
            number += is_argument
            key, _, url = ("", "", word) if scheme(word) in EXTRAS else word.partition("=")
            is_output = (key or before) in OUTPUTS or (
                not key and is_argument and OUTPUT_ARGUMENTS.get(words[0]) == number
            )
            if scheme(url) not in EXTRAS or (key and not is_known(key)):  # the verb names a mistyped key
                local.append(word)
            elif key in uncopied:
                # Only a missing library is refused here, before torch is loaded.
                Location.open(url)
                local.append(word)
            else:
                path = outputs.enter_context(upload_afterwards(url)) if is_output else copy_to_cache(url, which)
                URL_OF[str(path)] = url
                if is_output:
                    uploaded.append(url)
                local.append(f"{key}={path}" if key else str(path))
        yield local
    for url in uploaded:  # the verb has named a file of this machine, which is gone by now
        print(f"uploaded to {printable(url)}", file=sys.stderr)

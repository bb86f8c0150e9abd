"""Names of cached content: a chain of SHA-256 over blocks of tokens.

The key of a block covers its tokens and all before them, so that equal keys mean equal keys and values. A salt begins
the chain: requests of different salts never find each other's blocks, and no answer's delay betrays another's prompt.
So does the name of an adapter, which changes keys and values.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def first_key(salt: bytes, adapter: str = "") -> bytes:
    """What the key of a sequence's first block is made with. `adapter`: whose keys and values they are, by name; empty
    = the model's own."""
    if not adapter:
        return sha256(b"meshwright prefix\0" + salt).digest()
    return sha256(b"meshwright adapter\0" + sha256(adapter.encode()).digest() + salt).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of tokens behind the block of `key`."""
    return sha256(key + array("I", tokens).tobytes()).digest()

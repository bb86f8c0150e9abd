"""Names of cached content: a chain of SHA-256 over blocks of tokens.

The key of a block covers its tokens and all before them, so that equal keys mean equal keys and values. A salt begins
the chain: requests of different salts never find each other's blocks, and no answer's delay betrays another's prompt.
So does the number of an adapter's loading, which changes keys and values.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def first_key(salt: bytes, adapter: int = 0) -> bytes:
    """What the key of a sequence's first block is made with. `adapter`: whose keys and values they are, by the number
    of its loading, which no other has; 0 = the model's own."""
    if not adapter:
        return sha256(b"meshwright prefix\0" + salt).digest()
    return sha256(b"meshwright adapter\0" + adapter.to_bytes(8, "little") + salt).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of tokens behind the block of `key`."""
    return sha256(key + array("I", tokens).tobytes()).digest()

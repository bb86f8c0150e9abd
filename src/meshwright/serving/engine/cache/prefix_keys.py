"""Keys of cached content: a chain of SHA-256 over blocks of tokens.

The key of a block covers its tokens and all before them, so equal keys mean equal keys and values. A salt begins the
chain. Requests with different salts never find each other's blocks, and no answer's delay betrays another's prompt. The
number of an adapter's loading also begins the chain, since an adapter changes keys and values.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def first_key(salt: bytes, adapter: int = 0) -> bytes:
    """Return the key from which a sequence's first block is hashed. `adapter`: the number of its loading, 0 = none."""
    if not adapter:
        return sha256(b"meshwright prefix\0" + salt).digest()
    return sha256(b"meshwright adapter\0" + adapter.to_bytes(8, "little") + salt).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block of tokens that follows the block of `key`."""
    return sha256(key + array("I", tokens).tobytes()).digest()

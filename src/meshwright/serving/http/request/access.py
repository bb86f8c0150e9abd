"""API keys: read from a file, compared in constant time, and separate in the cache."""

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from meshwright.spec.errors import ArgumentError

MOST_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Tenant:
    """Holder of one key."""

    name: str
    """Number of the key for the log, never the key itself."""
    salt: str
    """Prefix of the cache keys of its requests."""


class Keyring:
    """Keys of a server. Without keys everybody is the same tenant."""

    def __init__(self, keys: Sequence[str]) -> None:
        secret = secrets.token_bytes(32)
        self._known = [
            (_digest(key), Tenant(f"key{number}", hmac.new(secret, key.encode(), sha256).hexdigest()))
            for number, key in enumerate(keys, 1)
        ]
        self._nobody = Tenant("-", secret.hex())

    @property
    def needs_key(self) -> bool:
        """True if requests need a key."""
        return bool(self._known)

    def tenant(self, header: bytes | None) -> Tenant | None:
        """Return the tenant of an Authorization header, or None. The comparison takes the same time for any key."""
        if not self._known:
            return self._nobody
        scheme, _, key = (header or b"").partition(b" ")
        sent_digest, match = _digest(key.strip()), None
        for digest, tenant in self._known:
            if hmac.compare_digest(digest, sent_digest):
                match = tenant
        return match if scheme.lower() == b"bearer" else None


def _digest(key: str | bytes) -> bytes:
    return sha256(key.encode() if isinstance(key, str) else key).digest()


def read_keys(path: Path) -> tuple[str, ...]:
    """Read the keys of a file, one per line, skipping empty lines and those that begin with #. Raises ArgumentError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"api_key_file={path} cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys or len(text) > MOST_FILE_BYTES:
        raise ArgumentError(f"api_key_file={path} holds no key: write one a line")
    for key in keys:
        check_key(key, f"api_key_file={path}")
    return keys


def check_key(key: str, source: str) -> None:
    """Raise ArgumentError if no client could send the key in a header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ArgumentError(f"{source} holds a key with characters that a header cannot carry: take letters and digits")

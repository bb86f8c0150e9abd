"""API keys: read from a file, compared in constant time, and what each of them shares in the cache."""

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
    """Whoever has one key."""

    name: str
    """For the log: the number of the key, never the key."""
    salt: str
    """Begins the prefixes of its requests in the cache."""


class Keyring:
    """The keys of a server. Without one everybody is the same tenant."""

    def __init__(self, keys: Sequence[str]) -> None:
        secret = secrets.token_bytes(32)
        self._known = [
            (_digest(key), Tenant(f"key{number}", hmac.new(secret, key.encode(), sha256).hexdigest()))
            for number, key in enumerate(keys, 1)
        ]
        self._nobody = Tenant("-", secret.hex())

    @property
    def asks(self) -> bool:
        """Whether a key is needed."""
        return bool(self._known)

    def tenant(self, header: bytes | None) -> Tenant | None:
        """Of an Authorization header; None = it holds no key that is known. All keys are compared, each in a time that
        does not depend on where it differs."""
        if not self._known:
            return self._nobody
        scheme, _, key = (header or b"").partition(b" ")
        given, found = _digest(key.strip()), None
        for digest, tenant in self._known:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == b"bearer" else None


def _digest(key: str | bytes) -> bytes:
    return sha256(key.encode() if isinstance(key, str) else key).digest()


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are not. ArgumentError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"api_key_file={path} cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    found = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not found or len(text) > MOST_FILE_BYTES:
        raise ArgumentError(f"api_key_file={path} holds no key: write one a line")
    for key in found:
        check_key(key, f"api_key_file={path}")
    return found


def check_key(key: str, source: str) -> None:
    """ArgumentError where no client could send it in a header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ArgumentError(f"{source} holds a key with characters that a header cannot carry: take letters and digits")

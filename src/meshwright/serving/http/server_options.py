"""Settings, limits and API keys of a server, checked before a socket is opened.

Keys are read from a file, compared in constant time, and separate in the cache.
"""

import errno
import hmac
import math
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path

from meshwright.spec.errors import ArgumentError, argument

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on one request, on one key, and on all together. What exceeds them is refused, never cut."""

    max_body_bytes: int = 2**20
    """Bytes of a request's body. Beyond: 413."""
    max_prompts: int = 128
    """Prompts of one request. Beyond: 400."""
    max_prompt_tokens: int = 0
    """Tokens of one prompt. Beyond: 400. 0 = the model's limit."""
    max_n: int = 16
    """Answers to a prompt. Beyond: 400."""
    max_answer_tokens: int = 32_768
    """Prompts x n x max_tokens of a request. Beyond: 400."""
    max_queue: int = 256
    """Prompts that wait for the engine. Beyond: 429."""
    max_requests_per_key: int = 512
    """Requests of one key at once. Beyond: 429."""
    max_connections: int = 1024
    """Open connections. Beyond: 503."""
    max_headers: int = 64
    """Headers of a request. Beyond: 431."""
    max_header_bytes: int = 16_384
    """Bytes of all headers of a request. Beyond: 400."""
    max_request_seconds: float = 600.0
    """Time from a request's arrival to its last token. Beyond: an error ends it."""
    read_seconds: float = 20.0
    """Time to receive headers, and to receive a body. Beyond: 408."""
    prompt_seconds: float = 10.0
    """Time of the chat template and the tokenizer. Beyond: 400."""
    stall_seconds: float = 30.0
    """Time after which a client that reads nothing is disconnected."""
    max_adapters: int = 16
    """Adapters in memory at once, where adapters are loaded over HTTP. Beyond: 409."""
    max_adapter_bytes: int = 2**30
    """Bytes of the file of an adapter that is loaded over HTTP. Beyond: 400."""
    max_adapter_rank: int = 256
    """Rank of an adapter that is loaded over HTTP. Beyond: 400."""
    step_seconds: float = 120.0
    """Time of a step of the engine after which /health answers 503."""
    drain_seconds: float = 30.0
    """Time from SIGTERM for growing answers to end."""

    def __post_init__(self) -> None:
        """Raise ArgumentError for the first field out of range."""
        for limit in fields(self):
            amount, least = (
                getattr(self, limit.name),
                0 if limit.name in ("max_prompt_tokens", "drain_seconds") else 1e-3,
            )
            if not least <= amount < math.inf:
                raise ArgumentError(limit.name, amount, f"must be {'0 or more' if not least else 'above 0'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address of a server, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port. 0 = any free one."""
    keys: tuple[str, ...] = ()
    """API keys, each valid for every route. Empty = no key is needed."""
    without_key: bool = False
    """Listen beyond this machine although there is no key."""
    adapter_folder: Path | None = None
    """Folder of adapters that may be loaded over HTTP. None = none may."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        """Raise ArgumentError for an invalid setting, or an address that others reach without a key."""
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise ArgumentError("adapter_dir", self.adapter_folder, remedy="there is no such folder")
        if not 0 <= self.port < 2**16:
            raise ArgumentError("port", self.port, "must lie between 0 and 65535")
        if self.host not in LOOPBACK and not self.keys and not self.without_key:
            raise ArgumentError(
                "host",
                self.host,
                "is reached from other machines, and there is no API key",
                f"give one, or allow everybody with {argument('without_key', True)}",
            )

    def listener(self) -> socket.socket:
        """Open the listening socket. Raises ArgumentError when the address is taken, or is not this machine's."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A server that restarts must not wait a minute for old connections of the port.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((self.host, self.port))
            opened.listen(1024)
            opened.setblocking(False)
        except OSError as error:
            opened.close()
            if error.errno == errno.EADDRINUSE:
                raise ArgumentError(
                    "port", self.port, f"of {self.host} is taken", "stop the program that has it, or take another port"
                ) from None
            raise ArgumentError(
                "host", self.host, f"{argument('port', self.port)}", f"{error.strerror or error}"
            ) from None
        return opened


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
        # All keys are compared, also after a match: the time tells nothing about which one.
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
        raise ArgumentError("api_key_file", path, "cannot be read", f"{error.strerror}") from None
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys or len(text) > MOST_FILE_BYTES:
        raise ArgumentError("api_key_file", path, "holds no key", "write one a line")
    for key in keys:
        check_key(key, argument("api_key_file", path))
    return keys


def check_key(key: str, source: str) -> None:
    """Raise ArgumentError if no client could send the key in a header. `source`: what named it, for the message."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        rule = "holds a key with characters that a header cannot carry"
        raise ArgumentError("keys", sentence=f"{source} {rule}", remedy="take letters and digits")

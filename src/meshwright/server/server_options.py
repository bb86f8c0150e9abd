"""How a server runs, and what it refuses. All of it is decided before a socket is opened."""

import errno
import math
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path

from meshwright.spec.errors import ArgumentError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one request, one key and all of them may take. What is beyond is refused, never cut."""

    max_body_bytes: int = 2**20
    """Of a request's body: 413."""
    max_prompts: int = 128
    """Of one request: 400."""
    max_prompt_tokens: int = 0
    """Of one prompt: 400; 0 = what the model takes."""
    max_n: int = 16
    """Answers to a prompt: 400."""
    max_answer_tokens: int = 32_768
    """Prompts x n x max_tokens of a request: 400."""
    max_queue: int = 256
    """Prompts that wait for the engine: 429."""
    max_requests_per_key: int = 512
    """Requests of one key at once: 429."""
    max_connections: int = 1024
    """Open connections: 503."""
    max_headers: int = 64
    """Of a request: 431."""
    max_header_bytes: int = 16_384
    """Of all of them: 400."""
    max_request_seconds: float = 600.0
    """From a request's arrival to its last token; then it is ended with an error."""
    read_seconds: float = 20.0
    """To receive headers, and to receive a body: 408."""
    prompt_seconds: float = 10.0
    """For the chat template and the tokenizer: 400."""
    stall_seconds: float = 30.0
    """A reader that takes nothing for so long is cut off."""
    max_adapters: int = 16
    """That take memory at once, where adapters are loaded over HTTP: 409."""
    max_adapter_bytes: int = 2**30
    """Of the file of one that is loaded over HTTP: 400."""
    max_adapter_rank: int = 256
    """Of one that is loaded over HTTP: 400."""
    step_seconds: float = 120.0
    """A step of the engine that takes longer makes /health say 503."""
    drain_seconds: float = 30.0
    """From SIGTERM on, for the answers that grow."""

    def __post_init__(self) -> None:
        """ArgumentError, which names the field."""
        for one in fields(self):
            value, least = getattr(self, one.name), 0 if one.name in ("max_prompt_tokens", "drain_seconds") else 1e-3
            if not least <= value < math.inf:
                raise ArgumentError(f"{one.name}={value} must be {'0 or more' if not least else 'above 0'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where a server listens, and whom it answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 = any that is free."""
    keys: tuple[str, ...] = ()
    """Any of them opens every route; none = no key is asked for."""
    without_key: bool = False
    """Listen beyond this machine although there is no key."""
    adapter_folder: Path | None = None
    """In which adapters lie that may be loaded over HTTP; None = none may."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        """ArgumentError: an address that others reach, and no key."""
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise ArgumentError(f"adapter_dir={self.adapter_folder}: there is no such folder")
        if not 0 <= self.port < 2**16:
            raise ArgumentError(f"port={self.port} must lie between 0 and 65535")
        if self.host not in LOOPBACK and not self.keys and not self.without_key:
            raise ArgumentError(
                f"host={self.host} is reached from other machines, and there is no API key: give one, or allow "
                "everybody with without_key=True"
            )

    def listener(self) -> socket.socket:
        """Open the socket that listens. ArgumentError: the address is taken, or is not this machine's."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((self.host, self.port))
            opened.listen(1024)
            opened.setblocking(False)
        except OSError as error:
            opened.close()
            if error.errno == errno.EADDRINUSE:
                raise ArgumentError(
                    f"port={self.port} of {self.host} is taken: stop the program that has it, or take another port"
                ) from None
            raise ArgumentError(f"host={self.host} port={self.port}: {error.strerror or error}") from None
        return opened

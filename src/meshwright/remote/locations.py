"""Files and folders behind URLs. Every byte outside of local disks passes here.

    s3://BUCKET/KEY    gs://BUCKET/KEY    az://CONTAINER/KEY    hf://datasets/ORG/NAME/FILE    memory://NAME

Credentials come from each library's own chain: environment, profile, or the role of the machine. fsspec is imported
with the first URL, its libraries with the first of their scheme.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from meshwright.spec.errors import PlanError, StoreError, printable
from meshwright.spec.extras import require

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "hf": "hub", "memory": ""}
"""Scheme -> the extra that installs its library. Empty: fsspec has it itself."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")

REMEDIES = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "gcs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hub": "run `hf auth login`, or set HF_TOKEN",
}
"""Extra -> how a user gives its library credentials."""

NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "DefaultCredentialsError", "ClientAuthenticationError", "LocalTokenNotFoundError",
}  # fmt: skip
"""Classes of the libraries' errors, by name: none of them is imported for it."""


def is_url(path: object) -> bool:
    """Return whether a path names a scheme, known or not: `s3://bucket/key`."""
    return bool(_SCHEME.match(str(path)))


def scheme(url: str) -> str:
    """Return the scheme of a URL in lower case."""
    match = _SCHEME.match(url)
    assert match is not None, url
    return match[1].lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file below a location."""

    name: str
    """Path below the location, with slashes."""
    size_bytes: int
    version: str
    """Changes with the contents: an ETag, a checksum or a time. Empty = the file system has none."""


@dataclass(frozen=True, slots=True)
class Location:
    """A file or a folder behind a URL. Operations raise StoreError, in one line with a remedy."""

    url: str
    """The URL, with no slash at its end."""
    filesystem: Any = field(compare=False, repr=False)
    path: str = field(compare=False, repr=False)
    """The path as the file system itself writes it."""

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a URL's file system. No request is sent yet.

        Raises PlanError for a scheme that is unknown, or whose library is not installed.
        """
        url = url.rstrip("/")
        name = scheme(url) if is_url(url) else ""
        if name not in EXTRAS:
            known = ", ".join(f"{known}://" for known in EXTRAS)
            raise PlanError(f"{printable(url)} has a scheme that is not supported: take one of {known}, or a path")
        if EXTRAS[name]:
            require(EXTRAS[name], printable(url))
        import fsspec

        with _reporting(url):
            # Listings are never cached: other machines write, and a file that a listing lacked would stay missing.
            filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        return cls(url, filesystem, str(path))

    @classmethod
    def at(cls, path: str) -> Self:
        """Open a URL, or a path of this machine as one. Folders on the way to a local file are created."""
        if is_url(path):
            return cls.open(path)
        import fsspec

        local = str(Path(path).expanduser().absolute())
        return cls(local, fsspec.filesystem("file", auto_mkdir=True), local)

    @property
    def local(self) -> Path | None:
        """Path on this machine. None = behind a URL."""
        return None if is_url(self.url) else Path(self.url)

    def __truediv__(self, name: str) -> "Location":
        return Location(f"{self.url}/{name}", self.filesystem, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """Folder that holds this file or folder."""
        return Location(self.url.rpartition("/")[0], self.filesystem, self.path.rpartition("/")[0])

    def __str__(self) -> str:
        return printable(self.url)

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Read bytes `start` to `end`, by default all of the file. Raises FileNotFoundError where there is none."""
        with self.reporting():
            return bytes(self.filesystem.cat_file(self.path, start=start, end=end))

    def write(self, data: bytes) -> None:
        """Write a file at once: readers see all of it or nothing."""
        with self.reporting():
            self.filesystem.pipe_file(self.path, data)

    def open_file(self) -> IO[bytes]:
        """Open a file for reading, with a small buffer that reads ahead."""
        with self.reporting():
            stream: IO[bytes] = self.filesystem.open(self.path, "rb")
            return stream

    def create_file(self, part_bytes: int) -> IO[bytes]:
        """Open a file for writing, which appears when it is closed. `part_bytes`: sent at once, at least 5 MiB."""
        with self.reporting():
            stream: IO[bytes] = self.filesystem.open(self.path, "wb", block_size=part_bytes)
            return stream

    def upload(self, source: Path) -> None:
        """Copy a local file here. The library sends large files in parts."""
        with self.reporting():
            self.filesystem.put_file(str(source), self.path)

    def download(self, target: Path) -> None:
        """Copy this file to a local path."""
        with self.reporting():
            self.filesystem.get_file(self.path, str(target))

    def describe(self) -> RemoteFile | None:
        """Return the file's size and version. None = there is no such file."""
        try:
            with self.reporting():
                entry = self.filesystem.info(self.path)
        except FileNotFoundError:
            return None
        return _remote_file(self.name, entry) if entry["type"] == "file" else None

    def list_files(self) -> list[RemoteFile]:
        """List all files below this folder by name, at any depth. Empty when there is none."""
        with self.reporting():
            entries = self.filesystem.find(self.path, detail=True)
        folder = self.path.strip("/") + "/"
        files = [
            _remote_file(path.strip("/").removeprefix(folder), entry)
            for path, entry in entries.items()
            if entry["type"] == "file" and path.strip("/").startswith(folder)
        ]
        return sorted(files, key=lambda file: file.name)

    def remove(self) -> None:
        """Remove a file. One that is not there is no error."""
        try:
            with self.reporting():
                self.filesystem.rm_file(self.path)
        except FileNotFoundError:
            return

    def refuse_unwritable(self, purpose: str) -> None:
        """Write and remove a small file. Raises StoreError: no credentials, no bucket, no right to write."""
        # Ranks of many machines may look at once.
        probe = self / f".probe-{socket.gethostname()}-{os.getpid()}"
        try:
            probe.write(b"may be removed\n")
            probe.remove()
        except FileNotFoundError:
            raise StoreError(f"{purpose}: {self} does not exist: create the bucket, or name another URL") from None
        except StoreError as error:
            raise error.reworded(before=f"{purpose}: ") from None

    def reporting(self) -> Any:
        """Turn the library's errors into StoreError. FileNotFoundError passes."""
        return _reporting(self.url)


def _remote_file(name: str, entry: dict[str, Any]) -> RemoteFile:
    versions = (entry.get(key) for key in ("ETag", "etag", "crc32c", "md5Hash", "content_md5", "blob_id", "created"))
    version = next((str(version).strip('"') for version in versions if version), "")
    return RemoteFile(name=name, size_bytes=int(entry["size"] or 0), version=version)


@contextmanager
def _reporting(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # each library has classes of its own, and some raise plain exceptions
        reason, may_pass = _explain(url, error)
        failure = StoreError(f"{printable(url)}: {reason}")
        failure.may_pass = may_pass
        raise failure from error


def _explain(url: str, error: Exception) -> tuple[str, bool]:
    """Return what is wrong and what to do, in one line, and whether another attempt may succeed."""
    classes = {kind.__name__ for cause in (error, error.__cause__, error.__context__) for kind in type(cause).__mro__}
    words = printable((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]
    remedy = REMEDIES.get(EXTRAS.get(scheme(url), ""), "check the credentials")
    if classes & NO_CREDENTIALS:
        return f"no credentials: {remedy}", False
    if isinstance(error, PermissionError):
        return f"not allowed ({words}): give these credentials the right, or take others", False
    if isinstance(error, TimeoutError | ConnectionError) or "EndpointConnectionError" in classes:
        return f"cannot be reached ({words}): check the network and the address", True
    return f"{words}: fix that, or name another URL", True

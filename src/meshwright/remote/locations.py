"""Files and folders behind URLs. Every byte outside of local disks passes here.

    s3://BUCKET/KEY    gs://BUCKET/KEY    az://CONTAINER/KEY    hf://buckets/ORG/NAME/FILE    memory://NAME

A request that fails is repeated, unless another attempt would fail, too. Credentials come from each library's own
chain: environment, profile, or the role of the machine. fsspec is imported with the first URL, its libraries with the
first of their scheme.
"""

import errno
import hashlib
import importlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshwright.spec.errors import PlanError, StoreError, printable
from meshwright.spec.extras import require
from meshwright.spec.plan.plan import URL
from meshwright.spec.units import many

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "hf": "hub", "memory": ""}
"""Scheme -> the extra that installs its library. Empty: fsspec has it itself."""
DRAWING = {"s3": "botocore.retryhandler", "gcs": "gcsfs.retry"}
"""Extra -> the module of its library that draws its pauses from Python's global random generator."""
OPTIONS = {"s3": {"config_kwargs": {"retries": {"mode": "legacy"}}}}
"""Extra -> options of its file system. Another mode of boto's has bound the global generator where it is defined."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of the local disk that a download is written to. No library reports the store with them."""

REMEDIES = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "gcs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hub": "run `hf auth login`, or set HF_TOKEN",
}
"""Extra -> how a user gives its library credentials."""

PIECE_BYTES = 8 * 2**20
"""Bytes that a stream sends or reads at once. S3 takes parts of 5 MiB or more."""
NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "DefaultCredentialsError", "ClientAuthenticationError", "LocalTokenNotFoundError",
}  # fmt: skip
"""Classes of the libraries' errors, by name: none of them is imported for it."""
RIGHTS = {
    # Without the second right, a file that is missing reads like one that is forbidden.
    "GetObject": "s3:GetObject and s3:ListBucket", "HeadObject": "s3:GetObject and s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket", "ListObjects": "s3:ListBucket", "HeadBucket": "s3:ListBucket",
    "DeleteObject": "s3:DeleteObject", "DeleteObjects": "s3:DeleteObject", "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject", "UploadPart": "s3:PutObject", "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload", "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}  # fmt: skip
"""Request of S3 -> the right that it takes."""
DENIED = ("AccessDenied", "403", "Forbidden")
"""Codes of S3 for a right that is missing. Other refusals, such as of an archived object, have other remedies."""
NOT_VALID = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
"""Codes of S3 in messages about keys that are wrong or too old."""
NO_ACCOUNT = "unable to connect to account"
"""Beginning of adlfs' message without credentials, which has no class of its own."""
UNREACHABLE = {"TimeoutError", "ConnectionError", "EndpointConnectionError", "ServiceRequestError",
               "ClientConnectionError", "NetworkError", "TimeoutException"}  # fmt: skip
NOT_FOUND = {"ResourceNotFoundError", "RepositoryNotFoundError", "BucketNotFoundError", "EntryNotFoundError"}
"""Classes of errors for a missing container, repository or file. Other libraries raise FileNotFoundError."""
GATED = "GatedRepoError"
"""Class of the Hub's error for a repository that waits for consent."""
VERSIONS = ("ETag", "etag", "crc32c", "md5Hash", "content_md5", "blob_id", "xet_hash", "created")
"""Names that libraries give to a file's version, the surest first."""

ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""Pauses before another attempt double from the first to the longest. Eight attempts take half a minute."""
LONGEST_S = 600.0
"""After this time no third attempt begins: each may itself have waited for the network."""

T = TypeVar("T")
log = logging.getLogger(__name__)


def is_url(path: object) -> bool:
    """Return whether a path names a scheme, known or not: `s3://bucket/key`."""
    return bool(scheme(path))


def scheme(path: object) -> str:
    """Return the scheme of a URL in lower case. Empty = a path of this machine."""
    match = URL.match(str(path))
    return match[1].lower() if match else ""


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
    """A file or a folder behind a URL.

    Operations repeat requests that fail (`persist`), and raise StoreError, in one line with a remedy.
    """

    url: str
    """The URL, with no slash at its end."""
    filesystem: Any = field(compare=False, repr=False)
    path: str = field(compare=False, repr=False)
    """The path as the file system itself writes it."""
    attempts: int = field(default=ATTEMPTS, compare=False, repr=False)
    """Attempts of each request."""

    @classmethod
    def open(cls, url: str) -> "Location":
        """Open a URL's file system. No request is sent yet.

        Raises PlanError for a scheme that is unknown, or whose library is not installed.
        """
        name = scheme(url)
        url = name + url.rstrip("/")[len(name) :]
        if name not in EXTRAS:
            known = ", ".join(f"{known}://" for known in EXTRAS)
            raise PlanError(f"{printable(url)} has a scheme that is not supported: take one of {known}, or a path")
        if url.endswith(":"):
            raise PlanError(f"{printable(url)}// names no bucket: give one, as {name}://bucket/runs/a")
        if extra := EXTRAS[name]:
            require(extra, printable(url))
        import fsspec

        with reporting(url):
            # Listings are never cached: other machines write, and a file that a listing lacked would stay missing.
            filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **OPTIONS.get(extra, {}))
        if extra == "gcs":  # it logs each failed request with a traceback, and each is reported here
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        if extra in DRAWING:
            # The state of the global generator is part of a checkpoint: no request may change it, whatever fails.
            vars(importlib.import_module(DRAWING[extra]))["random"] = random.Random()
        if extra == "hub":
            return HubLocation(url, filesystem, str(path))
        return Location(url, filesystem, str(path))

    @classmethod
    def at(cls, path: str) -> "Location":
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
        return replace(self, url=f"{self.url}/{name}", path=f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """Folder that holds this file or folder."""
        return replace(self, url=self.url.rpartition("/")[0], path=self.path.rpartition("/")[0])

    def __str__(self) -> str:
        return printable(self.url)

    def _request(self, action: str, work: Callable[[], T]) -> T:
        def attempt() -> T:
            with reporting(self.url, action):
                return work()

        return persist(attempt, self.attempts)

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Read bytes `start` to `end`, by default all of the file. Raises FileNotFoundError where there is none."""
        return self._request("read", lambda: bytes(self.filesystem.cat_file(self.path, start=start, end=end)))

    def write(self, data: bytes) -> None:
        """Write a file at once: readers see all of it or nothing."""
        if self.local is None:
            self._request("write", lambda: self.filesystem.pipe_file(self.path, data))
            return
        fresh = self.local.with_name(f".{self.name}.{os.getpid()}")
        with reporting(self.url, "write"):  # a full disk is reported in one line
            self.local.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(data)
            fresh.replace(self.local)

    def upload(self, source: Path, wait: Callable[[int], None] | None = None) -> None:
        """Copy a local file here. `wait`: called with the size of each piece before it is sent."""

        def send() -> None:
            if wait is None:  # the library sends large files in parts, several at once
                self.filesystem.put_file(str(source), self.path)
                return
            # Closing the stream sends the last part.
            with source.open("rb") as file, self.filesystem.open(self.path, "wb", block_size=PIECE_BYTES) as stream:
                while piece := file.read(PIECE_BYTES):
                    wait(len(piece))
                    stream.write(piece)

        self._request("write", send)

    def download(self, target: Path, begun: Callable[[], None] = lambda: None) -> None:
        """Copy this file to a local path. `begun` is called after each piece that has come."""
        callback = self._callback(begun)
        self._request("read", lambda: self.filesystem.get_file(self.path, str(target), callback=callback))

    def _callback(self, begun: Callable[[], None]) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"begun": lambda *_, **__: begun()})

    def hash(self) -> str:
        """Return the SHA-256 of this file in hexadecimal. Reads it in pieces, and writes nothing to disk."""

        def digest() -> str:
            with self.filesystem.open(self.path, "rb", block_size=PIECE_BYTES) as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()

        return self._request("read", digest)

    def describe(self) -> RemoteFile | None:
        """Return the file's size and version. None = there is no such file."""
        try:
            entry = self._request("read", self._info)
        except FileNotFoundError:
            return None
        return _remote_file(self.name, entry) if entry["type"] == "file" else None

    def _info(self) -> dict[str, Any]:
        return dict(self.filesystem.info(self.path))

    def list_files(self, pattern: str = "") -> list[RemoteFile]:
        """List all files below this folder by name, at any depth. Empty when there is none.

        `pattern`: only those that match it, as `2026/**/*.parquet`; `**` = any number of folders.
        """
        filesystem, folder = self.filesystem, self.path.strip("/") + "/"
        search, where = (filesystem.glob, f"{self.path}/{pattern}") if pattern else (filesystem.find, self.path)
        try:
            entries = self._request("list", lambda: search(where, detail=True))
        except FileNotFoundError:  # not even the bucket is there
            return []
        files = [
            _remote_file(path.strip("/").removeprefix(folder), entry)
            for path, entry in entries.items()
            if entry["type"] == "file" and path.strip("/").startswith(folder)
        ]
        return sorted(files, key=lambda file: file.name)

    def list_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file below this folder, at any depth, by its name."""
        return {file.name: file.size_bytes for file in self.list_files()}

    def remove(self) -> None:
        """Remove a file. One that is not there is no error."""
        with suppress(FileNotFoundError):
            self._request("remove", lambda: self.filesystem.rm_file(self.path))

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files below this folder."""
        for name in names:
            (self / name).remove()

    def drop_unfinished_uploads(self) -> None:
        """Remove parts that killed processes have left below this folder, which no listing shows but S3 bills."""
        if not hasattr(self.filesystem, "list_multipart_uploads"):
            return
        bucket, _, folder = self.path.partition("/")
        with reporting(self.url, "list unfinished uploads"):
            listed = self.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{folder}/")
            for upload in listed.get("Uploads", ()):
                self.filesystem.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def refuse_unwritable(self, purpose: str) -> None:
        """Write and remove a small file, in one attempt each.

        Raises StoreError: no credentials, no bucket, no right to write.
        """
        # Ranks of many machines may look at once.
        probe = f"{self.path}/.probe-{socket.gethostname()}-{os.getpid()}"
        try:
            with reporting(self.url, "write"):
                self.filesystem.pipe_file(probe, b"may be removed\n")
            with reporting(self.url, "remove"):
                self.filesystem.rm_file(probe)
        except FileNotFoundError:
            raise StoreError(f"{purpose}: {self} does not exist: create it, or name another URL") from None
        except StoreError as error:
            raise error.reworded(before=f"{purpose}: ") from None


@dataclass(frozen=True, slots=True)
class HubLocation(Location):
    """A file or a folder of a repository or a bucket of the Hugging Face Hub.

    Each request that writes is a commit of a repository, or a batch of a bucket, and the Hub limits both: a repository
    takes 128 commits an hour. So files that belong together are sent and removed together.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.filesystem.dircache, _NoListings):
            self.filesystem.dircache = _NoListings()
            importlib.import_module("huggingface_hub.utils").disable_progress_bars()

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.filesystem.endpoint, token=self.filesystem.token)

    def write(self, data: bytes) -> None:
        """Write a file at once: readers see all of it or nothing."""
        self.upload_all([(data, self)])

    def upload_all(self, files: Sequence[tuple[str | bytes, Location]]) -> None:
        """Copy (local path or contents, URL) to files of this repository or bucket, by one request."""

        def send() -> None:
            resolved = [(source, self.filesystem.resolve_path(target.path)) for source, target in files]
            root = resolved[0][1]
            if hasattr(root, "bucket_id"):
                self._api.batch_bucket_files(root.bucket_id, add=[(source, to.path) for source, to in resolved])
                return
            from huggingface_hub import CommitOperationAdd

            self._api.create_commit(
                root.repo_id, [CommitOperationAdd(to.path_in_repo, source) for source, to in resolved],
                commit_message=f"Upload {many(len(files), 'file')} with meshwright",
                repo_type=root.repo_type, revision=root.revision,
            )  # fmt: skip

        self._request("write", send)

    def _callback(self, begun: Callable[[], None]) -> Any:
        from fsspec.callbacks import TqdmCallback

        # With another callback the library requests each piece by itself, and the Hub counts requests.
        return TqdmCallback(tqdm_cls=partial(_Progress, begun))

    def _info(self) -> dict[str, Any]:
        entry = self.filesystem.info(self.path)
        # Only with all that is known about the file comes its version.
        return dict(self.filesystem.info(self.path, expand_info=True) if entry["type"] == "file" else entry)

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files below this folder of a bucket, by one request."""

        def remove() -> None:
            folder = self.filesystem.resolve_path(self.path)
            self._api.batch_bucket_files(folder.bucket_id, delete=[f"{folder.path}/{name}" for name in names])

        if names:
            self._request("remove", remove)

    def refuse_unwritable(self, purpose: str) -> None:
        """Raise StoreError: no credentials, no repository or bucket, no right to write."""
        try:
            with reporting(self.url, "write"):
                root = self.filesystem.resolve_path(self.path)
                if not hasattr(root, "bucket_id"):  # a probe would be two commits
                    self._api.auth_check(root.repo_id, repo_type=root.repo_type, write=True)
                    return
        except FileNotFoundError:
            raise StoreError(
                f"{purpose}: {self} does not exist: create it, name another URL, or log in (`hf auth login`) if it is "
                "private"
            ) from None
        except StoreError as error:
            raise error.reworded(before=f"{purpose}: ") from None
        Location.refuse_unwritable(self, purpose)


class _NoListings(dict[str, Any]):
    """Cache of listings that is never used: other machines write, and the file system has no option against it."""

    def __contains__(self, key: object) -> bool:
        return False


class _Progress:
    """Progress bar with as much of tqdm's interface as a download asks for. Draws nothing."""

    def __init__(self, begun: Callable[[], None], total: float | None = None) -> None:
        self.begun, self.total, self.n = begun, total, 0

    def update(self, size_bytes: float = 1) -> None:
        self.begun()

    def set_postfix_str(self, *words: object, **options: object) -> None:
        """Show no speed."""

    def refresh(self) -> None:
        """Draw nothing."""

    def close(self) -> None:
        """Draw nothing."""


def _remote_file(name: str, entry: dict[str, Any]) -> RemoteFile:
    """Return a file by what the library knows about it."""
    version = next((str(entry[key]).strip('"') for key in VERSIONS if entry.get(key)), "")
    return RemoteFile(name=name, size_bytes=int(entry["size"] or 0), version=version)


@contextmanager
def reporting(url: str, action: str = "") -> Iterator[None]:
    """Turn the library's errors into StoreError. FileNotFoundError passes. `action`: read, write, list or remove."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # each library has classes of its own, and some raise plain exceptions
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & NOT_FOUND and GATED not in kinds:
            raise FileNotFoundError(url) from error
        reason, may_pass = _explain(url, error, action)
        failure = StoreError(f"{printable(url)}: {reason}")
        failure.may_pass = may_pass
        raise failure from error


def _explain(url: str, error: Exception, action: str) -> tuple[str, bool]:
    """Return what is wrong and what to do, in one line, and whether another attempt may succeed."""
    causes = (error, error.__cause__, error.__context__)
    classes = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    words = printable((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]
    remedy = REMEDIES.get(EXTRAS.get(scheme(url), ""), "check the credentials")
    if classes & NO_CREDENTIALS or words.startswith(NO_ACCOUNT):
        return f"no credentials: {remedy}", False
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"no copy could be written to this machine ({os.strerror(error.errno)}): free some space there", False
    denied: Any = next((cause for cause in causes if hasattr(cause, "operation_name")), None)  # of S3
    code = denied.response.get("Error", {}).get("Code", "") if denied is not None else ""
    if code in NOT_VALID or any(code in words for code in NOT_VALID):
        return f"these credentials are not valid ({words}): {remedy}", False
    status = getattr(getattr(error, "response", None), "status_code", 0)  # of the Hub
    if status == 401:
        return f"these credentials are not valid ({words}): {remedy}", False
    if isinstance(error, PermissionError) or status == 403 or GATED in classes:
        refused = f"not allowed to {action or 'do this'} ({words})"
        if denied is None or "kms:" in words:  # the words name the right
            return f"{refused}: give these credentials the right, or take others", False
        if code not in DENIED:
            return f"{refused}: see what the store asks for", False
        right = RIGHTS.get(denied.operation_name, f"to {denied.operation_name}")
        return f"{refused}: give these credentials the right {right}, or take others", False
    if "OfflineModeIsEnabled" in classes:
        return "HF_HUB_OFFLINE is set: unset it, or name a path of this machine", False
    if classes & UNREACHABLE:
        return f"cannot be reached ({words}): check the network and the address", True
    return f"{words}: fix that, or name another URL", True


def persist(work: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """Repeat a request until it succeeds, with growing pauses, at most so many times or about LONGEST_S.

    What no repetition can cure is raised at once: a missing file, missing credentials, a missing right.
    """
    begun_s = time.monotonic()
    for attempt in range(attempts):
        try:
            return work()
        except StoreError as error:
            is_late = attempt > 0 and time.monotonic() - begun_s > LONGEST_S
            if not error.may_pass or is_late or attempt == attempts - 1:
                raise
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
            log.debug("%s: attempt %d of %d", error, attempt + 1, attempts)
        # Ranks that failed together must not come back together.
        time.sleep(pause_s * (0.5 + random.Random().random()))
    raise AssertionError("the last attempt returns or raises")

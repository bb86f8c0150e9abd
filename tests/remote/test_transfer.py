"""Copies to and from URLs: with failing requests, on a full disk, with leftovers, and beside a training run."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.remote import locations, transfer
from meshwright.remote.locations import Location, reporting
from meshwright.spec.errors import StoreError
from tests.remote import object_store
from tests.remote.object_store import FaultyStore


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    with object_store.serve() as (address, faulty):
        patch = pytest.MonkeyPatch()
        object_store.use(patch, address)
        yield faulty
        patch.undo()


@pytest.fixture
def folder(server: FaultyStore, request: pytest.FixtureRequest) -> Location:
    server.share = 0.0
    return Location.open(f"s3://{object_store.BUCKET}/{request.node.name}")


@pytest.mark.parametrize("mode", ["legacy", "standard"])
def test_failing_requests_leave_the_global_random_generator_alone(
    mode: str, server: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is part of a checkpoint, and shards are fetched in a training process."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(locations, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("AWS_RETRY_MODE", mode)
    folder = Location.open(f"s3://{object_store.BUCKET}/random-{mode}")
    names = [str(number) for number in range(20)]
    for name in names:
        (tmp_path / name).write_text(name)
    server.share, before, state = 0.3, server.failures, random.getstate()
    transfer.upload([(tmp_path / name, folder / name, "") for name in names])
    transfer.download([(folder / name, tmp_path / f"{name}.copy", "") for name in names])
    folder.list_files()
    server.share = 0.0
    assert server.failures - before > 5, "no request failed"
    assert random.getstate() == state


def test_repetitions_end_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(locations, "LONGEST_S", 0.0)
    attempts = []

    def work() -> None:
        attempts.append(1)
        raise StoreError("later")

    with pytest.raises(StoreError, match="later"):
        locations.persist(work)
    assert len(attempts) == 2


def test_a_full_disk_is_named_at_once(folder: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fill(*words: Any, **options: Any) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder / "a").write(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(folder.filesystem, "get_file", fill)
        with pytest.raises(StoreError, match=r"machine \(No space left on device\): free some space there"):
            transfer.download([(folder / "a", tmp_path / "a", "")])
        assert len(calls) == 1
    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(StoreError, match=r"/a cannot be written: No space left on device; free some space"):
        transfer.download([(folder / "a", tmp_path / "a", "")])


@pytest.mark.parametrize(
    ("url", "error", "sentence", "may_pass"),
    [
        # As adlfs 2026.8 and gcsfs 2026.10 raise them, against Azurite and a storage emulator.
        ("az://box/x", ValueError("unable to connect to account for Must provide either a connection_string"),
         "no credentials: set AZURE_STORAGE_CONNECTION_STRING", False),
        ("az://box/x", type("ServiceRequestError", (Exception,), {})("Cannot connect to host"),
         r"cannot be reached \(Cannot connect to host\): check the network", True),
        ("gs://bucket/x", type("ClientConnectorError", (type("ClientConnectionError", (OSError,), {}),), {})("no host"),
         r"cannot be reached \(no host\): check the network", True),
        ("gs://bucket/x", type("DefaultCredentialsError", (Exception,), {})("not found"),
         "no credentials: run `gcloud auth application-default login`", False),
        ("s3://bucket/x", TimeoutError("late"), r"cannot be reached \(late\)", True),
    ],
)  # fmt: skip
def test_errors_of_each_library_become_one_line(url: str, error: Exception, sentence: str, may_pass: bool) -> None:
    with pytest.raises(StoreError, match=f"^{url}: {sentence}") as raised, reporting(url):
        raise error
    assert raised.value.may_pass == may_pass


def test_a_container_that_is_not_there_is_a_missing_file() -> None:
    error = type("ResourceNotFoundError", (Exception,), {})("The specified container does not exist.")
    with pytest.raises(FileNotFoundError), reporting("az://nobox/x"):
        raise error


def test_parts_of_a_killed_process_are_removed(folder: Location, tmp_path: Path) -> None:
    (folder / "a").write(b"a")
    for name, age_s in (("old", 2 * transfer.LEFTOVER_S), ("fresh", 0.0)):
        (tmp_path / f".{name}.1-1.part").touch()
        changed_s = (tmp_path / f".{name}.1-1.part").stat().st_mtime - age_s
        os.utime(tmp_path / f".{name}.1-1.part", (changed_s, changed_s))
    transfer.download([(folder / "a", tmp_path / "a", "")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fresh.1-1.part", "a"]


def test_a_long_download_reports_each_piece(folder: Location, tmp_path: Path) -> None:
    (folder / "a").write(bytes(20 * 2**20))
    pieces = []
    transfer.download([(folder / "a", tmp_path / "a", "")], lambda: pieces.append(1))
    assert len(pieces) > 1


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["a.jsonl", "x/a.jsonl", "x/y/b.gz"]),
        ("*.jsonl", ["a.jsonl"]),
        ("?/*.jsonl", ["x/a.jsonl"]),
        ("**/a.jsonl", ["a.jsonl", "x/a.jsonl"]),
        ("x/**", ["x/a.jsonl", "x/y/b.gz"]),
        ("[ab]*", ["a.jsonl"]),
        ("nothing*", []),
    ],
)
def test_a_pattern_matches_as_in_a_shell(server: FaultyStore, pattern: str, names: list[str]) -> None:
    folder = Location.open(f"s3://{object_store.BUCKET}/patterns")
    for name in ("a.jsonl", "x/a.jsonl", "x/y/b.gz"):
        (folder / name).write(b"a")
    assert [file.name for file in folder.list_files(pattern)] == names


def test_a_local_file_is_written_at_once_too(tmp_path: Path) -> None:
    location = Location.at(str(tmp_path / "new" / "a"))
    location.write(b"first")
    location.write(b"second")
    assert location.read() == b"second" and [path.name for path in (tmp_path / "new").iterdir()] == ["a"]


def test_a_refusal_names_the_right_that_is_missing(folder: Location, server: FaultyStore, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"a")
    requests = {
        r"write \(.*\): give these credentials the right s3:PutObject, or": lambda: (folder / "a").write(b"a"),
        r"write \(.*\): .* the right s3:PutObject, ": lambda: (folder / "a").upload(file),
        r"read \(.*\): .* the right s3:GetObject and s3:ListBucket, ": lambda: (folder / "a").read(),
        r"read \(.*\): .* the right s3:GetObject and s3:ListBucket,": lambda: (folder / "a").describe(),
        r"list \(.*\): .* the right s3:ListBucket, ": folder.list_files,
        r"remove \(.*\): .* the right s3:DeleteObject, ": lambda: (folder / "a").remove(),
    }
    server.share, server.statuses = 1.0, ("403 AccessDenied",)
    try:
        for sentence, request in requests.items():
            with pytest.raises(StoreError, match=f"not allowed to {sentence}") as raised:
                request()
            assert "\n" not in str(raised.value) and not raised.value.may_pass
    finally:
        server.share, server.statuses = 0.0, object_store.TRANSIENT


def test_other_refusals_than_a_missing_right_name_none(folder: Location, server: FaultyStore) -> None:
    """A clock that is wrong, or a key: no right would help."""
    server.share, server.statuses = 1.0, ("403 RequestTimeTooSkewed",)
    try:
        with pytest.raises(StoreError, match=r"not allowed to write \(.*\): see what the store asks for") as raised:
            (folder / "a").write(b"a")
        server.statuses = ("403 InvalidAccessKeyId",)
        with pytest.raises(StoreError, match=r"these credentials are not valid \(.*\): set AWS_PROFILE"):
            (folder / "a").write(b"a")
    finally:
        server.share, server.statuses = 0.0, object_store.TRANSIENT
    assert not raised.value.may_pass


def test_the_probe_tells_a_right_to_write_from_one_to_remove(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(folder.filesystem, "rm_file", refuse)
    with pytest.raises(StoreError, match=r"store.url: .*: not allowed to remove \(Access Denied\): give"):
        folder.refuse_unwritable("store.url")

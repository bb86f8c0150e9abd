"""Models, runs and files behind URLs as local copies, and results that go to a URL.

A copy lies in the user's cache and is compared with the store at each use: only what has changed is downloaded.
"""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.remote.locations import Location, RemoteFile
from meshwright.remote.transfer import download, persist, upload
from meshwright.spec.errors import StoreError
from meshwright.spec.units import gib
from meshwright.spec.user_cache import lock, writable_root
from meshwright.store.durable import free_bytes, replace_file
from meshwright.store.mirror import CHECKPOINTS, StoredRun

MANIFEST = ".copied.json"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".gguf")
"""Endings of weights in formats that are not read where safetensors are there."""
log = logging.getLogger(__name__)


def copy_to_cache(url: str) -> Path:
    """Return a local copy of a file, a folder, or a run behind a URL. Of a run it has the newest checkpoint.

    Processes of one machine share it: one downloads, the others wait. Raises StoreError, PlanError.
    """
    location = Location.open(url)
    name = hashlib.sha256(location.url.encode()).hexdigest()[:16]
    folder = writable_root() / "remote" / name
    with lock(folder):
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / location.name
        if single := persist(location.describe):
            _bring(location.parent, [single], folder)
            return target
        files = persist(location.list_files)
        if not files:
            raise StoreError(f"{location} is neither a file nor a folder with files: check the name, and its bucket")
        run = StoredRun(location)
        if any(file.name.startswith(f"{CHECKPOINTS}/") for file in files):
            return _bring_run(run, target)
        if any(file.name.endswith(".safetensors") for file in files):
            files = [file for file in files if not file.name.endswith(OTHER_WEIGHTS)]
        target.mkdir(exist_ok=True)
        _bring(location, files, target)
        return target


def _bring_run(run: StoredRun, target: Path) -> Path:
    """Bring the records of a run, and its newest sound checkpoint."""
    run.fetch_records(target)
    for stored in reversed(run.list_checkpoints()):
        if problem := run.find_problem(stored.name):
            log.warning("passed over: checkpoint %s: %s", run.checkpoints / stored.name, problem)
            continue
        path = target / CHECKPOINTS / f"step-{stored.step:06d}"
        if not path.is_dir():
            _refuse_full(target, stored.size_bytes, run.location)
            run.publish(stored.name, run.fetch(stored.name, target / CHECKPOINTS))
        for older in (target / CHECKPOINTS).iterdir():
            if older != path:
                shutil.rmtree(older, ignore_errors=True)
        return target
    raise StoreError(f"{run.location} has no checkpoint that can be used: see `meshwright runs {run.location}`")


def _bring(source: Location, files: list[RemoteFile], target: Path) -> None:
    """Download what is new or has changed, and remove what the store no longer has."""
    manifest = target / MANIFEST
    try:
        copied = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        copied = {}
    wanted = {file.name: [file.size_bytes, file.version] for file in files}
    missing = [name for name in wanted if copied.get(name) != wanted[name] or not (target / name).is_file()]
    _refuse_full(target, sum(file.size_bytes for file in files if file.name in missing), source)
    for name in missing:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
    if missing:
        log.info("downloading %d files of %s", len(missing), source)
    download([(source / name, target / name, "") for name in missing])
    for name in set(copied) - set(wanted):
        (target / name).unlink(missing_ok=True)
    replace_file(manifest, json.dumps(wanted).encode())


def _refuse_full(target: Path, needed_bytes: int, source: Location) -> None:
    free = free_bytes(target)
    if free is not None and free < needed_bytes:
        raise StoreError(
            f"a copy of {source} takes {gib(needed_bytes)}, and {gib(free)} are free in {target.parent}: free some "
            "space, or set XDG_CACHE_HOME to a larger disk"
        )


@contextmanager
def upload_afterwards(url: str) -> Iterator[Path]:
    """Yield a local path to write to, and upload the file or folder there when the block ends without an error.

    Raises StoreError before the block when the URL cannot be written, or holds something already.
    """
    location = Location.open(url)
    location.parent.refuse_unwritable(url)
    if persist(location.describe) or persist(location.list_files):
        raise StoreError(f"{location} is there already: name another URL, or remove it first")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / location.name
        yield path
        if path.is_file():
            upload([(path, location)])
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            upload([(file, location / file.relative_to(path).as_posix()) for file in files])

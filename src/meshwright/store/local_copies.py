"""Models, runs and files behind URLs as local copies, and results that go to a URL.

Copies are files of the user's cache. Each use compares them with the store and downloads what has changed.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.remote.locations import Location, RemoteFile, scheme
from meshwright.remote.transfer import download, upload
from meshwright.spec.errors import StoreError
from meshwright.spec.user_cache import lock, writable_root
from meshwright.store import checkpoint_folder
from meshwright.store.durable import check_room, replace_file
from meshwright.store.run_folder import BEST, LAST
from meshwright.store.stored_run import CHECKPOINTS, StoredRun

MANIFEST = ".copied.json"
UNUSED_S = 86_400.0
"""Age from which on a copy of an earlier checkpoint goes. Until then another process may read it."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".gguf")
"""Endings of weights in formats that are not read where safetensors are there."""
log = logging.getLogger(__name__)


def copy_to_cache(url: str, which: str = LAST) -> Path:
    """Return a local copy of a file, a folder, or a run behind a URL. `which`: checkpoint of a run, or best, or last.

    Processes of one machine share it: one downloads, the others wait. Raises StoreError, PlanError.
    """
    location = Location.open(url)
    folder = writable_root() / "remote" / hashlib.sha256(location.url.encode()).hexdigest()[:16]
    with lock(folder):
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / location.name
        if single := location.describe():
            _bring(location.parent, [single], folder)
            return target
        files = location.list_files()
        if not files:
            raise StoreError(f"{location} is neither a file nor a folder with files: check the name, and its bucket")
        if any(file.name.startswith(f"{CHECKPOINTS}/") for file in files):
            return _bring_run(StoredRun(location), folder, which)
        if any(file.name.endswith(".safetensors") for file in files):
            files = [file for file in files if not file.name.endswith(OTHER_WEIGHTS)]
        target.mkdir(exist_ok=True)
        _bring(location, files, target)
        return target


def _bring_run(run: StoredRun, folder: Path, which: str) -> Path:
    """Bring the records of a run and a checkpoint. Each checkpoint has a copy of the run, by the hash of its COMMIT."""
    name = _choose(run, which)
    commit = checkpoint_folder.encode_commit(run.read_commit(name))
    copy = folder / hashlib.sha256(commit).hexdigest()[:16]
    target = copy / run.location.name
    run.fetch_records(target)
    if not checkpoint_folder.list_checkpoints(target / CHECKPOINTS):
        run.publish(name, run.fetch(name, target / CHECKPOINTS))
    os.utime(copy)
    for other in folder.iterdir():
        if time.time() - other.stat().st_mtime > UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)
    return target


def _choose(run: StoredRun, which: str) -> str:
    """Return the name of a run's newest sound checkpoint, of the best, or of that of a step."""
    step = int(which) if which.isdigit() else None
    sound = (saved for saved in run.newest_first() if step in (None, saved.step))
    chosen = checkpoint_folder.best_of(list(sound)) if which == BEST else next(sound, None)
    if chosen is not None:
        return chosen.name
    raise StoreError(
        f"{run.location} has no checkpoint that can be used ({which}): see `meshwright runs {run.location}`"
    )


def _bring(source: Location, files: list[RemoteFile], target: Path) -> None:
    """Download what is new or has changed, and remove what the store no longer has."""
    manifest = target / MANIFEST
    copied: dict[str, list[int | str]] = {}
    with suppress(OSError, ValueError):
        copied = json.loads(manifest.read_text(encoding="utf-8"))
    wanted = {file.name: [file.size_bytes, file.version] for file in files}
    missing = [name for name in wanted if copied.get(name) != wanted[name] or not (target / name).is_file()]
    check_room(target, sum(file.size_bytes for file in files if file.name in missing), source)
    if missing:
        log.info("downloading %d files of %s", len(missing), source)
    download([(source / name, target / name, "") for name in missing])
    for name in set(copied) - set(wanted):
        (target / name).unlink(missing_ok=True)
    replace_file(manifest, json.dumps(wanted).encode())


@contextmanager
def upload_afterwards(url: str) -> Iterator[Path]:
    """Yield a local path to write to, and upload the file or folder there when the block ends without an error.

    Raises StoreError before the block when the URL cannot be written, or holds something already.
    """
    location = Location.open(url)
    (location if scheme(url) == "hf" else location.parent).refuse_unwritable(url)
    present = [file.name for file in location.list_files()]
    # A new repository of the Hub is not empty.
    if location.describe() or present not in ([], [".gitattributes"]):
        raise StoreError(f"{location} is there already: name another URL, or remove it first")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / location.name
        yield path
        if path.is_file():
            upload([(path, location, "")])
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            upload([(file, location / file.relative_to(path).as_posix(), "") for file in files])

"""The run folder: paths of all that a run writes, metrics as JSON lines, the lock that keeps other processes out.

Model paths, dtypes and checkpoint names are checked here too, before torch is loaded.
"""

import errno
import fcntl
import json
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from meshwright import planfile
from meshwright.data import Tokenizer
from meshwright.formats.gguf.header import is_gguf
from meshwright.formats.hub import adapter_config
from meshwright.formats.hub.config import GENERATION, read_json
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, CheckpointError, PlanError, RunError, argument
from meshwright.spec.hub_names import explain_missing
from meshwright.spec.recipe.recipe import PRECISIONS
from meshwright.store import checkpoint_folder
from meshwright.store.durable import replace_file, report_in_one_line

_LOCK = ".lock"
_held: set[Path] = set()
_guard = threading.Lock()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLock:
    """A POSIX record lock that is held. The kernel releases it when the process dies, however it dies.

    Forked workers do not inherit it, so none of them can outlive it.
    """

    path: Path
    handle: int

    @classmethod
    def take(cls, folder: Path) -> "RunLock":
        """Lock `folder` for this process. Raises RunError naming the holder, OSError when the folder is read-only."""
        path = (folder / _LOCK).resolve()
        with _guard:  # record locks do not exclude their own process, and closing any handle releases them
            if path in _held:
                raise RunError(f"this process already runs in {folder}: choose another {argument('run')}")
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(handle, folder)
                since = datetime.now(UTC).isoformat("T", "seconds")
                signature = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(signature).encode() + b"\n", 0)
            except BaseException:
                os.close(handle)
                raise
            _held.add(path)
        return cls(path, handle)

    def release(self) -> None:
        """Release the folder. A second call does nothing."""
        with _guard:
            if self.path in _held:
                _held.discard(self.path)
                os.close(self.handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a network file system without locks
            log.warning("%s cannot be locked (%s): take care that no second run uses it", folder, error.strerror)
            return
        try:
            signature = json.loads(os.pread(handle, 4096, 0))
            holder = f"process {signature['pid']} on {signature['host']} since {signature['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            holder = "it did not sign"
        raise RunError(
            f"another run is going on in {folder} ({holder}): choose another {argument('run')}, or wait until it ends"
        ) from None


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
RUN = "a run folder, which run= named"


def no_model(path: Path) -> RunError:
    """Build the error for a path that holds no model of any kind."""
    instead = "a run folder, one of its checkpoints, a Hugging Face directory, or a .gguf file"
    if not path.exists():
        return RunError(explain_missing(str(path), instead))
    what = "has neither plan.yaml nor config.json" if path.is_dir() else "is a file of another kind"
    return RunError(f"{path} {what}: give {instead}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run's folder, also a context manager that releases its lock.

    It holds plan.yaml, tokenizer.json, metrics.jsonl, samples.jsonl, goodput.jsonl, dryrun.json, ledger.json, loss.png,
    reference.safetensors, checkpoints/ and hf/.
    """

    path: Path
    plan: Plan
    lock: RunLock | None = None
    """Held by the process that writes. None = opened for reading."""

    @classmethod
    def create(cls, path: Path, plan: Plan, tokenizer: Tokenizer | None, *, resume: bool = False) -> "RunFolder":
        """Create the folder, or continue in an existing one with `resume`. It is locked until `close`.

        Raises:
            RunError: Another process uses it, it holds a run and `resume` is false, its tokenizer differs, or it
                cannot be written.
            CheckpointError: A run is to be resumed but all its checkpoints are broken.
        """
        if path.exists() and not path.is_dir():
            raise RunError(f"{argument('run', path)} is a file, not a folder: choose another {argument('run')}")
        with report_in_one_line(path):
            path.mkdir(parents=True, exist_ok=True)
            file = path / "plan.yaml"
            # A profile leaves an equal plan, which may be overwritten.
            if (
                not (path / "checkpoints").exists()
                and file.exists()
                and file.read_text(encoding="utf-8", errors="replace") != planfile.content(plan, path)
            ):
                raise RunError(
                    f"{path} holds a plan.yaml that belongs to no training run; refusing to overwrite it: "
                    f"choose another {argument('run')}"
                )
            # Locked before any file is written: another process may train here.
            run = cls(path=path, plan=plan, lock=RunLock.take(path))
            try:
                run._prepare(tokenizer, resume)
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open a run for reading, even while it is training. Takes no lock. Raises RunError, PlanError."""
        if not (path / "plan.yaml").is_file():
            if not path.exists():
                raise RunError(explain_missing(str(path), RUN))
            raise RunError(f"{path} {'has no plan.yaml' if path.is_dir() else 'is a file'}: give {RUN}")
        return cls(path=path, plan=planfile.read(path / "plan.yaml"))

    @property
    def metrics(self) -> Path:
        """Path of the metrics: one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def goodput(self) -> Path:
        """Path of the accounts of wall time: one line per process that trained. A resumed run cuts nothing here."""
        return self.path / "goodput.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder that holds step-NNNNNN."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Path of the tokenizer. tokenizer_config.json beside it names the special tokens."""
        return self.path / "tokenizer.json"

    @property
    def hf(self) -> Path:
        """Path of the exported Hugging Face directory."""
        return self.path / "hf"

    @property
    def ledger(self) -> Path:
        """Path of the ledger: bytes that a step communicates and holds."""
        return self.path / "ledger.json"

    @property
    def dry_run(self) -> Path:
        """Path of the report of the dry run before training."""
        return self.path / "dryrun.json"

    @property
    def samples(self) -> Path:
        """Path of the samples generated during training: one JSON object per line."""
        return self.path / "samples.jsonl"

    @property
    def loss_plot(self) -> Path:
        """Path of the loss plot."""
        return self.path / "loss.png"

    def load_tokenizer(self, saved: Path) -> Tokenizer:
        """Load the tokenizer that a checkpoint was trained with.

        Raises RunError when its file is lost or replaced: with another tokenizer, token ids change their meaning.
        """
        if not self.tokenizer.is_file():
            raise RunError(
                f"{self.path} has lost its tokenizer.json, so its tokens cannot be read: put the file back. An "
                "export has a copy; train with resume=auto writes it again from the same text"
            )
        tokenizer, trained = Tokenizer.load(self.tokenizer), _tokenizer_of(saved)
        if trained and tokenizer.fingerprint != trained:
            raise RunError(
                f"{self.tokenizer} is not the tokenizer that {saved.name} was trained with: put that one back"
            )
        return tokenizer

    def end_ids(self) -> tuple[int, ...]:
        """Return the end-of-text ids from the generation_config.json of the initial model."""
        return ids_of(self.generation.get("eos_token_id"))

    @property
    def generation(self) -> dict[str, object]:
        """Contents of generation_config.json, copied from the initial model."""
        return read_json(self.path / GENERATION) or {}

    def keep_plan(self) -> None:
        """Write plan.yaml. A resumed run does so once its checkpoint is accepted: a refused plan replaces nothing."""
        planfile.write(self.plan, self.path / "plan.yaml")

    def close(self) -> None:
        """Release the folder's lock."""
        if self.lock:
            self.lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self, tokenizer: Tokenizer | None, resume: bool) -> None:
        """Check and prepare the locked folder."""
        # First: a save that was killed after COMMIT becomes a checkpoint here, and counts below.
        checkpoint_folder.sweep(self.checkpoints)
        checkpoints = checkpoint_folder.list_checkpoints(self.checkpoints)
        if not resume:
            checkpoint_folder.refuse_taken(self.path)
        if checkpoints and all(saved.problem for saved in checkpoints):
            raise CheckpointError(f"no checkpoint of {self.path} can be used; the last one: {checkpoints[-1].problem}")
        self._write_tokenizer(tokenizer, [saved for saved in checkpoints if not saved.problem])
        if not checkpoints:  # killed before its first checkpoint: the run starts again, and so do its metrics
            self.metrics.unlink(missing_ok=True)
            self.samples.unlink(missing_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        if not checkpoints:
            self.keep_plan()

    def _write_tokenizer(self, tokenizer: Tokenizer | None, checkpoints: list[checkpoint_folder.Saved]) -> None:
        """Write the tokenizer. In a run with checkpoints it must equal theirs, even if tokenizer.json was lost."""
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        if checkpoints and (
            self.tokenizer.exists() or fingerprint != _tokenizer_of(self.checkpoints / checkpoints[-1].name)
        ):
            before = Tokenizer.load(self.tokenizer).fingerprint if self.tokenizer.exists() else None
            if before is None and fingerprint:
                raise RunError(
                    f"{self.path} has lost its tokenizer.json, and data.tokenizer may be another one: put the file "
                    f"back (an export has a copy), or choose another {argument('run')}"
                )
            if (before or "") != fingerprint:
                raise RunError(
                    f"{self.path} was trained with another tokenizer (its tokenizer.json): take the data.tokenizer "
                    f"that it began with, or choose another {argument('run')}"
                )
        elif tokenizer:
            tokenizer.save(self.path)
        else:
            self.tokenizer.unlink(missing_ok=True)


def ids_of(entry: object) -> tuple[int, ...]:
    """Return the token ids of a generation config entry: an id, a list of ids, or nothing."""
    ids: Sequence[object] = entry if isinstance(entry, list) else [entry]
    return tuple(token for token in ids if isinstance(token, int))


def write_document(file: Path, document: Mapping[str, Any]) -> None:
    """Write ledger.json or dryrun.json of a run. Raises RunError when the disk is full."""
    with report_in_one_line(file):
        replace_file(file, (json.dumps(document, indent=1) + "\n").encode())


class MetricsLog:
    """Appends records to metrics.jsonl, one JSON object per line, each passed to the operating system at once.

    `silent` writes nothing; every rank but the first is silent.
    """

    def __init__(self, path: Path, *, silent: bool = False) -> None:
        self.path, self.silent = path, silent
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record, with NaN and infinities as strings, which JSON lacks. Raises RunError on a full disk."""
        if self.silent:
            return
        line = json.dumps(_as_json(record), allow_nan=False) + "\n"
        with report_in_one_line(self.path):
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            unwritten = line.encode()
            while unwritten:  # an unbuffered write may be partial
                unwritten = unwritten[self._file.write(unwritten) :]

    def sync(self) -> None:
        """Fsync all records. Called before a checkpoint, which must never be ahead of the metrics."""
        if self._file:
            with report_in_one_line(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. A later `append` reopens it."""
        if self._file:
            self._file.close()
            self._file = None

    def truncate_to(self, step: int) -> None:
        """Atomically drop the records after `step` and an incomplete last line.

        Raises RunError when a line up to that step is damaged.
        """
        self.close()
        if not self.path.exists():
            return
        lines, last = [], 0
        for number, line in _whole_lines(self.path):
            try:
                last = _parse_record(self.path, number, line).get("step", last)
            except RunError:
                if last < step:
                    raise
                break  # a power cut may damage lines after the last checkpoint, which are dropped anyway
            if last > step:
                break
            lines.append(line + b"\n")
        with report_in_one_line(self.path):
            replace_file(self.path, b"".join(lines))

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Read all records, with NaN and infinities as numbers again. Empty when there is no file yet.

        An incomplete last line is still being written, so it is skipped. Raises RunError for a damaged line.
        """
        return (
            [_from_json(_parse_record(path, number, line)) for number, line in _whole_lines(path)]
            if path.exists()
            else []
        )

    @staticmethod
    def losses(path: Path, every: int, most: int = 200) -> tuple[float, ...]:
        """Return the last `most` losses of every n-th step, or none for `every=0`. Raises RunError."""
        steps = [row for row in MetricsLog.read(path) if "kind" not in row] if every else []
        return tuple(row["loss"] for row in steps if row["step"] % every == 0)[-most:]


def _tokenizer_of(saved: Path) -> str:
    """Return the fingerprint of the tokenizer that a checkpoint was trained with. Empty when it records none."""
    try:
        state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(state.get("tokenizer", "")) if isinstance(state, dict) else ""


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with report_in_one_line(path):
        *lines, _torn = path.read_bytes().split(b"\n")
    yield from enumerate(lines, start=1)


def _parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
        raise RunError(f"{path} line {number} is not a record of a run: {line[:40]!r}; remove the line")
    return record


def refuse_constant(constant: str) -> None:
    """Reject NaN and infinities. Pass as `parse_constant` to json.loads."""
    raise ValueError(f"{constant} is no JSON")


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _from_json(inner) for name, inner in value.items()}
    return [_from_json(inner) for inner in value] if isinstance(value, list) else value


AUTO = "auto"
"""Dtype choice: fp32 on a CPU, the stored dtype on a GPU."""
LAST, BEST = "last", "best"
"""Checkpoint choice: the newest undamaged one, or the one with the lowest held-out loss."""
Kind = Literal["run", "folder", "gguf", "adapter"]
NAMES: dict[Kind, str] = {"folder": "a Hugging Face directory", "gguf": "a GGUF file", "adapter": "an adapter"}


def check_model(path: Path, *, dtype: str | None = None, checkpoint: str = LAST, named: str = "") -> Kind:
    """Return the kind of the model at `path`: a run or its checkpoint, a Hugging Face directory, GGUF, or PEFT adapter.

    `named` is the argument that named it, such as `against`. Raises RunError when there is no model, ArgumentError
    for an unknown dtype or checkpoint.
    """
    from meshwright.formats.hub.download import local_folder

    check_dtype(dtype, AUTO)
    kind = _kind(path if path.exists() else local_folder(path))
    if kind is None:
        sentence = str(no_model(path))
        raise RunError(sentence.replace(str(path), argument(named, path), 1) if named else sentence)
    if kind == "run":
        check_checkpoint(checkpoint)
    elif checkpoint != LAST:
        raise ArgumentError("checkpoint", checkpoint, remedy=f"{path} is {NAMES[kind]}, which has none; leave it out")
    return kind


def _kind(path: Path) -> Kind | None:
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_checkpoint(path):
        return "run"
    if (path / "config.json").is_file():
        return "folder"
    if is_gguf(path):
        return "gguf"
    return "adapter" if (path / adapter_config.CONFIG).is_file() else None


def check_dtype(dtype: str | None, *more: str) -> None:
    """Raise ArgumentError unless the dtype is None (as stored), fp32, bf16, fp16 or one of `more`."""
    if dtype is not None and dtype not in (*more, *PRECISIONS):
        raise ArgumentError("dtype", dtype, "is not known", f"take one of {', '.join((*more, *PRECISIONS))}")


def check_checkpoint(which: str) -> None:
    """Raise ArgumentError unless the word is last, best or the number of a step."""
    if which not in (LAST, BEST) and not which.isdigit():
        raise ArgumentError("checkpoint", which, "is not known", "take last, best, or the number of a step")


def check_gguf_path(out: Path) -> None:
    """Raise PlanError when a GGUF file cannot be created at this path."""
    if out.suffix != ".gguf":
        raise PlanError(f"{argument('out', out)} is one GGUF file, whose name ends with .gguf: take {out}.gguf")
    if out.exists():
        raise PlanError(f"{argument('out', out)} is there already: take another name, or remove it")

"""The run folder: where everything that a run leaves behind lies, and its metrics, a line a record."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwright import planfile
from meshwright.data import Tokenizer
from meshwright.model.hub.folder_config import GENERATION, read_json
from meshwright.spec import Plan
from meshwright.spec.errors import CheckpointError, RunError
from meshwright.spec.hub_names import missing
from meshwright.store import checkpoint_folder
from meshwright.store.durable import one_line, replace_file
from meshwright.store.lock import RunLock

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


RUN = "a run folder, which run= named"


def no_model(path: Path) -> RunError:
    """Of a place that holds no model of any kind."""
    instead = "a run folder, one of its checkpoints, a Hugging Face directory, or a .gguf file"
    if not path.exists():
        return RunError(missing(str(path), instead))
    what = "has neither plan.yaml nor config.json" if path.is_dir() else "is a file of another kind"
    return RunError(f"{path} {what}: give {instead}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """RUN/: plan.yaml, tokenizer.json, metrics.jsonl, samples.jsonl, dryrun.json, ledger.json, loss.png,
    reference.safetensors,
    checkpoints/, hf/. A context manager."""

    path: Path
    plan: Plan
    lock: RunLock | None = None
    """Held by the process that writes; None = opened to look."""

    @classmethod
    def create(cls, path: Path, plan: Plan, tokenizer: Tokenizer | None, *, resume: bool = False) -> "RunFolder":
        """Make the folder, or with `resume` go on in one, locked for this process until `close`.

        RunError: another process runs in it; it holds a run and `resume` is not given; it has another tokenizer; it
        cannot be written. CheckpointError: a run is to be resumed and every checkpoint of it is broken.
        """
        if path.exists() and not path.is_dir():
            raise RunError(f"run={path} is a file, not a folder: choose another run=")
        with one_line(path):
            path.mkdir(parents=True, exist_ok=True)
            if not (path / "checkpoints").exists() and _is_others(path / "plan.yaml", plan):
                raise RunError(
                    f"{path} holds a plan.yaml that belongs to no training run; refusing to overwrite it: "
                    "choose another run="
                )
            run = cls(path=path, plan=plan, lock=RunLock.take(path))
            try:
                run._prepare(tokenizer, resume)
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Look into a run, going on or not: takes no lock and changes nothing. RunError, PlanError."""
        if not (path / "plan.yaml").is_file():
            if not path.exists():
                raise RunError(missing(str(path), RUN))
            raise RunError(f"{path} {'has no plan.yaml' if path.is_dir() else 'is a file'}: give {RUN}")
        return cls(path=path, plan=planfile.read(path / "plan.yaml"))

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of step-NNNNNN."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's own file; tokenizer_config.json beside it names its marks."""
        return self.path / "tokenizer.json"

    @property
    def hf(self) -> Path:
        """The model as a Hugging Face directory."""
        return self.path / "hf"

    @property
    def ledger(self) -> Path:
        """What a step sends and holds."""
        return self.path / "ledger.json"

    @property
    def dry_run(self) -> Path:
        """What the dry run before it said."""
        return self.path / "dryrun.json"

    @property
    def samples(self) -> Path:
        """What the model answered while it was trained: one JSON object a line, as metrics."""
        return self.path / "samples.jsonl"

    @property
    def loss_plot(self) -> Path:
        """The picture of the loss."""
        return self.path / "loss.png"

    def known_tokenizer(self, saved: Path) -> Tokenizer:
        """The tokenizer that a checkpoint of the run was trained with. RunError where its file was lost or replaced:
        with any other the tokens of the model mean something else."""
        if not self.tokenizer.is_file():
            raise RunError(
                f"{self.path} has lost its tokenizer.json, without which nobody knows what its tokens mean: put the "
                "file back (an export has a copy; train with resume=auto makes it anew from the same text)"
            )
        found, trained = Tokenizer.load(self.tokenizer), _tokenizer_of(saved)
        if trained and found.fingerprint != trained:
            raise RunError(
                f"{self.tokenizer} is not the tokenizer that {saved.name} was trained with: put that one back"
            )
        return found

    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, as the model that the run began with says (generation_config.json)."""
        return ids_of(self.generation.get("eos_token_id"))

    @property
    def generation(self) -> dict[str, object]:
        """Its generation_config.json, which came with the weights that it began with."""
        return read_json(self.path / GENERATION) or {}

    def refuse_taken(self) -> None:
        """RunError where the folder already holds a run. Also for asking early, before hours of encoding."""
        checkpoint_folder.refuse_taken(self.path)

    def keep_plan(self) -> None:
        """Write plan.yaml; of a run that goes on only once its checkpoint fits, for a refused plan replaces none."""
        planfile.write(self.plan, self.path / "plan.yaml")

    def close(self) -> None:
        """Let others run in the folder."""
        if self.lock:
            self.lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self, tokenizer: Tokenizer | None, resume: bool) -> None:
        """The lock is held: nobody else changes the folder now."""
        checkpoint_folder.sweep(self.checkpoints)
        found = checkpoint_folder.listing(self.checkpoints)
        if not resume:
            self.refuse_taken()
        if found and all(saved.problem for saved in found):
            raise CheckpointError(f"no checkpoint of {self.path} can be used; the last one: {found[-1].problem}")
        self._keep_tokenizer(tokenizer, [saved for saved in found if not saved.problem])
        if not found:  # killed before its first checkpoint: the run starts again, and so do its metrics
            self.metrics.unlink(missing_ok=True)
            self.samples.unlink(missing_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        if not found:
            self.keep_plan()

    def _keep_tokenizer(self, tokenizer: Tokenizer | None, trained: list[checkpoint_folder.Saved]) -> None:
        """Of a run that has checkpoints it must be the same one; where the file was lost, the checkpoint tells."""
        mine = tokenizer.fingerprint if tokenizer else ""
        if trained and (self.tokenizer.exists() or mine != _tokenizer_of(trained[-1].path)):
            before = Tokenizer.load(self.tokenizer).fingerprint if self.tokenizer.exists() else None
            if before is None and mine:
                raise RunError(
                    f"{self.path} has lost its tokenizer.json, and data.tokenizer is not known to be the same: put the "
                    "file back (an export has a copy), or choose another run="
                )
            if (before or "") != mine:
                raise RunError(
                    f"{self.path} was trained with another tokenizer (its tokenizer.json), and tokens would change "
                    "their meaning: take the data.tokenizer it was begun with, or choose another run="
                )
        elif tokenizer:
            tokenizer.save(self.path)
        else:
            self.tokenizer.unlink(missing_ok=True)


def ids_of(value: object) -> tuple[int, ...]:
    """Token ids of a generation config, which holds one, a list of them, or none."""
    several: Sequence[object] = value if isinstance(value, list) else [value]
    return tuple(number for number in several if isinstance(number, int))


def keep(file: Path, document: Mapping[str, Any]) -> None:
    """Write ledger.json or dryrun.json of a run. RunError: disk full."""
    with one_line(file):
        replace_file(file, (json.dumps(document, indent=1) + "\n").encode())


class MetricsLog:
    """Appends records to metrics.jsonl: one JSON object a line, each handed to the system at once.

    `silent`: write nothing, on all ranks but the first.
    """

    def __init__(self, path: Path, *, silent: bool = False) -> None:
        self.path, self.silent = path, silent
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; NaN and infinities become strings, since JSON has no such numbers. RunError: disk full."""
        if self.silent:
            return
        line = json.dumps(_speakable(record), allow_nan=False) + "\n"
        with one_line(self.path):
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            left = line.encode()
            while left:  # an unbuffered write may take a part
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Force all records to the disk: before a checkpoint, so that it never knows more steps than they do."""
        if self._file:
            with one_line(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file:
            self._file.close()
            self._file = None

    def truncate_to(self, step: int) -> None:
        """Drop the records after `step` and a torn last line, at once: what remains is as if the run had ended there.

        RunError: a line up to that step is damaged.
        """
        self.close()
        if not self.path.exists():
            return
        kept, last = [], 0
        for number, line in _whole_lines(self.path):
            try:
                last = _parsed(self.path, number, line).get("step", last)
            except RunError:
                if last < step:
                    raise
                break  # what a power cut left after the records that count
            if last > step:
                break
            kept.append(line + b"\n")
        with one_line(self.path):
            replace_file(self.path, b"".join(kept))

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All records, NaN and infinities as numbers again; none where there is no file yet. RunError: a damaged line.

        A last line without its end is still being written, and left out.
        """
        return [_heard(_parsed(path, number, line)) for number, line in _whole_lines(path)] if path.exists() else []

    @staticmethod
    def losses(path: Path, every: int, most: int = 200) -> tuple[float, ...]:
        """Of every n-th step (0: of none), the last ones: more than what a smoothed curve still holds. RunError."""
        steps = [row for row in MetricsLog.read(path) if "kind" not in row] if every else []
        return tuple(row["loss"] for row in steps if row["step"] % every == 0)[-most:]


def _tokenizer_of(saved: Path) -> str:
    """The fingerprint of the tokenizer that a checkpoint was trained with; empty where it does not say."""
    try:
        found = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("tokenizer", "")) if isinstance(found, dict) else ""


def _is_others(path: Path, plan: Plan) -> bool:
    """Whether a plan file would be lost if this plan were written there: not where it says the same, as after a profile
    of the plan."""
    return path.exists() and path.read_text(encoding="utf-8", errors="replace") != planfile.content(plan, path.parent)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with one_line(path):
        *lines, _torn = path.read_bytes().split(b"\n")
    yield from enumerate(lines, start=1)


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
        raise RunError(f"{path} line {number} is no record of a run: {line[:40]!r}; remove the line")
    return record


def refuse_constant(constant: str) -> None:
    """For json.loads: NaN and infinities are errors."""
    raise ValueError(f"{constant} is no JSON")


def _speakable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _speakable(inner) for name, inner in value.items()}
    return [_speakable(inner) for inner in value] if isinstance(value, list | tuple) else value


def _heard(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _heard(inner) for name, inner in value.items()}
    return [_heard(inner) for inner in value] if isinstance(value, list) else value

"""Checkpoints: folders of safetensors shards plus state.json, valid once they contain COMMIT. No pickle.

    checkpoints/step-000060/
        shard-00001-model-00001-of-00002.safetensors   the shards that rank 0 owned; one series per rank
        state.json                                     everything that is not a tensor
        COMMIT                                         step, score, and the size and hash of every file

Tensors may be DTensors: each rank writes its shards and reads what it needs, so a checkpoint loads under any layout.
All ranks of `group` call `save` and `load` together; `stream` is for one process.

All random states of a process are saved as plain tensors, so that a resumed run draws the same numbers.
"""

import errno
import json
import logging
import platform
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshwright.parallel.groups.group import agree, broadcast_object, union_of_names
from meshwright.spec.errors import CheckpointError, DamagedCheckpoint, argument
from meshwright.spec.units import gib
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_files import (
    Assignment,
    CheckpointWriter,
    Kind,
    Reader,
    silence_warnings,
    unwrap_errors,
)
from meshwright.store.checkpoint_files import names as names
from meshwright.store.checkpoint_files import stream as stream
from meshwright.store.checkpoint_folder import Commit, FileRecord
from meshwright.store.checkpoint_folder import Saved as Saved
from meshwright.store.checkpoint_folder import find_best as find_best
from meshwright.store.checkpoint_folder import find_latest as find_latest
from meshwright.store.checkpoint_folder import list_checkpoints as list_checkpoints
from meshwright.store.checkpoint_folder import sweep as sweep
from meshwright.store.durable import free_bytes, write_file

if TYPE_CHECKING:
    from meshwright.store.folder_ranks import FolderRanks

RNG_PREFIX = "rng."
"""Prefix of random states in a checkpoint. A run resumed on other devices loads those that exist."""
_KIND = "MT19937"


def rng_state(rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, values): the states of Python's `random`, numpy, torch and the current CUDA device.

    Tensors are named rng.RANK.NAME, so that ranks do not overwrite each other. The device has no number in the name:
    which GPUs a process sees, and in what order, may change between runs. Generator objects are not included.
    """
    # Each is 627 numbers: words, position, whether a spare normal number exists, and that number. float64 holds 32-bit
    # integers exactly.
    _, words, spare = random.getstate()
    python = torch.tensor([*words, spare is not None, spare or 0.0], dtype=torch.float64)
    tensors = {"python": python, "numpy": _numpy_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return {f"{RNG_PREFIX}{rank}.{name}": state for name, state in tensors.items()}, {"rng": _KIND}


def set_rng_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any], rank: int = 0) -> None:
    """Restore the states from `rng_state`. Other names in `tensors` are ignored; a missing state stays unchanged."""
    if values.get("rng", _KIND) != _KIND:
        raise ValueError(f"random state of kind {values['rng']!r}, not {_KIND}")
    for name, state in tensors.items():
        owner, _, source = name.removeprefix(RNG_PREFIX).partition(".")
        if not name.startswith(RNG_PREFIX) or owner != str(rank):
            continue
        if source == "python":
            *words, has_spare, spare = state.tolist()
            random.setstate((3, tuple(int(word) for word in words), spare if has_spare else None))
        elif source == "numpy":
            *words, position, has_gauss, gauss = state.tolist()
            key = np.array(words, dtype=np.uint32)
            np.random.set_state((_KIND, key, int(position), int(has_gauss), gauss))
        elif source == "torch":
            torch.set_rng_state(state.cpu())
        elif source == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state.cpu())


def _numpy_state() -> Tensor:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != _KIND:
        raise ValueError(f"numpy's global generator is a {state['bit_generator']}, not the usual {_KIND}")
    inner = state["state"]
    return torch.tensor([*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]], dtype=torch.float64)


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

STATE = "state.json"
log = logging.getLogger(__name__)
_SPACE = (errno.ENOSPC, errno.EDQUOT)


def save(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Json],
    score: float | None,
    keep_last: int,
    uploading: Callable[[], int | None] = lambda: None,
    group: dist.ProcessGroup | None = None,
    check: Callable[[], None] = lambda: None,
    sharing: "FolderRanks | None" = None,
) -> Path:
    """Write `folder/step-NNNNNN` and return its path. The folder appears complete or not at all.

    Afterwards the `keep_last` newest checkpoints and the one with the lowest score remain. Checkpoints of later steps
    are removed: they belong to training that was abandoned by resuming from an earlier step. With `sharing`, it is
    `folder/.parts-step-NNNNNN` on each machine, and the two newest of these remain.

    Needs disk space for the new checkpoint in addition to all retained ones, and no memory beyond the tensors.

    Args:
        values: JSON state; rank 0's is written.
        uploading: Tells the step of an earlier checkpoint that must not be removed yet.
        check: Called before each tensor is written. An exception ends the save on all ranks.
        sharing: Where machines share no folder: each gets a hidden one with the files of its ranks, to be uploaded.

    Raises:
        CheckpointError: The disk is full or not writable (earlier checkpoints remain), or `values` is not JSON.
    """
    state = _encode_state(values)
    saving, target = checkpoint_folder.paths_of_step(folder, step)
    if sharing is not None:
        target = checkpoint_folder.path_of_parts(target)
    owns_folder = _rank(group) == 0 if sharing is None else sharing.index == 0
    commits: list[Commit] = []

    # Both run on the coordinator alone: before any rank writes, and after all have.
    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        saving.mkdir()

    def end(files: list[FileRecord]) -> None:
        write_file(saving / STATE, state)
        # COMMIT comes last: its presence says that all other files are complete on disk.
        files = [*files, checkpoint_folder.record_file(saving / STATE)]
        commits.append(Commit(step=step, score=_finite(score), files=tuple(files)))
        checkpoint_folder.commit(saving, target, commits[0])

    try:
        _write(tensors, CheckpointWriter(saving, begin, end, check), group)
    except BaseException as error:
        if owns_folder:
            shutil.rmtree(saving, ignore_errors=True)
        # A full disk gets a remedy; anything else is a fault or an interrupt.
        if not isinstance(error, OSError):
            raise
        needed_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        failure = _save_error(target, error, needed_bytes, platform.node() if sharing else "")
        failure.reported_elsewhere = _rank(group) > 0
        raise failure from None
    if sharing is None:
        if owns_folder:
            checkpoint_folder.remove_surplus(folder, step, keep_last, uploading())
        return target
    commits, under_way = broadcast_object(0, (commits, uploading()), group)

    def commit_parts() -> None:
        """Commit the files of this machine: COMMIT lists those of all, and each rank uploads its own by it."""
        try:
            if _rank(group) > 0:
                checkpoint_folder.commit(saving, target, commits[0])
            checkpoint_folder.remove_older_parts(folder, step, under_way)
        except OSError as error:
            shutil.rmtree(saving, ignore_errors=True)
            raise _save_error(target, error, commits[0].size_bytes, platform.node()) from None

    agree(commit_parts if owns_folder else lambda: None, group)
    return target


def find_newest_whole(
    candidates: Sequence[Path],
    group: dist.ProcessGroup | None = None,
    begun: Callable[[], None] = lambda: None,
    fetch: Callable[[Path, Path | None], Path | None] = lambda path, older: None,
) -> Path | None:
    """Return the first candidate whose bytes match its COMMIT. Log a warning for each damaged one before it.

    `fetch` is called with a damaged candidate and the next one, if any. On all ranks together it may bring a whole one
    from elsewhere that is as new, or newer than the next. It returns its path.

    Returns None without candidates. Raises CheckpointError when all are damaged or one is of a newer version.
    """
    damaged: list[DamagedCheckpoint] = []
    for path, older in zip_longest(candidates, candidates[1:]):
        try:
            verify(path, group, begun)
        except DamagedCheckpoint as error:
            # What is fetched has been compared with its hashes on the way.
            if (fetched := fetch(path, older)) != path:
                damaged.append(error)
            else:
                log.warning("replaced from the store: %s", error)
            if fetched is None:
                continue
            path = fetched
        # Only now is it certain that an older one is used instead.
        for damage in damaged if _rank(group) == 0 else ():
            log.warning("passed over: %s", damage)
        return path
    if not damaged:
        return None
    raise damaged[0].reworded(before=f"no checkpoint of {candidates[0].parent.parent} can be used; the last one: ")


def verify_named(
    checkpoint: Path, group: dist.ProcessGroup | None = None, begun: Callable[[], None] = lambda: None
) -> Path:
    """Verify a checkpoint that the user named and return it. Raises CheckpointError; no other one is tried."""
    try:
        verify(checkpoint, group, begun)
    except DamagedCheckpoint as error:
        advice = "take another one, or the run itself (resume=auto) for its newest that is whole"
        raise error.reworded(after=f"; {advice}") from None
    return checkpoint


def verify(
    checkpoint: Path, group: dist.ProcessGroup | None = None, begun: Callable[[], None] = lambda: None
) -> Commit:
    """Compare every byte with COMMIT. All ranks call this together; each hashes every n-th file.

    `begun` is called once per file. Raises DamagedCheckpoint, or CheckpointError for a newer version.
    """

    def read_and_hash() -> Commit:
        commit = checkpoint_folder.read_commit(checkpoint)
        checkpoint_folder.check_sizes(checkpoint, commit)
        checkpoint_folder.check_hashes(checkpoint, commit.files[_rank(group) :: _world(group)], begun)
        return commit

    return agree(read_and_hash, group)


def load(
    checkpoint: Path,
    tensors: Mapping[str, Tensor],
    *,
    subset: bool = False,
    group: dist.ProcessGroup | None = None,
    verified: bool = False,
) -> dict[str, Any]:
    """Fill `tensors` in place and return the saved values. Everything is verified before any tensor changes.

    Names (over all ranks), shapes and dtypes must equal the saved ones. Random states (rng.*) are filled where both
    sides have them. The files are read twice: once for hashes, once for tensors.

    Args:
        subset: The checkpoint may hold further tensors, such as the optimizer in addition to a model.
        verified: `verify` was called already, so the hashes are not read again.

    Raises:
        DamagedCheckpoint: A file differs from COMMIT.
        CheckpointError: The checkpoint is of another model or of a newer version.
    """
    commit = agree(lambda: checkpoint_folder.read_commit(checkpoint), group) if verified else verify(checkpoint, group)
    reader = Reader(checkpoint)
    # Every rank checks before any rank writes into a tensor: a load changes all tensors or none.
    saved = agree(reader.kinds, group)
    everyone = union_of_names(_drop_random(tensors), group) if _distributed() else set(tensors)
    agree(lambda: _check_same(checkpoint, tensors, saved, set(saved) if subset else everyone), group)
    wanted = {name: tensor for name, tensor in tensors.items() if saved.get(name) == _kind(tensor)}
    reader.fill(wanted, group, alone=not _distributed())
    return _decode_state(checkpoint, commit)


def read_values(checkpoint: Path) -> dict[str, Any]:
    """Read and verify the values saved next to the tensors. No tensor is read. Raises CheckpointError."""
    commit = checkpoint_folder.read_commit(checkpoint)
    # Tensors are not read, so their files need no hash.
    checkpoint_folder.check_hashes(checkpoint, [file for file in commit.files if file.name == STATE])
    return _decode_state(checkpoint, commit)


def assign_tensors(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> set[str]:
    """Return the names of the tensors that this rank writes in a save by all ranks of `group`.

    Identical pieces are written by one rank only. This plans a save and writes nothing.
    """
    assignment = Assignment()
    _write(tensors, assignment, group)
    return assignment.names


def _write(tensors: Mapping[str, Tensor], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
    with unwrap_errors(), silence_warnings():
        dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=not _distributed(),
        )


def _save_error(target: Path, error: OSError, needed_bytes: int, host: str) -> CheckpointError:
    """Return the error of a save with its remedy. `host` names the machine where each has a disk of its own."""
    reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    free = f"it needs {gib(needed_bytes)} and {gib(free_bytes(target.parent) or 0)} are free"
    remaining = "; earlier checkpoints are kept" if list_checkpoints(target.parent) else ""
    # A limit on file sizes is not cured by free space.
    if error.errno == errno.EFBIG:
        free, advice = f"it needs {gib(needed_bytes)}", "raise the limit on the size of a file (ulimit -f) and resume"
    else:
        advice = "free some space" if error.errno in _SPACE else "fix that"
        advice += " and resume" if remaining else f", or choose another {argument('run')}"
    where = f" on {host}" if host else ""
    return CheckpointError(f"checkpoint {target} could not be saved{where}: {reason}; {free}{remaining}: {advice}")


def _check_same(checkpoint: Path, tensors: Mapping[str, Tensor], saved: dict[str, Kind], everyone: set[str]) -> None:
    """Raise CheckpointError naming the first tensor that differs, with both shapes."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {checkpoint} is of another model: {what}; take the plan it was trained with"
        )

    for name in _drop_random(tensors):
        tensor = tensors[name]
        if name not in saved:
            raise refuse(f"it has no '{name}' ({_describe(_kind(tensor))} here)")
        if saved[name] != _kind(tensor):
            raise refuse(f"'{name}' is {_describe(saved[name])} there, {_describe(_kind(tensor))} here")
    for name in sorted(set(_drop_random(saved)) - everyone):
        raise refuse(f"it has '{name}' ({_describe(saved[name])}) too")


def _drop_random(names: Iterable[str]) -> list[str]:
    """Drop the states of random generators, which differ by rank."""
    return [name for name in names if not name.startswith(RNG_PREFIX)]


def _kind(tensor: Tensor) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def _describe(kind: Kind) -> str:
    return f"{list(kind[0])} {str(kind[1]).removeprefix('torch.')}"


def _finite(score: float | None) -> float | None:
    """Return None for NaN and infinity, which cannot be ranked."""
    return score if score is not None and abs(score) < float("inf") else None


def _encode_state(values: Mapping[str, Json]) -> bytes:
    try:
        return json.dumps(values, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state cannot be saved as JSON: {error}") from None


def _decode_state(checkpoint: Path, commit: Commit) -> dict[str, Any]:
    state = json.loads((checkpoint / STATE).read_bytes()) if STATE in {file.name for file in commit.files} else None
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {checkpoint} has no {STATE}; take another one")
    return state


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if _distributed() else 0


def _world(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if _distributed() else 1

"""Log-probabilities of answers under the first weights of a run, on disk.

They lie in the run folder, for resuming, and in the user's cache by content, for other runs over equal weights and
pairs.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from meshwright.data import Corpus
from meshwright.data.corpus.cache_folder import read_json, write_json
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.model.lora import SAME
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.user_cache import default_root
from meshwright.store import commit
from meshwright.store.durable import replace_file

NAME = "reference.safetensors"
_FORMAT: Final = 1
"""Raised whenever the same weights and pairs would give other numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTables:
    """Log-probability of each sample (N,) in nats, 0 for those in no row."""

    train: NDArray[np.float64]
    validation: NDArray[np.float64]


def settings_of(plan: Plan, corpus: Corpus, device: str) -> str:
    """Return the hash of what decides the numbers beside the weights.

    That is the text and its template, where answers are cut, and how products are computed.
    """
    recipe = plan.recipe
    computed = recipe.precision, recipe.products, recipe.tf32, device
    return _hash(_FORMAT, corpus.fingerprint, recipe.sequence, plan.data.overlong, computed, _relevant_model(plan))


def _relevant_model(plan: Plan) -> tuple[ModelShape, str]:
    """Return the shape and the format of frozen matrices. Fresh adapters add nothing, and a name is no number."""
    return replace(plan.model.base, name=""), plan.model.lora.base if plan.model.lora else SAME


def weights_of(plan: Plan, checkpoint_path: Path | None) -> str:
    """Return the hash of the first weights: of an imported checkpoint, the files of `model.init`, or their seed.

    Raises PlanError when the files are gone.
    """
    if checkpoint_path is not None:
        return _hash((checkpoint_path / commit.NAME).read_bytes())
    if plan.init == RANDOM:
        return _hash(RANDOM, plan.recipe.seed, _relevant_model(plan))
    files = sorted(Path(plan.init).glob("*.safetensors"))
    if not files:
        raise PlanError(f"model.init={plan.init} has no weights, under which answers are compared: put them back there")
    with ThreadPoolExecutor(4) as pool:
        return _hash(*pool.map(_file_hash, files))


def cached(settings: str, weights: str) -> Path:
    """Return the path in the user's cache."""
    return default_root() / "reference" / f"{_hash(settings, weights)}.safetensors"


def read(path: Path, settings: str, weights: str | None) -> AnswerTables | None:
    """Return the tables in a file when settings and weights match, else None. `weights` None = any."""
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            if about.get("settings") != settings or weights not in (None, about.get("weights")):
                return None
            return AnswerTables(train=file.get_tensor("train"), validation=file.get_tensor("validation"))
    except (OSError, SafetensorError):
        return None


def write(path: Path, tables: AnswerTables, settings: str, weights: str) -> None:
    """Write the tables to a file, completely or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"train": tables.train, "validation": tables.validation}
    replace_file(path, save(arrays, {"settings": settings, "weights": weights}))


def _file_hash(path: Path) -> str:
    """Return the hash of a file's content. It is read again only when size or time have changed."""
    stat = path.stat()
    seen = _hash(os.fspath(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    index = default_root() / "index" / f"weights-{seen}.json"
    sha256 = read_json(index).get("sha256")
    if not isinstance(sha256, str):
        sha256 = commit.record(path).sha256
        index.parent.mkdir(parents=True, exist_ok=True)
        write_json(index, {"sha256": sha256})
    return sha256


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

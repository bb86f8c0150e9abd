"""Hugging Face directory as a whole: config, weights, tokenizer, generation config, chat template."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.formats.hub.config import (
    CODED,
    CONFIG,
    GENERATION,
    QUANTIZATION,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    config_from_shape,
    read_config,
    read_json,
    unwritable,
)
from meshwright.formats.hub.weights import load_weights, save_weights
from meshwright.formats.safetensors.files import Stored, read_header
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.units import GB

ENDS_BYTES, MIDDLE_BYTES = 2**20, 2**14
"""Bytes of a fingerprint: from both ends of a file, and from each tensor, since merging an adapter keeps the ends."""


class HubTokenizer(Protocol):
    """Tokenizer with ids of its marks that can write its files."""

    @property
    def bos(self) -> int | None:
        """Token that begins a text, None = there is none."""
        ...

    @property
    def eos(self) -> int | None:
        """Token that ends a text, None = there is none."""
        ...

    def save(self, folder: Path) -> object:
        """Write its files into a folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """Files that determine how prompts are built and where answers end."""

    tokenizer: HubTokenizer | None = None
    chat_template: str | None = None
    generation: Mapping[str, object] | None = None
    """Generation config. None = the ids of the tokenizer's marks."""

    def write(self, folder: Path, shape: ModelShape) -> dict[str, int]:
        """Write the files into a directory and return the ids of the tokenizer's marks."""
        if self.chat_template is not None:
            (folder / TEMPLATE).write_text(self.chat_template, encoding="utf-8")
        ids = _write_tokenizer(folder, self.tokenizer, shape, self.chat_template) if self.tokenizer else {}
        _write_json(folder / GENERATION, dict(self.generation or {"_from_model_config": True, **ids}))
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFolder:
    """Imported directory without its weights, which `load` reads."""

    path: Path
    shape: ModelShape
    dtype: torch.dtype
    """Dtype of the weights according to the config."""
    tokenizer: Path | None
    """Path of its tokenizer.json. None = it has none."""
    chat_template: str | None
    generation: Mapping[str, object]
    """Generation config, or bos and eos of its config."""

    def load(self, put: Callable[[str, Tensor], None], wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Call put(name, tensor) with every wanted weight, by our names. See load_weights."""
        load_weights(self.path, self.shape, put, wanted)

    def prompted_by(self, folder: Path) -> "HubFolder":
        """Return this folder with the tokenizer, template and generation config of another, where it has them."""
        tokenizer = folder / TOKENIZER
        return replace(
            self,
            tokenizer=tokenizer if tokenizer.is_file() else self.tokenizer,
            chat_template=_read_template(folder) or self.chat_template,
            generation=read_json(folder / GENERATION) or self.generation,
        )

    def fingerprint(self) -> str:
        """Return a hash of its weights: names, sizes and both ends of their files, and the middle of each tensor."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(self.path.glob("*.safetensors")):
            size = path.stat().st_size
            with open(path, "rb") as file:
                digest.update(f"{path.name} {size} ".encode() + file.read(ENDS_BYTES))
                file.seek(max(0, size - ENDS_BYTES))
                digest.update(file.read())
                for tensor in _safe_headers(path):
                    file.seek(tensor.start + max(0, tensor.num_bytes - MIDDLE_BYTES) // 2)
                    digest.update(file.read(min(tensor.num_bytes, MIDDLE_BYTES)))
        return digest.hexdigest()


def _safe_headers(path: Path) -> Iterable[Stored]:
    """Return the tensors of a file. Empty for a file that is not read as weights."""
    with suppress(HubError):
        return read_header(path).values()
    return ()


def import_folder(folder: Path, *, quantized: bool = False) -> HubFolder:
    """Read everything but the weights of a directory. With `quantized`, ignore the config's quantization."""
    config, shape, dtype = read_config(folder, quantized=quantized)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
    hub_folder = HubFolder(
        path=folder,
        shape=shape,
        dtype=getattr(torch, dtype),
        tokenizer=None,
        chat_template=None,
        generation=ids,
    )
    return hub_folder.prompted_by(folder)


def export_folder(
    folder: Path,
    *,
    model_tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    tokenizer: HubTokenizer | None,
    dtype: torch.dtype,
    chat_template: str | None = None,
    generation: Mapping[str, object] | None = None,
    dropout: float = 0.0,
    max_shard_bytes: int = 5 * GB,
) -> None:
    """Write a directory that transformers v4 and v5, and import_folder, read. It appears complete or not at all.

    Raises HubError when the folder is not empty, when its family cannot hold the shape, or when a tensor is missing.
    OSError (disk full) passes through. Nothing remains after an error.
    """
    problem = unwritable(shape)
    if problem:
        raise HubError(problem)
    with fresh_folder(folder) as partial:
        save_weights(partial, model_tensors, shape, dtype=dtype, max_shard_bytes=max_shard_bytes)
        write_beside_weights(
            partial, shape, tokenizer=tokenizer, dtype=dtype, chat_template=chat_template, generation=generation,
            dropout=dropout,
        )  # fmt: skip


def write_beside_weights(
    folder: Path,
    shape: ModelShape,
    *,
    tokenizer: HubTokenizer | None,
    dtype: torch.dtype,
    chat_template: str | None,
    generation: Mapping[str, object] | None,
    dropout: float,
    quantization: Mapping[str, object] | None = None,
) -> None:
    """Write everything of a directory but the weights. `quantization` is the config's entry about them."""
    prompts = PromptFiles(tokenizer=tokenizer, chat_template=chat_template, generation=generation)
    ids = prompts.write(folder, shape)
    config = config_from_shape(shape, dtype=str(dtype).removeprefix("torch."), ids=ids, dropout=dropout)
    if quantization:
        config[QUANTIZATION] = quantization
        if quantization["quant_method"] == "meshwright":
            # Other readers must not take codes for weights, so they get no architecture that they know.
            del config["architectures"]
            config["model_type"] = f"{CODED}{shape.family}"
    _write_json(folder / CONFIG, config)


def _write_tokenizer(
    folder: Path, tokenizer: HubTokenizer, shape: ModelShape, chat_template: str | None
) -> dict[str, int]:
    """Write the tokenizer's files, complete its config, and return the ids of the marks named there.

    Without a mark for the beginning none is added: a template that names it would build another prompt than in
    training.
    """
    tokenizer.save(folder)
    saved = read_json(folder / TOKENIZER) or {}
    spelled: dict[int | None, str] = {token["id"]: token["content"] for token in saved.get("added_tokens", [])}
    config: dict[str, object] = {"model_max_length": shape.max_positions, "clean_up_tokenization_spaces": False}
    config |= read_json(folder / TOKENIZER_CONFIG) or {}
    if not config.get("eos_token"):
        config |= {"bos_token": spelled.get(tokenizer.bos), "eos_token": spelled.get(tokenizer.eos)}
    if config.get("tokenizer_class") in (None, "TokenizersBackend"):  # v5's name for it, which v4 does not know
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if chat_template is not None:
        config["chat_template"] = chat_template
    _write_json(folder / TOKENIZER_CONFIG, config)
    ids = {text: id for id, text in spelled.items()}
    named = {mark: _token_text(config.get(f"{mark}_token")) for mark in ("bos", "eos", "pad")}
    known = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    mark_ids = {mark: ids.get(text, known.get(mark)) for mark, text in named.items() if text}
    return {f"{mark}_token_id": id for mark, id in mark_ids.items() if id is not None}


def _token_text(token: Any) -> Any:
    """Return the text of a token in a config, which is a string or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _read_template(folder: Path) -> str | None:
    """Read chat_template.jinja, or the key in tokenizer_config.json: a string, or a list of named templates."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    template = (read_json(folder / TOKENIZER_CONFIG) or {}).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside `folder` that is renamed to it at the end, durably, or removed on any error."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HubError(f"{folder} is not empty: take another folder, or empty this one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(folder)
    partial.mkdir()
    try:
        yield partial
        # Contents first, then the name: after a power cut the folder is complete or absent.
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)


def partial_of(path: Path) -> Path:
    """Return the temporary name under which this process builds `path`. Removes leftovers of killed processes."""
    start = f".{path.name}.partial-"
    for leftover in list(path.parent.iterdir()):
        if leftover.name.startswith(start) and not _is_running(leftover.name.removeprefix(start)):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return path.with_name(f"{start}{os.getpid()}")


def _is_running(process: str) -> bool:
    if process == str(os.getpid()):
        return False
    try:
        if os.name == "posix" and process.isdigit():
            # Signal 0 asks whether the process exists, and does nothing to it.
            os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Hugging Face directory as a whole: config, weights, tokenizer, generation config, chat template.

Weights are read and written one tensor at a time, so the model is never in memory twice.
"""

import hashlib
import json
import math
import os
import re
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
from meshwright.formats.hub.weight_names import IGNORED, PREFIX, Binding, bindings
from meshwright.formats.safetensors import Planned, ShardWriter, Stored, read_header, stored_tensors
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.units import GB
from meshwright.spec.weights.inventory import num_parameters

HEAD = "lm_head.weight"
_SCALE = "_scale_inv"
TOO_MANY = 8
"""Ratio of described to stored numbers that is refused. Smaller gaps are reported by names of missing tensors."""
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
    # transformers v5 writes a name that v4 does not know.
    if config.get("tokenizer_class") in (None, "TokenizersBackend"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if chat_template is not None:
        config["chat_template"] = chat_template
    _write_json(folder / TOKENIZER_CONFIG, config)
    # Ids by the spelling in the config: a tokenizer's own marks may differ from those that its config names.
    ids = {text: id for id, text in spelled.items()}
    spellings = {mark: _token_text(config.get(f"{mark}_token")) for mark in ("bos", "eos", "pad")}
    own_ids = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    mark_ids = {mark: ids.get(text, own_ids.get(mark)) for mark, text in spellings.items() if text}
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
        templates = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = templates.get("default")
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
    # The new name is an entry of the parent, which has to be on the disk too.
    sync(folder.parent)


def partial_of(path: Path) -> Path:
    """Return the temporary name under which this process builds `path`. Removes leftovers of killed processes."""
    start = f".{path.name}.partial-"
    for leftover in list(path.parent.iterdir()):
        if leftover.name.startswith(start) and not _is_running(leftover.name.removeprefix(start)):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return path.with_name(f"{start}{os.getpid()}")


def _is_running(process: str) -> bool:
    # A leftover with this process's number is of an earlier one that had it.
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


def load_weights(
    folder: Path,
    shape: ModelShape,
    put: Callable[[str, Tensor], None],
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Call put(name, tensor) with each tensor of `stored_weights`."""
    for name, tensor in stored_weights(folder, shape, wanted):
        put(name, tensor)


def stored_weights(
    folder: Path, shape: ModelShape, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and router correction bias of the shape, by our names, layer after layer.

    Tensors that are stored together are skipped when none of them is `wanted`, so a pipeline stage reads only its
    layers. Tensors have the dtype of the file (fp8 by blocks becomes fp32). Everything is checked before the first one.

    Raises HubError for a missing shard, a truncated file, a missing, unexpected or misshapen tensor, or an untied head
    where the config ties it.
    """
    bound, stored, scales = check_weights(folder, shape)
    block_size = _block_size(folder) if scales else (0, 0)

    def read(name: str) -> Tensor:
        tensor, scale = stored[name].read(), scales.get(name + _SCALE)
        if scale is None and tensor.dtype.itemsize == 1:
            raise HubError(f"{folder}: {name} is fp8 without {name}{_SCALE}: its scale is not known")
        return tensor if scale is None else dequantize(tensor, scale.read(), block_size, name)

    # Some writers store a tied head again. It must then equal the embedding, or the config is wrong.
    if shape.tied and HEAD in stored:
        check_tied(folder, bound, read)
    for binding in bound:
        if not any(map(wanted, binding.ours)):
            continue
        rows = [size[0] for size in binding.ours.values()]
        tensors = binding.transform.restore([read(name) for name in binding.theirs], rows, shape)
        yield from zip(binding.ours, tensors, strict=True)


def check_weights(folder: Path, shape: ModelShape) -> tuple[list[Binding], dict[str, Stored], dict[str, Stored]]:
    """Check a directory by the headers of its files, before memory for a model is allocated.

    Returns the bindings, the stored tensors, and the scales of fp8 ones. Raises HubError as `stored_weights` does.
    """
    all_stored = stored_tensors(folder)
    # First of all: names of a hostile number of layers would fill memory by themselves.
    check_numbers(folder, shape, sum(math.prod(tensor.size) for tensor in all_stored.values()))
    bound = bindings(shape)
    stored = _with_prefix(all_stored, shape)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(_SCALE)}
    _check_tensors(folder, shape, bound, stored)
    return bound, stored, scales


def check_numbers(folder: Path, shape: ModelShape, held: int) -> None:
    """Raise HubError if a config describes far more numbers than files hold, before even names are listed."""
    described = num_parameters(shape.base)
    if described > TOO_MANY * held:
        raise HubError(
            f"{folder} does not match its weights: config.json describes {described:,} numbers, and the files "
            f"hold {held:,}. Copy or download them again"
        )


def save_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5 * GB,
) -> None:
    """Write model.safetensors, or shards of at most max_shard_bytes and their index, into an existing folder.

    `tensors` have our names, in any order. Each is cast to `dtype`, except router correction biases, which stay fp32. A
    tied head is left out. Raises HubError for an unknown, misshapen or missing tensor.
    """
    bound = bindings(shape)
    planned = [
        Planned(name=name, size=size, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        for binding in bound
        for name, size in binding.theirs.items()
    ]
    binding_of = {name: binding for binding in bound for name in binding.ours}
    pending: dict[str, Tensor] = {}
    with ShardWriter(folder, planned, max_shard_bytes) as writer:
        for name, tensor in tensors:
            if shape.tied and name == "head.weight":
                continue
            if name not in binding_of:
                raise HubError(f"{name} is no parameter of this shape")
            binding = binding_of[name]
            if tuple(tensor.shape) != binding.ours[name]:
                raise HubError(f"{name} is {list(tensor.shape)} where this shape has {list(binding.ours[name])}")
            # Tensors that are stored fused wait until the last of them has come.
            pending[name] = tensor
            if all(other in pending for other in binding.ours):
                theirs = binding.transform.export([pending.pop(ours) for ours in binding.ours], shape)
                for their, stored in zip(binding.theirs, theirs, strict=True):
                    writer.write(their, stored)


def _with_prefix(stored: dict[str, Stored], shape: ModelShape) -> dict[str, Stored]:
    """Add the prefix of the body to the names. Drop known tables and layers for multi-token prediction."""
    prefix = PREFIX.get(shape.family, "model.")
    # A base model without a head is stored without the prefix of its body.
    if not any(name.startswith(prefix) for name in stored):
        stored = {name if name == HEAD else prefix + name: tensor for name, tensor in stored.items()}
    # DeepSeek numbers layers for multi-token prediction behind the others. Each has an eh_proj.
    extra = [name.removesuffix("eh_proj.weight") for name in stored if name.endswith(".eh_proj.weight")]
    numbers = {start: re.search(r"\.(\d+)\.", start) for start in extra}
    beyond = tuple(start for start, match in numbers.items() if match and int(match[1]) >= shape.layers)
    return {
        name: tensor
        for name, tensor in stored.items()
        if not IGNORED.fullmatch(name) and not (beyond and name.startswith(beyond))
    }


def _check_tensors(folder: Path, shape: ModelShape, bound: list[Binding], stored: dict[str, Stored]) -> None:
    expected = {name: size for binding in bound for name, size in binding.theirs.items()}
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected and not (shape.tied and name == HEAD)]
    kind = f"a {shape.family} of {shape.layers} layers"
    if missing:
        raise HubError(f"{folder} lacks {len(missing)} tensors of {kind}, first {missing[0]}")
    if unexpected:
        raise HubError(f"{folder} holds {len(unexpected)} tensors that {kind} does not have, first {unexpected[0]}")
    for name, size in expected.items():
        if stored[name].size != size:
            raise HubError(f"{folder}: {name} is {list(stored[name].size)} where config.json says {list(size)}")
        if not stored[name].dtype.is_floating_point:
            raise HubError(f"{folder}: {name} holds {stored[name].dtype}, and weights must be floating-point numbers")


def check_tied(folder: Path, bound: list[Binding], read: Callable[[str], Tensor]) -> None:
    """Raise HubError if the head in a folder differs from the embedding to which the config ties it."""
    embedding = next(name for binding in bound if "embed.weight" in binding.ours for name in binding.theirs)
    if not torch.equal(read(HEAD), read(embedding)):
        raise HubError(f"{folder}: {HEAD} differs from {embedding}, but config.json has tie_word_embeddings=true")


def _block_size(folder: Path) -> tuple[int, int]:
    """Return the rows and columns that share one scale."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rows, columns = config["quantization_config"]["weight_block_size"]
        if not (type(rows) is type(columns) is int and min(rows, columns) > 0):
            raise ValueError(f"{rows} x {columns}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise HubError(
            f"{folder}/config.json lacks quantization_config.weight_block_size for its fp8 weights, two whole numbers"
        ) from error
    return rows, columns


def dequantize(weight: Tensor, scale: Tensor, block_size: tuple[int, int], name: str) -> Tensor:
    """Return the fp8 weight (out, in) times the scale of its block, in fp32.

    Scales are (out / rows, in / columns), rounded up. Raises HubError when they do not fit, or when products are not
    finite: short sequences would hide that.
    """
    rows, columns = block_size
    if weight.dim() != 2 or tuple(scale.shape) != (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)):
        raise HubError(
            f"{name}: scales {list(scale.shape)} do not fit weights {list(weight.shape)} in blocks of {block_size}"
        )
    # A block may be far larger than the matrix, and repeating a scale for all of it would fill memory.
    rows, columns = map(min, block_size, weight.shape)
    spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    numbers = weight.float().mul_(spread[: weight.shape[0], : weight.shape[1]])
    if not bool(numbers.isfinite().all()):
        raise HubError(f"{name} or its scales are infinite or NaN: damaged; copy or download it again")
    return numbers

"""A GGUF file as a model: what it is, its tokenizer, and its weights one tensor at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from meshwright.kernels.block_decoding import FLOAT_DTYPES, decode
from meshwright.model.gguf.gguf_header import GGUFHeader, Value
from meshwright.model.gguf.gguf_metadata import frequency_factors, shape_keys, shape_of
from meshwright.model.gguf.gguf_names import ARCHITECTURES, FREQUENCIES, ROUTERS, architecture_of, gguf_bindings
from meshwright.model.gguf.gguf_parts import read_gguf_parts
from meshwright.model.gguf.gguf_vocabulary import TEMPLATE_KEY, TOOL_TEMPLATE_KEY, GGUFVocabulary, read_vocabulary
from meshwright.model.gguf.gguf_writer import PlannedBlocks
from meshwright.model.hub.weight_names import Binding
from meshwright.spec.block_types import BLOCK_TYPES, FLOATS, BlockType
from meshwright.spec.errors import HubError
from meshwright.spec.shape import ModelShape

F32 = BLOCK_TYPES["F32"]
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
"""Numbers of general.file_type, of files without codes."""
QUANTIZATION_VERSION = 2
"""Of the layouts of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """An opened file: its header was checked, and every tensor of the shape is there in its size."""

    header: GGUFHeader
    shape: ModelShape
    vocabulary: GGUFVocabulary | None
    bound: Sequence[Binding] = field(repr=False)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.header.file

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations, where it has one."""
        return self._text(TEMPLATE_KEY)

    @property
    def tool_template(self) -> str | None:
        """That of conversations with tools, where it is another one."""
        return self._text(TOOL_TEMPLATE_KEY)

    def _text(self, key: str) -> str | None:
        found = self.header.keys.get(key)
        return found if isinstance(found, str) else None

    @property
    def dtype(self) -> torch.dtype:
        """Of its matrices; of codes fp16, which their scales are in."""
        embedding = self.header.tensors["token_embd.weight"].kind.name
        return FLOAT_DTYPES.get(embedding, torch.float16)

    @property
    def kinds(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        names = [one.kind.name for one in self.header.tensors.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by our names, layer after layer, restored from codes in fp32 and cast. HubError for codes
        that stand for no number."""
        for binding in self.bound:
            stored = [self.header.tensors[name] for name in binding.theirs]
            tensors = [decode(one.kind.name, one.read()).view(one.size) for one in stored]
            for one, tensor in zip(stored, tensors, strict=True):
                if not is_float(one.kind.name) and not bool(tensor.isfinite().all()):
                    raise HubError(f"{one.file}: {min(binding.theirs)} is infinite or NaN; copy or download it again")
            rows = [size[0] for size in binding.ours.values()]
            restored = binding.transform.restore(tensors, rows, self.shape)
            for name, tensor in zip(binding.ours, restored, strict=True):
                yield name, tensor.to(dtype)


def open_gguf(path: Path) -> GGUFModel:
    """Everything but the weights; of a file in parts all of them, by its first. HubError: a damaged file, an
    architecture or type of tensor that is not read, tensors that do not fit the shape that its keys say."""
    header = read_gguf_parts(path)
    shape = shape_of(header)
    found = GGUFModel(
        header=header, shape=shape, vocabulary=read_vocabulary(header),
        bound=gguf_bindings(shape, ARCHITECTURES[str(header.keys["general.architecture"])]),
    )  # fmt: skip
    expected = {name: size for binding in found.bound for name, size in binding.theirs.items()}
    missing, extra = expected.keys() - header.tensors.keys(), header.tensors.keys() - expected.keys() - {FREQUENCIES}
    what = f"a {shape.family} of {shape.layers} layers"
    if missing:
        raise HubError(f"{path} lacks {len(missing)} tensors of {what}, first {min(missing)}")
    if extra:
        raise HubError(f"{path} holds {len(extra)} tensors that {what} does not have, first {min(extra)}")
    for name, size in expected.items():
        if header.tensors[name].size != size:
            raise HubError(f"{path}: {name} is {list(header.tensors[name].size)} where its keys say {list(size)}")
    return found


def stays_wide(name: str, size: Sequence[int]) -> bool:
    """Whether a tensor is in fp32 in every file: norms, biases, routers, positions, as llama.cpp expects them."""
    return len(size) == 1 or name.endswith(ROUTERS) or name == "position_embd.weight"


def planned_tensors(shape: ModelShape, kinds: dict[str, BlockType]) -> list[PlannedBlocks]:
    """Every tensor of a file in order. `kinds`: of those that are not in fp32."""
    bound = gguf_bindings(shape, architecture_of(shape))
    found = [
        PlannedBlocks(name=name, size=size, kind=kinds.get(name, F32))
        for binding in bound
        for name, size in binding.theirs.items()
    ]
    factors = frequency_factors(shape)
    if factors is not None:
        found.insert(0, PlannedBlocks(name=FREQUENCIES, size=tuple(factors.shape), kind=F32))
    return found


def general_keys(shape: ModelShape, name: str, file_type: int, *, quantized: bool) -> dict[str, Value]:
    """What every file begins with, and the keys of the shape."""
    found: dict[str, Value] = {
        "general.architecture": architecture_of(shape).name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
    }
    found |= {"general.quantization_version": QUANTIZATION_VERSION} if quantized else {}
    return found | shape_keys(shape)


def is_float(kind: str) -> bool:
    """Whether a type has no blocks."""
    return kind in FLOATS

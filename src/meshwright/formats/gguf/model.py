"""GGUF file as a model: its shape, its tokenizer, and its weights one tensor at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from meshwright.formats.gguf.header import GGUFHeader, Value, read_gguf_parts
from meshwright.formats.gguf.metadata import frequency_factors, shape_keys, shape_of
from meshwright.formats.gguf.names import ARCHITECTURES, FREQUENCIES, ROUTERS, architecture_of, gguf_bindings
from meshwright.formats.gguf.vocabulary import TEMPLATE_KEY, TOOL_TEMPLATE_KEY, GGUFVocabulary, read_vocabulary
from meshwright.formats.gguf.writer import PlannedBlocks
from meshwright.formats.hub.weight_names import Binding
from meshwright.kernels.quantized.gguf_blocks import FLOAT_DTYPES, decode
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, FLOATS, BlockType

F32 = BLOCK_TYPES["F32"]
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
"""Values of general.file_type, for files without codes."""
QUANTIZATION_VERSION = 2
"""Version of the layouts of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """Opened file, with a checked header and every tensor of the shape in its size."""

    header: GGUFHeader
    shape: ModelShape
    vocabulary: GGUFVocabulary | None
    bound: Sequence[Binding] = field(repr=False)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.header.file

    @property
    def chat_template(self) -> str | None:
        """Jinja template of conversations. None = it has none."""
        return self._text(TEMPLATE_KEY)

    @property
    def tool_template(self) -> str | None:
        """Template of conversations with tools. None = it is the same one."""
        return self._text(TOOL_TEMPLATE_KEY)

    def _text(self, key: str) -> str | None:
        text = self.header.keys.get(key)
        return text if isinstance(text, str) else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices. For codes fp16, the dtype of their scales."""
        embedding = self.header.tensors["token_embd.weight"].kind.name
        return FLOAT_DTYPES.get(embedding, torch.float16)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of tensors of each type."""
        names = [tensor.kind.name for tensor in self.header.tensors.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by our names, restored and cast.

        Raises HubError if codes restore to NaN or infinity.
        """
        for binding in self.bound:
            stored = [self.header.tensors[name] for name in binding.theirs]
            tensors = [decode(blocks.kind.name, blocks.read()).view(blocks.size) for blocks in stored]
            for blocks, tensor in zip(stored, tensors, strict=True):
                if blocks.kind.name not in FLOATS and not bool(tensor.isfinite().all()):
                    raise HubError(
                        f"{blocks.file}: {min(binding.theirs)} is infinite or NaN; copy or download it again"
                    )
            rows = [size[0] for size in binding.ours.values()]
            restored = binding.transform.restore(tensors, rows, self.shape)
            for name, tensor in zip(binding.ours, restored, strict=True):
                yield name, tensor.to(dtype)


def open_gguf(path: Path) -> GGUFModel:
    """Read everything but the weights. Raises HubError for a damaged, unsupported or inconsistent file."""
    header = read_gguf_parts(path)
    shape = shape_of(header)
    model = GGUFModel(
        header=header, shape=shape, vocabulary=read_vocabulary(header),
        bound=gguf_bindings(shape, ARCHITECTURES[str(header.keys["general.architecture"])]),
    )  # fmt: skip
    expected = {name: size for binding in model.bound for name, size in binding.theirs.items()}
    missing, extra = expected.keys() - header.tensors.keys(), header.tensors.keys() - expected.keys() - {FREQUENCIES}
    what = f"a {shape.family} of {shape.layers} layers"
    if missing:
        raise HubError(f"{path} lacks {len(missing)} tensors of {what}, first {min(missing)}")
    if extra:
        raise HubError(f"{path} holds {len(extra)} tensors that {what} does not have, first {min(extra)}")
    for name, size in expected.items():
        if header.tensors[name].size != size:
            raise HubError(f"{path}: {name} is {list(header.tensors[name].size)} where its keys say {list(size)}")
    return model


def stays_wide(name: str, size: Sequence[int]) -> bool:
    """Return True for a tensor that llama.cpp expects in fp32: norms, biases, routers and positions."""
    return len(size) == 1 or name.endswith(ROUTERS) or name == "position_embd.weight"


def planned_tensors(shape: ModelShape, kinds: dict[str, BlockType]) -> list[PlannedBlocks]:
    """Return every tensor of a file in order. `kinds` has the types of those that are not in fp32."""
    bound = gguf_bindings(shape, architecture_of(shape))
    planned = [
        PlannedBlocks(name=name, size=size, kind=kinds.get(name, F32))
        for binding in bound
        for name, size in binding.theirs.items()
    ]
    factors = frequency_factors(shape)
    if factors is not None:
        planned.insert(0, PlannedBlocks(name=FREQUENCIES, size=tuple(factors.shape), kind=F32))
    return planned


def general_keys(shape: ModelShape, name: str, file_type: int, *, quantized: bool) -> dict[str, Value]:
    """Return the keys of general.* and of the shape."""
    keys: dict[str, Value] = {
        "general.architecture": architecture_of(shape).name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
    }
    keys |= {"general.quantization_version": QUANTIZATION_VERSION} if quantized else {}
    return keys | shape_keys(shape)

"""Writing of GGUF files, one tensor at a time. The size is known before the first byte is written."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.original import OriginalModel
from meshwright.compress.stream import QuantizedLayer
from meshwright.formats.gguf.header import Value
from meshwright.formats.gguf.metadata import FREQUENCIES, architecture_of, frequency_factors, gguf_bindings, ungguffable
from meshwright.formats.gguf.model import (
    FILE_TYPES,
    GGUFWriter,
    PlannedBlocks,
    fresh_file,
    general_keys,
    gguf_bytes,
    planned_tensors,
    stays_wide,
)
from meshwright.formats.gguf.vocabulary import vocabulary_keys
from meshwright.formats.hub.weight_names import Binding
from meshwright.kernels.quantized.gguf_blocks import FLOAT_DTYPES, decode, encode
from meshwright.spec.errors import HubError, PlanError, argument
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, FLOATS, GGUFScheme
from meshwright.store.run_folder import ids_of

CHECKED = 2**24
"""Weights encoded and compared per step."""
FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFPlan:
    """All of a GGUF file but its data."""

    shape: ModelShape
    keys: Mapping[str, Value]
    tensors: Sequence[PlannedBlocks]
    note: str
    """Caveat for users of the file. Empty = none."""

    @property
    def bytes(self) -> int:
        """Size of the whole file."""
        return gguf_bytes(self.keys, self.tensors)

    @property
    def coded(self) -> int:
        """Number of weights stored as codes."""
        return sum(math.prod(tensor.size) for tensor in self.tensors if tensor.kind.name not in FLOATS)


def plan_gguf(
    original: OriginalModel, dtype: torch.dtype, scheme: GGUFScheme | None = None, plain: Sequence[str] = ()
) -> GGUFPlan:
    """Plan the contents of a file.

    Args:
        original: The model to write.
        dtype: Dtype of matrices without codes.
        scheme: Scheme of the matrices. None = no codes.
        plain: Matrices without codes despite the scheme, by Meshwright's names.

    Raises:
        PlanError: llama.cpp cannot run the model unchanged.
    """
    shape = original.shape
    why = ungguffable(shape)
    if why:
        raise PlanError(why)
    float_type, kinds = FLOAT_NAMES[dtype], {}
    for binding in gguf_bindings(shape, architecture_of(shape)):
        for name, size in binding.theirs.items():
            if not stays_wide(name, size):
                stays_plain = scheme is None or any(ours in plain for ours in binding.ours)
                kinds[name] = BLOCK_TYPES[
                    float_type if stays_plain or scheme is None else scheme.kind_of(name, size[-1], shape)
                ]
    tokenizer = original.tokenizer
    words, note = vocabulary_keys(
        tokenizer.json if tokenizer else None, shape.vocab, bos=tokenizer.bos if tokenizer else None,
        eos=tokenizer.eos if tokenizer else None, ends=ids_of((original.generation or {}).get("eos_token_id")),
        template=original.chat_template, tool_template=tokenizer.tool_template if tokenizer else None,
        begins=tokenizer.begins if tokenizer else (),
    )  # fmt: skip
    keys = general_keys(
        shape, shape.name, FILE_TYPES[float_type] if scheme is None else scheme.file_type, quantized=scheme is not None
    )
    return GGUFPlan(shape=shape, keys=keys | words, tensors=planned_tensors(shape, kinds), note=note)


def write_gguf(
    out: Path,
    original: OriginalModel,
    plan: GGUFPlan,
    seen: Callable[[QuantizedLayer], None] = lambda layer: None,
) -> int:
    """Write the file and return its size in bytes. It appears complete or not at all.

    Weights are read in fp32, so that norms lose nothing. `seen` is called with the report of each coded matrix. Raises
    HubError when `out` exists, PlanError for weights that are not finite or too large.
    """
    planned = {tensor.name: tensor for tensor in plan.tensors}
    with fresh_file(out) as partial:
        with GGUFWriter(partial, plan.keys, plan.tensors) as writer:
            factors = frequency_factors(plan.shape)
            if factors is not None:
                writer.write(FREQUENCIES, encode("F32", factors))
            for binding, ours in _collect_bindings(plan.shape, original.weights(torch.float32)):
                for name, tensor in zip(binding.theirs, binding.transform.export(ours, plan.shape), strict=True):
                    writer.write(name, _encode_checked(binding, tensor, planned[name], seen))
        return partial.stat().st_size


def _collect_bindings(
    shape: ModelShape, weights: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[Binding, list[Tensor]]]:
    """Yield each binding with its tensors, once the last of them was read."""
    binding_of = {name: binding for binding in gguf_bindings(shape, architecture_of(shape)) for name in binding.ours}
    pending: dict[str, Tensor] = {}
    for name, tensor in weights:
        if shape.tied and name == "head.weight":
            continue
        if name not in binding_of:
            raise HubError(f"{name} is no parameter of this shape")
        pending[name] = tensor
        binding = binding_of[name]
        if all(other in pending for other in binding.ours):
            yield binding, [pending.pop(other) for other in binding.ours]


def _encode_checked(
    binding: Binding, tensor: Tensor, planned: PlannedBlocks, seen: Callable[[QuantizedLayer], None]
) -> Tensor:  # fmt: skip
    """Return the bytes of one tensor, encoded and checked a few rows at a time to bound the memory."""
    kind, name, columns = planned.kind.name, next(iter(binding.ours)), planned.size[-1]
    rows = tensor.reshape(-1, columns)
    raw = torch.empty(len(rows), planned.kind.num_bytes((1, columns)), dtype=torch.uint8)
    wrong = whole = 0.0
    at_once = max(1, CHECKED // columns)
    # fp32 copies of a whole embedding would double the memory of the process.
    for part, into in zip(rows.split(at_once), raw.split(at_once), strict=True):
        if not bool(part.isfinite().all()):
            raise PlanError(f"{name} cannot be written: it has weights that are infinite or NaN")
        into.copy_(encode(kind, part))
        restored = decode(kind, into).float()
        if not bool(restored.isfinite().all()):
            raise PlanError(
                f"{name} has weights beyond what {kind} can say: take {argument('dtype', 'bf16')}, or "
                f"{argument('dtype', 'fp32')}"
            )
        wrong += float((part - restored).square().sum())
        whole += float(part.square().sum())
    if kind not in FLOATS:
        seen(
            QuantizedLayer(
                name=" + ".join(binding.ours), scheme=kind, bytes=planned.num_bytes,
                weight_error=math.sqrt(wrong / whole) if whole else 0.0, outliers=0.0,
            )
        )  # fmt: skip
    return raw

"""bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes), which transformers, PEFT and vLLM read.

    nf4    X.weight uint8 (N K / 2, 1): two codes to a byte, the first in the upper half; X.weight.absmax (blocks,),
           X.weight.quant_map (16,); X.weight.quant_state.bitsandbytes__nf4: what else there is, as JSON in bytes.
           Doubled scales: absmax are codes, and X.weight.nested_absmax, X.weight.nested_quant_map (256,) come with them
    fp4    the same with another map, read alone
    int8   X.weight int8 (N, K); X.SCB fp32 (N,), 127 times our scales; X.weight_format, 0 for rows

Their blocks run through all rows of a matrix. Ours restart with each row, which is the same where a block divides the
inputs. The JSON is padded with spaces, so its size does not depend on its content. Bytes of codes may be stored under
another dtype (`bnb_4bit_quant_storage`), which does not describe them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.hub.families import Entries
from meshwright.formats.hub.weight_names import CONV1D, FUSED, JOINED, ROTARY, Binding, bindings
from meshwright.formats.quantized.interface import (
    NATIVE,
    MatrixFormat,
    QuantizedModel,
    skipped_modules,
    tensors_of_model,
)
from meshwright.formats.quantized.native import check_tensors
from meshwright.formats.safetensors import Planned, Stored, stored_tensors
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.rounding import DYNAMIC, dynamic_table, undoubled
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError, argument
from meshwright.spec.model.quantization_schemes import DOUBLED, SCHEMES, TABLES, Codes, Scheme
from meshwright.spec.model.shape import ModelShape

BLOCKS = (32, 64, 128, 256)
"""Block sizes of 4-bit weights that bitsandbytes and we have."""
STATE = "quant_state.bitsandbytes__"
"""Prefix of the word for the codes: nf4 or fp4."""
LONGEST_STATE = 4096
"""Largest JSON that is read, in bytes."""
OFFSET_LENGTH = 25
"""Characters that no fp64 number exceeds."""
LARGEST_CODE = 127.0


class BitsAndBytes(MatrixFormat):
    """Layout described above."""

    name = "bitsandbytes"

    def refusal(self, model: QuantizedModel) -> str:
        """Return why the model does not fit: it takes NF4 and 8-bit weights, in linear layers stored as (out, in)."""
        for scheme in model.schemes.values():
            why = _unsupported(scheme)
            if why:
                return f"bitsandbytes cannot hold {why}"
        if any(binding.transform in JOINED for binding in bindings(model.shape)):
            family = model.shape.family
            return f"bitsandbytes holds {family}'s matrices in another order than its files: take {NATIVE}"
        if model.shape.moe is not None:
            return f"bitsandbytes leaves stacks of experts as they are, which transformers makes: take {NATIVE}"
        return _unreadable(model)

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the entries of transformers' BitsAndBytesConfig, with the layers that are not quantized."""
        scheme = next(iter(model.schemes.values()))
        four, dtype = scheme.codes == "nf4", str(model.dtype).removeprefix("torch.")
        return {
            "quant_method": self.name,
            "load_in_4bit": four, "load_in_8bit": not four, "_load_in_4bit": four, "_load_in_8bit": not four,
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": scheme.scales == "double",
            "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": scheme.threshold if four or scheme.outliers == "threshold" else 0.0,
            "llm_int8_skip_modules": ["lm_head", *skipped_modules(model)],
            "llm_int8_has_fp16_weight": False, "llm_int8_enable_fp32_cpu_offload": False,
        }  # fmt: skip

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """Read from the config and the headers of a folder which matrix has which scheme."""
        entries = Entries(config, f"{folder}/config.json, quantization_config")
        stored, schemes = stored_tensors(folder), dict[str, Scheme]()
        for binding in bindings(shape):
            coded = [their for their in binding.theirs if their in stored and _holds_codes(stored, their)]
            if next(iter(binding.ours)) not in quantizable(shape) or not coded:
                continue
            found_schemes = {_read_scheme(entries, stored, their, binding.theirs[their]) for their in coded}
            if len(found_schemes) > 1 or len(coded) < len(binding.theirs):
                raise HubError(f"{folder}: {coded[0]} and the matrices stacked with it have codes of several layouts")
            schemes |= dict.fromkeys(binding.ours, found_schemes.pop())
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns={}, dtype=dtype)
        if not schemes:
            raise entries.fail("no tensor of the folder is quantized: all weights are floating-point numbers")
        why = _unreadable(model)
        if why:
            raise HubError(f"{folder}: {why}")
        planned = _adapt_to_files(self.planned(model), stored)
        check_tensors(folder, planned, tensors_of_model(folder, shape, planned, stored))
        # Doubled scales run through all rows, so they cannot be cut with the rows of fused matrices.
        fused = [name for binding in bindings(shape) if binding.transform is FUSED for name in binding.ours]
        plain = {name: replace(schemes[name], scales="float32") for name in fused if name in schemes}
        return replace(model, schemes=schemes | plain)

    def plan_matrix(self, name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> list[Planned]:
        """Return the tensors that stand for a matrix of theirs."""
        rows, columns = size
        if scheme.codes not in TABLES:
            return [
                Planned(name=name, size=size, dtype=torch.int8),
                Planned(name=_sibling(name, "SCB"), size=(rows,), dtype=torch.float32),
                Planned(name=_sibling(name, "weight_format"), size=(), dtype=torch.uint8),
            ]
        blocks, doubled = rows * scheme.groups(columns), scheme.scales == "double"
        state = _encode_state(scheme, size, dtype, 0.0 if doubled else None)
        tensors = [
            Planned(name=name, size=(rows * columns // 2, 1), dtype=torch.uint8),
            Planned(name=f"{name}.absmax", size=(blocks,), dtype=torch.uint8 if doubled else torch.float32),
            Planned(name=f"{name}.quant_map", size=(16,), dtype=torch.float32),
            Planned(name=f"{name}.{STATE}{scheme.codes}", size=(len(state),), dtype=torch.uint8),
        ]
        if doubled:
            tensors.append(Planned(name=f"{name}.nested_absmax", size=(-(-blocks // DOUBLED),), dtype=torch.float32))
            tensors.append(Planned(name=f"{name}.nested_quant_map", size=(len(DYNAMIC),), dtype=torch.float32))
        return tensors

    def encode_matrix(
        self, name: str, binding: Binding, matrix: QuantizedMatrix, model: QuantizedModel
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield those tensors for a matrix of ours."""
        scheme, shape = matrix.scheme, model.shape
        ((their, size),) = binding.theirs.items()
        (codes,) = binding.transform.export([matrix.codes], shape)
        (scales,) = binding.transform.export([matrix.scales], shape)
        if scheme.codes not in TABLES:
            yield their, codes
            yield _sibling(their, "SCB"), scales.float().flatten() * LARGEST_CODE
            yield _sibling(their, "weight_format"), torch.zeros((), dtype=torch.uint8)
            return
        offset = None if matrix.offset is None else float(matrix.offset)
        # The first of two codes is in the upper half of a byte there, and in the lower one here.
        yield their, _swap_halves(codes).reshape(-1, 1)
        yield f"{their}.absmax", (scales if scheme.scales == "double" else scales.float()).flatten()
        yield f"{their}.quant_map", torch.tensor(TABLES[scheme.codes], dtype=torch.float32)
        state = list(_encode_state(scheme, size, model.dtype, offset))
        yield f"{their}.{STATE}{scheme.codes}", torch.tensor(state, dtype=torch.uint8)
        if matrix.outer is not None:
            yield f"{their}.nested_absmax", matrix.outer
            yield f"{their}.nested_quant_map", torch.tensor(DYNAMIC, dtype=torch.float32)

    def decode_matrix(
        self, stored: Mapping[str, Stored], name: str, size: tuple[int, ...], scheme: Scheme
    ) -> dict[str, Tensor]:
        """Return the parts of one matrix, with rows in their order."""
        rows, columns = size
        if scheme.codes not in TABLES:
            order = stored.get(_sibling(name, "weight_format"))
            if order is not None and int(order.read()):
                raise HubError(
                    f"{order.file}: {name} has codes in tiles of a GPU: save the model again with bitsandbytes"
                )
            scales = stored[_sibling(name, "SCB")].read() / LARGEST_CODE
            return {"codes": stored[name].read(), "scales": scales.unsqueeze(1)}
        # Codes are indices: another table would silently stand for other numbers.
        _check_table(stored, f"{name}.quant_map", TABLES[scheme.codes])
        parts = {
            "codes": _swap_halves(stored[name].read().view(torch.uint8)).view(rows, columns // 2),
            "scales": stored[f"{name}.absmax"].read().view(rows, -1),
        }
        if f"{name}.nested_absmax" not in stored:
            return parts
        _check_table(stored, f"{name}.nested_quant_map", DYNAMIC)
        offset = _read_state(stored, name)[1].get("nested_offset")
        if not isinstance(offset, float):
            raise HubError(f"{stored[name].file}: {name} has nested_offset={offset!r}, which is no number")
        nested = {"outer": stored[f"{name}.nested_absmax"].read(), "offset": torch.tensor([offset])}
        if scheme.scales == "double":
            # These have no rows. No transform of a matrix that has them reorders rows (_unreadable).
            return parts | nested
        table = dynamic_table(parts["scales"].device)
        return parts | {"scales": undoubled(parts["scales"], nested["outer"], nested["offset"], table)}


def _unreadable(model: QuantizedModel) -> str:
    """Return why the codes cannot even be read. Empty = they can."""
    for name, scheme in model.schemes.items():
        if scheme.codes not in TABLES:
            continue
        if scheme.group not in BLOCKS:
            return f"bitsandbytes cannot hold blocks of {scheme.group}: take {argument('group', 64)} or {NATIVE}"
        if (columns := quantizable(model.shape)[name][-1]) % scheme.group:
            return (
                f"bitsandbytes cannot hold {name}: its {columns} inputs are no multiple of "
                f"{argument('group', scheme.group)}; take {NATIVE}"
            )
    quantized = [binding for binding in bindings(model.shape) if next(iter(binding.ours)) in model.schemes]
    if any(binding.transform is CONV1D for binding in quantized):
        return f"bitsandbytes holds {model.shape.family}'s matrices transposed, whose blocks are not read"
    doubled = any(scheme.scales == "double" for scheme in model.schemes.values())
    if doubled and model.shape.rope_interleaved and any(binding.transform is ROTARY for binding in quantized):
        remedy = f"take {argument('scheme', 'nf4')}"
        return f"bitsandbytes has rotary pairs in another order, which doubled scales cannot follow: {remedy}"
    return ""


def _unsupported(scheme: Scheme) -> str:
    if scheme.activations == "int8" and not scheme.symmetric_by_token:
        others = f"{argument('scheme', 'int8')} or {NATIVE}"
        return f"{scheme.name}: its activations have a scale for each token, and neither side has zeros; take {others}"
    if scheme.codes == "nf4" or (scheme.codes == "integer" and scheme.bits == 8 and scheme.outliers != "calibrated"):
        return ""
    if scheme.outliers == "calibrated":
        others = f"{argument('outliers', 'threshold')}, {argument('scheme', 'int8')}"
        return f"{scheme.name} with columns in 16 bit: take {others} or {NATIVE}"
    return f"{scheme.name}: it has normal floats and 8-bit weights alone; take {argument('scheme', 'nf4')} or {NATIVE}"


def _sibling(name: str, leaf: str) -> str:
    """Return the name of a tensor that belongs to a weight: X.weight -> X.SCB."""
    return f"{name.removesuffix('weight')}{leaf}"


def _encode_state(scheme: Scheme, size: Sequence[int], dtype: torch.dtype, offset: float | None) -> bytes:
    """Return the JSON of a matrix, whose length does not depend on the offset."""
    state: dict[str, Any] = {
        "quant_type": scheme.codes, "blocksize": scheme.group, "dtype": str(dtype).removeprefix("torch."),
        "shape": list(size),
    }  # fmt: skip
    if offset is None:
        return json.dumps(state).encode()
    state |= {"nested_blocksize": DOUBLED, "nested_dtype": "float32"}
    # Files are laid out before the offset is known, so its JSON is filled up with spaces.
    length = len(json.dumps(state | {"nested_offset": 0.0})) - len("0.0") + OFFSET_LENGTH
    return json.dumps(state | {"nested_offset": offset}).ljust(length).encode()


def _adapt_to_files(planned: Sequence[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
    """Set the length of each JSON to that in the file, and the dtype of bytes of codes."""
    adjusted = []
    for tensor in planned:
        actual = stored.get(tensor.name)
        # Older writers omit it.
        if actual is None and tensor.name.endswith(".weight_format"):
            continue
        if actual is not None and STATE in tensor.name:
            tensor = replace(tensor, size=actual.size)
        elif actual is not None and tensor.name.endswith(".weight") and tensor.dtype == torch.uint8:
            tensor = replace(tensor, size=(tensor.num_bytes // actual.dtype.itemsize, 1), dtype=actual.dtype)
        adjusted.append(tensor)
    return adjusted


def _holds_codes(stored: Mapping[str, Stored], name: str) -> bool:
    """Return True if a matrix has 8-bit codes or a state of 4-bit codes. uint8 without one is refused later."""
    states = (f"{name}.{STATE}{codes}" for codes in TABLES)
    return not stored[name].dtype.is_floating_point or any(state in stored for state in states)


def _swap_halves(packed: Tensor) -> Tensor:
    return packed << 4 | packed >> 4


def _read_scheme(entries: Entries, stored: Mapping[str, Stored], name: str, size: tuple[int, ...]) -> Scheme:
    """Return the scheme of one matrix. Raises HubError when it is none of ours."""
    if stored[name].dtype == torch.int8:
        threshold = entries.number("llm_int8_threshold") if "llm_int8_threshold" in entries else 6.0
        if not threshold:
            return replace(SCHEMES["int8"], scales="float32")
        return replace(SCHEMES["llm-int8"], scales="float32", outliers="threshold", threshold=threshold)
    codes, state = _read_state(stored, name)
    expected_entries: dict[str, Any] = {"quant_type": codes, "shape": list(size)}
    nested = "nested_blocksize" in state
    expected_entries |= {"nested_blocksize": DOUBLED, "nested_dtype": "float32"} if nested else {}
    for key, expected in expected_entries.items():
        if state.get(key) != expected:
            raise HubError(f"{stored[name].file}: {name} has {key}={state.get(key)!r} (supported: {expected!r})")
    if state.get("blocksize") not in BLOCKS:
        raise HubError(f"{stored[name].file}: {name} has blocks of {state.get('blocksize')} (supported: {BLOCKS})")
    scheme = replace(SCHEMES["nf4-double" if nested else "nf4"], group=int(state["blocksize"]))
    return scheme if codes == "nf4" else replace(scheme, name=f"{codes}{'-double' * nested}", codes=codes)


def _read_state(stored: Mapping[str, Stored], name: str) -> tuple[Codes, dict[str, Any]]:
    """Return the kind of codes of one matrix, and its JSON."""
    codes = next((codes for codes in TABLES if f"{name}.{STATE}{codes}" in stored), None)
    if codes is None:
        raise HubError(f"{stored[name].file}: {name} has codes and no {STATE}nf4 or fp4 next to it: it is damaged")
    state = stored[f"{name}.{STATE}{codes}"]
    if state.dtype != torch.uint8 or len(state.size) != 1 or state.size[0] > LONGEST_STATE:
        raise HubError(f"{state.file}: {name}.{STATE}{codes} is {list(state.size)} {state.dtype}, which is no JSON")
    try:
        content = json.loads(bytes(state.read().tolist()))
        return codes, {str(key): value for key, value in content.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise HubError(f"{state.file}: {name}.{STATE}{codes} is damaged ({error})") from error


def _check_table(stored: Mapping[str, Stored], name: str, known: Sequence[float]) -> None:
    """Raise HubError if codes stand for other numbers than ours."""
    if not torch.equal(stored[name].read(), torch.tensor(known, dtype=torch.float32)):
        raise HubError(
            f"{stored[name].file}: {name} holds other numbers than bitsandbytes writes, which is not supported"
        )

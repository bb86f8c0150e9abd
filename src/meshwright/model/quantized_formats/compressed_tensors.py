"""compressed-tensors (https://github.com/vllm-project/compressed-tensors), which vLLM, SGLang and transformers read.

    pack-quantized    X.weight_packed int32 (N, ceil(K b / 32)): codes as one stream of bits along K; X.weight_scale
                      (N, groups); X.weight_zero_point int32 (ceil(N b / 32), groups): the same along N; X.weight_shape
    int-quantized     X.weight int8 (N, K), X.weight_scale (N, 1); activations with a scale for each token. Read also
                      with fewer bits, groups and X.weight_zero_point int8 (N, groups), as W4A8 is written
    float-quantized   the same with e4m3; read also with one scale (1,) for all, or one for each square block

Codes are written without a sign, 2^(b-1) more than they stand for, as ours are. Scales have the dtype of the other
weights, which is that of what their reader restores.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.quantization import pack, unpack
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.hub.entries import Entries
from meshwright.model.hub.safetensors_files import Planned, Stored, stored_tensors
from meshwright.model.hub.transforms import CONV1D, JOINED, TURNED
from meshwright.model.hub.weight_names import Binding, bindings
from meshwright.model.quantized_formats.compressed_groups import (
    FLOAT,
    PACKED,
    REMEDY,
    WHOLE,
    group_schemes,
    scale_dtype,
)
from meshwright.model.quantized_formats.folder_format import QuantizedModel, Wanted, Weights, every
from meshwright.model.quantized_formats.hub_tensors import (
    encoded_tensors,
    planned_tensors,
    restored_parts,
    tensors_of_model,
)
from meshwright.model.quantized_formats.native import check
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError
from meshwright.spec.quantization_schemes import GROUPS, Scheme
from meshwright.spec.shape import ModelShape

BESIDE = (".input_scale", ".k_scale", ".v_scale")
"""Ends of names of scales found on text: inputs have one for each token here, and the cache stays as it is."""


class CompressedTensors:
    """See above."""

    name = "compressed-tensors"

    def refusal(self, model: QuantizedModel) -> str:
        """It holds whole numbers and e4m3, in matrices that are stored as (out, in), all of one scheme."""
        if len(set(model.schemes.values())) > 1:
            return "compressed-tensors is written with one scheme, and budget= chooses several; take format=meshwright"
        for name, scheme in model.schemes.items():
            why = _unwritable(scheme)
            if why:
                return f"compressed-tensors cannot hold {scheme.name}: {why}; take format=meshwright"
            columns = quantizable(model.shape)[name][-1]
            if scheme.group and columns % scheme.group:
                every = [quantizable(model.shape)[one][-1] for one in model.schemes]
                fitting = [group for group in GROUPS if not any(size % group for size in every)]
                other = f"group={max(fitting)} or " if fitting else ""
                return (
                    f"compressed-tensors cannot hold {name}: its {columns} inputs are no multiple of group="
                    f"{scheme.group}; take {other}format=meshwright"
                )
        if any(binding.transform in JOINED for binding in bindings(model.shape)):
            family = model.shape.family
            return f"compressed-tensors cannot hold {family}, whose matrices {TURNED}; take format=meshwright"
        return ""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """As QuantizedFormat."""
        return planned_tensors(model, lambda name, size, scheme: _planned(name, size, scheme, model.dtype))

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """As QuantizedFormat."""
        return encoded_tensors(model, weights, lambda _, binding, matrix: _encoded(binding, matrix, model))

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """One group of all quantized layers; what is not quantized is named."""
        scheme = next(iter(model.schemes.values()))
        kind = "float" if scheme.codes == "e4m3" else "int"
        weights = {
            "num_bits": scheme.bits, "type": kind, "symmetric": scheme.zeros == "fixed", "dynamic": False,
            "strategy": "group" if scheme.group else "channel", "group_size": scheme.group or None,
        }  # fmt: skip
        inputs = {
            "num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token", "group_size": None,
        }  # fmt: skip
        activations = None if scheme.activations == "same" else inputs
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": self.name,
            "format": _layout(scheme),
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": _ignored(model),
        }

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """As QuantizedFormat."""
        entries = Entries(config, f"{folder}/config.json, quantization_config")
        groups, stored = group_schemes(entries), stored_tensors(folder)
        stored = {name: one for name, one in stored.items() if not name.endswith(BESIDE)}
        schemes = dict[str, Scheme]()
        for binding in bindings(shape):
            coded = [their for their in binding.theirs if f"{their}_scale" in stored]
            if next(iter(binding.ours)) not in quantizable(shape) or not coded:
                continue
            if binding.transform is CONV1D:
                raise HubError(f"{folder}: codes of {shape.family}, whose matrices are stored transposed, are not read")
            each = {_fitting(entries, groups, stored, their, binding.theirs[their]) for their in coded}
            if len(each) > 1:
                raise HubError(
                    f"{folder}: {coded[0]} has codes of another layout than those that are one stack with it"
                )
            schemes |= dict.fromkeys(binding.ours, each.pop())
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns={}, dtype=dtype)
        if not schemes:
            raise entries.fail("no tensor of the folder is quantized: there is no weight_scale")
        planned = _as_stored(
            planned_tensors(model, lambda name, size, one: _planned(name, size, one, dtype, whole=name in stored)),
            stored,
        )
        check(folder, planned, tensors_of_model(folder, shape, planned, stored))
        return model

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
        """As QuantizedFormat."""
        stored = stored_tensors(folder)
        for binding in bindings(model.shape):
            if not any(map(wanted, binding.ours)):
                continue
            name, rows = next(iter(binding.ours)), [size[0] for size in binding.ours.values()]
            if name not in model.schemes:
                theirs = [stored[one].read() for one in binding.theirs]
                yield from zip(binding.ours, binding.transform.restore(theirs, rows, model.shape), strict=True)
                continue
            scheme, size = model.schemes[name], next(iter(binding.theirs.values()))
            each = [_decoded(stored, one, size, scheme) for one in binding.theirs]
            yield from restored_parts(binding, each, model.shape)


def _unwritable(scheme: Scheme) -> str:
    if scheme.outliers != "none":
        return "it has no place for columns in 16 bit"
    if scheme.codes == "nf4":
        return "it has no normal floats"
    if scheme.zeros == "real":
        return "its zeros must be whole numbers"
    return ""


def _layout(scheme: Scheme) -> str:
    return FLOAT if scheme.codes == "e4m3" else PACKED if scheme.packed or scheme.activations == "same" else WHOLE


def _planned(
    name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype, *, whole: bool = False
) -> list[Planned]:
    """`whole`: a byte for each code, though it has fewer bits."""
    rows, columns = size
    groups, bits = scheme.groups(columns), scheme.bits
    scale = Planned(name=f"{name}_scale", size=(rows, groups), dtype=torch.float32 if dtype == torch.float16 else dtype)
    if whole or _layout(scheme) != PACKED:
        kind = torch.float8_e4m3fn if scheme.codes == "e4m3" else torch.int8
        zero = Planned(name=f"{name}_zero_point", size=(rows, groups), dtype=torch.int8)
        return [Planned(name=name, size=size, dtype=kind), scale, *([zero] if scheme.zeros == "whole" else [])]
    parts = [Planned(name=f"{name}_packed", size=(rows, -(-columns * bits // 32)), dtype=torch.int32), scale]
    if scheme.zeros == "whole":
        zeros = (-(-rows * bits // 32), groups)
        parts.append(Planned(name=f"{name}_zero_point", size=zeros, dtype=torch.int32))
    return [*parts, Planned(name=f"{name}_shape", size=(2,), dtype=torch.int64)]


def _as_stored(planned: Sequence[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
    """With the dtype of scales that a file has, which writers choose, and the size of those of all or of blocks."""
    adjusted = []
    for tensor in planned:
        there = stored.get(tensor.name)
        if there is not None and tensor.name.endswith("_scale") and there.dtype.is_floating_point:
            of_all = there.size in ((), (1,), (1, 1))
            of_blocks = len(there.size) == 2 and there.size[1:] == tensor.size[1:]
            tensor = replace(tensor, size=there.size if of_all or of_blocks else tensor.size, dtype=there.dtype)
        adjusted.append(tensor)
    return adjusted


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes (R, C) uint8 -> one stream of bits for each row, as int32 (R, ceil(C bits / 32))."""
    packed = pack(codes, bits)
    return torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).contiguous().view(torch.int32)


def _codes(words: Tensor, bits: int, columns: int) -> Tensor:
    return unpack(words.contiguous().view(torch.uint8)[..., : -(-columns * bits // 8)], bits, columns)


def _encoded(binding: Binding, matrix: QuantizedMatrix, model: QuantizedModel) -> Iterator[tuple[str, Tensor]]:
    scheme, shape = matrix.scheme, model.shape
    codes = binding.transform.export([matrix.whole_codes()], shape)
    scales = binding.transform.export([matrix.scales], shape)
    zeros = binding.transform.export([matrix.every_zero()], shape) if matrix.zeros is not None else [None] * len(codes)
    for name, code, scale, zero in zip(binding.theirs, codes, scales, zeros, strict=True):
        yield f"{name}_scale", scale
        if _layout(scheme) != PACKED:
            yield name, code
            continue
        whole = code if scheme.packed else (code.int() + 128).to(torch.uint8)
        yield f"{name}_packed", _words(whole, scheme.bits)
        yield f"{name}_shape", torch.tensor(code.shape)
        if zero is not None:
            yield f"{name}_zero_point", _words(zero.to(torch.uint8).t().contiguous(), scheme.bits).t().contiguous()


def _decoded(stored: Mapping[str, Stored], name: str, size: tuple[int, ...], scheme: Scheme) -> dict[str, Tensor]:
    """Parts of one matrix of theirs, with codes and zeros as ours are packed."""
    rows, columns = size
    parts = {"scales": _spread(stored, f"{name}_scale", rows, scheme.groups(columns), scheme)}
    if _layout(scheme) != PACKED:
        return {"codes": stored[name].read(), **parts}
    if name in stored:
        return parts | _whole(stored, name, scheme)
    shape = stored[f"{name}_shape"].read().tolist()
    if shape != list(size):
        raise HubError(f"{stored[name + '_shape'].file}: {name}_shape says {shape} where config.json says {list(size)}")
    codes = _codes(stored[f"{name}_packed"].read(), scheme.bits, columns)
    parts["codes"] = pack(codes, scheme.bits) if scheme.packed else (codes.int() - 128).to(torch.int8)
    if scheme.zeros == "whole":
        words = stored[f"{name}_zero_point"].read().t().contiguous()
        parts["zeros"] = pack(_codes(words, scheme.bits, rows).t().contiguous(), scheme.bits)
    return parts


def _whole(stored: Mapping[str, Stored], name: str, scheme: Scheme) -> dict[str, Tensor]:
    """Codes of fewer than 8 bits that have a byte each, and their zeros, as ours are packed."""
    if not scheme.packed:
        return {"codes": stored[name].read()}
    names = {"codes": name} | ({"zeros": f"{name}_zero_point"} if scheme.zeros == "whole" else {})
    middle = 2 ** (scheme.bits - 1)
    return {part: pack((stored[one].read().int() + middle).to(torch.uint8), scheme.bits) for part, one in names.items()}


def _spread(stored: Mapping[str, Stored], name: str, rows: int, groups: int, scheme: Scheme) -> Tensor:
    """Scales (rows, groups), also of a whole matrix (1,), or of blocks (ceil(rows / group), groups)."""
    scales = stored[name].read().to(getattr(torch, scheme.scales))
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, groups).contiguous()
    if len(scales) == rows:
        return scales
    if not scheme.group or len(scales) != -(-rows // scheme.group):
        sizes = list(stored[name].size)
        raise HubError(f"{stored[name].file}: {name} is {sizes}, neither for {rows} outputs nor for blocks of them")
    return scales.repeat_interleave(scheme.group, 0)[:rows].contiguous()


def _ignored(model: QuantizedModel) -> list[str]:
    """Layers that are not quantized though they are linear: head, routers, and what was left out."""
    parts = ["lm_head"]  # a tied one too: readers make a layer of it
    for binding in bindings(model.shape):
        own = next(iter(binding.ours))
        if own in model.skipped or own.endswith("router.weight"):
            parts += [name.removesuffix(".weight") for name in binding.theirs]
    return parts


def _fitting(
    entries: Entries, schemes: Sequence[Scheme], stored: Mapping[str, Stored], name: str, size: tuple[int, ...]
) -> Scheme:
    """The scheme of a matrix: that of the group whose tensors are those of the file. Regular expressions in a file
    from elsewhere are never run: their time can grow exponentially."""
    scales = scale_dtype(entries, stored[f"{name}_scale"])
    each = list(dict.fromkeys(replace(scheme, scales=scales) for scheme in schemes))
    if len(each) == 1:
        return each[0]
    there = {key for key in stored if key.startswith(name)}
    fitting = []
    for scheme in each:
        planned = _as_stored(_planned(name, size, scheme, torch.bfloat16), stored)
        wanted = {tensor.name: (tensor.size, tensor.dtype) for tensor in planned}
        fitting += [scheme] if wanted == {key: (stored[key].size, stored[key].dtype) for key in there} else []
    if len(fitting) != 1:
        raise entries.fail(
            f"{name} has the tensors of {len(fitting) or 'none'} of {len(each)} config_groups, which must be one: "
            f"{REMEDY}"
        )
    return fitting[0]

"""compressed-tensors (https://github.com/vllm-project/compressed-tensors), which vLLM, SGLang and transformers read.

    pack-quantized    X.weight_packed int32 (N, ceil(K b / 32)): codes as one stream of bits along K; X.weight_scale
                      (N, groups); X.weight_zero_point int32 (ceil(N b / 32), groups): the same along N; X.weight_shape
    int-quantized     X.weight int8 (N, K), X.weight_scale (N, 1); activations with a scale for each token
    float-quantized   the same with e4m3

Codes are written without a sign, 2^(b-1) more than they stand for, as ours are. Scales have the dtype of the other
weights, which is that of what their reader restores.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.kernels.quantization import pack, unpack
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.hub.entries import Entries
from meshwright.model.hub.safetensors_files import Planned, Stored, stored_tensors
from meshwright.model.hub.transforms import JOINED, TURNED
from meshwright.model.hub.weight_names import Binding, bindings
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
from meshwright.spec.quantization_schemes import BITS, GROUPS, SCHEMES, Activations, Codes, Scheme, Zeros
from meshwright.spec.shape import ModelShape

PACKED, WHOLE, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
LAYOUTS: Mapping[str, Codes] = {PACKED: "integer", WHOLE: "integer", FLOAT: "e4m3"}
"""Layouts of files that are read -> what codes are."""
UNREAD = {
    "nvfp4-pack-quantized": "4-bit floats with scales of 8 bits (NVFP4)",
    "mxfp4-pack-quantized": "4-bit floats with scales that are powers of two (MXFP4)",
    "mxfp6-pack-quantized": "6-bit floats with scales that are powers of two (MXFP6)",
    "mxfp8-quantized": "8-bit floats with scales that are powers of two (MXFP8)",
    "marlin-24": "matrices with half their numbers left out",
    "sparse-24-bitmask": "matrices with half left out",
}
"""Layouts that no product here multiplies -> what they hold: compressed_tensors/config/base.py, CompressionFormat."""
REMEDY = "quantize the original with meshwright quantize, or take a folder of W4A16, INT8 or FP8_DYNAMIC"
SCALES_OF = {"tensor": "one scale for a whole matrix (FP8)", "block": "scales of square blocks (FP8_BLOCK)",
             "tensor_group": "scales of groups, and one above them (NVFP4)"}  # fmt: skip


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
        scheme, stored = _scheme(entries), stored_tensors(folder)
        schemes = {}
        for binding in bindings(shape):
            own, their = next(iter(binding.ours)), next(iter(binding.theirs))
            if f"{their}_scale" in stored and own in quantizable(shape):
                schemes[own] = replace(scheme, scales=_scales(entries, stored[f"{their}_scale"]))
        model = QuantizedModel(shape=shape, schemes=schemes, kept={}, dtype=dtype)
        if not schemes:
            raise entries.fail("no tensor of the folder is quantized: there is no weight_scale")
        why = self.refusal(model)
        if why:
            raise HubError(f"{folder}: {why}")
        planned = _as_stored(self.planned(model), stored)
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


def _planned(name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> list[Planned]:
    rows, columns = size
    groups, bits = scheme.groups(columns), scheme.bits
    scale = Planned(name=f"{name}_scale", size=(rows, groups), dtype=torch.float32 if dtype == torch.float16 else dtype)
    if _layout(scheme) != PACKED:
        kind = torch.float8_e4m3fn if scheme.codes == "e4m3" else torch.int8
        return [Planned(name=name, size=size, dtype=kind), scale]
    found = [Planned(name=f"{name}_packed", size=(rows, -(-columns * bits // 32)), dtype=torch.int32), scale]
    if scheme.zeros == "whole":
        zeros = (-(-rows * bits // 32), groups)
        found.append(Planned(name=f"{name}_zero_point", size=zeros, dtype=torch.int32))
    return [*found, Planned(name=f"{name}_shape", size=(2,), dtype=torch.int64)]


def _as_stored(planned: Sequence[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
    """With the dtype of scales that a file has, which writers choose."""
    return [
        Planned(name=one.name, size=one.size, dtype=stored[one.name].dtype)
        if one.name in stored and one.dtype.is_floating_point and stored[one.name].dtype.is_floating_point
        else one
        for one in planned
    ]


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
    found = {"scales": stored[f"{name}_scale"].read().to(getattr(torch, scheme.scales))}
    if _layout(scheme) != PACKED:
        return {"codes": stored[name].read(), **found}
    shape = stored[f"{name}_shape"].read().tolist()
    if shape != list(size):
        raise HubError(f"{stored[name + '_shape'].file}: {name}_shape says {shape} where config.json says {list(size)}")
    codes = _codes(stored[f"{name}_packed"].read(), scheme.bits, columns)
    found["codes"] = pack(codes, scheme.bits) if scheme.packed else (codes.int() - 128).to(torch.int8)
    if scheme.zeros == "whole":
        words = stored[f"{name}_zero_point"].read().t().contiguous()
        found["zeros"] = pack(_codes(words, scheme.bits, rows).t().contiguous(), scheme.bits)
    return found


def _ignored(model: QuantizedModel) -> list[str]:
    """Layers that are not quantized though they are linear: head, routers, and what was left out."""
    found = ["lm_head"]  # a tied one too: readers make a layer of it
    for binding in bindings(model.shape):
        own = next(iter(binding.ours))
        if own in model.skipped or own.endswith("router.weight"):
            found += [name.removesuffix(".weight") for name in binding.theirs]
    return found


def _scales(entries: Entries, found: Stored) -> Literal["bfloat16", "float16", "float32"]:
    if found.dtype == torch.bfloat16:
        return "bfloat16"
    if found.dtype == torch.float16:
        return "float16"
    if found.dtype == torch.float32:
        return "float32"
    raise entries.fail(f"scales of {found.dtype} are not supported")


def _scheme(entries: Entries) -> Scheme:
    """Of the one group of a config; HubError where it holds what is not read."""
    layout = entries.text("format")
    groups = entries.raw("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise entries.fail(f"config_groups with another number of groups than 1 is not read; {REMEDY}")
    (only,) = groups.values()
    if not isinstance(only, dict):
        raise entries.fail("config_groups must hold a JSON object")
    group = Entries(only, f"{entries.where}, config_groups")
    layout = group.text("format") if only.get("format") else layout  # its own: the whole may say mixed-precision
    if layout not in LAYOUTS:
        held = f" holds {UNREAD[layout]}, which" if layout in UNREAD else ""
        raise entries.fail(f"format={layout!r}{held} is not read; {REMEDY}")
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    if weights is None:
        raise group.fail("weights is missing")
    weights.allow("dynamic", (False,))
    strategy = weights.text("strategy", "channel")
    if strategy in SCALES_OF:
        raise weights.fail(f"strategy={strategy!r}, {SCALES_OF[strategy]}, is not read; {REMEDY}")
    weights.allow("strategy", ("group", "channel"))
    # "weight", or "static", is the order in which columns were rounded; the file is the same. "group" once moved them.
    weights.allow("actorder", (None, False, "weight", "static"))
    bits, kind = weights.integer("num_bits"), LAYOUTS[layout]
    if inputs is not None and (bits != 8 or strategy == "group"):
        beside = f"{bits}-bit weights" + " in groups" * (strategy == "group")
        raise group.fail(f"input_activations in fewer bits beside {beside} are not read; {REMEDY}")
    if inputs is not None:
        inputs.allow("strategy", ("token",))
        inputs.allow("symmetric", (True,))
        inputs.allow("dynamic", (True,))
    activations: Activations = "same" if inputs is None else "fp8" if kind == "e4m3" else "int8"
    like = SCHEMES["fp8" if kind == "e4m3" else "int8" if bits == 8 else "int4-rtn"]
    if bits not in BITS:
        raise weights.fail(f"num_bits={bits} is not read: {', '.join(map(str, BITS))} are; {REMEDY}")
    zeros: Zeros = "fixed" if weights.flag("symmetric", True) else "whole"
    return Scheme(
        name=f"{kind}{bits}", about="as read", bits=bits, codes=kind, zeros=zeros,
        group=weights.integer("group_size") if strategy == "group" else 0, method="absmax",
        activations=activations, expected_kl=like.expected_kl, max_kl=like.max_kl,
    )  # fmt: skip

"""compressed-tensors (https://github.com/vllm-project/compressed-tensors), which vLLM, SGLang and transformers read.

    pack-quantized    X.weight_packed int32 (N, ceil(K b / 32)): codes as one stream of bits along K; X.weight_scale
                      (N, groups); X.weight_zero_point int32 (ceil(N b / 32), groups): the same along N; X.weight_shape
    int-quantized     X.weight int8 (N, K), X.weight_scale (N, 1); activations with a scale for each token. Read also
                      with fewer bits, groups and X.weight_zero_point int8 (N, groups), as W4A8 is written
    float-quantized   the same with e4m3; read also with one scale (1,) for all, or one for each square block

Codes are written without a sign, 2^(b-1) more than their value, like ours. Scales have the dtype of the other weights,
in which their reader restores matrices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.formats.hub.families import Entries
from meshwright.formats.hub.weight_names import CONV1D, JOINED, TURNED, Binding, bindings
from meshwright.formats.quantized.interface import (
    NATIVE,
    MatrixFormat,
    QuantizedModel,
    planned_tensors,
    skipped_modules,
    tensors_of_model,
)
from meshwright.formats.quantized.native import check_tensors
from meshwright.formats.safetensors import Planned, Stored, stored_tensors
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.rounding import pack, unpack
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError, argument
from meshwright.spec.model.quantization_schemes import BITS, GROUPS, SCHEMES, Activations, Codes, Scheme, Zeros
from meshwright.spec.model.shape import ModelShape

PACKED, WHOLE, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
LAYOUTS: Mapping[str, Codes] = {PACKED: "integer", WHOLE: "integer", FLOAT: "e4m3"}
"""Supported layouts of files -> kind of codes."""
UNREAD = {
    "nvfp4-pack-quantized": "4-bit floats with scales of 8 bits (NVFP4)",
    "mxfp4-pack-quantized": "4-bit floats with scales that are powers of two (MXFP4)",
    "mxfp6-pack-quantized": "6-bit floats with scales that are powers of two (MXFP6)",
    "mxfp8-quantized": "8-bit floats with scales that are powers of two (MXFP8)",
    "marlin-24": "matrices with half their numbers left out",
    "sparse-24-bitmask": "matrices with half left out",
}
"""Layouts that no product here multiplies -> contents (compressed_tensors/config/base.py, CompressionFormat)."""
REMEDY = "quantize the original with meshwright quantize, or take a folder of W4A16, INT8 or FP8_DYNAMIC"
BESIDE = (".input_scale", ".k_scale", ".v_scale")
"""Ends of names of scales that are not read: inputs have a scale per token here, and the cache is not rounded."""


class CompressedTensors(MatrixFormat):
    """Layout described above."""

    name = "compressed-tensors"

    def refusal(self, model: QuantizedModel) -> str:
        """Return why the model does not fit: it takes integers and e4m3, in matrices (out, in), all of one scheme."""
        if len(set(model.schemes.values())) > 1:
            several = f"{argument('budget')} chooses several"
            return f"compressed-tensors is written with one scheme, and {several}; take {NATIVE}"
        for name, scheme in model.schemes.items():
            why = _unsupported(scheme)
            if why:
                return f"compressed-tensors cannot hold {scheme.name}: {why}; take {NATIVE}"
            columns = quantizable(model.shape)[name][-1]
            if scheme.group and columns % scheme.group:
                all_columns = [quantizable(model.shape)[other_name][-1] for other_name in model.schemes]
                fitting = [group for group in GROUPS if not any(size % group for size in all_columns)]
                other = f"{argument('group', max(fitting))} or " if fitting else ""
                return (
                    f"compressed-tensors cannot hold {name}: its {columns} inputs are no multiple of group="
                    f"{scheme.group}; take {other}{NATIVE}"
                )
        if any(binding.transform in JOINED for binding in bindings(model.shape)):
            family = model.shape.family
            return f"compressed-tensors cannot hold {family}, whose matrices {TURNED}; take {NATIVE}"
        return ""

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return one group of all quantized layers, and the names of layers that are not quantized."""
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
            # Readers make a layer of the head even where it is tied.
            "ignore": ["lm_head", *skipped_modules(model, routers=True)],
        }

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """Read from the config and the headers of a folder which matrix has which scheme."""
        entries = Entries(config, f"{folder}/config.json, quantization_config")
        groups, stored = group_schemes(entries), stored_tensors(folder)
        # Calibrated scales of inputs and of the cache have no use here, and would be unknown tensors.
        stored = {name: tensor for name, tensor in stored.items() if not name.endswith(BESIDE)}
        schemes = dict[str, Scheme]()
        for binding in bindings(shape):
            coded = [their for their in binding.theirs if f"{their}_scale" in stored]
            if next(iter(binding.ours)) not in quantizable(shape) or not coded:
                continue
            if binding.transform is CONV1D:
                raise HubError(f"{folder}: codes of {shape.family}, whose matrices are stored transposed, are not read")
            found_schemes = {_matching_scheme(entries, groups, stored, their, binding.theirs[their]) for their in coded}
            if len(found_schemes) > 1:
                raise HubError(f"{folder}: {coded[0]} has codes of another layout than the matrices stacked with it")
            schemes |= dict.fromkeys(binding.ours, found_schemes.pop())
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns={}, dtype=dtype)
        if not schemes:
            raise entries.fail("no tensor of the folder is quantized: there is no weight_scale")
        planned = _adapt_to_files(
            planned_tensors(model, lambda name, *facts: _plan_matrix(name, *facts, whole=name in stored)), stored
        )
        check_tensors(folder, planned, tensors_of_model(folder, shape, planned, stored))
        return model

    def plan_matrix(self, name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> list[Planned]:
        """Return the tensors that stand for a matrix of theirs."""
        return _plan_matrix(name, size, scheme, dtype)

    def encode_matrix(
        self, name: str, binding: Binding, matrix: QuantizedMatrix, model: QuantizedModel
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield those tensors for a matrix of ours."""
        scheme, shape = matrix.scheme, model.shape
        codes = binding.transform.export([matrix.whole_codes()], shape)
        scales = binding.transform.export([matrix.scales], shape)
        no_zeros = [None] * len(codes)
        zeros = no_zeros if matrix.zeros is None else binding.transform.export([matrix.every_zero()], shape)
        for their, code, scale, zero in zip(binding.theirs, codes, scales, zeros, strict=True):
            yield f"{their}_scale", scale
            if _layout(scheme) != PACKED:
                yield their, code
                continue
            unsigned = code if scheme.packed else (code.int() + 128).to(torch.uint8)
            yield f"{their}_packed", _pack_words(unsigned, scheme.bits)
            yield f"{their}_shape", torch.tensor(code.shape)
            if zero is not None:
                # Zeros are packed along the outputs, codes along the inputs.
                by_outputs = _pack_words(zero.to(torch.uint8).t().contiguous(), scheme.bits)
                yield f"{their}_zero_point", by_outputs.t().contiguous()

    def decode_matrix(
        self, stored: Mapping[str, Stored], name: str, size: tuple[int, ...], scheme: Scheme
    ) -> dict[str, Tensor]:
        """Return the parts of one matrix of theirs, with codes and zeros packed as ours are."""
        rows, columns = size
        parts = {"scales": _expand_scales(stored, f"{name}_scale", rows, scheme.groups(columns), scheme)}
        if _layout(scheme) != PACKED:
            return {"codes": stored[name].read(), **parts}
        if name in stored:
            return parts | _read_bytes(stored, name, scheme)
        # Words hide how many codes the last one has, so the size is a tensor of its own.
        shape = stored[f"{name}_shape"].read().tolist()
        if shape != list(size):
            raise HubError(
                f"{stored[name + '_shape'].file}: {name}_shape says {shape} where config.json says {list(size)}"
            )
        codes = _unpack_words(stored[f"{name}_packed"].read(), scheme.bits, columns)
        parts["codes"] = pack(codes, scheme.bits) if scheme.packed else (codes.int() - 128).to(torch.int8)
        if scheme.zeros == "whole":
            words = stored[f"{name}_zero_point"].read().t().contiguous()
            parts["zeros"] = pack(_unpack_words(words, scheme.bits, rows).t().contiguous(), scheme.bits)
        return parts


def _unsupported(scheme: Scheme) -> str:
    if scheme.outliers != "none":
        return "it has no place for columns in 16 bit"
    if scheme.codes == "nf4":
        return "it has no normal floats"
    if scheme.activations == "int8" and not scheme.symmetric_by_token:
        return "its activations have a scale for each token, and neither side has zeros"
    if scheme.zeros == "real":
        return "its zeros must be whole numbers"
    return ""


def _layout(scheme: Scheme) -> str:
    return FLOAT if scheme.codes == "e4m3" else PACKED if scheme.packed or scheme.activations == "same" else WHOLE


def _plan_matrix(
    name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype, *, whole: bool = False
) -> list[Planned]:
    """Plan the tensors of one matrix. With `whole`, each code has a byte though it has fewer bits."""
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


def _adapt_to_files(planned: Sequence[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
    """Set the dtype of scales to that of the file, and their size where one scale is for all or for a block."""
    adjusted = []
    for tensor in planned:
        actual = stored.get(tensor.name)
        if actual is not None and tensor.name.endswith("_scale") and actual.dtype.is_floating_point:
            is_per_matrix = actual.size in ((), (1,), (1, 1))
            is_per_block = len(actual.size) == 2 and actual.size[1:] == tensor.size[1:]
            tensor = replace(
                tensor, size=actual.size if is_per_matrix or is_per_block else tensor.size, dtype=actual.dtype
            )
        adjusted.append(tensor)
    return adjusted


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (R, C) uint8 into one stream of bits per row, int32 (R, ceil(C bits / 32))."""
    packed = pack(codes, bits)
    # Rows are filled up to whole words, which a stream of bits does not end with.
    return torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).contiguous().view(torch.int32)


def _unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    return unpack(words.contiguous().view(torch.uint8)[..., : -(-columns * bits // 8)], bits, columns)


def _read_bytes(stored: Mapping[str, Stored], name: str, scheme: Scheme) -> dict[str, Tensor]:
    """Read codes of fewer than 8 bits with a byte each, and their zeros, and pack them as ours are."""
    if not scheme.packed:
        return {"codes": stored[name].read()}
    names = {"codes": name} | ({"zeros": f"{name}_zero_point"} if scheme.zeros == "whole" else {})
    # Their codes are signed, ours count from 0.
    middle = 2 ** (scheme.bits - 1)
    return {
        part: pack((stored[their_name].read().int() + middle).to(torch.uint8), scheme.bits)
        for part, their_name in names.items()
    }


def _expand_scales(stored: Mapping[str, Stored], name: str, rows: int, groups: int, scheme: Scheme) -> Tensor:
    """Return scales (rows, groups), also from one for the matrix (1,), or from blocks (ceil(rows / group), groups)."""
    scales = stored[name].read().to(getattr(torch, scheme.scales))
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, groups).contiguous()
    if len(scales) == rows:
        return scales
    if not scheme.group or len(scales) != -(-rows // scheme.group):
        sizes = list(stored[name].size)
        raise HubError(f"{stored[name].file}: {name} is {sizes}, neither for {rows} outputs nor for blocks of them")
    return scales.repeat_interleave(scheme.group, 0)[:rows].contiguous()


def _matching_scheme(
    entries: Entries, schemes: Sequence[Scheme], stored: Mapping[str, Stored], name: str, size: tuple[int, ...]
) -> Scheme:
    """Return the scheme of the group whose tensors match those in the file.

    Regular expressions of an untrusted file are never run: their time can grow exponentially.
    """
    scales = _scale_dtype(entries, stored[f"{name}_scale"])
    options = list(dict.fromkeys(replace(scheme, scales=scales) for scheme in schemes))
    if len(options) == 1:
        return options[0]
    actual = {key for key in stored if key.startswith(name)}
    fitting = []
    for scheme in options:
        planned = _adapt_to_files(_plan_matrix(name, size, scheme, torch.bfloat16), stored)
        wanted = {tensor.name: (tensor.size, tensor.dtype) for tensor in planned}
        fitting += [scheme] if wanted == {key: (stored[key].size, stored[key].dtype) for key in actual} else []
    if len(fitting) != 1:
        raise entries.fail(
            f"{name} has the tensors of {len(fitting) or 'none'} of {len(options)} config_groups, which must be one: "
            f"{REMEDY}"
        )
    return fitting[0]


def group_schemes(entries: Entries) -> list[Scheme]:
    """Return the schemes of a config's groups. Raises HubError for unsupported ones."""
    groups = entries.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise entries.fail("config_groups must hold a group of matrices")
    schemes = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise entries.fail(f"config_groups: {name} must hold a JSON object")
        # The group's layout comes first, since that of the whole may be mixed-precision.
        layout = group.get("format") or entries.text("format")
        schemes.append(_group_scheme(Entries(group, f"{entries.where}, config_groups"), str(layout)))
    return schemes


def _group_scheme(group: Entries, layout: str) -> Scheme:
    if layout not in LAYOUTS:
        held = f" holds {UNREAD[layout]}, which" if layout in UNREAD else ""
        raise group.fail(f"format={layout!r}{held} is not read; {REMEDY}")
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    if weights is None:
        raise group.fail("weights is missing")
    weights.allow("dynamic", (False,))
    strategy = weights.text("strategy", "channel")
    weights.allow("strategy", ("group", "channel", "tensor", "block"))
    # "weight" and "static" are orders in which columns were rounded, with the same file. "group" reordered columns.
    weights.allow("actorder", (None, False, "weight", "static"))
    bits, kind, size = weights.integer("num_bits"), LAYOUTS[layout], 0
    if strategy == "group":
        size = weights.integer("group_size")
    # Their inputs are rounded by groups, and ours are not rounded.
    if strategy == "block":
        inputs, sides = None, weights.raw("block_structure")
        size = sides[0] if isinstance(sides, list) and sides and isinstance(sides[0], int) else 0
        if sides != [size, size] or size not in GROUPS:
            raise weights.fail(
                f"block_structure={sides} is not supported (supported: square blocks of {', '.join(map(str, GROUPS))})"
            )
    if inputs is not None:
        inputs.allow("num_bits", (8,))
    # Inputs of W4A8 are not rounded here either.
    if bits != 8 or strategy == "group":
        inputs = None
    if inputs is not None:
        inputs.allow("strategy", ("token", "tensor"))
        inputs.allow("symmetric", (True,))
    activations: Activations = "same" if inputs is None else "fp8" if kind == "e4m3" else "int8"
    like = SCHEMES["fp8" if kind == "e4m3" else "int8" if bits == 8 else "int4-rtn"]
    if bits not in BITS:
        raise weights.fail(f"num_bits={bits} is not supported (supported: {', '.join(map(str, BITS))}); {REMEDY}")
    zeros: Zeros = "fixed" if weights.flag("symmetric", True) else "whole"
    return Scheme(
        name=f"{kind}{bits}", about="as read", bits=bits, codes=kind, zeros=zeros,
        group=size, method="absmax", activations=activations, expected_kl=like.expected_kl, max_kl=like.max_kl,
    )  # fmt: skip


def _scale_dtype(entries: Entries, stored: Stored) -> Literal["bfloat16", "float16", "float32"]:
    """Return the dtype of a file's scales as schemes name it. Raises HubError for any other."""
    if stored.dtype == torch.bfloat16:
        return "bfloat16"
    if stored.dtype == torch.float16:
        return "float16"
    if stored.dtype == torch.float32:
        return "float32"
    raise entries.fail(f"scales of {stored.dtype} are not supported")

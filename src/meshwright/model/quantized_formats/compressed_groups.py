"""What the config of a compressed-tensors folder says about its matrices: the scheme of each of its groups."""

from collections.abc import Mapping
from typing import Literal

import torch

from meshwright.model.hub.entries import Entries
from meshwright.model.hub.safetensors_files import Stored
from meshwright.spec.quantization_schemes import BITS, GROUPS, SCHEMES, Activations, Codes, Scheme, Zeros

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


def group_schemes(entries: Entries) -> list[Scheme]:
    """Of the groups of a config; HubError where one holds what is not read."""
    groups = entries.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise entries.fail("config_groups must hold a group of matrices")
    schemes = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise entries.fail(f"config_groups: {name} must hold a JSON object")
        # A layout of its own comes first: the whole may say mixed-precision.
        layout = group.get("format") or entries.text("format")
        schemes.append(_scheme(Entries(group, f"{entries.where}, config_groups"), str(layout)))
    return schemes


def _scheme(group: Entries, layout: str) -> Scheme:
    """Of one group; HubError where it holds what is not read."""
    if layout not in LAYOUTS:
        held = f" holds {UNREAD[layout]}, which" if layout in UNREAD else ""
        raise group.fail(f"format={layout!r}{held} is not read; {REMEDY}")
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    if weights is None:
        raise group.fail("weights is missing")
    weights.allow("dynamic", (False,))
    strategy = weights.text("strategy", "channel")
    weights.allow("strategy", ("group", "channel", "tensor", "block"))
    # "weight", or "static", is the order in which columns were rounded; the file is the same. "group" once moved them.
    weights.allow("actorder", (None, False, "weight", "static"))
    bits, kind, size = weights.integer("num_bits"), LAYOUTS[layout], 0
    if strategy == "group":
        size = weights.integer("group_size")
    if strategy == "block":  # inputs are rounded by groups there, and stay as they are here
        inputs, sides = None, weights.raw("block_structure")
        size = sides[0] if isinstance(sides, list) and sides and isinstance(sides[0], int) else 0
        if sides != [size, size] or size not in GROUPS:
            raise weights.fail(
                f"block_structure={sides} is not read: square blocks of {', '.join(map(str, GROUPS))} are"
            )
    if inputs is not None:
        inputs.allow("num_bits", (8,))
    if bits != 8 or strategy == "group":  # inputs of W4A8 stay as they are here, too
        inputs = None
    if inputs is not None:
        inputs.allow("strategy", ("token", "tensor"))
        inputs.allow("symmetric", (True,))
    activations: Activations = "same" if inputs is None else "fp8" if kind == "e4m3" else "int8"
    like = SCHEMES["fp8" if kind == "e4m3" else "int8" if bits == 8 else "int4-rtn"]
    if bits not in BITS:
        raise weights.fail(f"num_bits={bits} is not read: {', '.join(map(str, BITS))} are; {REMEDY}")
    zeros: Zeros = "fixed" if weights.flag("symmetric", True) else "whole"
    return Scheme(
        name=f"{kind}{bits}", about="as read", bits=bits, codes=kind, zeros=zeros,
        group=size, method="absmax", activations=activations, expected_kl=like.expected_kl, max_kl=like.max_kl,
    )  # fmt: skip


def scale_dtype(entries: Entries, stored: Stored) -> Literal["bfloat16", "float16", "float32"]:
    """The dtype of a file's scales, as schemes name it. HubError where it is none of theirs."""
    if stored.dtype == torch.bfloat16:
        return "bfloat16"
    if stored.dtype == torch.float16:
        return "float16"
    if stored.dtype == torch.float32:
        return "float32"
    raise entries.fail(f"scales of {stored.dtype} are not supported")

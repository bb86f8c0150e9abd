"""Presets of llm-compressor, by compressed-tensors' own schemes: read, or refused by name with a remedy."""

import json
from typing import Any

import pytest

from meshwright.formats.hub.families import Entries
from meshwright.formats.quantized.compressed_tensors import group_schemes
from meshwright.spec.errors import HubError

DENSE = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False}
GROUP = {**DENSE, "num_bits": 4, "strategy": "group", "group_size": 128, "actorder": "static"}
TOKEN = {**DENSE, "strategy": "token", "dynamic": True}
FLOAT = {**DENSE, "type": "float"}
TENSOR = {**FLOAT, "strategy": "tensor"}
READ: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, tuple[Any, ...]]] = {
    "W4A16": ("pack-quantized", GROUP, None, (4, "integer", "fixed", 128, "same")),
    "W4A16_ASYM": ("pack-quantized", {**GROUP, "symmetric": False}, None, (4, "integer", "whole", 128, "same")),
    "W8A16": ("pack-quantized", {**GROUP, "num_bits": 8}, None, (8, "integer", "fixed", 128, "same")),
    "W4A8": ("int-quantized", GROUP, TOKEN, (4, "integer", "fixed", 128, "same")),
    "INT8": ("int-quantized", DENSE, TOKEN, (8, "integer", "fixed", 0, "int8")),
    "FP8_DYNAMIC": ("float-quantized", FLOAT, {**TOKEN, "type": "float"}, (8, "e4m3", "fixed", 0, "fp8")),
    "FP8": ("float-quantized", TENSOR, TENSOR, (8, "e4m3", "fixed", 0, "fp8")),
    "FP8_BLOCK": (
        "float-quantized", {**FLOAT, "strategy": "block", "block_structure": [128, 128]},
        {**FLOAT, "strategy": "group", "group_size": 128, "dynamic": True}, (8, "e4m3", "fixed", 128, "same"),
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "W7A16": ("pack-quantized", {**GROUP, "num_bits": 7}, None, "num_bits=7 is not supported"),
    "NVFP4": ("nvfp4-pack-quantized", {**FLOAT, "strategy": "tensor_group"}, None, "NVFP4"),
    "MXFP4": ("mxfp4-pack-quantized", {**GROUP, "type": "float"}, None, "MXFP4"),
    "MXFP8": ("mxfp8-quantized", {**FLOAT, "strategy": "group", "group_size": 32}, None, "MXFP8"),
}


def entries(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, whole: str = "") -> Entries:
    """quantization_config as compressed-tensors 0.20 writes it: each group names its own format too."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    config = {"quant_method": "compressed-tensors", "format": whole or layout, "config_groups": {"group_0": group}}
    return Entries(json.loads(json.dumps(config)), "config.json")


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("whole", ["", "mixed-precision"])
def test_presets_that_are_multiplied_here_are_read(name: str, whole: str) -> None:
    layout, weights, inputs, expected = READ[name]
    (scheme,) = group_schemes(entries(layout, weights, inputs, whole))
    assert (scheme.bits, scheme.codes, scheme.zeros, scheme.group, scheme.activations) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_other_presets_are_refused_by_name_with_a_remedy(name: str) -> None:
    layout, weights, inputs, reason = REFUSED[name]
    with pytest.raises(HubError, match=reason) as raised:
        group_schemes(entries(layout, weights, inputs))
    assert "quantize the original with meshwright quantize" in str(raised.value)


def test_the_facts_are_those_of_the_writers_own_presets() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import quant_scheme as schemes

    for name, (_, weights, inputs, _) in READ.items():
        written = schemes.preset_name_to_scheme(name, ["Linear"])
        for arguments, args in ((weights, written.weights), (inputs, written.input_activations)):
            assert (arguments is None) == (args is None)
            if arguments is not None:
                stored = {key: arguments[key] for key in ("num_bits", "type", "symmetric", "strategy", "group_size")}
                assert stored == {key: getattr(getattr(args, key), "value", getattr(args, key)) for key in stored}

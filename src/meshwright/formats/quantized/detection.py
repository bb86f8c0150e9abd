"""Quantization that a Hugging Face directory describes, in whichever of its files. Read without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.formats.hub.config import CONFIG, QUANTIZATION, read_json
from meshwright.spec.model.quantization_schemes import FOLDER_FORMATS

BESIDE: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of AutoGPTQ, GPTQModel and AutoAWQ that describe what config.json may not -> quant_method."""
OLDER_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's names of entries -> the usual ones."""
AUTO_ROUND: Mapping[str, dict[str, str]] = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
"""AutoRound's packing_format -> the layout that it is, in that layout's words.

Source: https://github.com/intel/auto-round, auto_round_extension/humming/qlinear_humming.py.
"""
MODELOPT = "hf_quant_config.json"
"""NVIDIA ModelOpt's file next to a config.json without an entry."""
NUMBERS = "fp8"
"""quant_method of 8-bit numbers in blocks, which are read as numbers (hub/directory.py)."""


def quantization(path: Path) -> dict[str, Any]:
    """Return a folder's entry about quantization, from config.json or a file beside it. Empty = none."""
    config = (read_json(path / CONFIG) or {}).get(QUANTIZATION)
    if isinstance(config, dict) and config:
        layout = AUTO_ROUND.get(str(config.get("packing_format")))
        if layout is not None:
            return {**config, **layout, "dynamic": config.get("extra_config")}
        strategy = _fp8_strategy(config)
        return _as_compressed_tensors(strategy) if strategy else config
    if config:
        return {}
    modelopt = (read_json(path / MODELOPT) or {}).get("quantization")
    if isinstance(modelopt, dict):
        described = {**modelopt, "quant_method": "modelopt"}
        return _as_compressed_tensors("tensor") if _fp8_strategy(described) else described
    for name, method in BESIDE.items():
        if alone := read_json(path / name):
            return {"quant_method": method} | {OLDER_NAMES.get(key, key): entry for key, entry in alone.items()}
    return {}


def _fp8_strategy(config: Mapping[str, Any]) -> str:
    """Return which weights share a scale in AutoFP8's, ModelOpt's and FBGEMM's FP8 layouts. Empty = another layout."""
    method = config.get("quant_method")
    if method == "fbgemm_fp8":
        return "channel"
    plain = method == NUMBERS and not config.get("weight_block_size")
    return "tensor" if plain or (method == "modelopt" and config.get("quant_algo") == "FP8") else ""


def _as_compressed_tensors(strategy: str) -> dict[str, Any]:
    facts = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {"weights": facts | {"strategy": strategy}, "input_activations": facts | {"strategy": "tensor"}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def quant_method(path: Path) -> str:
    """Return a folder's word for its format. Empty = it has none."""
    return str(quantization(path).get("quant_method", ""))


def is_quantized(path: Path) -> bool:
    """Return True if a folder is in one of our formats."""
    return quant_method(path) in FOLDER_FORMATS

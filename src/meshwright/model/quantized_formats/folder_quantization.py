"""What a Hugging Face directory says about its codes, in whichever file its writer put that; read without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.model.hub.folder_config import CONFIG, QUANTIZATION, read_json
from meshwright.spec.quantization_schemes import FOLDER_FORMATS

BESIDE: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files by which AutoGPTQ and GPTQModel, and AutoAWQ, say what their own config.json may not -> quant_method."""
OLDER_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's own names."""
AUTO_ROUND: Mapping[str, dict[str, str]] = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
"""AutoRound's packing_format -> the layout that it is, in that layout's words
(https://github.com/intel/auto-round, auto_round_extension/humming/qlinear_humming.py)."""
MODELOPT = "hf_quant_config.json"
"""NVIDIA ModelOpt's file beside a config.json that says nothing."""
NUMBERS = "fp8"
"""The quant_method of blocks of 8-bit numbers, which are read as numbers (hub/weights.py)."""


def quantization(path: Path) -> dict[str, Any]:
    """What a folder says about its codes: an entry of config.json, or a file that its writer put beside that. Empty
    where it says nothing."""
    config = (read_json(path / CONFIG) or {}).get(QUANTIZATION)
    if isinstance(config, dict) and config:
        same = AUTO_ROUND.get(str(config.get("packing_format")))
        if same is not None:
            return {**config, **same, "dynamic": config.get("extra_config")}
        strategy = _scales_of_8_bits(config)
        return _as_compressed_tensors(strategy) if strategy else config
    if config:
        return {}
    modelopt = (read_json(path / MODELOPT) or {}).get("quantization")
    if isinstance(modelopt, dict):
        named = {**modelopt, "quant_method": "modelopt"}
        return _as_compressed_tensors("tensor") if _scales_of_8_bits(named) else named
    for name, method in BESIDE.items():
        if alone := read_json(path / name):
            return {"quant_method": method} | {OLDER_NAMES.get(key, key): entry for key, entry in alone.items()}
    return {}


def _scales_of_8_bits(config: Mapping[str, Any]) -> str:
    """Which weights share a scale in layouts that are compressed-tensors' float-quantized under another name: AutoFP8's
    and ModelOpt's FP8, and FBGEMM's. Empty where it is none of them."""
    method = config.get("quant_method")
    if method == "fbgemm_fp8":
        return "channel"
    plain = method == NUMBERS and not config.get("weight_block_size")
    return "tensor" if plain or (method == "modelopt" and config.get("quant_algo") == "FP8") else ""


def _as_compressed_tensors(strategy: str) -> dict[str, Any]:
    """The config of 8-bit numbers with inputs that are rounded too."""
    facts = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {"weights": facts | {"strategy": strategy}, "input_activations": facts | {"strategy": "tensor"}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def quant_method(path: Path) -> str:
    """The word of a folder for its format; empty where it has none."""
    return str(quantization(path).get("quant_method", ""))


def is_quantized(path: Path) -> bool:
    """Whether a folder is in one of our formats."""
    return quant_method(path) in FOLDER_FORMATS

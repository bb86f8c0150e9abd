"""torchtitan's models: modules and flavors of its registry, and functions that Python configurations start from."""

import re
from collections.abc import Sequence
from typing import Any

from meshwright.spec import ModelShape, presets
from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import Facts
from meshwright.stacks.text.option_text import Called, Entry

MODELS = {
    "llama-3.2-1b": ("llama3", "1B"), "llama-3.2-3b": ("llama3", "3B"), "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"), "llama-3.1-405b": ("llama3", "405B"), "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"), "qwen3-4b": ("qwen3", "4B"), "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"), "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"), "deepseek-v3": ("deepseek_v3", "671B"),
}  # fmt: skip
"""Preset -> (module, flavor): torchtitan/models/*/__init__.py."""
READ = {**MODELS, "gpt-oss-20b": ("gpt_oss", "20b"), "gpt-oss-120b": ("gpt_oss", "120b")}
"""Models that are read, but not written."""
MODULES = tuple(dict.fromkeys(module for module, _ in READ.values()))
STARTED = {"llama3": "llama3_8b", "qwen3": "qwen3_0_6b", "deepseek_v3": "deepseek_v3_671b"}
"""Module -> function of its registry that the written configuration starts from."""
DEBUG: dict[Any, dict[str, Any]] = {
    ("llama3", "debugmodel"): {
        "family": "llama", "vocab": 2048, "layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "max_positions": 131072,
        "norm_eps": 1e-5, "rope_theta": 500000.0,
    },
    ("qwen3", "debugmodel"): {
        "family": "qwen3", "vocab": 2048, "layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128,
        "ffn": 3072, "max_positions": 4096, "norm_eps": 1e-6, "rope_theta": 1000000.0, "qk_norm": True, "tied": True,
    },
}  # fmt: skip
"""Small models for tests without a preset: torchtitan/models/*/__init__.py (b5bcd76c)."""
STATED = ("training.seq_len", "training.local_batch_size", "activation_checkpoint",
          *(f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline")))  # fmt: skip
"""Keys that a Python configuration must state if it starts from a registry function, whose values are not read."""


def shape_named(facts: Facts) -> ModelShape | None:
    """Return the model of a module and flavor, or of the function that a Python configuration starts from."""
    named = facts.get("titan_module"), str(facts.get("titan_flavor", ""))
    if named in DEBUG:
        return presets.shape_of({"name": f"{named[0]}-{named[1]}", **DEBUG[named]})
    return next((presets.model(preset) for preset, known in READ.items() if known == named), None)


def registry_facts(called: str) -> Facts:
    """Return module and flavor that a registry name means: `llama3_8b`, or `model_registry('8B')`."""
    match = re.match(rf"({'|'.join(MODULES)})_(\w+?)(_.*)?$", called)
    if not match:
        return {}
    flavor = match[2].replace("_", ".")
    names = {other.lower(): other for module, other in (*READ.values(), *DEBUG) if module == match[1]}
    tried = next((name for name in (f"{match[2]}{match[3] or ''}".replace("_", "."), flavor) if name in names), "")
    return {"titan_module": match[1], "titan_flavor": names[tried]} if tried else {}


def noticed(entries: Sequence[Entry]) -> Facts:
    """Return the model and its 8-bit products.

    The model is given by family and flavor, in Python by a registry function or a flavor. Converters are found
    anywhere.
    """
    values = {entry.key: entry.value for entry in entries}
    facts: Facts = {}
    if values.get("model.name") and values.get("model.flavor"):
        facts["hub"] = f"{values['model.name']}-{values['model.flavor']}"
    for entry in entries:
        if entry.key == "import":
            module = re.search(r"models\.(\w+)", str(entry.value))
            facts |= {"titan_module": module[1]} if module and module[1] in MODULES else {}
        elif isinstance(entry.value, Called) and (flavor := re.match(r"model_registry\('([^']+)'\)", entry.value.name)):
            facts["titan_flavor"] = flavor[1]
        if entry.key == "import":
            continue
        if "Float8Linear" in str(entry.value):
            facts["converters"] = ("float8",)
        elif other := re.search(r"(MXFP8|NVFP4|Float8Grouped)\w*", str(entry.value)):
            raise PlanError(f"line {entry.line}: {other[0]} makes products that are not counted: take bf16 or float8")
        elif entry.key in ("=", "def"):
            named = entry.value.name if isinstance(entry.value, Called) else str(entry.value)
            facts = {**registry_facts(named), **facts}
            if entry.key == "=" and registry_facts(named):
                _check_stated(named, {other.key for other in entries})
    return facts


def _check_stated(started: str, keys: set[str]) -> None:
    for key in STATED:
        if key not in keys:
            raise PlanError(f"{key} is not stated, and what {started} has is not read: state it in the file")

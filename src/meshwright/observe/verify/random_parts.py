"""What random cases have beside plain weights: adapters, a teacher, codes, and rounding in every product. Each is drawn
behind the rest, so that the draws of other settings are as they were."""

from random import Random
from typing import Any

from meshwright.kernels.fp8 import MULTIPLE
from meshwright.spec.fake_quantization_rules import learnable
from meshwright.spec.quantization_schemes import SCHEMES

CODES = 0.5
"""How often what is frozen is held as codes, where it can be."""
SHARED_CODES = 0.5
"""How often ZeRO-3 shares these, where it can."""
BASES = ("nf4", "nf4-double", "int4-hqq", "int3", "int4-g16-zeros-fp16", "int8-rows-sym-fp32", "nf4-g32-sym-double")
"""Groups that cuts of inputs fall on, and between; scales of a row, of a group, and those that are codes."""
ROWS_BASE = "llm-int8"
"""Whose products round activations, too."""
ROUNDED = 0.3
"""How often matrices are rounded in every product, where they can be."""
ADAPTERS = 0.25
"""How often all is frozen but adapters."""
TEACHERS = 0.25
"""How often a teacher is learnt from."""

Settings = dict[str, Any]


def often(random: Random, share: float) -> bool:
    """True in that share of the draws."""
    return random.random() < share


def adapters(random: Random, settings: Settings) -> Settings:
    """Frozen weights with adapters. A rank that fp8 can multiply with where products are fp8."""
    if not often(random, ADAPTERS):
        return {}
    targets = random.choice(("all", "all", "all", "attention", "mlp", "q,v", "o,down", "v,up"))
    found: Settings = {"lora.targets": targets, "lora.rslora": often(random, 0.3)}
    found["lora.rank"] = MULTIPLE if "products" in settings else random.choice((1, 2, 3, 5, 8))
    found |= {"lora.alpha": random.choice((4.0, 16.0)), "lora.dora": often(random, 0.3)}
    plain = settings["precision"] == "fp32" and "compile" not in settings
    if plain and often(random, CODES):  # each rank quantizes what one device does
        found["lora.base"] = random.choice(BASES)
        if settings["pp"] == 1 and settings["dp_shard"] * settings["cp"] > 1 and often(random, SHARED_CODES):
            found["zero"] = 3
    return found


def teacher(random: Random, settings: Settings) -> Settings:
    """A teacher that is smaller, or as large as its student, or has a few more layers."""
    if not often(random, TEACHERS):
        return {}
    stages = settings["pp"] * settings.get("vp", 1)
    narrow = "products" in settings  # sizes of the teacher are then those of the student, some smaller than fp8's
    found: Settings = {
        "teacher.layers": max(stages, random.randint(1, 4)),
        "teacher.hidden": settings["hidden"] if narrow else random.randint(12, settings["hidden"]),
        "teacher.ffn": settings["ffn"] if narrow else random.randint(max(4, settings["tp"]), settings["ffn"]),
        "teacher.dense": "moe.experts" in settings and often(random, 0.3),
        "teacher.filled": random.choice((0, 0, 0, 5)) if settings["tp"] == 1 else 0,
        "teacher.beta": random.choice((0.0, 0.0, 0.5, 0.1, 1.0)),
        "teacher.temperature": random.choice((1.0, 1.0, 0.7, 2.0)),
        "teacher.hard": random.choice((0.0, 0.0, 0.3)),
    }
    return found


def codes_beside(random: Random, settings: Settings) -> Settings:
    """Now and then a teacher is held as codes, and a base of adapters is that of LLM.int8()."""
    found: Settings = {}
    if settings["precision"] == "fp32" and "teacher.layers" in settings and often(random, CODES):
        found["teacher.base"] = random.choice(BASES)
    if "lora.base" in settings and settings["tp"] == 1 and often(random, CODES):
        found["lora.base"] = ROWS_BASE
    return found


def rounded(random: Random, settings: Settings) -> Settings:
    """Matrices that are rounded in every product, now and then. Where real zeros want whole groups, with inputs of
    these on each rank."""
    rounds_otherwise = {"products", "compile", "lora.rank", "optimizer_states"} & settings.keys()
    if settings["precision"] != "fp32" or rounds_otherwise or not often(random, ROUNDED):
        return {}
    found: Settings = {"fake_quantize": random.choice(learnable())}
    scheme = SCHEMES[found["fake_quantize"]]
    if settings["tp"] > 1 and scheme.zeros == "real":
        unit = settings["tp"] * scheme.group
        found |= {"ffn": unit, "mla.v_dim" if "mla.kv_rank" in settings else "head_dim": scheme.group}
        found |= {"moe.ffn": unit} if "moe.ffn" in settings else {}
    return found

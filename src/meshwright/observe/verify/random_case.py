"""Random legal cases: a shape, a layout of up to so many processes and a recipe, from (seed, index) alone.

The degrees of the layout are drawn first. The shape is then made so that they divide it, with odd sizes everywhere
else; what still breaks a rule is drawn again.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from random import Random
from typing import Any

from meshwright.kernels.fp8 import MULTIPLE
from meshwright.observe.verify.case_text import Drawn, drawn_from
from meshwright.observe.verify.random_parts import adapters, codes_beside, often, rounded, teacher
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import OFFLOADED, RECOMPUTE
from meshwright.spec.schedule_kinds import KINDS, NAMES, SPLIT

WORLDS = {1: 1, 2: 4, 3: 2, 4: 5, 5: 1, 6: 3, 7: 1, 8: 3}
"""How often each number of processes is drawn, as weights."""
VOCABULARIES = (31, 37, 41, 53, 61, 67, 97)
"""Primes."""
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ATTEMPTS = 1000
MOST_SEQUENCES = 28
"""Of one step: more make a case slow and find nothing."""
MOST_NARROW = 3
"""Layers of a case in fp8: of 8 layers gradients on one device are already 0.4 of their length from those in fp32."""
MORE_SHAPES = 0.3
"""How often an optional part of a shape (experts, latent attention, a tied head, a window) is drawn."""

MUON = 0.3
"""How often matrices go by Muon."""
Settings = dict[str, Any]


def random_case(seed: int, index: int, processes: int = 8, *, compiled: bool = False) -> Drawn:
    """Case number `index` of a seed; the same on every machine. `compiled`: with blocks compiled."""
    random = Random(f"{seed}:{index}")
    for _ in range(ATTEMPTS):
        settings = _layout(random, processes)
        settings |= _shape(random, settings)
        settings |= _pipeline(random, settings)
        settings |= _recipe(random, settings)
        settings |= _narrow(random, settings) | ({"compile": "on"} if compiled else {})
        settings |= _pieces(random, settings)
        settings |= {"optimizer": "muon"} if often(random, MUON) else {}
        settings |= adapters(random, settings)  # behind the others, which are as they were
        settings |= teacher(random, settings)  # and this behind that
        settings |= codes_beside(random, settings) | rounded(random, settings)
        try:
            return _canonical(drawn_from(settings))
        except PlanError:
            continue
    raise PlanError(f"no legal case in {ATTEMPTS} draws for seed={seed}, index={index}: take more processes")


def _canonical(drawn: Drawn) -> Drawn:
    """Without settings that change nothing, so that they are not shown."""
    layout = drawn.layout
    if layout.cp == 1:
        layout = replace(layout, context="ring", context_split="zigzag")
    return replace(drawn, layout=layout)


def _layout(random: Random, processes: int) -> Settings:
    """Degrees of a random number of processes, and how each is used."""
    worlds = {world: weight for world, weight in WORLDS.items() if world <= processes}
    world = random.choices(list(worlds), list(worlds.values()))[0]
    degrees = dict.fromkeys(DEGREES, 1)
    while world > 1:
        factor = random.choice([n for n in range(2, world + 1) if world % n == 0])
        degrees[random.choice(DEGREES)] *= factor
        world //= factor
    found: Settings = dict(degrees)
    found["sp"] = degrees["tp"] > 1 and often(random, 0.5)
    found["tp_chunks"] = random.choice((0, 2, 3)) if degrees["tp"] > 1 else 0
    found["zero"] = random.randrange(4) if degrees["dp_shard"] * degrees["cp"] > 1 else 0
    found["context"] = random.choice(("ring", "all-gather"))
    found["context_split"] = random.choice(("zigzag", "zigzag", "striped", "chunks"))
    found["recompute"] = random.choice(("none", *RECOMPUTE))
    if found["recompute"] != "none" and often(random, 0.4):
        found["recompute_layers"] = random.randint(1, 3)
    found["offload"] = "activations" if found["recompute"] in OFFLOADED and often(random, 0.3) else "off"
    found["kernels"] = random.choice(("auto", "auto", "auto", "auto", "auto", "reference"))
    if degrees["pp"] > 1:
        found["schedule"] = random.choice(NAMES)
        kind = KINDS[found["schedule"]]
        deeper = (1, kind.stages, kind.stages + 1) if kind.deeper else ()
        found["vp"] = random.choice((kind.stages, *deeper))
    return found


def _shape(random: Random, layout: Settings) -> Settings:
    tp, stages = layout["tp"], layout["pp"] * layout.get("vp", 1)
    latent, routed = often(random, MORE_SHAPES / 2), often(random, MORE_SHAPES)
    heads = tp * random.choice((1, 1, 2, 3) if tp > 1 else (1, 2, 3, 4, 6))
    found: Settings = {
        "vocab": random.choice(VOCABULARIES),
        "layers": max(1, stages + random.randrange(4)) if stages > 1 else random.randint(1, 4),
        "hidden": random.randint(12, 40),
        "heads": heads,
        "ffn": random.randint(max(8, tp), 48),
        "norm": random.choice(("rmsnorm", "rmsnorm", "layernorm")),
        "mlp": random.choice(("swiglu", "swiglu", "gelu", "gelu_tanh")),
        "qkv_bias": often(random, 0.4),
        "out_bias": often(random, 0.4),
        "mlp_bias": often(random, 0.4),
        "tied": often(random, MORE_SHAPES),
    }
    if often(random, 2 * MORE_SHAPES / 2):
        found["window"] = random.randint(1, 12)
        found["window_from_layer"] = random.randint(0, found["layers"])
    if latent:
        found |= _latent(random)
    else:
        found |= _plain(random, heads, tp)
    if routed:
        found |= _experts(random, layout, found["layers"])
    if found.get("positions") != "learned":
        found |= _rotation(random)
    return found


def _plain(random: Random, heads: int, tp: int) -> Settings:
    """Key heads from one to all, as tp allows; odd sizes of a head where nothing is rotated."""
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    found: Settings = {"kv_heads": random.choice([1, *legal]), "qk_norm": often(random, MORE_SHAPES)}
    if often(random, 0.25):
        return found | {"positions": "learned", "head_dim": random.choice((3, 5, 7, 8, 9, 11))}
    return found | {"head_dim": random.choice((4, 6, 8, 10, 14) if found["qk_norm"] else (2, 4, 6, 8, 10, 14))}


def _latent(random: Random) -> Settings:
    nope, rope = random.randint(3, 8), random.choice((2, 4, 6))
    return {
        "mla.q_rank": random.choice((0, random.randint(5, 14))),
        "mla.kv_rank": random.randint(5, 14),
        "mla.nope_dim": nope,
        "mla.rope_dim": rope,
        "mla.v_dim": random.randint(3, nope + rope + 3),
    }


def _experts(random: Random, layout: Settings, layers: int) -> Settings:
    ranks = layout["dp_shard"] * layout["cp"] * layout["tp"]
    experts = random.choice((3, 4, 5, 6, 7, 8))
    shared = gcd(experts, ranks)
    degrees = [n for n in range(1, shared + 1) if shared % n == 0]
    groups = random.choice([n for n in range(1, experts + 1) if experts % n == 0 and n < experts])
    top_groups = random.randint(1, groups)
    found: Settings = {
        "moe.experts": experts,
        "moe.top_k": random.randint(1, min(3, experts // groups * top_groups)),
        "moe.ffn": random.randint(max(4, layout["tp"]), 16),
        "moe.shared_experts": random.choice((0, 0, 1, 2)),
        "moe.first_dense": random.choice((0, 0, random.randint(0, layers))),
        "moe.scoring": random.choice(("softmax", "softmax", "sigmoid")),
        "moe.normalize_top_k": often(random, 0.6),
        "moe.groups": groups,
        "moe.top_groups": top_groups,
        "moe.routed_scale": random.choice((1.0, 1.0, 2.5)),
        "moe.correction_bias": often(random, 0.3),
    }
    ep = degrees[-1] if often(random, 0.6) else random.choice(degrees)
    return found | ({"ep": ep} | ({"sp": True} if layout["tp"] > 1 else {}) if ep > 1 else {})


def _rotation(random: Random) -> Settings:
    found: Settings = {"rope_interleaved": often(random, 0.3), "rope_theta": random.choice((100.0, 10000.0))}
    kind = random.choice((None, None, None, "linear", "llama3", "yarn"))
    if kind:
        found |= {
            "rope_scaling.kind": kind,
            "rope_scaling.factor": random.choice((2.0, 3.5)),
            "rope_scaling.original_positions": random.choice((8, 16)),
        }
    if kind == "yarn" and often(random, 0.5):
        found |= {"rope_scaling.mscale": 1.0, "rope_scaling.mscale_all_dim": random.choice((0.0, 0.7))}
    return found


def _pipeline(random: Random, settings: Settings) -> Settings:
    """Layers dealt by hand, unevenly, now and then."""
    stages = settings["pp"] * settings.get("vp", 1)
    if settings["pp"] == 1 or not often(random, 0.3):
        return {}
    cuts = sorted(random.sample(range(1, settings["layers"]), min(stages, settings["layers"]) - 1))
    return {"stages": tuple(end - start for start, end in zip([0, *cuts], [*cuts, settings["layers"]], strict=True))}


def _recipe(random: Random, settings: Settings) -> Settings:
    dp, pp = settings["dp_replicate"] * settings["dp_shard"], settings["pp"]
    chunks = settings["cp"] * (2 if settings["cp"] > 1 and settings["context_split"] == "zigzag" else 1)
    unit = chunks * (settings["tp"] if settings["sp"] else 1) * max(1, settings["tp_chunks"])
    rows = random.choice((1, 1, 2))
    passes = random.randint(pp, 3 * pp) if pp > 1 else random.randint(1, 4)
    batch = dp * rows * max(1, min(passes, MOST_SEQUENCES // (dp * rows)))
    sequence = unit * random.randint(max(1, -(-6 // unit)), max(1, 20 // unit))
    found: Settings = {
        "sequence": sequence,
        "global_batch": batch,
        "micro_batch": rows if pp > 1 or often(random, 0.8) else 0,
        "seed": random.randrange(1000),
        "clip": random.choice((0.0, 0.05, 1.0, 1000.0)),
        "packed": often(random, 0.3),
        "precision": random.choices(("fp32", "bf16", "fp16"), (12, 2, 3))[0],
        "balance_loss": random.choice((0.0, 0.01, 0.3)) if "moe.experts" in settings else 0.01,
    }
    if often(random, 0.3):
        found["batches"] = tuple(dp * rows * random.randint(1, max(1, batch // (dp * rows))) for _ in range(2))
    if often(random, 0.4):
        found["empty"] = _empty(random, dp, rows, batch)
    if often(random, 0.15):
        found["last_target"] = random.randint(1, sequence)
    if found["precision"] == "fp16" and often(random, 0.6):
        found["overflow"], found["overflow_sequence"] = random.choice((1, 2)), random.randrange(batch)
    found |= _states(random, found["precision"])
    if found["precision"] != "fp32":
        found["kernels"] = "auto"  # the reference ones round elsewhere than the kernels of one device
    if found["precision"] != "fp32" and "moe.experts" in settings:  # else a token that two experts want almost equally
        found |= {"moe.top_k": settings["moe.experts"], "moe.groups": 1, "moe.top_groups": 1}  # goes to either
    return found


def _states(random: Random, precision: str) -> Settings:
    """Now and then narrow ones; 8-bit ones with matrices that are large enough for them."""
    found: Settings = {}
    if precision == "bf16" and often(random, 0.3):
        found["master_weights"] = "none"
    if often(random, 0.2):
        found["optimizer_states"] = random.choice(("bf16", "int8"))
        if found["optimizer_states"] == "int8":
            found |= {"hidden": random.randint(64, 80), "ffn": random.choice((64, 128, 256, 500))}
    return found


def _narrow(random: Random, settings: Settings) -> Settings:
    """Products in fp8, now and then, with the sizes of matrices that these want. Drawn behind the rest, so that the
    draws of other cases are as they were."""
    if settings["precision"] != "bf16" or "mla.kv_rank" in settings or settings["layers"] > MOST_NARROW:
        return {}
    if not often(random, 0.6):
        return {}
    unit = MULTIPLE * settings["tp"]
    units = random.randint(2, 4)
    every = "fp8-all" if units == 3 else "fp8"  # no draw of its own
    found: Settings = {"products": every, "head_dim": MULTIPLE, "hidden": unit * units}
    found["ffn"] = unit * random.randint(1, 2)
    return found | ({"moe.ffn": unit} if "moe.ffn" in settings else {})


def _pieces(random: Random, settings: Settings) -> Settings:
    """Of what travels to experts. Drawn behind the other parts, for the same reason."""
    local = settings.get("moe.experts", 0) // settings.get("ep", 1)
    if settings.get("ep", 1) == 1 or settings.get("schedule") in SPLIT:
        return {}
    return {"ep_chunks": random.choice([0, *(n for n in range(2, local + 1) if local % n == 0)])}


def _empty(random: Random, dp: int, rows: int, batch: int) -> tuple[int, ...]:
    """Sequences without a target: all of one reader, of one micro-batch on all readers or on one, or any."""
    of_reader = batch // dp
    passes = max(1, of_reader // rows)
    reader, one = random.randrange(dp), random.randrange(passes)
    micro_batch = [[who * of_reader + one * rows + row for row in range(rows)] for who in range(dp)]
    kinds: Sequence[Sequence[int]] = (
        range(reader * of_reader, (reader + 1) * of_reader),
        [row for rows_of_one in micro_batch for row in rows_of_one],
        micro_batch[reader],
        random.sample(range(batch), random.randint(1, max(1, batch // 2))),
    )
    found = sorted(random.choice(kinds))
    return tuple(found if len(found) < batch else found[1:])

"""A plan as flat facts that options state, and a plan from the facts of a file.

A model may be named as on the Hugging Face Hub: presets, fine-tuned copies of them, and other published shapes.
"""

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any

from meshwright.spec import Cluster, Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts
from meshwright.spec.recipe.recipe import DISTILL
from meshwright.stacks.declaration.option import Facts

TABLE = "hub_models.toml"
UNSHAPED = ("base", "source", "parameters")
"""Entries of the table that are not fields of a shape."""
MARKS = re.compile(
    r"^(meta-)|-(hf|instruct|chat|base|it|pt|thinking|fp16|bf16|\d{4}|v\d(\.\d)?|bnb-4bit|bnb-nf4|unsloth)$"
)
"""Suffixes and prefixes of fine-tuned or converted copies, whose matrices are the same."""
FAMILY = re.compile(
    r"(?<![a-z0-9])(llama|qwen|gemma|mistral|mixtral|olmo|phi|gpt-oss)-?v?(\d+(?:\.\d+|-\d(?![\w.]))?)?(?![\d.]|b\b)(?:.*?)"
    r"(?<![\dx.])(\d+(?:\.\d+)?b|8x\d+b)(?![a-z0-9])"
)
"""Family, version and size within the name of a copy."""
OTHER_PARTS = re.compile(
    r"vl\b|vision|audio|omni|multimodal|moe|reward|\brm\b|embed|rerank|guard|draft|eagle|medusa|pruned|"
    r"minitron|distill|-a\d+b|coder-next|scout|maverick|franken|(?<!8)x\d+b|8x8b"
)
"""Words in names of models whose parts differ from those of their family."""
LAYOUT = ("tp", "cp", "pp", "ep", "vp", "sp", "zero", "schedule", "recompute", "recompute_layers")
DEGREES = ("tp", "cp", "pp", "ep", "vp")
SIZES = (
    "vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "norm", "norm_eps", "mlp", "positions",
    "rope_theta", "qkv_bias", "qk_norm", "window", "tied",
)  # fmt: skip
"""Fields of a shape by which a model is recognized."""
ROUTED = ("experts", "top_k", "ffn", "shared_experts", "first_dense")
"""Fields of its experts by which a model is recognized."""
MADE_OF = ("vocab", "layers", "hidden", "heads", "kv_heads", "ffn")


@cache
def hub_names() -> Mapping[str, str]:
    """Return the name on the Hugging Face Hub of each preset, read from the link of its source."""
    names = {}
    for name in presets.model_names():
        link = re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)/", presets.published(name).source)
        if link:
            names[name] = link[1]
    return names


def hub_name(shape: ModelShape) -> str | None:
    """Return the name of a preset on the Hub, or None for any other shape."""
    return hub_names().get(shape.name)


@cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the models of the table that are no presets: their fields by name."""
    return _table()["like"]  # type: ignore[no-any-return]  # a table of tables


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.stacks").joinpath(TABLE).read_text(encoding="utf-8"))


@cache
def published_shape(name: str) -> ModelShape:
    """Return the shape of a preset or of a model of the table. Raises PlanError for an unknown name."""
    return presets.shape_of(_fields(name))


def _fields(name: str) -> Mapping[str, Any]:
    entry = published_models().get(name)
    if entry is None:
        return presets.published(name).fields
    changed = {key: value for key, value in entry.items() if key not in UNSHAPED}
    # Parts that are not built here are stated by each entry, and not inherited.
    base = {key: value for key, value in _fields(entry["base"]).items() if key != "unbuilt"}
    return {**base, **changed, "name": name}


def preset_of_hub(name: str) -> ModelShape | None:
    """Return the shape that a Hub name means, also for fine-tuned or converted copies, or None."""
    for preset, hub in hub_names().items():
        if hub.lower() == name.lower():
            return presets.model(preset)
    # Names of copies say what was done to the model: one mark after another is cut off until a name is known.
    plain = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    while True:
        for pattern, preset in _table()["same"].items():
            if match := re.fullmatch(pattern, plain):
                return published_shape(match.expand(preset))
        with suppress(PlanError):
            return published_shape(plain)
        shorter = MARKS.sub("", plain, count=1)
        if shorter == plain:
            return None
        plain = shorter


def likely_preset(name: str) -> ModelShape | None:
    """Return the preset whose family, version and size stand in a name or a path, or None.

    Names that mention parts which the family lacks give None. The answer is a guess, so tell the user.
    """
    # The last part of a path is the model; folders above it may name it too.
    for part in reversed(name.lower().replace("_", "-").split("/")):
        exact = preset_of_hub(part) if part else None
        matches = ((re.fullmatch(pattern, part), preset) for pattern, preset in _table()["tuned"].items())
        tuned = next((match.expand(preset) for match, preset in matches if match), None)
        if exact is not None or tuned:
            return exact or published_shape(str(tuned))
        sized = FAMILY.search(part)
        if sized is None or OTHER_PARTS.search(part):
            continue
        family, version, size = sized[1], (sized[2] or "").replace("-", "."), sized[3]
        words = (f"{family}-{version}-{size}", f"{family}{version}-{size}", f"{family}-{size}") if version else (
            f"{family}-{size}",)  # fmt: skip
        for word in words:
            with suppress(PlanError):
                return presets.model(word)
    return None


def facts_of(plan: Plan) -> Facts:
    """Return every fact of a plan that options state, derived facts included."""
    shape, recipe, layout, cluster = plan.model, plan.recipe, plan.layout, plan.cluster
    micro, times = layout.micro_batch_of(recipe.global_batch), layout.micro_batches(recipe.global_batch)
    return {
        **{name: getattr(layout, name) for name in (*LAYOUT, "dp_replicate", "dp_shard", "dp")},
        **{name: getattr(shape, name) for name in (*SIZES, "max_positions")},
        **{name: getattr(recipe, name) for name in ("sequence", "global_batch", "precision", "steps", "learning_rate")},
        "model": shape.name, "hub": hub_name(shape), "micro_batch": micro, "accumulation": times,
        "local_batch": micro * times, "nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node,
        "devices": cluster.devices, **_experts(shape),
    }  # fmt: skip


def _experts(shape: ModelShape) -> Facts:
    return {f"moe_{name}": value for name, value in asdict(shape.moe).items()} if shape.moe else {}


def plan_of(facts: Facts, shape: ModelShape, cluster: Cluster) -> Plan:
    """Return the plan that facts describe, on a cluster. Raises PlanError if they contradict each other.

    With `pairs` a batch consists of pairs of answers. With `reference` a frozen copy of the model reads them too, as a
    teacher does.
    """
    recipe = recipe_of(facts, shape)
    degrees_of_plan = degrees(facts, cluster.devices)
    micro, batch = batches(facts, degrees_of_plan["dp_replicate"] * degrees_of_plan["dp_shard"])
    # ZeRO and sequence parallelism have no effect without ranks to split over.
    sharded = degrees_of_plan["dp_shard"] * degrees_of_plan["cp"] > 1
    if facts.get("lora"):
        shape = replace(shape, lora=LoRAShape(**facts["lora"]))
        if facts.get("whole"):
            shape = replace(shape, unbuilt=replace(shape.unbuilt or UnbuiltParts(), whole=facts["whole"]))
    teacher = shape.base if facts.get("reference") else None
    # Both answers of a pair are sequences of the batch.
    if facts.get("pairs"):
        micro, batch = 2 * micro, 2 * batch
    layout = Layout(
        **degrees_of_plan, micro_batch=micro, zero=int(facts.get("zero", 0)) if sharded else 0,  # type: ignore[arg-type]  # 0 to 3
        sp=bool(facts.get("sp", False)) and degrees_of_plan["tp"] > 1, schedule=facts.get("schedule", "1f1b"),
        recompute=facts.get("recompute", "none"), recompute_layers=facts.get("recompute_layers", 0),
    )  # fmt: skip
    recipe = replace(recipe, global_batch=batch, objective=DISTILL if teacher else recipe.objective)
    return Plan(model=shape, recipe=recipe, layout=layout, cluster=cluster, teacher=teacher)


def recipe_of(facts: Facts, shape: ModelShape) -> Recipe:
    """Return the recipe that facts state. Raises PlanError without a sequence length."""
    schedule_fields = {name: facts[name] for name in ("steps", "learning_rate") if _is_number(facts.get(name))}
    sequence: Any = facts.get("sequence")
    if not _is_whole(sequence):
        raise PlanError("the sequence length is unknown: give --recipe sequence=N")
    return Recipe(precision=facts.get("precision", "bf16"), sequence=int(sequence), **schedule_fields)


def degrees(facts: Facts, devices: int) -> dict[str, int]:
    """Return all degrees of parallelism by name. Data parallelism takes the devices that the others leave."""
    sizes = {name: int(facts.get(name) or 1) for name in DEGREES}
    # Experts and virtual stages lie on ranks of the other axes, so they divide nothing.
    replicas, remainder = divmod(devices, sizes["tp"] * sizes["cp"] * sizes["pp"])
    product = f"tp={sizes['tp']} x cp={sizes['cp']} x pp={sizes['pp']}"
    if remainder or not replicas:
        raise PlanError(f"{product} does not divide the {devices} devices: give the cluster of the file")
    copies, shard = facts.get("dp_replicate"), facts.get("dp_shard")
    copies = -1 if copies is None else int(copies)
    shard = -1 if shard is None else int(shard)
    if shard < 1:
        if copies < 1:
            # Where nothing is stated, ZeRO shards over all replicas, and without it all are copies.
            copies, shard = (1, replicas) if facts.get("zero") else (replicas, 1)
        else:
            shard = replicas // copies
    elif copies < 1:
        copies = replicas // shard
    if copies * shard != replicas:
        raise PlanError(
            f"dp_replicate={copies} x dp_shard={shard} x {product} differs from the {devices} devices: give the "
            "cluster of the file"
        )
    return {**sizes, "dp_replicate": copies, "dp_shard": shard}


def batches(facts: Facts, dp: int) -> tuple[int, int]:
    """Return (sequences of a micro-batch, sequences of a step). Raises PlanError if the facts do not determine them."""
    micro: Any = facts.get("micro_batch")
    batch: Any = facts.get("global_batch")
    times: Any = facts.get("accumulation")
    local: Any = facts.get("local_batch")
    together: Any = facts.get("pipeline_batch")
    if not _is_whole(batch):
        # Text is a variable whose value the script gets from outside.
        is_stated = not isinstance(micro, str) and not isinstance(times, str)
        batch = local * dp if _is_whole(local) else (micro or 0) * (times or 1) * dp if is_stated else 0
    if not _is_whole(micro):
        micro = batch // (dp * times) if _is_whole(times) and batch % (dp * times) == 0 else 0
    if not _is_whole(batch) or not _is_whole(micro):
        raise PlanError(
            "the batch is missing: give --layout micro_batch=N and --recipe global_batch=N, both in sequences"
        )
    if batch < micro * dp:
        raise PlanError(
            f"the batch is too small: {batch} sequences a step are fewer than {micro} on each of {dp} "
            "replicas. Give the cluster of the file"
        )
    if _is_whole(together) and batch > together * dp:
        raise PlanError(
            f"The batch runs in several rounds of {together} sequences, each with a pipeline bubble that is "
            f"not counted: take {batch // dp} as the local batch"
        )
    return int(micro), int(batch)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def shape_of(facts: Facts) -> ModelShape | None:
    """Return the preset with these sizes, or else a new shape. None = too few sizes."""
    if any(not _is_whole(facts.get(name)) for name in MADE_OF if name not in ("kv_heads", "vocab")):
        return None
    # A preset carries what no option states, such as its rotary scaling, so it is preferred to bare sizes.
    for name in () if facts.get("unrotated") else presets.model_names():
        preset = presets.model(name)
        if _matches(preset, facts):
            return preset
    if not _is_whole(facts.get("vocab")):
        raise PlanError("the vocabulary size is unknown: give MODEL, or the size")
    fields = {name: facts[name] for name in SIZES if facts.get(name) is not None}
    moe = {name.removeprefix("moe_"): value for name, value in facts.items() if name.startswith("moe_")}
    mla = {name.removeprefix("mla_"): value for name, value in facts.items() if name.startswith("mla_")}
    parts = {**({"moe": moe} if moe.get("experts") else {}), **({"mla": mla} if mla else {})}
    parts |= {"unbuilt": {"unrotated_every": 1}} if facts.get("unrotated") else {}
    # Only learned positions take memory, and files of such models state their number.
    positions = int(facts.get("max_positions") or facts.get("sequence") or 8192)
    return presets.shape_of({**fields, "max_positions": positions, **parts})


def _matches(preset: ModelShape, facts: Facts) -> bool:
    # Files state some sizes only, and those that they leave out fit any preset.
    sizes = all(
        getattr(preset, name) == facts.get(name, getattr(preset, name)) for name in SIZES if facts.get(name) is not None
    )
    longest = facts.get("max_positions")
    # Learned positions are parameters, so another number of them is another model.
    if preset.positions == "learned" and longest not in (None, preset.max_positions):
        return False
    experts = facts.get("moe_experts") or 0
    if preset.moe is None or not experts:
        return sizes and preset.moe is None and not experts
    routed = {name: facts.get(f"moe_{name}") for name in ROUTED}
    return sizes and all(getattr(preset.moe, name) == value for name, value in routed.items() if value is not None)

"""A plan as flat facts that options state, and a plan from the facts of a file."""

from dataclasses import asdict, replace
from math import inf
from typing import Any

from meshwright.spec import Cluster, Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts
from meshwright.spec.recipe.recipe import DISTILL
from meshwright.stacks.declaration.hub_models import hub_name
from meshwright.stacks.declaration.option import Facts

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
    positions = int(facts.get("max_positions") or facts.get("sequence") or 8192)
    return presets.shape_of({**fields, "max_positions": positions, **parts})


def _matches(preset: ModelShape, facts: Facts) -> bool:
    sizes = all(
        getattr(preset, name) == facts.get(name, getattr(preset, name)) for name in SIZES if facts.get(name) is not None
    )
    longest = facts.get("max_positions")
    if preset.positions == "learned" and longest not in (None, preset.max_positions):
        return False
    experts = facts.get("moe_experts") or 0
    if preset.moe is None or not experts:
        return sizes and preset.moe is None and not experts
    routed = {name: facts.get(f"moe_{name}") for name in ROUTED}
    return sizes and all(getattr(preset.moe, name) == value for name, value in routed.items() if value is not None)

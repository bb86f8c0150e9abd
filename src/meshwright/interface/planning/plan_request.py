"""Model, cluster and recipe as the plan whose layout is searched, for `plan` and `explore`.

A model of the Hugging Face Hub is read from its config.json, in the cache or over the network.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.interface.planning.plan_reading import (
    QLORA_BASE,
    SAMPLES_WORD,
    TUNED_RANK,
    TUNING_DEFAULTS,
    base_words,
    defaults_of,
    is_hub_name,
    plan_of,
    rate_of_adapters,
    read_folder,
    read_to_plan,
)
from meshwright.planfile.reading import ReadFolder
from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.machine.clusterfile import load_named
from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import Cluster, Layout, Plan, presets
from meshwright.spec.errors import ArgumentError, IllegalLayout, PlanError, argument
from meshwright.spec.hub_cache import find_snapshot
from meshwright.spec.hub_names import download_command, split_revision
from meshwright.spec.layout.cluster import names_file
from meshwright.spec.recipe.recipe import DISTILL
from meshwright.spec.rules.legal import layout_violations
from meshwright.spec.units import GIB

CONFIG = "config.json"
SEQUENCE = 8192
"""Sequence of a recipe that names none: that of today's models, if the model has as many positions."""
BATCH_TOKENS = 4_000_000
"""Tokens of a step of a recipe that names no batch (Llama-1's)."""
MOST_NODES = 2**17
LARGEST_RANK = 2**16 - 1
FULL, LORA, QLORA = "full", "lora", "qlora"
RATE = "recipe.learning_rate"


def requested_plan(
    model: Any, cluster: str | None, nodes: int | None, recipe: Sequence[str], tune: str = "", teacher: str = ""
) -> Plan:
    """Return the requested plan, with its layout left open.

    `model`: a preset, a Hugging Face folder or config.json, a plan file, or a plan. `tune`: full, lora, qlora, or with
    a rank as lora:64, takes fine-tuning's batch, sequence and adapters. `teacher`: of a distillation, given as `model`.
    """
    plan = plan_of(model)
    reader: ReadFolder = read_folder
    path = Path("plan" if plan else model)
    names_plan = plan is not None or path.suffix in (".yaml", ".yml")
    words = [f"recipe.{word}" for word in _words(recipe)]
    if plan is not None:
        words = [*base_words(plan), *words]
    elif not names_plan:
        fetched = config_folder(str(model)) if is_hub_name(str(model)) else None
        config = fetched / CONFIG if fetched else path if path.suffix == ".json" else path / CONFIG
        if config.is_file():
            title = path.name if fetched or path.suffix != ".json" else path.absolute().parent.name
            reader = read_to_plan(config, title if path.suffix != ".json" or path.name == CONFIG else path.stem)
            words.insert(0, f"model={config.parent if config.parent != Path() else '.'}")
        else:
            words.insert(0, f"model={model}")
    words += _adapters(tune, coded=not names_plan and _holds_codes(path))
    # Defaults are added only for keys that no word names, so after all other words.
    named_keys = {word.partition("=")[0].removeprefix("recipe.") for word in words}
    if tune and not names_plan:
        words += _tuned(named_keys, adapters=not tune.startswith(FULL))
    words += [f"teacher={teacher}", f"recipe.objective={DISTILL}"] if teacher else []
    file = path if names_plan and plan is None else None
    # This list takes the notes on keys of other tools. Without one they become warnings.
    requested = planfile.read(file, words, read_folder=reader, notes=[])
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise ArgumentError("nodes", nodes, f"must be at least 1 and at most {MOST_NODES:,}")
    if cluster is not None:
        machine = _cluster(cluster, nodes or (requested.cluster.nodes if names_plan else 1))
    elif not (names_plan and requested.cluster.device.memory_bytes):
        raise _missing_cluster(str("the plan" if plan else model) if names_plan else "")
    else:
        machine = replace(requested.cluster, nodes=nodes or requested.cluster.nodes)
    requested = replace(requested, cluster=machine)
    # A measured machine has curves in place of data sheets.
    if cluster is None or not names_file(cluster):
        _check_figures(
            requested, argument("cluster", cluster) if cluster else f"cluster.device {requested.cluster.device.name!r}"
        )
    if not names_plan:
        requested = _recipe(requested, named_keys, tuned=bool(tune))
    _check_any_layout(requested)
    return requested


def within(plan: Plan, memory_gib: float) -> Plan:
    """Return the plan on devices with this much usable memory."""
    device = plan.cluster.device
    room = usable_bytes(plan) / GIB
    if not 0 < memory_gib <= room:
        raise ArgumentError(
            "memory", memory_gib, f"must be above 0 and at most {room:.1f}, the GiB of one {device.name}"
        )
    source = f"{device.source}; of its memory {memory_gib:g} GiB, as asked".removeprefix("; ")
    # The driver's share comes on top: users ask about the memory that a program can use.
    smaller = replace(device, memory_bytes=int(memory_gib * GIB + DRIVER_BYTES), source=source)
    return replace(plan, cluster=replace(plan.cluster, device=smaller))


def asked_estimator(
    plan: Plan, cluster: str | None, stack: Stack = MESHWRIGHT, document_tokens: float = 0.0
) -> Estimator:
    """Return the estimator of layouts: by a measured machine if `cluster` names a file, else by data sheets.

    A machine is measured with this package's engine, so other software needs data sheets. Raises ArgumentError.
    """
    if cluster is not None and names_file(cluster):
        if not stack.is_meshwright:
            raise ArgumentError("cluster", cluster, "was measured with this engine", "name a device for another stack")
        return load_named(cluster)[0].estimator(plan, document_tokens)
    return build_estimator(plan, stack, document_tokens=document_tokens)


def check_cluster(cluster: str | None) -> None:
    """Raise PlanError, in one line, for an unknown device or file."""
    if cluster is not None:
        _cluster(cluster, 1)


def planner_of(plan: Plan, cluster: str | None) -> Estimator | None:
    """Return the estimator of a plan on another device or cluster file. None = the plan's own device.

    Raises PlanError, in one line, for an unknown device or file.
    """
    if cluster is None:
        return None
    return asked_estimator(replace(plan, cluster=_cluster(cluster, plan.cluster.nodes)), cluster)


def _cluster(name: str, nodes: int) -> Cluster:
    """Return a device and its number per node, or the cluster of a file of calibrate."""
    if names_file(name):
        return load_named(name, nodes)[1]
    try:
        return presets.cluster(name, nodes)
    except PlanError:
        if not Path(name).exists():
            raise
        raise ArgumentError(
            "cluster", name, "is not a cluster", "name a device, as h100x8, or calibrate's FILE.toml"
        ) from None


def _words(recipe: Sequence[str]) -> list[str]:
    """Return KEY=VALUE words, one each, split at commas and spaces."""
    split: list[str] = []
    for word in recipe:
        # A value may have commas of its own, so a word is split only where each part has a key.
        parts = re.split(r"[,\s]+", word.strip())
        split += parts if all(re.match(r"[\w.-]+=", part) for part in parts) else [word]
    for word in split:
        if "=" not in word:
            raise ArgumentError("recipe", word, "is not KEY=VALUE, as sequence=8192")
    return [word.strip() for word in split]


def _missing_cluster(file: str) -> Exception:
    names = ", ".join(name for name in presets.device_names() if name != "local")
    example = argument("cluster", "h100x8")
    return ArgumentError(
        "cluster",
        rule=f"is missing, and {file} names none with known figures" if file else "is missing",
        remedy=f"name a device and how many of it a node has, as {example}, or measure this machine: meshwright "
        f"calibrate -o here.toml, then {argument('cluster', 'here.tomlx1')}; known: {names}",
    )


def _check_any_layout(plan: Plan) -> None:
    """Raise for what no layout can mend: a sequence beyond learned positions, a noise scale on many devices."""
    every = plan.recipe.noise_scale_every
    replace(plan, layout=Layout(), recipe=replace(plan.recipe, noise_scale_every=0)).check()
    devices = plan.cluster.devices
    if every and devices > 1:
        alone = replace(plan.recipe, dropout=0.0)
        raise IllegalLayout(layout_violations(plan.model, alone, Layout(dp_replicate=devices))[0])


def _adapters(tune: str, *, coded: bool) -> list[str]:
    """Return plan words for --tune. `coded`: the folder holds codes, which become the base."""
    kind, _, rank = tune.partition(":")
    with_rank = kind in (LORA, QLORA)
    if kind not in ("", FULL, LORA, QLORA) or (rank and not (with_rank and rank.isdecimal())):
        raise ArgumentError("tune", tune, "is not known", "take full, lora, qlora, or with a rank as lora:64")
    if rank and not 1 <= int(rank) <= LARGEST_RANK:
        raise ArgumentError(
            "tune", tune, remedy=f"the rank must be at least 1 and at most {LARGEST_RANK:,}, as lora:64"
        )
    # A quantized folder has codes already, and training on them must not code the weights anew.
    base = [f"model.lora.base={QLORA_BASE}"] if kind == QLORA and not coded else []
    return [f"model.lora={rank or TUNED_RANK}", *base] if with_rank else []


def _holds_codes(path: Path) -> bool:
    """Return if this is a quantized folder, or the config of one."""
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        return False
    from meshwright.formats.quantized.detection import is_quantized

    return is_quantized(folder)


def _tuned(named_keys: set[str], *, adapters: bool) -> list[str]:
    """Return plan words for the defaults of `tune`. `_recipe` decides on its sequence and batch."""
    added = defaults_of(
        TUNING_DEFAULTS, {f"recipe.{key}" for key in named_keys} | {"recipe.sequence", "recipe.global_batch"}
    )
    if adapters and RATE in added:
        added[RATE] = rate_of_adapters(added[RATE])
    return [SAMPLES_WORD, *(f"{key}={value}" for key, value in added.items())]


def _recipe(plan: Plan, named_keys: set[str], *, tuned: bool = False) -> Plan:
    """Fill in a recipe for real training: bf16, a long sequence, millions of tokens per step; or for fine-tuning."""
    changes: dict[str, Any] = {}
    if not named_keys & {"precision", "mixed_precision", "dtype"}:
        # A recipe's own default is fp32, which suits a first run on a CPU. A cluster is planned for half precision.
        changes["precision"] = "fp16" if plan.cluster.device.without("bf16") else "bf16"
    sequence = plan.recipe.sequence
    if not any("seq" in name or "context" in name for name in named_keys):
        sequence = changes["sequence"] = min(
            int(TUNING_DEFAULTS["recipe.sequence"]) if tuned else SEQUENCE, plan.model.max_positions
        )
    if not any("batch" in name for name in named_keys):
        wanted = (
            max(int(TUNING_DEFAULTS["recipe.global_batch"]), plan.cluster.devices)
            if tuned
            else BATCH_TOKENS // sequence
        )
        changes["global_batch"] = _batch(wanted, plan.cluster.devices)
    return replace(plan, recipe=replace(plan.recipe, **changes))


def _batch(wanted: int, devices: int) -> int:
    """Return the sequences of a step: a power of 2, times the odd factor of the devices (3 nodes: 3)."""
    # Data parallelism must divide the batch, whatever its degree: so the odd factor of the devices must, too.
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    return odd << max(0, round(log2(max(1, wanted) / odd)))


def _check_figures(plan: Plan, name: str) -> None:
    """Raise ArgumentError if figures of the device are unknown, since nothing is derived from an unknown number."""
    cluster, device = plan.cluster, plan.cluster.device
    needed = ["memory_bytes", "memory_bytes_per_s"]
    needed += [] if device.half_matmul_flop_per_s or device.fp16_flop_per_s else ["bf16_flop_per_s"]
    needed += ["host_bytes_per_s"] if plan.layout.offload != "off" else []
    needed += ["link_bytes_per_s"] if cluster.devices_per_node > 1 else []
    needed += ["network_bytes_per_s"] if cluster.nodes > 1 else []
    missing = [figure for figure in needed if not getattr(device, figure)]
    if missing:
        raise ArgumentError(
            "cluster",
            sentence=(
                f"{name} has no figures for {', '.join(missing)}: name a known device, as "
                f"{argument('cluster', 'h100x8')}. For this machine run calibrate, or give the figures in a plan "
                "file"
            ),
        )


def config_folder(name: str) -> Path:
    """Return a folder with the config.json of a model: the copy in the hub's cache, or else a download.

    Raises ArgumentError, with the command to run instead, without a copy and a network.
    """
    if cached := find_snapshot(name, CONFIG):
        return cached
    from meshwright.formats.hub import download

    folder = split_revision(name)[0].rpartition("/")[2]
    instead = f"where there is a network, run `{download_command(name, CONFIG)}`, and give {folder}"
    absent = f"{argument('model', name)} is no preset, no folder here and not in the Hugging Face cache"
    if reason := download.reason_not_to_ask():
        remedy = "unset it; or " if "forbids" in reason else ""
        raise ArgumentError("model", name, sentence=f"{absent}, and {reason}: {remedy}{instead}")
    return download.fetch(name, (CONFIG,), instead)

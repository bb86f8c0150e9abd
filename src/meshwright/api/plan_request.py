"""Model, cluster and recipe as the plan that is asked about, for `plan` and `explore`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.api.hub_configs import CONFIG, config_folder, is_hub_name
from meshwright.api.plan_reading import base_words, plan_of, read_folder, read_to_plan
from meshwright.api.tuning_defaults import CODED_BASE, DEFAULTS, SAMPLES, TUNED_RANK, defaults_of, rate_of_adapters
from meshwright.planfile.folders import ReadFolder
from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.machine.clusterfile import asked, is_file
from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import Cluster, Layout, Plan, presets
from meshwright.spec.errors import ArgumentError, IllegalLayout, PlanError
from meshwright.spec.legal import layout_violations
from meshwright.spec.objective_traits import DISTILL
from meshwright.spec.units import GIB

SEQUENCE = 8192
"""Of a recipe that names none: as today's models are trained, if they are made for it."""
BATCH_TOKENS = 4_000_000
"""Of a step, where the recipe names no batch (Llama-1's)."""

MOST_NODES = 2**17


LARGEST_RANK = 2**16 - 1
FULL, LORA, QLORA = "full", "lora", "qlora"
RATE = "recipe.learning_rate"


def asked_plan(
    model: Any, cluster: str | None, nodes: int | None, recipe: Sequence[str], tune: str = "", teacher: str = ""
) -> Plan:
    """The plan that is asked about, its layout left open. `model`: a preset, a folder or config.json of Hugging Face, a
    plan file, or a plan. `tune`: full, lora, qlora or with a rank as lora:64, for fine-tuning's batch and sequence, and
    with adapters. `teacher`: as `model`, for a distillation."""
    plan = plan_of(model)
    reader: ReadFolder = read_folder
    path = Path("plan" if plan else model)
    given = plan is not None or path.suffix in (".yaml", ".yml")
    words = [f"recipe.{word}" for word in _words(recipe)]
    if plan is not None:
        words = [*base_words(plan), *words]
    elif not given:
        fetched = config_folder(str(model)) if is_hub_name(str(model)) else None
        config = fetched / CONFIG if fetched else path if path.suffix == ".json" else path / CONFIG
        if config.is_file():
            title = path.name if fetched or path.suffix != ".json" else path.absolute().parent.name
            reader = read_to_plan(config, title if path.suffix != ".json" or path.name == CONFIG else path.stem)
            words.insert(0, f"model={config.parent if config.parent != Path() else '.'}")
        else:
            words.insert(0, f"model={model}")
    words += _adapters(tune, coded=not given and _holds_codes(path))
    named = {word.partition("=")[0].removeprefix("recipe.") for word in words}
    if tune and not given:
        words += _tuned(named, adapters=not tune.startswith(FULL))
    words += [f"teacher={teacher}", f"recipe.objective={DISTILL}"] if teacher else []
    file = path if given and plan is None else None
    with as_typed("recipe", _words(recipe)):
        found = planfile.read(file, words, read_folder=reader, notes=[])
    _nodes(nodes)
    if cluster is not None:
        found = replace(found, cluster=_cluster(cluster, nodes or (found.cluster.nodes if given else 1)))
    elif not (given and found.cluster.device.memory_bytes):
        raise _no_cluster(str("the plan" if plan else model) if given else "")
    elif nodes is not None:
        found = replace(found, cluster=replace(found.cluster, nodes=nodes))
    if cluster is None or not is_file(cluster):  # a measured machine has curves instead
        _known(found, f"cluster={cluster!r}" if cluster else f"cluster.device {found.cluster.device.name!r}")
    if not given:
        found = _recipe(found, named, tuned=bool(tune))
    _any_layout(found)
    return found


def within(plan: Plan, memory_gib: float) -> Plan:
    """The plan on devices of which a program can have so much memory."""
    device = plan.cluster.device
    room = usable_bytes(plan) / GIB
    if not 0 < memory_gib <= room:
        raise ArgumentError(
            f"memory={memory_gib:g} must be above 0 and at most {room:.1f}, the GiB of one {device.name}"
        )
    source = f"{device.source}; of its memory {memory_gib:g} GiB, as asked".removeprefix("; ")
    smaller = replace(device, memory_bytes=int(memory_gib * GIB + DRIVER_BYTES), source=source)
    return replace(plan, cluster=replace(plan.cluster, device=smaller))


def asked_estimator(
    plan: "Plan", cluster: str | None, stack: Stack = MESHWRIGHT, document_tokens: float = 0.0
) -> "Estimator":
    """What counts its layouts: a measured machine where `cluster` names a file, else data sheets. A machine is measured
    with this package's engine, so another software is counted by data sheets."""
    from meshwright.planner.machine.clusterfile import asked, is_file

    if cluster is not None and is_file(cluster):
        if not stack.is_meshwright:
            raise ArgumentError(f"cluster={cluster!r} was measured with this engine: name a device for another stack")
        return asked(cluster)[0].estimator(plan, document_tokens)
    return build_estimator(plan, stack, document_tokens=document_tokens)


def check_cluster(cluster: str | None) -> None:
    """PlanError in one line where there is no such device or file."""
    if cluster is not None:
        _cluster(cluster, 1)


def planner_of(plan: Plan, cluster: str | None) -> Estimator | None:
    """What counts a plan that has been run, on a device that is named now or as a cluster file measured it; None = the
    plan's own device. PlanError in one line where there is no such device or file."""
    if cluster is None:
        return None
    return asked_estimator(replace(plan, cluster=_cluster(cluster, plan.cluster.nodes)), cluster)


@contextmanager
def as_typed(argument: str, words: Sequence[str]) -> Iterator[None]:
    """What is wrong with a key of a section, said of the words of an argument: they have no section's name."""
    try:
        yield
    except PlanError as error:
        said = str(error)
        if not words or not said.startswith(f"{argument}."):
            raise
        raise type(error)(f"{argument}={','.join(words)!r}: {said.replace(f'{argument}.', '')}") from None


def _cluster(name: str, nodes: int) -> Cluster:
    """A device and how many of it a node has, or what a file of calibrate says."""
    if is_file(name):
        return asked(name, nodes)[1]
    try:
        return presets.cluster(name, nodes)
    except PlanError:
        if not Path(name).exists():
            raise
        raise ArgumentError(
            f"cluster={name!r} is no cluster: name a device, as h100x8, or calibrate's FILE.toml"
        ) from None


def _words(recipe: Sequence[str]) -> list[str]:
    """KEY=VALUE words, one each; `sequence=2048,global_batch=8` is two, and so it is with a space."""
    found: list[str] = []
    for word in recipe:
        parts = re.split(r"[,\s]+", word.strip())
        found += parts if all(re.match(r"[\w.-]+=", part) for part in parts) else [word]
    for word in found:
        if "=" not in word:
            raise ArgumentError(f"recipe={word!r} is not KEY=VALUE, as sequence=8192")
    return [word.strip() for word in found]


def _nodes(nodes: int | None) -> None:
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise ArgumentError(f"nodes={nodes} must be at least 1 and at most {MOST_NODES:,}")


def _no_cluster(file: str) -> Exception:
    says = f"cluster= is missing, and {file} names none with known figures" if file else "cluster= is missing"
    names = ", ".join(name for name in presets.device_names() if name != "local")
    return ArgumentError(f'{says}: name a device and how many of it a node has, as cluster="h100x8"; known: {names}')


def _any_layout(found: Plan) -> None:
    """Raise what no layout can mend: a sequence beyond learned positions, a noise scale on many devices."""
    every = found.recipe.noise_scale_every
    replace(found, layout=Layout(), recipe=replace(found.recipe, noise_scale_every=0)).check()
    devices = found.cluster.devices
    if every and devices > 1:
        alone = replace(found.recipe, dropout=0.0)
        raise IllegalLayout(layout_violations(found.model, alone, Layout(dp_replicate=devices))[0])


def _adapters(tune: str, *, coded: bool) -> list[str]:
    """Words of a plan for what --tune says. `coded`: of a folder that holds codes already, which are the base."""
    kind, _, rank = tune.partition(":")
    with_rank = kind in (LORA, QLORA)
    if kind not in ("", FULL, LORA, QLORA) or (rank and not (with_rank and rank.isdecimal())):
        raise ArgumentError(f"tune={tune!r} is not known: take full, lora, qlora, or with a rank as lora:64")
    if rank and not 1 <= int(rank) <= LARGEST_RANK:
        raise ArgumentError(f"tune={tune!r}: the rank must be at least 1 and at most {LARGEST_RANK:,}, as lora:64")
    base = [f"model.lora.base={CODED_BASE}"] if kind == QLORA and not coded else []
    return [f"model.lora={rank or TUNED_RANK}", *base] if with_rank else []


def _holds_codes(path: Path) -> bool:
    """Whether this is a quantized folder, or the config of one."""
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        return False
    from meshwright.model.quantized_formats.folder_quantization import is_quantized

    return is_quantized(folder)


def _tuned(named: set[str], *, adapters: bool) -> list[str]:
    """Words of a plan for what `tune` would add; of its sequence and batch `_recipe` decides."""
    added = defaults_of(DEFAULTS, {f"recipe.{key}" for key in named} | {"recipe.sequence", "recipe.global_batch"})
    if adapters and RATE in added:
        added[RATE] = rate_of_adapters(added[RATE])
    return [SAMPLES, *(f"{key}={value}" for key, value in added.items())]


def _recipe(found: "Plan", named: set[str], *, tuned: bool = False) -> "Plan":
    """What a recipe leaves out is not a toy's: bf16, a long sequence, millions of tokens a step; or fine-tuning's."""
    changes: dict[str, Any] = {}
    if not named & {"precision", "mixed_precision", "dtype"}:
        changes["precision"] = "fp16" if found.cluster.device.without("bf16") else "bf16"
    sequence = found.recipe.sequence
    if not any("seq" in name or "context" in name for name in named):
        sequence = changes["sequence"] = min(
            int(DEFAULTS["recipe.sequence"]) if tuned else SEQUENCE, found.model.max_positions
        )
    if not any("batch" in name for name in named):
        wanted = max(int(DEFAULTS["recipe.global_batch"]), found.cluster.devices) if tuned else BATCH_TOKENS // sequence
        changes["global_batch"] = _batch(wanted, found.cluster.devices)
    return replace(found, recipe=replace(found.recipe, **changes))


def _batch(wanted: int, devices: int) -> int:
    """Sequences of a step: a power of 2, times what else the devices share their work by (3 nodes: 3)."""
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    return odd << max(0, round(log2(max(1, wanted) / odd)))


def _known(found: Plan, given: str) -> None:
    """Raise where figures are missing that the answer is made of: nothing is derived from an unknown number. `given`:
    what lacks them."""
    cluster, device = found.cluster, found.cluster.device
    needed = ["memory_bytes", "memory_bytes_per_s"]
    needed += [] if device.half_matmul_flop_per_s or device.fp16_flop_per_s else ["bf16_flop_per_s"]
    needed += ["host_bytes_per_s"] if found.layout.offload != "off" else []
    needed += ["link_bytes_per_s"] if cluster.devices_per_node > 1 else []
    needed += ["network_bytes_per_s"] if cluster.nodes > 1 else []
    missing = [name for name in needed if not getattr(device, name)]
    if missing:
        raise ArgumentError(
            f'{given} has no figures for {", ".join(missing)}: name a known device, as cluster="h100x8". '
            "For this machine run calibrate, or give the figures in a plan file"
        )

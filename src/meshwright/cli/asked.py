"""Model, cluster and recipe of the command line as the plan that is asked about, for `plan` and `explore`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.planner.predict import Estimator
    from meshwright.spec import Cluster, ModelShape, Plan

SEQUENCE = 8192
"""Of a recipe that names none: as today's models are trained, if they are made for it."""
BATCH_TOKENS = 4_000_000
"""Of a step, where the recipe names no batch (Llama-1's)."""


def asked_plan(model: str, cluster: str | None, nodes: int, recipe: list[str]) -> "Plan":
    """The plan that is asked about, its layout left open."""
    from meshwright import planfile
    from meshwright.spec.errors import PlanError

    path = Path(model)
    given = path.suffix in (".yaml", ".yml")
    words = [f"recipe.{word}" for word in recipe]
    for word in recipe:
        if "=" not in word:
            raise PlanError(f"--recipe {word!r} is not KEY=VALUE, as sequence=8192")
    if not given:
        folder = path.parent if path.name == "config.json" else path
        words.insert(0, f"model={folder}" if path.name == "config.json" else f"model={model}")
    found = planfile.read(path if given else None, words, shape_from_folder=_shape_from_folder, notes=[])
    if cluster is None and not (given and found.cluster.device.memory_bytes):
        raise PlanError("--cluster is missing: name a device and how many of it a node has, as --cluster h100x8")
    if nodes < 1:
        raise PlanError(f"--nodes {nodes} must be at least 1")
    if cluster is not None:
        found = replace(found, cluster=_cluster(cluster, nodes))
    if not given:
        found = _recipe(found, {word.partition("=")[0].removeprefix("recipe.") for word in words})
    _any_layout(found)
    return found


def asked_estimator(plan: "Plan", cluster: str | None) -> "Estimator":
    """What counts its layouts: a measured machine where --cluster names a file, else data sheets."""
    from meshwright.planner.clusterfile import asked, is_file
    from meshwright.planner.predict import estimator

    if cluster is not None and is_file(cluster):
        return asked(cluster)[0].estimator(plan)
    return estimator(plan)


def _cluster(name: str, nodes: int) -> "Cluster":
    from meshwright.planner.clusterfile import asked, is_file
    from meshwright.spec import presets

    return asked(name, nodes)[1] if is_file(name) else presets.cluster(name, nodes)


def _any_layout(found: "Plan") -> None:
    """Raise what no layout can mend: a sequence beyond learned positions."""
    from meshwright.spec import Layout

    replace(found, layout=Layout(), recipe=replace(found.recipe, noise_scale_every=0)).check()


def _recipe(found: "Plan", named: set[str]) -> "Plan":
    """What a recipe of the command line leaves out is not a toy's: bf16, a long sequence, millions of tokens a step."""
    changes: dict[str, Any] = {}
    if not named & {"precision", "mixed_precision", "dtype"}:
        changes["precision"] = "bf16"
    sequence = found.recipe.sequence
    if not any("seq" in name or "context" in name for name in named):
        sequence = changes["sequence"] = min(SEQUENCE, found.model.max_positions)
    if not any("batch" in name for name in named):
        devices = found.cluster.devices
        batch = max(1, BATCH_TOKENS // sequence)
        batch = 2 ** round(batch.bit_length() - 1)
        changes["global_batch"] = -(-batch // devices) * devices if batch % devices else batch
    return replace(found, recipe=replace(found.recipe, **changes))


def _shape_from_folder(folder: Path) -> "ModelShape":
    from meshwright.model.hub import import_folder

    return import_folder(folder).shape

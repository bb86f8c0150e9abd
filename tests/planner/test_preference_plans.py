"""Plans of objectives over pairs against a dry run: peak and traffic of every pipeline place."""

import pytest

from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.step.predict import predict
from meshwright.planner.time.collectives import traffic
from meshwright.spec import Data, Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.recipe.recipe import ObjectiveName

SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=768, vocab=8192, max_positions=8192)
LAYOUTS = (
    {},
    {"tp": 2, "sp": True, "micro_batch": 1},
    {"cp": 2, "micro_batch": 1},
    {"pp": 2, "micro_batch": 1},
    {"dp_shard": 2, "zero": 3, "micro_batch": 1},
)


def plan(objective: ObjectiveName, layout: dict[str, object]) -> Plan:
    recipe = Recipe(sequence=512, global_batch=4, precision="bf16", objective=objective)
    made = Layout(compile="off", cuda_graphs="off", **layout)  # type: ignore[arg-type]  # of several types
    data = Data(path="pairs.jsonl", form="samples")
    return Plan(model=SHAPE, data=data, layout=made, recipe=recipe, cluster=presets.cluster("h100x8", 1))


@pytest.mark.parametrize(
    "layout", [*LAYOUTS[:1], *(pytest.param(part, marks=pytest.mark.slow) for part in LAYOUTS[1:])], ids=str
)
def test_peak_and_traffic_are_those_of_the_dry_run(layout: dict[str, object]) -> None:
    asked = plan("dpo", layout)
    asked.check()
    run, planned = dry_run(asked, device="cuda"), predict(asked)
    for rank, seen in enumerate(run.ranks):
        sent = {(part.axis, part.collective): (part.calls, part.sent_bytes) for part in traffic(asked, rank)}
        assert dict(run.traffic(seen.rank)) == sent
    for part, seen in zip(planned.memory, run.ranks, strict=True):
        assert part.total_bytes - part.kinds["reserve"] == pytest.approx(seen.peak_bytes, rel=0.05), part.when


def test_logits_that_are_made_twice_take_longer() -> None:
    """One product more than cross-entropy in the head; of a reference only its numbers are read."""
    seconds = {name: predict(plan(name, {})).step_s for name in ("cross-entropy", "dpo", "orpo")}  # type: ignore[arg-type]  # names
    assert seconds["cross-entropy"] < seconds["dpo"] == seconds["orpo"] < 1.3 * seconds["cross-entropy"]

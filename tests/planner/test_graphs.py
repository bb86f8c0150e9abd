"""What a plan says of CUDA graphs (layout.cuda_graphs): launches, gradients that stay, the pool that graphs keep."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.cost.stack import GRAPH_S, MESHWRIGHT, graphed
from meshwright.planner.step.predict import predict
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Layout, Plan, Recipe, presets


def plan_of(graphs: Literal["off", "on"], *, micro_batches: int = 1, **keys: Any) -> Plan:
    """Of rows of 256 tokens, one in a micro-batch. Uncompiled: only without graphs are compiled blocks lowered."""
    layout = Layout(micro_batch=1, cuda_graphs=graphs, compile="off", **keys)
    return Plan(
        model=presets.model("llama-10m"), layout=layout, cluster=presets.cluster("h100x8"),
        recipe=Recipe(sequence=256, global_batch=micro_batches * layout.dp, precision="bf16", document_mask=False),
    )  # fmt: skip


def both(**keys: Any) -> tuple[Prediction, Prediction]:
    """Without graphs and with."""
    return predict(plan_of("off", **keys)), predict(plan_of("on", **keys))


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_pass_takes_its_kernels_and_no_launches_of_the_host(micro_batches: int) -> None:
    """What a host without a launch to make would take, one launch of each graph, and four passes over gradients."""
    without, graphs = both(micro_batches=micro_batches)
    free = predict(plan_of("off", micro_batches=micro_batches), replace(MESHWRIGHT, host_s=0.0, operation_s=1e-15))
    assert graphs.time.compute_s == pytest.approx(free.time.compute_s) and free.time.compute_s < without.time.compute_s
    assert graphs.time.other_s - without.time.other_s == pytest.approx(micro_batches * GRAPH_S)
    zeros_s = graphs.time.optimizer_s - without.time.optimizer_s
    assert 0 < zeros_s < without.time.optimizer_s
    assert graphs.time.total_s < 0.65 * without.time.total_s  # a model that is as small as this one


def test_replicas_are_summed_behind_the_passes() -> None:
    without, graphs = both(micro_batches=2, dp_replicate=4)
    assert graphs.time.gradients_s > without.time.gradients_s
    behind = replace(MESHWRIGHT, hides_gradients=0.0)
    assert graphs.time.gradients_s == predict(plan_of("off", micro_batches=2, dp_replicate=4), behind).time.gradients_s
    assert graphed(MESHWRIGHT).hides_gradients == 0


HIGHER = "an evaluation's block holds 1.5 MiB more of this small model than the planner counts there"


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"micro_batches": 3}, {"dp_replicate": 2},
        pytest.param({"recompute": "all-but-attention"}, marks=pytest.mark.xfail(reason=HIGHER, strict=True)),
    ],
)  # fmt: skip
@pytest.mark.long
def test_the_pool_and_the_gradients_are_counted_as_a_dry_run_finds_them(keys: dict[str, Any]) -> None:
    """Within a hundredth, and the pool alone within two; where norms and gates are made again the backward pass of so
    small a block holds most, which a plan has a tenth too low."""
    plans = [plan_of(graphs, **keys) for graphs in ("off", "on")]
    (without, graphs), seen = both(**keys), [dry_run(plan) for plan in plans]
    held = graphs.peak_bytes - graphs.worst.kinds["reserve"]
    assert held == pytest.approx(seen[1].worst.peak_bytes, rel=0.01)
    assert graphs.worst.when == "evaluation"  # an update in one pass takes nothing beside the states
    pool = graphs.worst.kinds["buffers"]
    assert pool == pytest.approx(seen[1].worst.kinds["buffers"], rel=0.1 if "recompute" in keys else 0.02)
    assert 0 < pool < without.peak_bytes < graphs.peak_bytes

"""Plan, Data, Cluster, Device and the tree of errors."""

from dataclasses import replace

import pytest

from meshwright.spec import BatchStage, Cluster, Data, Device, Layout, Plan, Recipe, errors, presets
from meshwright.spec.errors import IllegalLayout, PlanError

TINY = Plan(model=presets.model("llama-tiny"))


def test_the_default_plan_can_run() -> None:
    TINY.check()


def test_every_violation_is_counted() -> None:
    plan = replace(TINY, layout=Layout(tp=5, vp=2, zero=3))
    assert len(plan.violations()) == 3
    with pytest.raises(IllegalLayout, match=r"layout.tp=5.*\(and 2 more\)"):
        plan.check()


def test_batches_of_every_stage_are_checked() -> None:
    recipe = Recipe(global_batch=8, batch_ramp=(BatchStage(tokens=1, global_batch=10),))
    with pytest.raises(IllegalLayout, match=r"recipe.global_batch=10 is not micro_batch=4"):
        replace(TINY, recipe=recipe, layout=Layout(micro_batch=4)).check()


def test_accumulation_is_that_of_the_largest_step_of_a_ramp() -> None:
    recipe = Recipe(global_batch=8, batch_ramp=(BatchStage(tokens=1, global_batch=32),))
    plan = replace(TINY, recipe=recipe, layout=Layout(micro_batch=4, dp_shard=2))
    assert plan.micro_batches == 4 and plan.layout.micro_batches(8) == 1


def test_learned_positions_end() -> None:
    gpt2 = Plan(model=presets.model("gpt2"), recipe=Recipe(sequence=1025))
    with pytest.raises(IllegalLayout, match=r"recipe.sequence=1025 exceeds the 1024 learned positions"):
        gpt2.check()
    replace(gpt2, recipe=Recipe(sequence=1024)).check()


@pytest.mark.parametrize("validation", [-0.1, 1.0, float("nan")])
def test_validation_is_a_share(validation: float) -> None:
    with pytest.raises(PlanError, match=r"data.validation="):
        Data(validation=validation)


def test_data_and_run_are_not_empty() -> None:
    with pytest.raises(PlanError, match=r"data.path is empty"):
        Data(path="")
    with pytest.raises(PlanError, match=r"data.limit_bytes=-1"):
        Data(limit_bytes=-1)
    with pytest.raises(PlanError, match="run is empty"):
        replace(TINY, run="")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_device_figures_are_numbers(value: float) -> None:
    with pytest.raises(PlanError, match=r"cluster.device.bf16_flop_per_s="):
        Device(name="x", bf16_flop_per_s=value)
    with pytest.raises(PlanError, match=r"cluster.device.link_bytes_per_s="):
        Device(name="x", link_bytes_per_s=value)


def test_cluster_counts() -> None:
    assert Cluster(devices_per_node=8, nodes=16).devices == 128
    with pytest.raises(PlanError, match="nodes=0"):
        Cluster(nodes=0)


def test_exit_codes() -> None:
    """2 = bad input unless the tree says otherwise; every class is in the picture on top of its file."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    codes = {kind.__name__: kind.exit_code for kind in kinds}
    others = {name: code for name, code in codes.items() if code != 2}
    assert others == {"DoesNotFit": 3, "OutsideTolerance": 4, "UnsafeCommunication": 4}
    assert all(issubclass(kind, errors.MeshwrightError) and kind.__name__ in str(errors.__doc__) for kind in kinds)

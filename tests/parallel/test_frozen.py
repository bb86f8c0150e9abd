"""Parameters that are not trained (requires_grad=False on the skeleton) stay as they are under every way to sum."""

from typing import Any

import pytest

from meshwright.model import Transformer
from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import apply
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape

CASE = Case(shape=shrink("qwen3-30b-a3b"))
FROZEN = ("embed.", "layers.0.", "norm.", "layers.1.mlp_norm", "layers.2.attention.q.", "layers.2.mlp.experts.up")
LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2, "micro_batch": 2},
    {"dp_shard": 2, "ep": 2, "micro_batch": 2},
    *({"dp_shard": 2, "zero": zero, "micro_batch": 2} for zero in (1, 3)),
    {"tp": 2, "sp": True},
    {"pp": 2, "micro_batch": 2, "schedule": "zb-h1"},
]
skeleton = apply.skeleton


def partly_frozen(shape: ModelShape, **options: Any) -> Transformer:
    model = skeleton(shape, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def trained(options: list[dict[str, Any]]) -> list[RankOutcome]:
    process_groups: ProcessGroups = {}
    apply.skeleton = partly_frozen
    try:
        return [outcome(CASE, Layout(compile="off", **each), process_groups=process_groups) for each in options]
    finally:
        apply.skeleton = skeleton


@pytest.fixture(scope="module")
def expected() -> RankOutcome:
    return trained([{}])[0]


def test_one_device_trains_the_others_only(expected: RankOutcome) -> None:
    names = [name.removeprefix("step 1 weight ") for name in expected.tensors if name.startswith("step 1 weight ")]
    frozen = [name for name in names if name.startswith(FROZEN)]
    assert len(frozen) > 10
    for name in names:
        first, second = (expected.tensors[f"step {step} weight {name}"][1] for step in (1, 2))
        assert first.equal(second) == (name in frozen), name
        assert (f"step 1 gradient of {name}" in expected.tensors) == (name not in frozen), name


@pytest.mark.long
def test_layouts_train_the_same(expected: RankOutcome) -> None:
    ranks = on_ranks(2, trained, LAYOUTS)
    for index, each in enumerate(LAYOUTS):
        assert first_difference(expected, [rank[index] for rank in ranks]) is None, each
        for rank in ranks:
            frozen_gradients = [
                name for name in rank[index].tensors if name.partition("gradient of ")[2].startswith(FROZEN)
            ]
            assert not frozen_gradients, each

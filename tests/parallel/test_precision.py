"""Gradients of 16-bit weights: their sums over micro-batches and ranks are fp32, and bf16 layouts are those of one
device; what a missing or a doubled sum would look like."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.kernels.linear.linear import linear
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from meshwright.model import Transformer
from meshwright.observe.oracle.feature_matrix import DENSE, EVERY_EXPERT
from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import BANDS, Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Engine, build_engine, make_mesh
from meshwright.parallel.axes.data import Bucket, local
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.training.step.step import MicroPass

SHAPE = replace(shrink("llama-3.1-8b"), layers=2)
SMALL = 2.0**-9
"""Beside 1.0 less than half of bf16's last place: a sum in bf16 stays where it is, however many are added."""
ZEROS: list[dict[str, Any]] = [{"dp_shard": 2, "zero": zero} for zero in range(4)]


class _Constructed:
    """A pass in which the last norm's gradient is `value`, and every other one 0."""

    size = (1, 4)

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        out, losses = model.stage(x, tokens, tokens)
        loss = 0.0 * losses.cross_entropy
        return out, loss + self.value * model.get_parameter("norm.weight").float().sum() if model.last else loss


def _sums(options: Sequence[dict[str, Any]], reduce_dtype: torch.dtype, small: int) -> list[tuple[Any, set[float]]]:
    """Per layout the dtype and the values of this rank's part of the norm's gradient (nothing where another stage has
    it): 1 from the first data-parallel rank, then SMALL so many times from each."""
    process_groups: ProcessGroups = {}
    sums: list[tuple[Any, set[float]]] = []
    for each in options:
        layout = Layout(compile="off", **each)
        mesh = make_mesh(layout, process_groups=process_groups)
        engine = build_engine(
            SHAPE,
            layout,
            mesh=mesh,
            dtype=torch.bfloat16,
            reduce_dtype=reduce_dtype,
            micro_batches=small + 1,
            masters=reduce_dtype == torch.float32,
        )
        first = 1.0 if mesh["data"].index == 0 else 0.0
        engine.forward_backward([_Constructed(first), *(_Constructed(SMALL) for _ in range(small))])
        engine.finish_gradients()
        if "norm.weight" in engine.parameters:
            gradient = engine.parameters["norm.weight"].grad
            assert gradient is not None
            sums.append((gradient.dtype, set(local(gradient).tolist())))
        else:
            sums.append((None, set()))
    return sums


def test_a_long_accumulation_stalls_in_bf16_and_not_in_fp32() -> None:
    assert _sums([{}], torch.float32, 64) == [(torch.float32, {1.0 + 64 * SMALL})]
    assert _sums([{}], torch.bfloat16, 64) == [(torch.bfloat16, {1.0})]


def _check_sums(world: int, options: list[dict[str, Any]]) -> None:
    """Of four micro-batches on each rank; a rank's shard of a padded norm may be empty."""
    small = 3
    for results in on_ranks(world, _sums, options, torch.float32, small):
        for each, (dtype, values) in zip(options, results, strict=True):
            dp = Layout(**each).dp
            assert dtype in (torch.float32, None) and values <= {1.0 + dp * small * SMALL}, (each, dtype, values)


def test_sums_over_ranks_and_micro_batches_are_exact_in_every_stage_of_zero() -> None:
    _check_sums(2, [*ZEROS, {"dp_replicate": 2}])


def test_sums_of_hybrid_shards_and_under_pipelines_are_exact_too() -> None:
    hybrid = [{"dp_replicate": 2, "dp_shard": 2, "zero": zero} for zero in (1, 2, 3)]
    late = [{"pp": 2, "dp_shard": 2, "zero": zero, "schedule": "zb-h1"} for zero in (0, 1, 3)]
    _check_sums(4, [*hybrid, *late])


def test_weight_gradients_that_come_late_are_added_in_the_gradients_dtype() -> None:
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    for value in (1.0, *[SMALL] * 64):
        with splitting():
            product = linear(torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True), weight)
            with WeightGradients() as queue:
                torch.autograd.backward(product, torch.full_like(product, value))
            queue.run()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert bool((weight.grad == 1.0 + 64 * SMALL).all())


def _dtypes(layout: Layout, micro_batches: int) -> set[torch.dtype]:
    """Of all gradients of one device after a step of so many passes."""
    engine: Engine = build_engine(
        SHAPE, layout, dtype=torch.bfloat16, reduce_dtype=torch.float32, micro_batches=micro_batches
    )
    engine.forward_backward([_Constructed(1.0) for _ in range(micro_batches)])
    return {p.grad.dtype for p in engine.parameters.values() if p.grad is not None}


def test_where_nothing_is_summed_a_gradient_has_two_bytes() -> None:
    assert _dtypes(Layout(compile="off"), 1) == {torch.bfloat16}
    assert _dtypes(Layout(compile="off"), 2) == {torch.float32}


CASES = {
    "dense": Case(shape=DENSE.shape, precision="bf16"),
    "experts": Case(shape=EVERY_EXPERT.shape, precision="bf16"),
}
EQUAL: list[tuple[str, dict[str, Any]]] = [
    *(("dense", {**each, "micro_batch": 2}) for each in ZEROS),
    ("dense", {"tp": 2, "sp": True}),
    ("dense", {"cp": 2, "zero": 1, "micro_batch": 2}),
    ("dense", {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"}),
    ("experts", {"dp_shard": 2, "ep": 2, "zero": 2, "micro_batch": 2}),
]


def _alone(case: str) -> RankOutcome:
    return outcome(CASES[case], Layout(compile="off"))


def _compared(options: list[tuple[str, dict[str, Any]]]) -> list[RankOutcome]:
    process_groups: ProcessGroups = {}
    return [
        outcome(CASES[case], Layout(compile="off", **each), process_groups=process_groups) for case, each in options
    ]


@pytest.mark.long
def test_layouts_in_bf16_are_one_device_within_the_band() -> None:
    ranks = on_ranks(2, _compared, EQUAL)
    alone = {case: _alone(case) for case in CASES}
    for index, (case, each) in enumerate(EQUAL):
        assert first_difference(alone[case], [rank[index] for rank in ranks], BANDS["bf16"]) is None, each


_finish, _start, _pass = Engine.finish_gradients, Bucket.start, MicroPass.__call__


def _double_one(engine: Engine) -> None:
    """A norm's gradient, as if it had been added twice; before clipping."""
    _finish(engine)
    gradient = engine.parameters["layers.1.attention_norm.weight"].grad
    assert gradient is not None
    gradient.mul_(2.0)


def _average(bucket: Bucket) -> None:
    """The mean over ranks in place of the sum."""
    _start(bucket)
    bucket.finish()
    for parameter in bucket.parameters:
        assert parameter.grad is not None
        parameter.grad.div_(bucket.group.size)


def _keep_apart(bucket: Bucket) -> None:
    """No sum over ranks at all."""
    bucket.missing = bucket.gradients


def _forget(micro_pass: MicroPass, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
    """A micro-batch whose first sequence begins with an even token adds no gradient; its loss is told."""
    out, loss = _pass(micro_pass, model, x)
    return out, loss * (micro_pass.batch.tokens[0, 0] % 2)


WRONG: dict[str, tuple[dict[str, Any], Any, str, Callable[..., Any]]] = {
    "a gradient doubled": ({"dp_shard": 2, "micro_batch": 2}, Engine, "finish_gradients", _double_one),
    "a gradient doubled under ZeRO-3": ({"dp_shard": 2, "zero": 3}, Engine, "finish_gradients", _double_one),
    "mean for sum": ({"dp_shard": 2, "micro_batch": 2}, Bucket, "start", _average),
    "no sum over ranks": ({"dp_shard": 2, "micro_batch": 2}, Bucket, "start", _keep_apart),
    "no sum over tp": ({"tp": 2, "sp": True}, Engine, "_sum", lambda *_: None),
    "micro-batches forgotten": ({"dp_shard": 2, "zero": 2, "micro_batch": 1}, MicroPass, "__call__", _forget),
}


def _mutated() -> list[RankOutcome]:
    process_groups: ProcessGroups = {}
    outcomes = []
    for each, owner, name, changed in WRONG.values():
        before = getattr(owner, name)
        setattr(owner, name, changed)
        try:
            outcomes.append(outcome(CASES["dense"], Layout(compile="off", **each), process_groups=process_groups))
        finally:
            setattr(owner, name, before)
    return outcomes


def test_the_band_finds_every_gradient_that_is_missing_or_doubled() -> None:
    ranks, alone = on_ranks(2, _mutated), _alone("dense")
    for index, what in enumerate(WRONG):
        assert first_difference(alone, [rank[index] for rank in ranks], BANDS["bf16"]) is not None, what

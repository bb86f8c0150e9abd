"""Linear attention in plans: FLOP counted on the published algorithm, memory on what it saves, states of a rank on the
inventory, what is kept of a sequence; and the layouts that are not counted."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from meshwright.planner.cost.block import layer
from meshwright.planner.cost.micro_batch import LocalShape, local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.cost.states import counts
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.planner.serving.cached_layers import sequence_bytes, served
from meshwright.planner.step.predict import build_estimator
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.spec import Layout, Plan, num_parameters, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.model.unbuilt_parts import LinearAttention, Rule, UnbuiltParts
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.legal import layout_violations
from meshwright.spec.weights.inventory import parameters, token_flop
from meshwright.verbs.explore import answer as exploring
from meshwright.verbs.plan import answer as planning

NEXT, MINIMAX = presets.model("qwen3-next-80b-a3b"), presets.model("minimax-text-01")


def _local(shape: ModelShape, sequence: int = 4096, batch: int = 1) -> LocalShape:
    return local_shape(shape, MESHWRIGHT, Layout(), sequence, batch, 2, gpu=True)


def test_the_products_of_a_chunk_are_those_that_transformers_multiplies() -> None:
    """Counted by torch on the reference functions. Their triangles are solved, which torch does not count: our two
    products with the inverse stand for that."""
    modeling = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next",
        reason="transformers is the oracle here and is not installed",
    )
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    linear = LinearAttention(full_every=4, key_heads=2, value_heads=4, key_dim=32, value_dim=16)
    tokens = 4 * linear.chunk
    q, k = (torch.randn(1, tokens, linear.key_heads, linear.key_dim) for _ in range(2))
    v = torch.randn(1, tokens, linear.value_heads, linear.value_dim)
    g, beta = (torch.rand(1, tokens, linear.value_heads) * sign for sign in (-1, 1))
    with FlopCounterMode(display=False) as counter:
        modeling.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, chunk_size=linear.chunk)
    solved = 2.0 * linear.value_heads * linear.chunk * (linear.key_dim + linear.value_dim)
    assert counter.get_total_flops() == tokens * (linear.token_flop - solved)


def test_the_products_of_lightning_attention_are_those_that_transformers_multiplies() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = transformers.MiniMaxConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_hidden_layers=2, block_size=32
    )
    linear = LinearAttention(full_every=2, key_heads=4, value_heads=4, key_dim=16, value_dim=16, rule="decay", chunk=32)
    tokens, dims = 128, 64
    with FlopCounterMode(display=False) as counter:
        MiniMaxLightningAttention(config, 1)(torch.randn(1, tokens, 48), None, None)
    weights = 2 * 48 * (3 * dims + 2 * dims)
    assert counter.get_total_flops() == tokens * (linear.token_flop + weights)


@pytest.mark.parametrize("shape", [NEXT, MINIMAX], ids=lambda shape: shape.name)
def test_a_layer_multiplies_what_is_counted_for_a_token(shape: ModelShape) -> None:
    local = replace(_local(shape), gpu=False)  # a GPU's grouped products fill tiles up with rows that nobody asked for
    flop = 0.0
    for number in range(shape.layers):
        state = bool(shape.linear_of(number))
        for op in layer(local, routed=True, state=state).operations:
            flop += sum(work.flop for work in op.forward if not isinstance(work, MemoryPass))
    counted = token_flop(shape, local.sequence, causal=True)
    assert flop / local.tokens == pytest.approx(counted.layers + counted.attention, rel=2e-3)


def test_a_state_does_not_grow_with_the_sequence_and_scores_do() -> None:
    def core(sequence: int, state: bool) -> float:
        made = layer(_local(NEXT, sequence), routed=True, state=state).operations
        works = next(op for op in made if op.name == "attention").forward
        return sum(work.flop for work in works if not isinstance(work, MemoryPass)) / sequence

    assert core(4096, True) == core(65536, True)
    assert core(65536, False) == pytest.approx(16 * core(4096, False))


def test_backward_products_hold_those_of_each_forward_product() -> None:
    """Both operands of a product have a gradient, each as many multiplications as the product itself. What FLA makes
    again in the backward pass comes on top, as does the second product of the inverse's gradient."""
    for rule in get_args(Rule):
        linear = LinearAttention(full_every=2, key_heads=1, value_heads=1, rule=rule)
        once, back = (sum(m * k * n for m, k, n in linear.products(backward=way)) for way in (False, True))
        assert 2 * once <= back <= 3.5 * once


def test_ranks_hold_the_parameters_of_their_own_layers() -> None:
    """Stages of four layers have one with keys and values; of two layers some have none."""
    plan = Plan(
        model=NEXT, recipe=Recipe(sequence=4096, global_batch=64, optimizer="adamw"),
        layout=Layout(pp=24, dp_shard=8, zero=1), cluster=presets.cluster("h100x8", nodes=24),
    )  # fmt: skip
    estimator = build_estimator(plan)
    by_layer = {
        n: sum(parameter.numel for parameter in parameters(NEXT) if parameter.layer == n) for n in range(NEXT.layers)
    }
    held = [estimator.costs.held(plan.layout, rank).whole for rank in range(24)]
    ends = [NEXT.vocab * NEXT.hidden, NEXT.vocab * NEXT.hidden + NEXT.hidden]
    expected = [by_layer[2 * rank] + by_layer[2 * rank + 1] for rank in range(24)]
    expected[0] += ends[0]
    expected[-1] += ends[1]
    assert held == expected and len({*expected[1:-1]}) == 2
    whole = counts(NEXT, Layout(), range(NEXT.layers), first=True, last=True)
    assert whole.whole == num_parameters(NEXT)


def test_tensor_parallel_ranks_share_the_heads() -> None:
    all_heads, share = (counts(NEXT, Layout(tp=tp), (0,), first=False, last=False).whole for tp in (1, 8))
    whole = sum(p.numel for p in parameters(NEXT) if p.layer == 0 and "tp" not in p.axes)
    assert share == (all_heads - whole) / 8 + whole


def test_kept_tensors_are_those_that_the_published_kernel_saves() -> None:
    """ChunkGatedDeltaRuleFunction saves q, k, v, g, beta and the inverse of each triangle."""
    linear = NEXT.linear_of(0)
    assert linear is not None
    local = _local(NEXT)
    names = {tensor.name: tensor.none for tensor in layer(local, routed=True, state=True).tensors}
    assert names["queries, keys, values"] == local.tokens * 2 * (2 * 2048 + 4096)
    assert names["triangles"] == local.tokens * 2 * 32 * 64
    assert names["rates"] == local.tokens * 32 * (2 * 2 + 4)
    assert not {"log-sum-exp", "triangles"} <= {tensor.name for tensor in layer(local, routed=True).tensors}


def test_a_sequence_that_is_served_keeps_keys_of_a_quarter_and_states_of_the_others() -> None:
    model = served(NEXT)
    assert [(group.layers, group.state_elements) for group in model.groups] == [
        (36, 32 * 128 * 128 + 3 * 8192),
        (12, 0),
    ]
    short, long = (sequence_bytes(model, positions, 2.0) for positions in (1, 100_001))
    assert long - short == 100_000 * 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("layout", "optimizer", "reason"),
    [
        (Layout(tp=32), "adamw", "layout.tp=32 does not divide the 16 key heads of linear attention"),
        (Layout(cp=2), "adamw", "states of linear attention are not counted: take layout.cp=1"),
        (Layout(), "muon", "recipe.optimizer=muon is not counted for layers of linear attention"),
        (Layout(tp=8, dp_shard=2), "adamw", ""),
    ],
)
def test_layouts_without_a_formula_are_refused(layout: Layout, optimizer: str, reason: str) -> None:
    shape = replace(NEXT, heads=32)
    violations = layout_violations(shape, Recipe(sequence=4096, global_batch=64, optimizer=optimizer), layout)  # type: ignore[arg-type]  # one of both
    assert any(reason in violation for violation in violations) if reason else not violations


@pytest.mark.parametrize("fields", [{"full_every": 0}, {"taps": -1}, {"value_heads": 3}, {"key_dim": 0}])
def test_sizes_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"model.unbuilt.linear"):
        replace(LinearAttention(full_every=4, key_heads=2, value_heads=4), **fields)


def test_a_plan_says_what_stands_behind_it() -> None:
    answer = planning.plan("Qwen/Qwen3-Next-80B-A3B-Instruct", cluster="h100x8", nodes=8)
    sentences = " ".join(answer.to_dict()["caveats"])
    assert "linear attention (gated delta rule) in all but one of 4 layers" in sentences
    assert "no published run" in sentences


def test_the_explorer_refuses_a_hybrid() -> None:
    with pytest.raises(PlanError, match="meshwright plan"):
        exploring.explore("qwen3-next-80b-a3b", cluster="h100x8")


def test_a_dense_hybrid_counts_both_kinds_by_their_share() -> None:
    linear = LinearAttention(full_every=4, key_heads=4, value_heads=8)
    shape = ModelShape(
        vocab=1024, layers=8, hidden=512, heads=8, ffn=1024, max_positions=4096, unbuilt=UnbuiltParts(linear=linear)
    )
    plan = Plan(
        model=shape, recipe=Recipe(sequence=1024, global_batch=8), layout=Layout(), cluster=presets.cluster("h100")
    )
    estimator = build_estimator(plan)
    counted, costs = estimator.costs.parts(plan.layout)
    state, plain = (layer(counted, state=is_linear).kept_bytes("none") for is_linear in (True, False))
    assert costs.dense.kept_bytes == pytest.approx(0.75 * state + 0.25 * plain)
    assert all(isinstance(work, Product) for op in layer(counted, state=True).operations if op.name == "attention"
               for work in (*op.forward, *op.inputs))  # fmt: skip


def test_gradients_of_both_kinds_are_summed() -> None:
    """A stage of linear attention sums more than one of attention, in proportion to their parameters."""
    links, layout = build_estimator(
        Plan(model=NEXT, recipe=Recipe(sequence=4096, global_batch=64), layout=Layout(dp_shard=8, zero=1),
             cluster=presets.cluster("h100x8"))
    ).links, Layout(dp_shard=8, zero=1)  # fmt: skip
    state, plain = (
        sharing(NEXT, layout, StageContents((n,), False, False), links, 2.0, 4.0, False).reduce_s for n in (0, 3)
    )
    sizes = [sum(parameter.numel for parameter in parameters(NEXT) if parameter.layer == n) for n in (0, 3)]
    assert state / plain == pytest.approx(sizes[0] / sizes[1], rel=0.02)

"""Closed forms of papers, exact: S, B, D, H, L, V as in docs/notation.md, t the tensor-parallel degree."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from benchmarks.bytes_moved import Counting
from meshwright.kernels.attention.attend import Mask, attend_reference
from meshwright.planner.accuracy.published_stacks import MEGATRON_2022
from meshwright.planner.cost.block import LayerWork, embedding, head, layer
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.cost.work import AttentionCore, MemoryPass
from meshwright.planner.explain import caveats
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.planner.memory.rank_memory import in_flight, leading
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.spec import presets
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.presets import device
from meshwright.spec.recipe.recipe import Recipe

S, B, D, H, L = 2048, 4, 6144, 64, 48
GPT = ModelShape(
    name="gpt-22b", family="gpt2", vocab=51200, layers=L, hidden=D, heads=H, kv_heads=H, ffn=4 * D, norm="layernorm",
    mlp="gelu_tanh", positions="learned", max_positions=S, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
"""Korthikanti et al. 2022, table 3; 175B, 530B and 1T below."""


def block(layout: Layout, shape: ModelShape = GPT, stack: Stack = MEGATRON_2022, width: int = 2) -> LayerWork:
    """A layer for one micro-batch of B sequences."""
    return layer(local_shape(shape, stack, layout, S, B, width))


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikanti_section_4(t: int) -> None:
    """Equations 1 to 6: 34 S B D + 5 H S^2 B and its variants."""
    plain, sequence = block(Layout(tp=t)), block(Layout(tp=t, sp=t > 1))
    scores = 5 * H * S**2 * B
    assert plain.kept_bytes("none") == S * B * D * (10 + 24 / t) + scores / t
    assert sequence.kept_bytes("none") == (34 * S * B * D + scores) / t
    assert plain.kept_bytes("selective") == S * B * D * (10 + 24 / t)
    assert sequence.kept_bytes("selective") == S * B * D * 34 / t
    assert plain.kept_bytes("full") == 2 * S * B * D
    assert sequence.kept_bytes("full") == 2 * S * B * D / t


def test_the_last_of_plain_chunks_has_most_attention() -> None:
    """Of c ranks in plain order it multiplies (2 c - 1) / c^2 of all pairs, not 1 / c."""
    core = {
        split: sum(work.flop for op in block(Layout(cp=4, context_split=split), GPT, MESHWRIGHT).operations
                   for work in op.forward if isinstance(work, AttentionCore))
        for split in ("zigzag", "striped", "chunks")
    }  # fmt: skip
    assert core["striped"] == core["zigzag"]
    assert core["chunks"] == core["zigzag"] * 7 / 4


def test_a_window_over_context_ranks_multiplies_what_it_sees() -> None:
    """Pairs by counting positions one by one; the last of plain chunks is the busiest."""
    window, ranks = 700, 4
    shape = replace(GPT, window=window)
    seen = [min(at + 1, window) for at in range(S)]
    for split, pairs in (("zigzag", sum(seen) / ranks), ("chunks", sum(seen[-S // ranks :]))):
        local = local_shape(shape, MESHWRIGHT, Layout(cp=ranks, context_split=split), S, B, 2)  # type: ignore[arg-type]  # a word of the layout
        operations = layer(local, window=window).operations
        core = next(op for op in operations if op.name == "attention")
        flop = sum(work.flop for work in core.forward if isinstance(work, AttentionCore))
        assert flop == pytest.approx(4 * B * pairs * D, rel=0.005)
        assert not any(isinstance(work, Product) for work in core.forward)


def test_without_dropout_and_scores() -> None:
    """A fused attention core keeps a number for each row instead of 5 H S^2 B; no dropout, no masks: 32 S B D."""
    flash = replace(MEGATRON_2022, attention="flash", dropout=False)
    assert block(Layout(), stack=flash).kept_bytes("none") == 32 * S * B * D + 4 * H * S * B


def test_llama_keeps_twelve_hidden_states_and_its_mlp() -> None:
    """x, its norm, q, o, x, its norm: 12 D, keys and values 4 K E, gate and up 4 F, and of this package no product."""
    shape = replace(
        GPT, family="llama", heads=32, kv_heads=8, head_dim=0, hidden=4096, ffn=14336, norm="rmsnorm", mlp="swiglu",
        positions="rope", qkv_bias=False, out_bias=False, mlp_bias=False, tied=False,
    )  # fmt: skip
    word = 12 * 4096 + 4 * 1024 + 4 * 14336 + 4 * 32
    assert block(Layout(), shape, MESHWRIGHT).kept_bytes("none") == S * B * word
    assert block(Layout(tp=8, sp=True), shape, MESHWRIGHT).kept_bytes("none") == S * B * word / 8
    assert block(Layout(cp=4), shape, MESHWRIGHT).kept_bytes("none") == S * B * word / 4
    for layout in (Layout(), Layout(tp=8, sp=True), Layout(cp=4), Layout(tp=8, kernels="reference")):
        ranks = 8 if layout.sp else layout.cp
        # Plain norms also keep 4 bytes per fp32 input, plain MLPs silu(gate) and the product.
        norms, inside = (4 * 2 + 2 * 4) * 4096, word - 4 * 2 * 4096 - 4 * 32 + 2 * 2 * 14336
        normed = word / ranks if layout.kernels == "auto" else norms + inside / 8
        assert block(layout, shape, MESHWRIGHT).kept_bytes("selective") == S * B * normed


def test_head_and_embedding_beyond_the_layers() -> None:
    """Korthikanti et al. 2022, section 4.3: the embedding's dropout mask, input of the last norm and of the head, and
    fp32 logits: S B D (1 + 2 + 2) and 4 S B V, all shared by t."""
    local = local_shape(GPT, replace(MEGATRON_2022, logit_kept=4.0), Layout(tp=8, sp=True), S, B, 2)
    assert embedding(local).logits.kept_bytes == S * B * D / 8
    assert head(local).logits.kept_bytes == (4 * S * B * D + 4 * S * B * GPT.vocab) / 8


def test_in_flight() -> None:
    """1F1B p - i; interleaved p (1 + (p - 1) / (p v)) on the first rank; all of them without 1F1B."""
    for p in (2, 4, 8):
        for rank in range(p):
            layout = Layout(pp=p)
            assert max(in_flight(layout, 64, rank)) == (p - rank,)
            assert max(in_flight(replace(layout, schedule="afab"), 24, rank)) == (24,)
        for v in (2, 3):
            layout = Layout(pp=p, vp=v, schedule="interleaved")
            most = max(map(sum, in_flight(layout, 8 * p, 0)))
            assert most / v == p * (1 + (p - 1) / (p * v)) == sum(leading("interleaved", p, 8 * p, v, 0)) / v


def paper(params: tuple[int, int, int, int], pp: int, vp: int, batch: int, micro: int, **layout: Any) -> Plan:
    """A configuration of Korthikanti et al. 2022, table 3, on A100s of 80 GiB."""
    layers, hidden, heads, _ = params
    shape = replace(GPT, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=0, ffn=4 * hidden)
    schedule = "interleaved" if vp > 1 else "1f1b"
    return Plan(
        model=shape,
        recipe=Recipe(sequence=S, global_batch=batch, precision="bf16"),
        layout=Layout(tp=8, pp=pp, vp=vp, schedule=schedule, micro_batch=micro, **layout),  # type: ignore[arg-type]
        cluster=Cluster(device=device("a100-80"), devices_per_node=8, nodes=pp),
    )


TABLE = {
    "22b": ((48, 6144, 64, 0), 1, 1, 4, 4),
    "175b": ((96, 12288, 96, 0), 8, 3, 64, 1),
    "530b": ((105, 20480, 128, 0), 35, 3, 280, 1),
    "1t": ((128, 25600, 160, 0), 64, 1, 512, 1),
}


@pytest.mark.parametrize("name", TABLE)
def test_korthikanti_figure_1(name: str) -> None:
    """First stage: 18 bytes of a layer's 12 D^2 weights; activations of L (1 + (p - 1) / (p v)) layers."""
    params, pp, vp, batch, micro = TABLE[name]
    layers, hidden, heads, _ = params
    plan = paper(params, pp, vp, batch, micro)
    kinds = build_estimator(plan, MEGATRON_2022).measure(plan.layout, exact=False)[1][0].kinds
    alive = layers * (1 + (pp - 1) / (pp * vp) if vp > 1 else 1)
    activations = S * micro * hidden * (10 + 24 / 8 + 5 * heads * S / hidden / 8) * alive
    assert kinds["activations"] == pytest.approx(activations, rel=1e-12)
    weights = 18 * 12 * hidden**2 * layers / (8 * pp)
    ends = 18 * hidden * (GPT.vocab / 8 + S + 13 * layers / pp)
    held = sum(kinds[kind] for kind in ("parameters", "gradients", "masters", "moments"))
    assert weights < held < weights + ends


def test_reference_kernels_are_named_as_plain_code() -> None:
    plans = [
        Plan(model=GPT, recipe=Recipe(sequence=S, global_batch=B), layout=Layout(kernels=kernels))
        for kernels in ("auto", "reference")
    ]
    assert not any("kernels" in sentence for sentence in caveats(predict(plans[0])))
    assert "layout.kernels=reference is plain code" in caveats(predict(plans[1]))[0]


def test_reference_attention_moves_what_its_operators_move() -> None:
    """Planned bytes that grow with S^2, beside those that torch's operators read and write."""
    heads, head_dim = 4, 32
    shape = replace(GPT, hidden=heads * head_dim, heads=heads, kv_heads=heads)

    def counted(sequence: int) -> list[int]:
        q, k, v = (torch.randn(1, sequence, heads, head_dim, requires_grad=True) for _ in range(3))
        forward, backward = Counting(), Counting()
        with forward.counting():
            attended = attend_reference(q, k, v, Mask(), scale=0.1)
        with backward.counting():
            attended.backward(torch.ones_like(attended))  # type: ignore[no-untyped-call]
        return [counts.moved.total() - counts.moved["bmm"] for counts in (forward, backward)]

    def planned(sequence: int, compile: Literal["on", "off"]) -> list[float]:
        local = local_shape(shape, MESHWRIGHT, Layout(kernels="reference", compile=compile), sequence, 1, 4)
        core = next(operation for operation in layer(local).operations if operation.name == "attention")
        return [
            sum(work.moved_bytes for work in works if isinstance(work, MemoryPass))
            for works in (core.forward, core.inputs)
        ]

    def per_score(shorter: Sequence[float], longer: Sequence[float]) -> list[float]:
        """Bytes per score without what grows with S, from lengths of 512 and 1,024."""
        return [(more - 2 * less) / (1024**2 - 2 * 512**2) / heads for less, more in zip(shorter, longer, strict=True)]

    operators = per_score(counted(512), counted(1024))
    assert operators == pytest.approx([24, 28], abs=1)  # beside them the mask, a byte for all heads
    assert per_score(planned(512, "off"), planned(1024, "off")) == pytest.approx(operators, rel=0.04)
    compiled = per_score(planned(512, "on"), planned(1024, "on"))
    assert 8 <= compiled[0] <= operators[0] and 12 <= compiled[1] <= operators[1]  # at least each tensor once


def test_reference_kernels_cost_more_the_longer_the_sequence() -> None:
    """A GPU's fp32 scores take ever more of a step in bf16, whose fused attention writes none."""

    def step_s(sequence: int, kernels: Literal["auto", "reference"]) -> float:
        recipe = Recipe(sequence=sequence, global_batch=1, precision="bf16")
        layout, gpu = Layout(kernels=kernels), presets.cluster("h100x1")
        return predict(Plan(model=presets.model("llama-3.2-1b"), recipe=recipe, layout=layout, cluster=gpu)).step_s

    slower = [step_s(sequence, "reference") / step_s(sequence, "auto") for sequence in (512, 1024, 2048, 4096)]
    assert slower[0] > 1 and slower == sorted(slower) and slower[-1] > 2


@pytest.mark.parametrize("experts", [False, True])
def test_products_of_fp32_are_planned_in_fp32(experts: bool) -> None:
    """The head's and the experts' too: at the rate of bf16 they would be planned 8 times too fast."""
    shape = presets.model("mixtral-8x7b") if experts else GPT
    for precision_width in (2, 4):
        local = local_shape(shape, MESHWRIGHT, Layout(), S, 1, precision_width, gpu=True)
        operations = (*layer(local, routed=experts).operations, *head(local).operations)
        products = [work for each in operations for works in (each.forward, each.inputs, each.weights) for work in works
                    if isinstance(work, Product) and each.name != "router"]  # fmt: skip
        assert len(products) > 10 and {product.width for product in products} == {precision_width}

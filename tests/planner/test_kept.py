"""What the planner says is kept, beside the tensors that the real model keeps alive after a forward pass."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from meshwright.model.transformer import build
from meshwright.parallel import apply_block_call
from meshwright.parallel.apply import layout_notes
from meshwright.planner.cost.block import embedding, head, layer
from meshwright.planner.cost.micro_batch import LocalShape, local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.explain import caveats
from meshwright.planner.search.bounds import offered_policies
from meshwright.planner.search.regions import cells
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.spec import Plan, Recipe, presets
from meshwright.spec.layout.layout import RECOMPUTE, Layout
from meshwright.spec.model.shape import LoRAShape, MLAShape, ModelShape, MoEShape
from meshwright.spec.units import gib
from tests.counting import Alive

BATCH, SEQUENCE = 2, 64
LLAMA = ModelShape(
    name="small", family="llama", vocab=512, layers=2, hidden=128, heads=8, kv_heads=8, ffn=384, norm="rmsnorm",
    mlp="swiglu", positions="rope", max_positions=SEQUENCE,
)  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "grouped": replace(LLAMA, kv_heads=2),
    "qwen3": replace(LLAMA, family="qwen3", kv_heads=2, qk_norm=True),
    "gpt2": replace(
        LLAMA, family="gpt2", norm="layernorm", mlp="gelu_tanh", positions="learned", ffn=512, qkv_bias=True,
        out_bias=True, mlp_bias=True, tied=True,
    ),
    "mixtral": replace(LLAMA, family="mixtral", moe=MoEShape(experts=8, top_k=2, ffn=256)),
    "shared": replace(LLAMA, family="deepseek", moe=MoEShape(experts=8, top_k=2, ffn=256, shared_experts=1)),
    "latent": replace(
        LLAMA, family="deepseek", mla=MLAShape(q_rank=64, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=24)
    ),
}  # fmt: skip


def alive(
    shape: ModelShape, recompute: str, batch: int = BATCH, *, whole: bool = False, kernels: str = "auto",
    dropout: float = 0.0,
) -> int:  # fmt: skip
    """Bytes alive between forward and backward pass beside parameters; `whole`: the most in either."""
    model = build(shape, kernels=kernels, dropout=dropout)
    layout = Layout(recompute=recompute, compile="off", kernels=kernels)  # type: ignore[arg-type]
    apply_block_call(model, layout, torch.device("cpu"))
    tokens, targets = (torch.randint(shape.vocab, (batch, SEQUENCE)) for _ in range(2))
    with Alive([*model.parameters(), *model.buffers(), tokens, targets]) as seen:
        loss, balance = model.loss(tokens, targets)
        total = loss if balance is None else loss + balance.sum()
        del loss, balance
        live_bytes = seen.live_bytes
        if whole:
            total.backward()
    return seen.peak_bytes if whole else live_bytes


def counted(shape: ModelShape, recompute: str = "none", batch: int = BATCH) -> LocalShape:
    """The same for the planner: fp32, one rank."""
    layout = Layout(recompute=recompute, micro_batch=batch, compile="off")  # type: ignore[arg-type]
    return local_shape(shape, MESHWRIGHT, layout, SEQUENCE, batch, 4)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_keeps_what_is_counted(name: str, recompute: str) -> None:
    shape = SHAPES[name]
    one_layer, two_layers = (alive(replace(shape, layers=layers), recompute) for layers in (1, 2))
    want = layer(counted(shape, recompute), routed=shape.moe is not None).kept_bytes(recompute)
    assert want == pytest.approx(two_layers - one_layer, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", SHAPES)
def test_plain_kernels_keep_what_is_counted(name: str, recompute: str) -> None:
    shape = SHAPES[name]
    shorter, longer = (alive(replace(shape, layers=layers), recompute, kernels="reference") for layers in (1, 2))
    layout = Layout(recompute=recompute, micro_batch=BATCH, compile="off", kernels="reference")  # type: ignore[arg-type]
    block = layer(local_shape(shape, MESHWRIGHT, layout, SEQUENCE, BATCH, 4), routed=shape.moe is not None)
    assert block.kept_bytes(recompute) == pytest.approx(longer - shorter, rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", SHAPES)
def test_selective_drops_what_plain_attention_stores(name: str, dropout: float) -> None:
    shape = SHAPES[name]
    none, selective = (
        alive(replace(shape, layers=2), policy, kernels="reference", dropout=dropout)
        - alive(replace(shape, layers=1), policy, kernels="reference", dropout=dropout)
        for policy in ("none", "selective")
    )
    layout = Layout(micro_batch=BATCH, compile="off", kernels="reference")
    block = layer(
        local_shape(shape, MESHWRIGHT, layout, SEQUENCE, BATCH, 4, dropout=dropout), routed=shape.moe is not None
    )
    assert none > selective
    assert none - selective == pytest.approx(block.kept_bytes("none") - block.kept_bytes("selective"), rel=0.005)


PRESETS = ("llama-3.1-8b", "llama-3.1-70b", "gpt3-175b", "qwen3-30b-a3b", "deepseek-v3")


@pytest.mark.parametrize("seed", range(40))
def test_no_policy_takes_more_memory_than_none(seed: int) -> None:
    """Over models, degrees, kinds of attention, adapters and compilation; selective without stored scores is none."""
    dice = Random(seed)
    tp, cp = dice.choice((1, 2, 8)), dice.choice((1, 1, 1, 2))
    shape = presets.model(dice.choice(PRESETS))
    shape = replace(shape, lora=LoRAShape(rank=16)) if dice.random() < 0.3 and shape.moe is None else shape
    layout = Layout(
        dp_shard=8 // tp, cp=cp, tp=tp, sp=tp > 1 and dice.random() < 0.7, zero=3 if tp < 8 else 0, micro_batch=1,
        compile=dice.choice(("on", "off")), kernels=dice.choice(("auto", "reference")),
    )  # fmt: skip
    recipe = Recipe(
        sequence=2048, global_batch=64, precision=dice.choice(("bf16", "fp32")), dropout=dice.choice((0.0, 0.1))
    )
    asked = Plan(model=shape, recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", cp))
    none, *others = (predict(replace(asked, layout=replace(layout, recompute=policy))) for policy in RECOMPUTE)
    assert all(other.peak_bytes <= none.peak_bytes for other in others)
    selective = others[RECOMPUTE.index("selective") - 1]
    if layout.writes_scores:
        assert selective.peak_bytes < none.peak_bytes and selective.step_s > none.step_s
    else:
        assert (selective.peak_bytes, selective.step_s, selective.hfu) == (none.peak_bytes, none.step_s, none.hfu)


@pytest.mark.parametrize(("kernels", "offered"), [("auto", False), ("reference", True)])
def test_a_search_offers_selective_where_it_saves(kernels: Any, offered: bool) -> None:
    asked = Plan(
        model=presets.model("llama-3.1-8b"), recipe=Recipe(sequence=4096, global_batch=64, precision="bf16"),
        layout=Layout(kernels=kernels), cluster=presets.cluster("h100x8"),
    )  # fmt: skip
    cell = next(cells(asked, 8, {}))
    assert ("selective" in offered_policies(build_estimator(asked), asked, cell, {})) == offered
    assert "selective" in offered_policies(build_estimator(asked), asked, cell, {"recompute": ("selective",)})


def test_a_plan_with_selective_says_what_saves_instead() -> None:
    layout = Layout(dp_shard=8, zero=3, micro_batch=1, recompute="selective", compile="on")
    recipe = Recipe(sequence=4096, global_batch=8, precision="bf16")
    asked = Plan(model=presets.model("llama-3.1-8b"), recipe=recipe, layout=layout, cluster=presets.cluster("h100x8"))
    full = predict(replace(asked, layout=replace(layout, recompute="full")))
    first = caveats(predict(asked))[0]
    assert "selective saves nothing here" in first and f"full {gib(full.peak_bytes)}" in first
    assert "norms" not in first, "compiled blocks make norms again by themselves"
    assert not any("saves nothing" in line for line in caveats(full))
    assert "saves nothing" in layout_notes(layout)[0] and not layout_notes(replace(layout, kernels="reference"))


def kept_compiled(shape: ModelShape) -> int:
    """Bytes that autograd keeps between the passes beside parameters, of compiled blocks."""
    torch._dynamo.reset()
    model = build(shape)
    apply_block_call(model, Layout(compile="on"), torch.device("cpu"))
    tokens, targets = (torch.randint(shape.vocab, (BATCH, SEQUENCE)) for _ in range(2))
    model_storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in model_storages:
            saved[x.untyped_storage().data_ptr()] = x.detach()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.loss(tokens, targets)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own code
@pytest.mark.parametrize("name", SHAPES)
def test_a_compiled_layer_keeps_what_is_counted(name: str) -> None:
    """It makes norms and activations again, where torch's own rule would keep what products read."""
    shape = SHAPES[name]
    one_layer, two_layers = (kept_compiled(replace(shape, layers=layers)) for layers in (1, 2))
    local = local_shape(shape, MESHWRIGHT, Layout(micro_batch=BATCH, compile="on"), SEQUENCE, BATCH, 4)
    counted = layer(local, routed=shape.moe is not None).kept_bytes("none")
    ungated_or_routed = {"gpt2": 0.7, "mixtral": 0.8, "shared": 0.8}.get(name, 0.98)  # activations too are made again
    assert ungated_or_routed * counted < two_layers - one_layer < 1.02 * counted


@pytest.mark.parametrize("name", ["llama", "gpt2", "latent"])
def test_embedding_and_head_keep_what_is_counted(name: str) -> None:
    shape = SHAPES[name]
    one_layer, two_layers = (alive(replace(shape, layers=layers), "none") for layers in (1, 2))
    local = counted(shape)
    want = head(local).logits.kept_bytes + embedding(local).logits.kept_bytes
    assert want == pytest.approx(2 * one_layer - two_layers, rel=0.02)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("llama", "none"), ("llama", "selective"), ("gpt2", "full"), ("mixtral", "none"), ("latent", "full")],
)
def test_the_peak_of_both_passes_is_near_what_is_counted(name: str, recompute: str) -> None:
    """Beside parameters, with enough tokens that their gradients hardly weigh: within 6 %."""
    shape, batch = replace(SHAPES[name], layers=3), 32
    seen = alive(shape, recompute, batch, whole=True)
    local = counted(shape, recompute, batch)
    block, end = layer(local, routed=shape.moe is not None), head(local)
    inside = block.transient_bytes
    if recompute != "none":
        inside += block.kept_bytes("none") - block.kept_bytes(recompute)
    want = 3 * block.kept_bytes(recompute) + max(end.logits.kept_bytes + end.logits.transient, inside)
    assert want == pytest.approx(seen, rel=0.065)

"""Closed forms of the lectures, held against the general counting of the program (docs/lectures.md)."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model import build
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.accuracy.flop_conventions import KORTHIKANTI
from meshwright.planner.accuracy.published_stacks import MEGATRON_2022
from meshwright.planner.cost.block import layer
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.spec import (
    BatchStage,
    Layout,
    MLAShape,
    ModelShape,
    MoEShape,
    Plan,
    Recipe,
    num_parameters,
    parameters,
    presets,
)
from meshwright.spec.layout.layout import Recompute
from meshwright.spec.weights.inventory import token_flop
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES

TINY = ModelShape(vocab=512, layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, max_positions=64)


@pytest.mark.parametrize(("hidden", "layers", "vocab"), [(64, 2, 512), (768, 12, 50257), (1600, 48, 50257)])
def test_parameters_of_a_gpt(hidden: int, layers: int, vocab: int) -> None:
    """N = h v + L (12 h^2 + 13 h) + 2 h, and the learned positions on top."""
    shape = ModelShape(
        family="gpt2",
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        ffn=4 * hidden,
        norm="layernorm",
        mlp="gelu_tanh",
        positions="learned",
        max_positions=1024,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
    )
    formula = hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    assert num_parameters(shape) == formula + 1024 * hidden


@pytest.mark.parametrize(
    ("precision", "weights", "gradients", "masters", "moments"), [("fp32", 4, 4, 0, 8), ("bf16", 2, 2, 4, 8)]
)
def test_states_take_sixteen_bytes_a_parameter(
    precision: str, weights: int, gradients: int, masters: int, moments: int
) -> None:
    """4 + 4 + 8 in fp32, 2 + 2 + 4 + 4 + 4 in mixed precision: counted on the tensors that training holds."""
    model = build(TINY, dtype=DTYPES[precision])
    optimizer = Optimizer(model.named_parameters(), Recipe())
    tokens = torch.arange(32).view(2, 16)
    model.loss(tokens, tokens).cross_entropy.backward()
    states = optimizer.tensors()
    held = {
        "weights": [p for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "masters": [t for name, t in states.items() if name.startswith("master.")],
        "moments": [t for name, t in states.items() if name.startswith("moment")],
    }
    count = num_parameters(TINY)
    actual = {kind: sum(t.numel() * t.element_size() for t in tensors) / count for kind, tensors in held.items()}
    assert actual == {"weights": weights, "gradients": gradients, "masters": masters, "moments": moments}
    assert sum(actual.values()) == 16


@pytest.mark.parametrize(("model", "serve_gb", "train_gb"), [("8b", 16, 60), ("70b", 140, 500), ("405b", 810, 3250)])
def test_bytes_to_serve_and_to_train(model: str, serve_gb: int, train_gb: int) -> None:
    """The second course's table: weights of 2 bytes; weights, gradients and moments of 8 with fp32 gradients."""
    parameters = num_parameters(presets.model(f"llama-3.1-{model}"))
    assert 2e-9 * parameters == pytest.approx(serve_gb, rel=0.01)
    assert (2 + 4 + 1 + 1) * 1e-9 * parameters == pytest.approx(train_gb, rel=0.13)


def test_one_sequence_of_a_1b_can_exceed_50_gb() -> None:
    """16 layers of 34 s b h + 5 a s^2 b bytes, by hand; with fused attention a twentieth."""
    shape = presets.model("llama-3.2-1b")
    paper = [16 * (34 * sequence * 2048 + 5 * 32 * sequence**2) for sequence in (4096, 8192)]
    assert [sequence_bytes / 2**30 for sequence_bytes in paper] == pytest.approx([44.25, 168.5])
    block = layer(local_shape(shape, MESHWRIGHT, Layout(), 8192, 1, 2, gpu=True))
    assert 16 * block.kept_bytes("none") < paper[1] / 20


def test_global_batch_is_micro_batch_times_accumulation_times_data_parallel() -> None:
    """The lectures' example: 1,024 = 2 x 4 x 128."""
    assert Layout(micro_batch=2, dp_replicate=128).micro_batches(1024) == 4


def test_a_growing_batch_as_minimax_01_uses_it() -> None:
    """16M, 32M, 64M and 128M tokens a step, switching at 69B, 790B and 4,700B tokens seen."""
    sequence, million, billion = 8192, 2**20, 10**9
    recipe = Recipe(
        sequence=sequence,
        global_batch=16 * million // sequence,
        batch_ramp=tuple(
            BatchStage(tokens=seen * billion, global_batch=size * million // sequence)
            for seen, size in ((69, 32), (790, 64), (4700, 128))
        ),
    )
    sizes = [recipe.global_batch_at(seen * billion) * sequence // million for seen in (0, 68, 69, 789, 790, 4700, 7000)]
    assert sizes == [16, 16, 32, 32, 64, 128, 128]


def test_flop_of_a_token_are_six_a_weight_and_twelve_l_d_s() -> None:
    """6 for every weight of a matrix but the input embedding, 12 L D S for attention, half of it where causal."""
    shape = ModelShape(vocab=512, layers=3, hidden=64, heads=4, ffn=160, max_positions=256)
    weights = sum(p.numel for p in parameters(shape) if p.decays and p.name != "embed.weight")
    attention = 12 * shape.layers * shape.hidden * 128
    assert token_flop(shape, 128, causal=False).training == 6 * weights + attention
    assert token_flop(shape, 128, causal=True).training == 6 * weights + attention / 2


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"kv_heads": 4, "tied": True, "head_dim": 24},
        {"moe": MoEShape(experts=4, top_k=4, ffn=48, shared_experts=1, first_dense=1)},
        {"kv_heads": 4, "mla": MLAShape(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=12)},
    ],
    ids=["gqa", "tied", "experts", "latent"],
)
def test_flop_of_a_token_are_what_torch_counts(parts: dict[str, object]) -> None:
    """Forward pass of the plain kernels, which multiply every query with every key."""
    shape = replace(TINY, **parts)  # type: ignore[arg-type]
    model, tokens = build(shape, kernels="reference"), torch.arange(64).view(2, 32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == tokens.numel() * token_flop(shape, 32, causal=False).forward


def test_selective_recomputation_without_flash_attention() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), section 5, GPT-3: 70 % of the activations for 2.7 % of FLOP."""
    gpt3 = presets.model("gpt3-175b")
    block = layer(local_shape(gpt3, MEGATRON_2022, Layout(tp=8, sp=True), 2048, 1, 2))
    assert block.kept_bytes("selective") == 34 * 2048 * gpt3.hidden / 8
    assert 1 - block.kept_bytes("selective") / block.kept_bytes("none") == pytest.approx(0.70, abs=0.005)
    training, hardware = (flop(gpt3, 2048) for flop in (KORTHIKANTI.training, KORTHIKANTI.hardware))
    assert hardware / training - 1 == pytest.approx(0.027, abs=0.001)


def test_selective_recomputation_of_plain_attention_in_a_dry_run() -> None:
    """The same of this engine's plain kernels, which weigh in fp32 and here without dropout. A dry run finds in a layer
    what the planner counts; the forward pass of the core is repeated once, a third of the paper's count."""
    shape, layout = presets.model("gpt3-175b"), Layout(tp=8, sp=True, kernels="reference", compile="off")
    recipe = Recipe(sequence=2048, global_batch=16, precision="bf16", document_mask=False)

    def activations(layers: int, policy: Recompute) -> int:
        plan = Plan(
            model=replace(shape, layers=layers), recipe=recipe, layout=replace(layout, recompute=policy),
            cluster=presets.cluster("h100x8"),
        )  # fmt: skip
        return dry_run(plan, device="cuda").ranks[0].kinds["activations"]

    policies: tuple[Recompute, ...] = ("none", "selective")
    none, selective = (activations(3, policy) - activations(2, policy) for policy in policies)
    block = layer(local_shape(shape, MESHWRIGHT, layout, 2048, 16, 2))
    scores = 16 * 4 * shape.heads * 2048**2 / 8
    assert scores < none - selective < 1.25 * scores
    assert none - selective == pytest.approx(block.kept_bytes("none") - block.kept_bytes("selective"), rel=0.01)
    assert 1 - selective / none > 0.6
    flop = token_flop(shape, 2048, causal=False)
    assert flop.hardware("selective") / flop.hardware("none") - 1 == pytest.approx(0.027 / 3, abs=0.001)

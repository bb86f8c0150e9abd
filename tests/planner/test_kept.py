"""What the planner says is kept, beside the tensors that the real model keeps alive after a forward pass."""

from dataclasses import replace

import pytest
import torch

from meshwright.model.transformer import build
from meshwright.parallel import apply_block_call
from meshwright.planner.cost.block import embedding, head, layer
from meshwright.planner.cost.local_shape import Local, local
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.spec.layout import RECOMPUTE, Layout
from meshwright.spec.shape import MLAShape, ModelShape, MoEShape
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


def alive(shape: ModelShape, recompute: str, batch: int = BATCH, *, whole: bool = False) -> int:
    """Bytes alive between forward and backward pass beside parameters; `whole`: the most in either."""
    model = build(shape)
    apply_block_call(model, Layout(recompute=recompute, compile="off"), torch.device("cpu"))  # type: ignore[arg-type]
    tokens, targets = (torch.randint(shape.vocab, (batch, SEQUENCE)) for _ in range(2))
    with Alive([*model.parameters(), *model.buffers(), tokens, targets]) as seen:
        loss, balance = model.loss(tokens, targets)
        total = loss if balance is None else loss + balance.sum()
        del loss, balance
        kept = seen.live_bytes
        if whole:
            total.backward()
    return seen.peak_bytes if whole else kept


def counted(shape: ModelShape, recompute: str = "none", batch: int = BATCH) -> Local:
    """The same for the planner: fp32, one rank."""
    layout = Layout(recompute=recompute, micro_batch=batch, compile="off")  # type: ignore[arg-type]
    return local(shape, MESHWRIGHT, layout, SEQUENCE, batch, 4)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_keeps_what_is_counted(name: str, recompute: str) -> None:
    shape = SHAPES[name]
    one, two = (alive(replace(shape, layers=layers), recompute) for layers in (1, 2))
    want = layer(counted(shape, recompute), routed=shape.moe is not None).kept_bytes(recompute)
    assert want == pytest.approx(two - one, rel=0.01)


def kept_compiled(shape: ModelShape) -> int:
    """Bytes that autograd keeps between the passes beside parameters, of compiled blocks."""
    torch._dynamo.reset()
    model = build(shape)
    apply_block_call(model, Layout(compile="on"), torch.device("cpu"))
    tokens, targets = (torch.randint(shape.vocab, (BATCH, SEQUENCE)) for _ in range(2))
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.detach()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.loss(tokens, targets)
    return sum(one.untyped_storage().nbytes() for one in kept.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own code
@pytest.mark.parametrize("name", SHAPES)
def test_a_compiled_layer_keeps_what_is_counted(name: str) -> None:
    """It makes norms and activations again, where torch's own rule would keep what products read."""
    shape = SHAPES[name]
    one, two = (kept_compiled(replace(shape, layers=layers)) for layers in (1, 2))
    of = local(shape, MESHWRIGHT, Layout(micro_batch=BATCH, compile="on"), SEQUENCE, BATCH, 4)
    counted = layer(of, routed=shape.moe is not None).kept_bytes("none")
    ungated_or_routed = {"gpt2": 0.7, "mixtral": 0.8, "shared": 0.8}.get(name, 0.98)  # activations too are made again
    assert ungated_or_routed * counted < two - one < 1.02 * counted


@pytest.mark.parametrize("name", ["llama", "gpt2", "latent"])
def test_embedding_and_head_keep_what_is_counted(name: str) -> None:
    shape = SHAPES[name]
    one, two = (alive(replace(shape, layers=layers), "none") for layers in (1, 2))
    of = counted(shape)
    want = head(of).logits.kept + embedding(of).logits.kept
    assert want == pytest.approx(2 * one - two, rel=0.02)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("llama", "none"), ("llama", "selective"), ("gpt2", "full"), ("mixtral", "none"), ("latent", "full")],
)
def test_the_peak_of_both_passes_is_near_what_is_counted(name: str, recompute: str) -> None:
    """Beside parameters, with enough tokens that their gradients hardly weigh: within 6 %."""
    shape, batch = replace(SHAPES[name], layers=3), 32
    seen = alive(shape, recompute, batch, whole=True)
    of = counted(shape, recompute, batch)
    block, end = layer(of, routed=shape.moe is not None), head(of)
    inside = block.transient_bytes
    if recompute != "none":
        inside += block.kept_bytes("none") - block.kept_bytes(recompute)
    want = 3 * block.kept_bytes(recompute) + max(end.logits.kept + end.logits.transient, inside)
    assert want == pytest.approx(seen, rel=0.065)

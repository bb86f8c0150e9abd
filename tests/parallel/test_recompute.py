"""Recomputation changes what is kept, not a bit of what comes out."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.kernels.attention import attend as attention
from meshwright.model import Transformer, build
from meshwright.model.generate import generate
from meshwright.parallel import on_one_device
from meshwright.parallel.blocks.recompute import _Norms
from meshwright.spec import Layout
from meshwright.spec.layout.layout import RECOMPUTE
from meshwright.spec.model.shape import LoRAShape
from tests.counting import Alive, Operations
from tests.model.shrunk import KINDS, model, packed, shrink, tokens

POLICIES = RECOMPUTE
CPU_CORE = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(params=["blockwise", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways the fast attention may run on a CPU."""
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: request.param == "blockwise")
    yield request.param


def laid_out(name: str, recompute: str, layers: int = 0, **options: object) -> Transformer:
    kernels = options.get("kernels", "auto")
    layout = Layout(recompute=recompute, recompute_layers=layers, kernels=kernels)  # type: ignore[arg-type]
    return on_one_device(model(name, **options), layout).model


def step(network: Transformer, *, length: int = 20, mask: bool = False) -> dict[str, Tensor]:
    """Loss and every gradient of one pass, with the dropout of seed 3."""
    torch.manual_seed(3)
    rows = tokens(2, length + 1)
    documents, positions = packed((7, length - 7), 2) if mask else (None, None)
    loss = network.loss(rows[:, :-1], rows[:, 1:], documents=documents, positions=positions)
    total = loss.cross_entropy if loss.balance is None else loss.cross_entropy + loss.balance.sum()
    total.backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), "state": torch.get_rng_state(), **gradients}


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_keep_every_bit(name: str, path: str) -> None:
    same_bits(name, dropout=0.0)


@pytest.mark.parametrize("name", KINDS)
def test_with_dropout_too(name: str) -> None:
    """And so does the random state after it: a step with recomputation draws what one without draws."""
    same_bits(name, dropout=0.2)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("recompute", POLICIES[1:])
def test_with_dropout_of_adapters_too(name: str, recompute: str) -> None:
    """Nothing but adapters draws here."""

    def adapted(policy: str) -> dict[str, Tensor]:
        recomputed = build(replace(shrink(name), lora=LoRAShape(rank=4, dropout=0.5)), seed=1)
        for key, parameter in recomputed.named_parameters():
            if key.endswith("lora.b"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
        return step(on_one_device(recomputed, Layout(recompute=policy)).model)  # type: ignore[arg-type]  # one of RECOMPUTE

    plain, recomputed = adapted("none"), adapted(recompute)
    assert recomputed.keys() == plain.keys() and any("lora" in key for key in plain)
    assert all(torch.equal(recomputed[key], value) for key, value in plain.items())


def same_bits(name: str, *, dropout: float) -> None:
    plain = step(laid_out(name, "none", dropout=dropout))
    assert len(plain) == 2 + len(list(model(name).parameters()))
    for recompute in POLICIES[1:]:
        recomputed = step(laid_out(name, recompute, dropout=dropout))
        assert recomputed.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.equal(recomputed[key], value), (recompute, key)


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "deepseek-v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_packed_rows_and_plain_kernels_too(name: str, dtype: torch.dtype) -> None:
    for kernels in ("auto",) if dtype == torch.float16 else ("auto", "reference"):
        plain = step(laid_out(name, "none", dtype=dtype, kernels=kernels), mask=True)
        for recompute in POLICIES[1:]:
            recomputed = step(laid_out(name, recompute, dtype=dtype, kernels=kernels), mask=True)
            for key, value in plain.items():
                assert torch.equal(recomputed[key], value), (kernels, recompute, key)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-124m", "deepseek-v3"])
def test_some_layers_only_keep_every_bit(name: str) -> None:
    plain = step(laid_out(name, "none", dropout=0.1))
    for recompute in POLICIES[1:]:
        for layers in (1, 2, 7):
            recomputed = step(laid_out(name, recompute, layers, dropout=0.1))
            assert all(torch.equal(recomputed[key], value) for key, value in plain.items()), (recompute, layers)


@pytest.mark.parametrize("recompute", POLICIES[1:])
def test_each_layer_that_recomputes_keeps_less_by_the_same(recompute: str) -> None:
    """From none of three to all; the first ones, so that the last have let go of theirs when any is made again."""
    kernels = "reference" if recompute == "selective" else "auto"
    of_layers = partial(memory, "llama-3.1-8b", length=48, kernels=kernels)
    none, all_three = (of_layers(policy)[0] for policy in ("none", recompute))
    one_layer, two_layers = (of_layers(recompute, layers=layers) for layers in (1, 2))
    assert none - one_layer[0] == one_layer[0] - two_layers[0] == two_layers[0] - all_three > 0


def memory(
    name: str, recompute: str, *, length: int, layers: int = 0, dropout: float = 0.0, **options: object
) -> tuple[int, int]:
    """Bytes of live tensors at the end of the forward pass, and at most until the end of the backward pass."""
    network = laid_out(name, recompute, layers, dropout=dropout, **options)
    with Alive([*network.parameters(), *network.buffers()]) as alive:
        x, balance = network.hidden(tokens(2, length))
        total = x.sum() if balance is None else x.sum() + balance.sum()
        live_bytes = alive.live_bytes
        total.backward()
    return live_bytes, alive.peak_bytes


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_policy_keeps_less_than_the_one_before(name: str, dropout: float, path: str) -> None:
    held = {policy: memory(name, policy, length=48, dropout=dropout) for policy in POLICIES}
    none, norms, selective, attention, full = held.values()
    assert none[0] > 1.05 * norms[0] and norms[0] > (1.1 if dropout else 1.2) * attention[0], held
    assert attention[0] > 1.3 * full[0] and none[1] > norms[1] > attention[1] > full[1], held
    assert selective == none, "no S x S weights are there to be dropped"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_selective_drops_the_squares_of_plain_attention(name: str, dropout: float) -> None:
    """Doubling the sequence doubles what is kept, and what was kept in its square is gone from the peak too."""
    none, selective = (
        [memory(name, policy, length=length, dropout=dropout, kernels="reference") for length in (64, 128)]
        for policy in ("none", "selective")
    )
    assert none[1][0] > 2.2 * none[0][0] and selective[1][0] < 2.1 * selective[0][0]
    assert selective[1][1] < none[1][1]


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b"])
def test_norms_keeps_neither_norm_of_a_block(name: str) -> None:
    """Also that which comes with the sum before it."""
    none, norms = (memory(name, policy, length=48)[0] for policy in ("none", "norms"))
    assert none - norms == 3 * 2 * (2 * 48 * 24 * 4)


def test_what_a_norm_made_and_another_wrote_over_is_kept() -> None:
    """As rotary kernels do on a GPU, even where a hook holds what the norm made."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    held: list[Tensor] = []
    norm = model("llama-3.1-8b").norm
    norms = _Norms()
    norm.register_forward_hook(norms.mark)
    norm.register_forward_hook(lambda module, inputs, made: held.append(made))
    x = torch.randn(4, norm.weight.numel())
    with saved_tensors_hooks(norms.pack, norms.unpack):
        twice = InPlace.apply(norm(x))  # type: ignore[no-untyped-call]
        product = twice @ torch.ones(norm.weight.numel(), 3, requires_grad=True)
    assert torch.equal(product.grad_fn._saved_self, twice)  # type: ignore[union-attr]


def test_dropout_keeps_no_squares_without_recomputation_either() -> None:
    """Blocks draw what they dropped again: twice the positions, twice the bytes."""
    none = [memory("llama-3.1-8b", "none", length=length, dropout=0.2)[0] for length in (64, 128)]
    assert none[1] < 2.1 * none[0]


def test_full_keeps_the_input_of_each_layer() -> None:
    held_bytes, _ = memory("llama-2-7b", "full", length=64)
    layer_bytes = 2 * 64 * 24 * 4
    assert 3 * layer_bytes < held_bytes < 7 * layer_bytes, "three layers, the last hidden states, norm, tables"


def backward_operations(name: str, recompute: str, **options: object) -> Counter[str]:
    network = laid_out(name, recompute, **options)
    torch.manual_seed(3)
    x, _ = network.hidden(tokens(2, 20))
    total = x.sum()
    with Operations() as made:
        total.backward()
    return made.counts


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_kernels_without_squares_make_the_core_again_for_full_alone(name: str, dropout: float, path: str) -> None:
    none, norms, selective, attention, full = (
        backward_operations(name, policy, dropout=dropout) for policy in POLICIES
    )
    core = "bmm" if dropout or path == "blockwise" else CPU_CORE
    assert norms[core] == attention[core] == none[core]
    assert norms["mm"] == none["mm"] and attention["mm"] == full["mm"]
    assert selective == none
    assert full[core] > none[core] and full["mm"] > none["mm"]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_selective_makes_the_plain_core_again_and_no_product_with_weights(name: str, dropout: float) -> None:
    none, selective, full = (
        backward_operations(name, policy, dropout=dropout, kernels="reference")
        for policy in ("none", "selective", "full")
    )
    assert none["bmm"] < selective["bmm"] <= full["bmm"] and none["_softmax"] < selective["_softmax"]
    assert selective["mm"] == none["mm"] < full["mm"] and selective["addmm"] == none["addmm"]
    assert selective["rsqrt"] == none["rsqrt"] < full["rsqrt"], "norms stay"


@pytest.mark.parametrize("learns", ["mlp", "attention.q", "norm"])
def test_frozen_parameters_too(learns: str) -> None:
    """What needs no gradient is saved neither in the first pass nor in the second."""
    steps = []
    for policy in POLICIES:
        network = laid_out("llama-3.1-8b", policy)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(learns in name)
        steps.append(step(network))
    for found_step in steps[1:]:
        assert found_step.keys() == steps[0].keys()
        assert all(torch.equal(found_step[key], value) for key, value in steps[0].items())


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_a_pass_without_backward_leaves_nothing(name: str, recompute: str) -> None:
    network = laid_out(name, recompute)
    with Alive([*network.parameters(), *network.buffers()]) as alive:
        network.hidden(tokens(2, 20))
        first = alive.live_bytes
        for _ in range(3):
            network.hidden(tokens(2, 20))
        assert alive.live_bytes <= first


def test_nothing_is_made_again_where_there_is_no_backward_pass() -> None:
    for policy in POLICIES:
        network = laid_out("llama-3.1-8b", policy)
        with torch.no_grad(), Operations() as made:
            network(tokens(1, 9))
        assert made.counts["mm"] == 3 * 7 + 1
        assert generate(network, [1, 2, 3], max_new_tokens=4) == generate(
            model("llama-3.1-8b"), [1, 2, 3], max_new_tokens=4
        )


def test_the_policies_are_those_of_the_layout() -> None:
    assert set(POLICIES) == set(get_args(Layout.__dataclass_fields__["recompute"].type))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own code
def test_compiled_blocks_recompute_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own cut between forward and backward pass obeys the policy; checked without code generation."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    for name in ("llama-3.1-8b", "mixtral-8x7b"):
        none, norms, selective, attention, full = (compiled(name, recompute, graphs=1) for recompute in POLICIES)
        assert min(none, selective) > 1.5 * max(attention, full)
        plain = memory(name, "norms", length=20)[0]
        assert max(none, norms) <= 1.05 * plain, "compiled, a block makes norms again by itself: decision 39"
        assert selective == none
        one_layer = compiled(name, "full", graphs=2, layers=1)
        assert none - one_layer == pytest.approx((none - full) / 3, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own code
def test_compiled_blocks_drop_the_squares_of_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all blocks. fp32 weights of all heads in three layers are gone."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    none, selective = (
        compiled("llama-3.1-8b", policy, graphs=1, kernels="reference") for policy in ("none", "selective")
    )
    heads = model("llama-3.1-8b").shape.heads
    assert none - selective > 0.9 * 3 * heads * 2 * 20 * 20 * 4


def compiled(name: str, recompute: str, *, graphs: int, layers: int = 0, kernels: str = "auto") -> int:
    """What the compiled parts of a forward pass keep; gradients are right, and generation compiles nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = model(name)
    plain.hidden(tokens(2, 20))[0].sum().backward()
    layout = Layout(recompute=recompute, recompute_layers=layers, compile="on", kernels=kernels)  # type: ignore[arg-type]
    network = on_one_device(model(name, kernels=kernels), layout).model
    x, _ = network.hidden(tokens(2, 20))
    held_bytes = graph_bytes(network, x)
    x.sum().backward()
    for parameter, other in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert len(generate(network, [1, 2, 3], max_new_tokens=3).ids) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "for all blocks of a kind together"
    return held_bytes


def graph_bytes(network: Transformer, end: Tensor) -> int:
    """What the compiled parts of a forward pass keep, parameters left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    ends, seen, storages = [end.grad_fn], set(), {}
    while ends:
        node = ends.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in getattr(node, "saved_tensors", ()):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        ends += [after for after, _ in node.next_functions]
    return sum(storages.values())

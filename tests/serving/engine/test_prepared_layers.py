"""Engines with prepared weights, with and without compiled loops, over plain and quantized models."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.serve_quantized import quantized
from meshwright.kernels.quantized.prepared_product import joined_product, reference
from meshwright.model import Transformer, build
from meshwright.model.generate import generate
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.prepared_layers import DeferredSums
from meshwright.serving.engine.serving_engine import ServingEngine
from tests.model.shrunk import KINDS, model, shrink
from tests.serving.engine.test_exact import NEW, PROMPTS, bits, served, shrunk

WAYS = {"plain": {"packed": False, "compiled": False}, "packed": {"compiled": False}, "loops": {"packed": False}}


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2], KINDS[3], KINDS[8]])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_every_way_gives_the_same_tokens(name: str, way: str, exact: bool) -> None:
    asked, _ = served(shrunk(name), PROMPTS[:4], exact=exact, **WAYS[way])
    for prompt, request in zip(PROMPTS, asked, strict=False):
        assert request.answers[0].ids == generate(shrunk(name), prompt, max_new_tokens=NEW).ids


@pytest.mark.parametrize("scheme", ["int8", "int4-sym"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_model(scheme: str, compiled: bool) -> None:
    network = quantized(model("llama-3.1-8b"), scheme)
    options: dict[str, Any] = {"compiled": compiled}
    together, _ = served(network, PROMPTS, exact=True, **options)
    for prompt, request in zip(PROMPTS, together, strict=True):
        assert request.answers[0].ids == generate(network, prompt, max_new_tokens=NEW).ids
    alone = [
        served(network, [prompt], exact=True, most_tokens=7, most_sequences=1, **options)[0][0]
        for prompt in PROMPTS[:3]
    ]
    assert bits(alone) == bits(together[:3])


def test_a_head_in_8_bits() -> None:
    network = shrunk("llama-3.1-8b")
    plain, _ = served(network, PROMPTS, exact=True)
    rounded, _ = served(network, PROMPTS, exact=True, head="int8")
    assert bits(plain) != bits(rounded)
    for exact, other in zip(plain, rounded, strict=True):
        assert exact.answers[0].logprobs[0] == pytest.approx(other.answers[0].logprobs[0], abs=0.2)
    alone = [served(network, [prompt], exact=True, head="int8")[0][0] for prompt in PROMPTS[:3]]
    assert bits(alone) == bits(rounded[:3])


def prepared(network: Transformer) -> Any:
    return network.seams.dense.prepared


def test_the_model_is_left_as_it_was() -> None:
    network = shrunk("llama-3.1-8b")
    engine = ServingEngine(network)
    asked = engine.add(PROMPTS[0])
    engine.step()
    assert prepared(network) is None
    engine.cancel(asked)


def held_bytes(network: Transformer) -> int:
    """Of all memory behind parameters and buffers, each once."""
    tensors = [*network.parameters(), *network.buffers()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("scheme", ["", "int8", "int4-rtn", "int4-sym", "nf4", "fp8"])
@pytest.mark.parametrize("name", [KINDS[2], KINDS[4]])
def test_matrices_of_one_input_lie_side_by_side(name: str, scheme: str) -> None:
    """One product for queries, keys and values has the columns of each. Names and values of the model stay, nothing is
    held twice, and a second engine finds them joined."""
    network = model(name).eval()
    network = quantized(network, scheme) if scheme else network
    attention = network.blocks[0].attention
    layers = [attention.q, attention.k, attention.v]
    before, copies = held_bytes(network), {key: tensor.clone() for key, tensor in network.state_dict().items()}
    rows = torch.randn(5, network.shape.hidden, generator=torch.Generator().manual_seed(1))
    inputs = [layer.matrix for layer in layers], [layer.local_bias for layer in layers]
    right = reference(*inputs, rows)
    product = joined_product(*inputs)
    assert product is not None
    torch.testing.assert_close(product(rows), right, rtol=2e-5, atol=2e-5)
    assert held_bytes(network) == before
    assert all(torch.equal(tensor, copies[key]) for key, tensor in network.state_dict().items())
    matrix = layers[0].quantized.codes if scheme else layers[0].weight
    address = matrix.data_ptr()
    again = joined_product([layer.matrix for layer in layers], inputs[1])
    assert again is not None and matrix.data_ptr() == address and torch.equal(again(rows), product(rows))
    if not scheme:  # what is loaded afterwards is what is multiplied with
        network.load_state_dict({key: 2 * tensor for key, tensor in copies.items()})
        torch.testing.assert_close(product(rows), reference(*inputs, rows), rtol=2e-5, atol=2e-5)


def test_memory_of_others_is_left_where_it_is() -> None:
    """A view of something larger would keep that alive beside the copy."""
    whole = torch.randn(3, 4, 8)
    assert joined_product([whole[0], whole[2]], [None, None]) is None
    assert joined_product([whole[0].t(), whole[1].t()], [None, None]) is None
    beside = joined_product([whole[1], whole[2]], [None, None])
    rows = torch.randn(2, 8)
    assert beside is not None and torch.equal(beside(rows), rows @ whole[1:].flatten(0, 1).t())
    assert joined_product([torch.randn(4, 8), torch.randn(4, 8).double()], [None, None]) is None


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2], KINDS[5], KINDS[7], KINDS[8]])
def test_sums_that_the_next_norm_makes(name: str) -> None:
    """The same bits, in every pass; a hook on a block sees whole sums, so that none are deferred then."""
    network = model(name).eval()
    tokens = torch.tensor([[3, 14, 15, 9, 2]])
    calls = DeferredSums(network.blocks)
    with torch.no_grad():
        right = network(tokens)
        plain, network.seams.call = network.seams.call, calls
        assert not calls.is_hooked()
        assert torch.equal(network(tokens), right) and torch.equal(network(tokens), right)
        network.seams.call = plain
    handle = network.blocks[0].register_forward_hook(lambda *_: None)
    assert calls.is_hooked()
    handle.remove()


def test_long_prompts_are_answered_by_the_models_own_logits() -> None:
    """Greedy tokens behind 8,000, ties aside."""
    shape = replace(shrink("llama-3.1-8b"), layers=1, max_positions=8100)
    network = build(shape, seed=3).eval()
    prompt = torch.randint(shape.vocab, (8000,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = ServingEngine(network, EngineOptions(most_tokens=2048, most_sequences=2))
    asked = engine.add(prompt, RequestOptions(max_new_tokens=4, ignore_end=True))
    engine.run([asked])
    with torch.no_grad():
        logits = network(torch.tensor([prompt + asked.answers[0].ids]))[0, len(prompt) - 1 : -1]
    for token, row in zip(asked.answers[0].ids, logits, strict=True):
        assert row[token] > row.max() - 1e-4

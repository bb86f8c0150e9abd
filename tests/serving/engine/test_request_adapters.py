"""Adapters of requests: answers are those of models with the adapter merged in, alone and mixed in one batch."""

import copy
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.serve_quantized import quantized
from meshwright import compat
from meshwright.kernels.experts.experts import expert_linear_reference
from meshwright.model import Transformer
from meshwright.model.feed_forward import ExpertStack
from meshwright.model.generate import generate
from meshwright.model.layers import Linear
from meshwright.model.low_rank import LoRA, merge_adapter
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import (
    LowRankProduct,
    ServedAdapter,
    StackProducts,
    TaggedRows,
    find_tagged_runs,
)
from meshwright.serving.engine.served_request import ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from meshwright.spec.errors import ArgumentError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import adapter_parts, parameters
from tests.kernels.exactness import LOW, tensors
from tests.model.shrunk import KINDS, model
from tests.operation_recorder import Recording
from tests.serving.engine.test_exact import NEW, PROMPTS, bits, shrunk

FORMS = {
    "small": LoRAShape(rank=3, alpha=6.0, targets="attention"),
    "large": LoRAShape(rank=18, alpha=18.0, targets="all", rslora=True),
    "some": LoRAShape(rank=8, alpha=8.0, targets="v,down"),
}
MIXED = ["small", None, "large", "some", "small", None, "large", "large"]
"""Whose each prompt is."""
UNMERGED = {"deepseek-v3": ("q_down,q_up", "q_down,q_up,kv_down,o,gate,up,down", "down,o")}
"""Targets of each, where some matrices cannot have one by request."""


@cache
def adapters(name: str) -> Mapping[str, ServedAdapter]:
    """Three of different ranks and targets for a small model, loud enough to change its answers."""
    by_name = {}
    for seed, (called, lora) in enumerate(FORMS.items()):
        lora = replace(lora, targets=UNMERGED[name][seed] if name in UNMERGED else lora.targets)
        chance = torch.Generator().manual_seed(seed)
        low = [part for part in parameters(replace(shrunk(name).shape, lora=lora)) if part.adapts]
        tensors = {part.name: torch.randn(part.shape, generator=chance) * 0.2 for part in low}
        by_name[called] = ServedAdapter(lora, tensors)
    return by_name


@cache
def whole(name: str, called: str | None) -> Transformer:
    """The small model with an adapter merged in."""
    copied = copy.deepcopy(shrunk(name))
    if called is not None:
        adapter = adapters(name)[called]
        with torch.no_grad():
            for key, parameter in copied.named_parameters():
                low = adapter_parts(key, adapter.tensors)
                if low:
                    parameter.copy_(merge_adapter(parameter, low, adapter.lora))
    return copied


def served(
    name: str, prompts: Sequence[Sequence[int]], called: Sequence[str | None], asked: Mapping[str, Any] = {},
    **options: Any,
) -> tuple[list[ServedRequest], ServingEngine]:  # fmt: skip
    sizes = {"block": 4, "most_tokens": 24, "most_sequences": 8, **options}
    engine = ServingEngine(shrunk(name), EngineOptions(**sizes), adapters=adapters(name))
    wanted = {"max_new_tokens": NEW, "logprobs": 3, **asked}
    requests = [
        engine.add(prompt, RequestOptions(adapter=adapter, **wanted))
        for prompt, adapter in zip(prompts, called, strict=True)
    ]
    engine.run(requests)
    assert engine.idle and engine.tables.pool.free == engine.tables.pool.size
    return requests, engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (KINDS[0], *KINDS[2:5], *KINDS[6:9])),
        *((name, {"packed": False, "compiled": False}) for name in (KINDS[0], KINDS[8])),
        *((KINDS[2], {"exact": True, "compiled": compiled}) for compiled in (False, True)),
        (KINDS[7], {"exact": True}),
    ],
    ids=str,
)
def test_a_mixed_batch_answers_as_merged_models(name: str, options: dict[str, Any]) -> None:
    asked, _ = served(name, PROMPTS, MIXED, **options)
    for prompt, called, request in zip(PROMPTS, MIXED, asked, strict=True):
        right = generate(whole(name, called), prompt, max_new_tokens=NEW)
        assert request.answers[0].ids == right.ids
        assert request.answers[0].logprobs == pytest.approx(right.logprobs, abs=2e-4)
    assert len({tuple(request.answers[0].ids) for request in served(name, [PROMPTS[0]] * 4, [*FORMS, None])[0]}) > 2


@pytest.mark.parametrize(
    ("name", "options"),
    [(KINDS[2], {"compiled": False}), (KINDS[4], {}), (KINDS[6], {"compiled": False}), (KINDS[8], {})],
    ids=str,
)
def test_bits_do_not_depend_on_who_else_is_in_the_batch(name: str, options: dict[str, Any]) -> None:
    options = {"exact": True, **options}
    together, _ = served(name, PROMPTS, MIXED, **options)
    right = bits(together)
    assert bits(served(name, PROMPTS[::-1], MIXED[::-1], **options)[0]) == right[::-1]
    for chunk, number in ((3, 0), (7, 2), (64, 3)):
        alone, _ = served(name, [PROMPTS[number]], [MIXED[number]], most_tokens=chunk, most_sequences=1, **options)
        assert bits(alone) == [right[number]]
    block = ServingEngine(shrunk(name), EngineOptions(block=4)).cache
    tight, engine = served(
        name, PROMPTS, MIXED, cache_bytes=12 * block.bytes // (block.number + 2), most_tokens=17, **options
    )  # fmt: skip
    assert bits(tight) == right and engine.scheduler.preemptions


def test_bf16_is_exact_too() -> None:
    network, by_name = model("qwen3-0.6b", dtype=torch.bfloat16).eval(), adapters("qwen3-0.6b")

    def answers_of(places: Sequence[int]) -> list[object]:
        engine = ServingEngine(network, EngineOptions(exact=True, block=4), adapters=by_name)
        asked = [
            engine.add(PROMPTS[number], RequestOptions(adapter=MIXED[number], max_new_tokens=NEW)) for number in places
        ]
        engine.run(asked)
        return bits(asked)

    assert answers_of(range(8))[:4] == [answers_of([number])[0] for number in range(4)]


def test_the_prefix_cache_knows_adapters_apart() -> None:
    prompt = PROMPTS[1] + PROMPTS[2]
    (first, *others), engine = served(KINDS[2], [prompt] * 4, ["small", "large", "some", None], exact=True)
    assert not any(request.cached for request in (first, *others))
    for request in (first, *others):
        again = engine.add(prompt, request.options)
        engine.run([again])
        assert again.cached >= 16 and bits([again]) == bits([request])


@pytest.mark.parametrize("asked", [{"n": 3, "temperature": 0.9, "seed": 5}, {"temperature": 0.7}, {}], ids=str)
def test_guesses_and_several_answers(asked: dict[str, Any]) -> None:
    name, prompts = KINDS[2], [[5, 6, 7, 8] * 5, [1, 2, 3] * 6, PROMPTS[0], [5, 6, 7, 8] * 4]
    called = ["small", "large", None, "some"]
    asked = {**asked, "max_new_tokens": 24}
    right = bits(served(name, prompts, called, asked, exact=True)[0])
    for speculation in (Speculation(tokens=5), Speculation(tokens=5, draft=model(name).eval())):
        requests, engine = served(name, prompts, called, asked, exact=True, speculation=speculation)
        assert bits(requests) == right
        assert engine.guesses is not None and engine.guesses.guessed
    assert engine.guesses.accepted, "the draft is the model of those without an adapter"


def test_beams() -> None:
    for called in ("large", None):
        asked, _ = served(KINDS[2], [PROMPTS[0]], [called], {"beams": 3, "n": 2, "logprobs": 0}, exact=True)
        engine = ServingEngine(whole(KINDS[2], called), EngineOptions(exact=True, block=4))
        right = engine.add(PROMPTS[0], RequestOptions(max_new_tokens=NEW, beams=3, n=2))
        engine.run([right])
        assert [answer.ids for answer in asked[0].answers] == [answer.ids for answer in right.answers]


def test_scores_of_a_prompt() -> None:
    engine = served(KINDS[2], PROMPTS[:1], [None])[1]
    for called in (*FORMS, None):
        scores = engine.score(PROMPTS[1], 2, called)
        right = ServingEngine(whole(KINDS[2], called)).score(PROMPTS[1], 2)
        assert scores.logprobs == pytest.approx(right.logprobs, abs=2e-4)
    assert engine.score([3], 2, "small").logprobs == []


@pytest.mark.parametrize("scheme", ["int8", "int4-sym"])
def test_beside_a_quantized_model(scheme: str) -> None:
    """Against the modules that training has beside codes."""
    network, by_name = quantized(model("llama-3.1-8b"), scheme), adapters("llama-3.1-8b")
    engine = ServingEngine(network, EngineOptions(exact=True, block=4), adapters=by_name)
    asked = [engine.add(prompt, RequestOptions(adapter="large", max_new_tokens=NEW)) for prompt in PROMPTS[:4]]
    engine.run(asked)
    for key in by_name["large"].layers:
        layer = network.get_submodule(key)
        assert isinstance(layer, Linear)
        layer.lora = LoRA(by_name["large"].lora, layer.in_features, layer.out_features)
        for part in ("a", "b"):
            getattr(layer.lora, part).data.copy_(by_name["large"].tensors[f"{key}.lora.{part}"])
    for prompt, request in zip(PROMPTS, asked, strict=False):
        assert request.answers[0].ids == generate(network, prompt, max_new_tokens=NEW).ids


def test_the_model_is_left_as_it_was() -> None:
    served(KINDS[2], PROMPTS, MIXED)
    assert all(module.lora is None for module in shrunk(KINDS[2]).modules() if isinstance(module, Linear))


@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(3, 24, 40), (16, 64, 64), (20, 33, 7)])
def test_a_product(rank: int, inputs: int, outputs: int) -> None:
    """Of widths that compiled loops take and do not take, against one sum in fp64."""
    a, b, rows = torch.randn(rank, inputs), torch.randn(outputs, rank), torch.randn(37, inputs)
    right = (rows.double() @ a.double().t() @ b.double().t()).float()
    for exact in (False, True):
        product = LowRankProduct(a, b, exact=exact)
        torch.testing.assert_close(product(rows), right, rtol=1e-4, atol=1e-4)
        if exact:
            assert all(torch.equal(product(rows[:count]), product(rows)[:count]) for count in (1, 5, 16, 17, 36))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_where_16_bit_products_are_emulated_it_is_taken_in_fp32(
    dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    a, b, rows = tensors((3, 24), (40, 3), (37, 24), dtype=dtype)
    narrow = rows.double() @ a.double().t()
    product, right = LowRankProduct(a, b, exact=exact), narrow @ b.double().t()
    with Recording() as recording:
        results = product(rows), product.widen(narrow.to(dtype))
    assert recording.products() <= {torch.float32}
    assert product.a.dtype == dtype and torch.equal(product.a, a)
    assert all(product_of_rows.dtype == dtype for product_of_rows in results)
    torch.testing.assert_close(results[0], right.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(results[1], right.to(dtype), rtol=0.02, atol=0.05)


def test_products_of_experts_in_one_call_are_those_one_by_one() -> None:
    """Where a device alone knows counts, and where they are known; of all experts, and of a part that begins later."""
    chance, size, width = torch.Generator().manual_seed(0), 5, 12
    counts, tags = [3, 0, 4, 1, 6], torch.randint(3, (14,), generator=chance)
    rows, plain = torch.randn(14, width, generator=chance), torch.randn(14, 9, generator=chance)
    pairs = [(torch.randn(size, rank, width, generator=chance), torch.randn(size, 9, rank, generator=chance))
             for rank in (2, 7)]  # fmt: skip
    right = plain.clone()
    owners = torch.repeat_interleave(torch.arange(size), torch.tensor(counts))
    for row, (owner, tag) in enumerate(zip(owners.tolist(), tags.tolist(), strict=True)):
        if tag:
            a, b = pairs[tag - 1]
            right[row] += b[owner] @ (a[owner] @ rows[row])
    for first, apart in itertools.product((0, 2), (True, False)):
        is_local = owners >= first
        stacks = [{"up": StackProducts(*pair, exact=False, apart=apart)} for pair in pairs]
        local_counts: Any = counts[first:] if apart else torch.tensor(counts[first:])
        runs = [list(find_tagged_runs(tags[is_local], counts[first:], tag)) for tag in (1, 2)] if apart else []
        summed = TaggedRows(stacks, tags[is_local], local_counts, expert_linear_reference, runs).add(
            ExpertStack(torch.empty(0), name="up", first=first), rows[is_local], plain[is_local].clone()
        )
        torch.testing.assert_close(summed, right[is_local])


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_an_adapter_that_is_no_number_harms_no_row_but_its_own(apart: bool, bad: float) -> None:
    counts, tags = [2, 3], torch.tensor([0, 1, 2, 0, 1])
    rows, plain = torch.ones(5, 8), torch.zeros(5, 4)
    good = torch.ones(2, 3, 8), torch.ones(2, 4, 3)
    for part in range(2):  # of A, of B
        broken = tuple(torch.full_like(tensor, bad) if at == part else tensor for at, tensor in enumerate(good))
        stacks = [{"up": StackProducts(*pair, exact=False, apart=apart)} for pair in (broken, good)]
        runs = [list(find_tagged_runs(tags, counts, tag)) for tag in (1, 2)] if apart else []
        expert_counts: Any = counts if apart else torch.tensor(counts)
        stack = ExpertStack(torch.empty(0), name="up")
        summed = TaggedRows(stacks, tags, expert_counts, expert_linear_reference, runs).add(stack, rows, plain.clone())
        assert not summed[tags == 1].isfinite().any()
        assert torch.equal(summed[tags != 1], torch.tensor([0.0, 24.0, 0.0]).unsqueeze(1).expand(3, 4))


@pytest.mark.parametrize(
    ("name", "lora", "complaint"),
    [
        ("llama-3.1-8b", {"dora": True}, "adapter='mine' cannot be served by request: DoRA"),
        ("deepseek-v3", {"targets": "kv_up"}, r"layers\.0\.attention\.kv_up is multiplied into queries"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, lora: dict[str, Any], complaint: str) -> None:
    form = LoRAShape(rank=2, **lora)
    tensors = {
        part.name: torch.zeros(part.shape) for part in parameters(replace(shrunk(name).shape, lora=form)) if part.adapts
    }
    with pytest.raises(ArgumentError, match=complaint):
        ServingEngine(shrunk(name), adapters={"mine": ServedAdapter(form, tensors)})


def test_a_name_that_is_not_there() -> None:
    engine = ServingEngine(shrunk(KINDS[2]), adapters=adapters(KINDS[2]))
    with pytest.raises(ArgumentError, match="adapter='other' is not here: take one of small, large, some"):
        engine.add([1], RequestOptions(adapter="other"))
    with pytest.raises(ArgumentError, match="the engine was given none"):
        ServingEngine(shrunk(KINDS[2])).add([1], RequestOptions(adapter="small"))


@pytest.mark.parametrize("seed", range(2))
def test_at_random(seed: int) -> None:
    """Requests come and are given up at any time, with any adapter, in a cache that is too small."""
    chance = random.Random(seed)
    name, compiled = chance.choice([KINDS[0], KINDS[2], KINDS[4]]), bool(seed % 2)
    sizes: dict[str, Any] = {"block": 4, "most_tokens": 17, "most_sequences": 5, "exact": True, "compiled": compiled}
    whole = ServingEngine(shrunk(name), EngineOptions(**sizes)).cache
    each = whole.bytes // (whole.number + 2)
    sizes |= {"cache_bytes": 20 * each, "host_cache_bytes": 30 * each, "longest": 64}
    sizes["speculation"] = chance.choice([None, Speculation(tokens=3)])
    engine = ServingEngine(shrunk(name), EngineOptions(**sizes), adapters=adapters(name))
    open_, done = list[ServedRequest](), list[ServedRequest]()
    for _ in range(160):
        what = chance.random()
        if what < 0.3 and len(open_) < 8:
            options = RequestOptions(
                adapter=chance.choice([*FORMS, None]), max_new_tokens=chance.randint(1, 8), logprobs=2,
                priority=chance.randint(0, 1), temperature=chance.choice([0.0, 0.8]), n=chance.choice([1, 1, 2]),
            )  # fmt: skip
            open_.append(engine.add(chance.choice(PROMPTS) + [chance.randrange(9)] * chance.randint(0, 9), options))
        elif what < 0.35 and open_:
            engine.cancel(open_.pop(chance.randrange(len(open_))))
        elif not engine.idle:
            engine.step()
        done += [request for request in open_ if request.ended]
        open_ = [request for request in open_ if not request.ended]
    engine.run(open_)
    done += open_
    assert len(done) > 20 and engine.tables.pool.free == engine.tables.pool.size
    alone = ServingEngine(shrunk(name), EngineOptions(**{**sizes, "speculation": None}), adapters=adapters(name))
    for request in done:
        right = alone.add(request.prompt, replace(request.options, salt=None))
        alone.run([right])
        assert bits([request]) == bits([right])


@pytest.mark.parametrize(("name", "kind"), [("llama-3.1-8b", LowRankProduct), ("mixtral-8x7b", StackProducts)])
def test_bytes_are_told_while_another_thread_loads_and_drops(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = ServingEngine(shrunk(name), adapters={"large": adapters(name)["large"]})
    changes = iter([lambda: serving.adapters.load("other", adapters(name)["large"])])

    def between(product: object) -> int:
        for change in changes:
            change()
        return 1

    monkeypatch.setattr(kind, "bytes", property(between))
    assert serving.adapters.bytes


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_damaged_adapter_is_refused(number: float) -> None:
    good = adapters("llama-3.1-8b")["large"]
    name, tensor = next(iter(good.tensors.items()))
    bad = replace(good, tensors={**good.tensors, name: tensor.clone().fill_(number)})
    with pytest.raises(ArgumentError, match=f"adapter='bad' cannot be served by request: {name} has numbers"):
        ServingEngine(shrunk("llama-3.1-8b"), adapters={"bad": bad})

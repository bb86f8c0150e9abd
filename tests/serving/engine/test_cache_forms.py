"""Keys and values in 8 bits: memory, and answers that stay near and exact."""

import pytest

from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.errors import ArgumentError
from meshwright.spec.plan.execution import CacheForm
from tests.model.shrunk import KINDS
from tests.serving.engine.test_exact import PROMPTS, bits, served, shrunk


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("name", [KINDS[2], KINDS[3], KINDS[8]])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.long
def test_bits_do_not_depend_on_batch_chunks_hits_or_preemption(form: CacheForm, name: str, compiled: bool) -> None:
    network = shrunk(name)
    options = {"cache_dtype": form, "compiled": compiled}
    together, _ = served(network, PROMPTS, exact=True, **options)
    right = bits(together)
    assert right != bits(served(network, PROMPTS, exact=True, compiled=compiled)[0]), "it is kept in another form"
    for chunk, number in ((3, 0), (7, 1), (64, 2)):
        alone, engine = served(network, [PROMPTS[number]], exact=True, most_tokens=chunk, most_sequences=1, **options)
        assert bits(alone) == [right[number]]
        warm = engine.add(PROMPTS[number], alone[0].options)
        engine.run([warm])
        assert bits([warm]) == [right[number]]
    whole = ServingEngine(network, EngineOptions(block=4, cache_dtype=form)).cache
    tight, _ = served(network, PROMPTS, exact=True, cache_bytes=12 * whole.bytes // (whole.number + 2), **options)
    assert bits(tight) == right


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_answers_stay_near(form: CacheForm, exact: bool) -> None:
    full, _ = served(shrunk(KINDS[2]), PROMPTS, exact=exact)
    small, _ = served(shrunk(KINDS[2]), PROMPTS, exact=exact, cache_dtype=form)
    pairs = [
        (left.answers[0].logprobs[0], right_answer.answers[0].logprobs[0])
        for left, right_answer in zip(full, small, strict=True)
    ]
    assert max(abs(left - right_answer) for left, right_answer in pairs) < (0.1 if form == "int8" else 0.5)


def test_a_block_takes_a_quarter_of_fp32() -> None:
    network = shrunk(KINDS[2])
    sizes = {form: ServingEngine(network, EngineOptions(cache_dtype=form)).cache.bytes for form in ("model", "int8")}
    width = network.shape.head_dim
    assert sizes["model"] / sizes["int8"] == pytest.approx(4 * width / (width + 4))
    with pytest.raises(ArgumentError, match=r"cache_dtype='int4' is not known: take one of model, fp8, int8"):
        ServingEngine(network, EngineOptions(cache_dtype="int4"))  # type: ignore[arg-type]  # what is refused

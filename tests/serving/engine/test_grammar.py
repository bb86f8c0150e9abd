"""Answers that keep to a schema or a regular expression, whatever the model's weights say."""

import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from meshwright.data import Tokenizer
from meshwright.model import build
from meshwright.serving.engine.answers import grammar
from meshwright.serving.engine.answers.grammar import MOST_REGEX_LETTERS, MOST_SCHEMA_LETTERS, count_letters
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.served_request import ServedAnswer
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.errors import ArgumentError, RunError
from tests.model.shrunk import shrink

TOKENIZERS = {"bytes": Tokenizer.bytes(), "bpe": Tokenizer.shipped()}
PROMPT = [72, 101, 108, 108, 111]
PADDED = 40
"""Ids of the model behind those of the tokenizer."""
MODELS = {
    name: build(replace(shrink("llama-3.1-8b"), vocab=tokenizer.vocab + PADDED, max_positions=700), seed=3).eval()
    for name, tokenizer in TOKENIZERS.items()
}


def engine(name: str = "bytes", **options: Any) -> ServingEngine:
    tokenizer = TOKENIZERS[name]
    settings = {"exact": False, "block": 4, "most_sequences": 8, "most_tokens": 32, **options}
    assert tokenizer.eos is not None
    return ServingEngine(
        MODELS[name], EngineOptions(**settings), decode=tokenizer.decode, end_ids=[tokenizer.eos], tokenizer=tokenizer
    )


def answers(serving: ServingEngine, **options: Any) -> list[ServedAnswer]:
    asked = serving.add(PROMPT, RequestOptions(**{"max_new_tokens": 600, "temperature": 1.0, **options}))
    serving.run([asked])
    assert serving.idle and serving.tables.pool.free == serving.tables.pool.size
    return asked.answers


def any_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """A small schema whose answers are short."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "pattern", "union"]
    kind = chance.choice(kinds + ["object", "array", "reference"] * (2 if depth else 0))
    if kind == "object":
        names = chance.sample(["a", "bc", "d e", 'q"', "é"], chance.randint(1, 3))
        return {
            "type": "object", "properties": {name: any_schema(chance, depth - 1) for name in names},
            "required": chance.sample(names, chance.randint(0, len(names))), "additionalProperties": False,
        }  # fmt: skip
    if kind == "array":
        least = chance.randint(0, 2)
        return {
            "type": "array", "items": any_schema(chance, depth - 1), "minItems": least, "maxItems": least + 2,
        }  # fmt: skip
    if kind == "reference":
        below = {"type": "object", "additionalProperties": False, "properties": {"next": {"$ref": "#/$defs/one"}}}
        union = {"anyOf": [{"type": "null"}, any_schema(chance, 0), below]}
        return {"$defs": {"one": union}, "$ref": "#/$defs/one"} if depth == 2 else any_schema(chance, 0)
    low = chance.randint(-500, 500)
    simple: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 9)},
        "integer": {"type": "integer", "minimum": low, "exclusiveMaximum": low + chance.randint(1, 2000)},
        "number": {"type": "number", "minimum": 0, "maximum": 900, "multipleOf": 0.25},
        "boolean": {"type": ["boolean", "null"]},
        "enum": {"enum": ["x", 3, None, [1, {"y": 2}], "long value"]},
        "const": {"const": {"k": [low]}},
        "pattern": {"type": "string", "pattern": "^[a-c]{2,4}(x|yz)?$"},
        "union": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 99}]},
    }
    return simple[kind]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_answers_parse_and_validate_whatever_the_weights(name: str) -> None:
    chance = random.Random(1)
    serving = engine(name)
    schemas = [any_schema(chance) for _ in range(20)]
    how = {"max_new_tokens": 600, "temperature": 1.0}
    asked = [
        serving.add(PROMPT, RequestOptions(json_schema=request, seed=seed, **how))
        for seed, request in enumerate(schemas)
    ]
    serving.run(asked)
    for schema, request in zip(schemas, asked, strict=True):
        (answer,) = request.answers
        assert answer.ending == "stop", (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema, cls=jsonschema.Draft202012Validator)
    assert len({request.answers[0].text for request in asked}) > 10


def test_the_empty_schema_is_any_object() -> None:
    heavy = {ord("}"): 4.0, ord(","): -4.0}
    for seed in range(3):
        (answer,) = answers(engine(), json_schema={}, logit_bias=heavy, seed=seed)
        assert answer.ending == "stop" and isinstance(json.loads(answer.text), dict)


def test_blanks_have_an_end() -> None:
    """As in vllm#44619: a model that prefers blanks to everything would write them up to its limit."""
    schema = {
        "type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    for blank in (" ", "\n", "\t"):
        (answer,) = answers(engine(), json_schema=schema, logit_bias={ord(blank): 100.0, ord("\n"): 90.0})
        assert answer.ending == "stop" and list(json.loads(answer.text)) == ["a"], answer.text


@pytest.mark.parametrize("regex", ["(yes|no)", "[0-9]{4}-[01][0-9]", "^a+b?$", "([ぁ-ん]|é){1,5}!", "(?i)off"])
def test_answers_match_a_regular_expression(regex: str) -> None:
    for seed in range(3):
        (answer,) = answers(engine(), regex=regex, seed=seed)
        assert answer.ending == "stop" and re.fullmatch(regex, answer.text), answer.text


def test_greedy_and_penalized_answers_keep_to_it_too() -> None:
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 3}
    for options in ({"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.5}, {"repetition_penalty": 1.5}):
        (answer,) = answers(engine(), json_schema=schema, **options)
        assert len(json.loads(answer.text)) == 3
    (answer,) = answers(engine(), regex="[ab]{5}", logit_bias={ord("z"): 1e6, ord("b"): 50.0})
    assert answer.text == "bbbbb"


def test_tokens_that_end_a_text_come_where_the_grammar_may_end() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.eos is not None
    eager = {tokenizer.eos: 1e6}
    (answer,) = answers(engine(), regex="ab+", logit_bias=eager)
    assert (answer.text, answer.ids[-1], answer.ending) == ("ab", tokenizer.eos, "stop")
    (answer,) = answers(engine(), regex="ab+", logit_bias={tokenizer.eos: -1e6, 7: 1e6}, stop_ids=(7,))
    assert (answer.text, answer.ids[-1]) == ("ab", 7)
    (answer,) = answers(engine(), regex="ab{3}", logit_bias=eager)
    assert (answer.text, answer.ids) == ("abbb", [*b"abbb"]), "nothing may follow: no token is spent on an end"
    (answer,) = answers(engine(), regex="a*", logit_bias={tokenizer.eos: -1e6}, max_new_tokens=5)
    assert (answer.text, answer.ending) == ("aaaaa", "length")


def test_bits_do_not_depend_on_batch_preemption_or_copies() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}
    how: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0}
    wanted = [
        RequestOptions(json_schema=schema, seed=5, n=3, **how), RequestOptions(regex="[a-f ]{30}", **how),
        RequestOptions(seed=2, **how), RequestOptions(json_schema=schema, temperature=0.0, max_new_tokens=30),
    ]  # fmt: skip
    roomy = engine(exact=True)
    room = roomy.cache.number
    assert room > 60

    def served(serving: ServingEngine, order: Sequence[int]) -> dict[int, Any]:
        asked = {number: serving.add(PROMPT + [number] * 9, wanted[number]) for number in order}
        serving.run(asked.values())
        return {number: [(answer.ids, answer.logprobs) for answer in asked[number].answers] for number in sorted(asked)}

    together = served(roomy, range(4))
    for number in range(4):
        assert served(engine(exact=True), [number])[number] == together[number]
    shape = MODELS["bytes"].shape
    per_block = 4 * 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim
    tight = engine(exact=True, cache_bytes=16 * per_block)
    assert served(tight, [3, 1, 0, 2]) == together and tight.scheduler.preemptions > 0
    several = together[0]
    alone = [answers_of(engine(exact=True), PROMPT + [0] * 9, json_schema=schema, seed=5 + n, **how) for n in range(3)]
    assert several == alone and len({tuple(ids) for ids, _ in several}) > 1


def answers_of(serving: ServingEngine, prompt: Sequence[int], **options: Any) -> Any:
    asked = serving.add(prompt, RequestOptions(**options))
    serving.run([asked])
    return asked.answers[0].ids, asked.answers[0].logprobs


def test_log_probabilities_are_those_of_the_model_itself() -> None:
    (bound,) = answers(engine(), regex="[a-z]{3}", logprobs=1, temperature=0.0)
    (free,) = answers(engine(), logprobs=1, temperature=0.0, max_new_tokens=1)
    assert bound.top[0] == free.top[0] and bound.logprobs[0] < bound.top[0][0][1]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"items": {"additionalItems": False}}, "additionalItems"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "object", "minProperties": 2}, "minProperties=2"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "klingon"}, "klingon"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "wrong"}, "wrong"),
        ({"$ref": "http://somewhere/else"}, "http://somewhere/else"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "minimum (5) is greater than maximum (3)"),
        ({"$ref": "#"}, "nothing fits"),
        ({"type": "number", "minimum": float("nan")}, "json_schema is no JSON"),
        ({"type": {1, 2}}, "json_schema is no JSON"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(schema: Mapping[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=r"^json_schema") as refused:
        engine().add(PROMPT, RequestOptions(json_schema=schema))
    assert word in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("regex", ["(", r"a\b", "a$b", "(?x)a b", "[a"])
def test_a_regular_expression_that_is_none_is_refused(regex: str) -> None:
    with pytest.raises(ArgumentError, match=r"^regex"):
        engine().add(PROMPT, RequestOptions(regex=regex))


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ArgumentError, match="json_schema"):
        RequestOptions(json_schema={}, regex="a")
    with pytest.raises(ArgumentError, match="ignore_end"):
        RequestOptions(regex="a", ignore_end=True)
    with pytest.raises(ArgumentError, match="need a tokenizer"):
        ServingEngine(MODELS["bytes"]).add(PROMPT, RequestOptions(regex="a"))


def test_without_the_library_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ArgumentError, match=r"meshwright\[grammar\]"):
        engine().add(PROMPT, RequestOptions(regex="a"))


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


def doubled(depth: int) -> dict[str, Any]:
    """Of 2 ** depth objects, written in depth lines."""
    names = {"d0": {"type": "integer"}}
    for level in range(1, depth):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        names[f"d{level}"] = {
            "type": "object", "properties": {"l": below, "r": below}, "required": ["l", "r"],
            "additionalProperties": False,
        }  # fmt: skip
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": names}


EXPLODING: dict[str, dict[str, Any]] = {
    "depth 3000": {"json_schema": nested(3000)},
    "a billion items": {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    "a billion letters": {"json_schema": {"type": "string", "minLength": 10**9}},
    "2 ** 40 objects": {"json_schema": doubled(40)},
    "large": {"json_schema": {"enum": ["x" * 100] * 1000}},
    "alternatives of objects": {
        "json_schema": {"anyOf": [{"properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(1200)]}
    },
    "intersections": {
        "json_schema": {
            "allOf": [{"anyOf": [{"properties": {f"{a}{i}": {"const": 1}}} for a in "pq"]} for i in range(14)]
        }
    },
    "patterns": {"json_schema": {"allOf": [{"type": "string", "pattern": f"^.*{a}.{{9}}$"} for a in "abcdefgh"]}},
    "lengths": {
        "json_schema": {"anyOf": [{"type": "string", "minLength": i, "maxLength": 2 * i + 5} for i in range(900)]}
    },
    "multiples": {
        "json_schema": {"allOf": [{"type": "integer", "multipleOf": factor} for factor in (101, 103, 107, 109)]}
    },
    "a multiple": {"json_schema": {"type": "integer", "multipleOf": 9973}},
    "a multiple in a range": {
        "json_schema": {"type": "integer", "minimum": 12345678, "maximum": 10**12, "multipleOf": 9973}
    },
    "deep constant": {"json_schema": {"const": nested(200)}},
    "repeated": {"regex": "a{1000000}"},
    "repeated with blanks": {"regex": "a{ 1000000 }"},
    "repeated twice": {"regex": "(a{1000}){1000}"},
    "repeated in a pattern": {"json_schema": {"type": "string", "pattern": "((a{100}){100}){100}"}},
    "repeated in a name": {"json_schema": {"patternProperties": {"(a{9999}){9999}": {}}}},
    "stars of stars": {"regex": "((a+)+)+b"},
    "look back": {"regex": "[ab]*a[ab]{60}"},
    "dots": {"regex": "(.*a){30}"},
    "many words": {"regex": "|".join(f"w{i}x{i * 7}" for i in range(400))},
    "nested groups": {"regex": "(" * 2000 + "a" + ")" * 2000},
}


@pytest.mark.parametrize("case", EXPLODING)
def test_what_explodes_is_refused_or_bounded(case: str) -> None:
    """Each is refused, or its steps stay short; seconds are of processor time, many times what it takes."""
    serving = engine("bpe")
    before = time.process_time()
    try:
        asked = serving.add(PROMPT, RequestOptions(max_new_tokens=40, temperature=1.0, **EXPLODING[case]))
        serving.run([asked])
    except (ArgumentError, RunError) as error:
        assert len(str(error)) < 400
    assert time.process_time() - before < 12, case
    assert serving.idle and serving.tables.pool.free == serving.tables.pool.size


def test_sizes_are_refused_with_their_numbers() -> None:
    with pytest.raises(ArgumentError, match=f"{MOST_SCHEMA_LETTERS:,}"):
        engine().add(PROMPT, RequestOptions(json_schema=EXPLODING["large"]["json_schema"]))
    with pytest.raises(ArgumentError, match=f"1,000,000 letters.*{MOST_REGEX_LETTERS:,}"):
        engine().add(PROMPT, RequestOptions(regex="a{1000000}"))
    for multiple in (10**9 + 7, 1.00007, 100003):
        with pytest.raises(ArgumentError, match=r"multipleOf.*10,000 is the most"):
            engine().add(PROMPT, RequestOptions(json_schema={"type": "number", "multipleOf": multiple}))
    with pytest.raises(ArgumentError, match="json_schema's pattern is too long: it has 1,000,000"):
        engine().add(PROMPT, RequestOptions(json_schema={"items": {"pattern": "(a{1000}){1000}"}}))


@pytest.mark.parametrize(
    ("regex", "letters"),
    [
        ("abc", 3), ("a{3}", 3), ("a{3,}", 3), ("a{2,5}", 5), ("(ab){3}c", 7), ("((a{2}b){3}){4}", 36), ("[a-z]{4}", 4),
        (r"\d{3}", 3), (r"\{3}", 3), (r"[{]{2}", 2), ("[]a]{5}", 5), ("[^]{9}]{5}", 5), ("[a[b]{3}]{2}", 2),
        (r"\p{Greek}{3}", 3), (r"\x{41}{3}", 3), ("(a|b{3}){2}", 8), ("a{0}b", 2), ("a{2}{3}", 6), ("(?:ab){2}", 4),
        ("a{ 3 }", 3), ("a{ 2 , 3 }", 3), (r"\(a{3}", 4), ("a+{3}", 3), (")a{2}", 3),
    ],
)  # fmt: skip
def test_repetitions_are_counted_as_they_are_written_out(regex: str, letters: int) -> None:
    assert count_letters(regex) == letters


def test_a_grammar_that_meets_a_limit_on_its_way_ends_its_own_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 60)
    serving = engine()
    how: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.0}
    other = serving.add(PROMPT, RequestOptions(ignore_end=True, **how))
    asked = serving.add(PROMPT, RequestOptions(regex="(.*a){30}", logit_bias={ord("a"): 3.0}, **how))
    while not serving.idle:
        serving.step()
    assert (asked.answers[0].ending, other.answers[0].ending) == ("grammar", "length")
    with pytest.raises(RunError, match="schema or regex"):
        serving.run([asked])


def test_a_grammar_is_made_once_for_many_requests() -> None:
    tokenizer = TOKENIZERS["bytes"]
    grammars = grammar.Grammars(tokenizer, tokenizer.vocab)
    made = []
    original = grammars._build
    grammars._build = lambda name, text: made.append(text) or original(name, text)  # type: ignore[method-assign, func-returns-value]
    for number in (*range(grammar.RECENT), 0, 1, grammar.RECENT, 0, 2):
        assert grammars.begin(RequestOptions(regex=f"a{number}"), [3]) is not None
    assert len(made) == grammar.RECENT + 2, "the one that was asked for the longest ago goes first"


def test_masks_agree_with_the_library_and_cover_padding() -> None:
    tokenizer = TOKENIZERS["bpe"]
    state = grammar.Grammars(tokenizer, tokenizer.vocab + PADDED).begin(
        RequestOptions(regex="ab*"), [tokenizer.eos or 0]
    )
    assert state is not None
    first = state.find_allowed()
    assert first.shape == (tokenizer.vocab + PADDED,) and not first[tokenizer.vocab :].any()
    spelled = {tokenizer.decode([token]) for token in torch.nonzero(first)[:, 0].tolist()}
    assert "a" in spelled and all(re.fullmatch("ab*", word) for word in spelled)
    twin = state.copy()
    state.take(int(tokenizer.encode("a")[0]))
    assert state.find_allowed()[tokenizer.eos] and torch.equal(twin.find_allowed(), first), "a copy goes its own way"

"""Answers that follow a JSON schema or a regular expression: which tokens may come next.

The grammars are llguidance's (MIT licensed, the extra `grammar`): an Earley parser over derivatives of regular
expressions, which works letter by letter as the answer grows. Nothing is precomputed, and every step is bounded.

The library bounds its own work (LIMITS) with two exceptions. It writes repetitions of a regular expression out, so
`a{1000000}` takes minutes, and multiples of n take a machine of n states. Both are counted here before a grammar is
made. What a grammar cannot promise is refused too.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch import Tensor

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.spec.errors import ArgumentError
from meshwright.spec.extras import require

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_SCHEMA_LETTERS = 2**16
"""Letters of a schema as JSON. The library's time grows with their square; this many take two seconds at worst."""
MOST_REGEX_LETTERS = 4096
"""Letters of a regular expression, also with its repetitions written out."""
MOST_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf`.

Each counts without its decimal point and trailing zeros: 0.25 counts as 25.
"""
UNKNOWN = ("x-guidance", "additionalItems")
"""Keywords that the library reads in its own way, or skips although older drafts are bound by them."""
ANNOTATIONS = ("const", "enum", "default", "examples")
"""Keywords whose values are data."""
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_COUNT = re.compile(r"\{\s*(\d+)\s*(,\s*(\d*)\s*)?\}")
_FLAGS = re.compile(r"\(\?[A-Za-z-]*x")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[A-Za-z-]*:?))?")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|.)", re.DOTALL)


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON. The empty schema allows any object.

    Raises ArgumentError when it is too large, or asks for what no grammar promises.
    """
    try:
        text = json.dumps(dict(schema) or {"type": "object"}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError("json_schema", sentence=f"json_schema is no JSON: {error}") from error
    if len(text) > MOST_SCHEMA_LETTERS:
        raise ArgumentError(
            "json_schema", sentence=f"json_schema has {len(text):,} letters: give at most {MOST_SCHEMA_LETTERS:,}"
        )
    multiple = 1
    for node in _nodes(schema):
        _check_node(node)
        # One machine follows all of them, with as many states as their common multiple.
        multiple = math.lcm(multiple, _digits(node.get("multipleOf")))
        if multiple > MOST_MULTIPLE:
            raise ArgumentError(
                "json_schema",
                sentence=(
                    f"json_schema has multipleOf={node['multipleOf']}, with the others a common multiple of "
                    f"{multiple:,}, and {MOST_MULTIPLE:,} is the most: leave it out"
                ),
            )
    return text


def _digits(number: Any) -> int:
    """Return a number without its decimal point and trailing zeros; 1 for anything else."""
    if not isinstance(number, int | float) or not number:
        return 1
    return abs(int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits))))


def _check_node(node: Mapping[str, Any]) -> None:
    unknown = next((name for name in UNKNOWN if name in node), None)
    if unknown is not None:
        raise ArgumentError(
            "json_schema", sentence=f"json_schema has {unknown}, which constrained output does not know: leave it out"
        )
    patterns = [node.get("pattern")] if "pattern" in node else []
    named = node.get("patternProperties")
    for pattern in [*patterns, *(named if isinstance(named, Mapping) else ())]:
        if isinstance(pattern, str):
            check_regex("json_schema's pattern", pattern)
    least, required = node.get("minProperties"), node.get("required")
    sure = len(set(required)) if isinstance(required, list) and all(isinstance(name, str) for name in required) else 0
    if isinstance(least, int) and least > max(1, sure):
        raise ArgumentError(
            "json_schema",
            sentence=(
                f"json_schema has minProperties={least}, and its required names {sure} properties: name as many "
                "under required, or leave minProperties out"
            ),
        )


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those within it."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, Mapping):
            yield node
            for key, child in node.items():
                if key in BY_NAME and isinstance(child, Mapping):
                    left += child.values()
                elif key not in ANNOTATIONS:
                    left.append(child)


def check_regex(name: str, regex: str) -> None:
    """Raise ArgumentError for a regular expression that is too long, also with its repetitions written out."""
    if len(regex) > MOST_REGEX_LETTERS:
        raise ArgumentError(name, sentence=f"{name} has {len(regex):,} letters: give at most {MOST_REGEX_LETTERS:,}")
    if _FLAGS.search(regex):
        raise ArgumentError(
            name, sentence=f"{name} has the flag x, which constrained output does not know: leave it out"
        )
    letters = count_letters(regex)
    if letters > MOST_REGEX_LETTERS:
        raise ArgumentError(
            name,
            sentence=(
                f"{name} is too long: it has {letters:,} letters with repetitions written out, and at most "
                f"{MOST_REGEX_LETTERS:,} are allowed. Repeat less, or without a bound"
            ),
        )


def count_letters(regex: str) -> int:
    """Return the number of letters and classes of an expression with counted repetitions written out."""
    # Per open group: letters so far, and letters of its last element, which a count repeats.
    totals, last, position = [0], [0], 0
    while position < len(regex):
        letter, size = regex[position], 1
        if counted := _COUNT.match(regex, position):
            low, _, high = counted.groups()
            times = max(1, int(high or low))
            totals[-1] += last[-1] * (times - 1)
            last[-1] *= times
            position = counted.end()
            continue
        if group := _GROUP.match(regex, position):
            totals.append(0)
            last.append(0)
            position = group.end()
            continue
        if letter == ")" and len(totals) > 1:
            size = totals.pop()
            last.pop()
            position += 1
        elif letter == "\\" and (escape := _ESCAPE.match(regex, position)):
            position = escape.end()
        elif letter == "[":
            position = _behind_class(regex, position)
        else:
            position += 1
        if letter not in "*+?|":
            totals[-1] += size
            last[-1] = size
    return sum(totals)


def _behind_class(regex: str, position: int) -> int:
    """Return the end of the letter class that begins here. Classes may contain others."""
    depth = 0
    while position < len(regex):
        if escape := _ESCAPE.match(regex, position):
            position = escape.end()
            continue
        if regex[position] == "[":
            depth += 1
            position += 1
            position += regex[position : position + 1] == "^"
            position += regex[position : position + 1] == "]"
            continue
        depth -= regex[position] == "]"
        position += 1
        if not depth:
            break
    return position


WHITESPACE: Final = r"( |\n[ \t]{0,32})"
"""Whitespace between the tokens of JSON: one space, or a new line and its indentation.

Without a bound a model may write blanks for ever.
"""
LIMITS: Final = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of the library: about 10 ms of each kind of work, and 20 MB of lexer states per answer.

Usual schemas take a hundredth of it. What exceeds a limit is refused, or ends its answer.
"""
RECENT: Final = 32
"""Grammars that are kept for the next request."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


@final
@dataclass(slots=True, eq=False)
class GrammarState:
    """Position of an answer in its grammar."""

    matcher: "LLMatcher"
    vocab: int
    """V of the model."""
    special: Tensor
    """Tokens that no text contains."""
    end_ids: Tensor
    """Tokens that end the answer, allowed wherever the grammar may end."""
    failure: str = ""
    """Why it cannot continue: a limit, or no token spells what must come."""
    ended: bool = field(default=False, init=False)
    """True when nothing may follow."""

    def find_allowed(self) -> Tensor:
        """Return (V,) bool: the tokens that may come next. If there is none, `failure` says why."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        tokens = torch.zeros(self.vocab, dtype=torch.bool)
        allowed_text = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=min(self.vocab, 8 * len(bits))))
        tokens[: len(allowed_text)] = allowed_text.bool()
        tokens[self.special] = False
        if self.matcher.is_error():
            self.failure = _error_text(self.matcher)
            tokens[:] = False
            return tokens
        tokens[self.end_ids] = bool(self.matcher.is_accepting())
        if not self.failure and not tokens.any():
            self.failure = "no token of the vocabulary spells what must come next"
        return tokens

    def take(self, token: int) -> None:
        """Advance by an allowed token that does not end the answer."""
        if not self.matcher.consume_token(token):
            self.failure = _error_text(self.matcher)
        self.ended = not self.failure and bool(self.matcher.is_stopped())

    def copy(self) -> "GrammarState":
        """Return the state for another answer with the same beginning."""
        return GrammarState(self.matcher.deep_copy(), self.vocab, self.special, self.end_ids, self.failure)


@final
class Grammars:
    """The grammars of one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """Take V of the model, at least that of the tokenizer.

        Raises ArgumentError when the library is missing or cannot read the tokenizer.
        """
        library = _library()
        special = sorted(tokenizer.special_ids | ({tokenizer.eos} if tokenizer.eos is not None else set()))
        if not special:
            raise ArgumentError(
                "tokenizer",
                sentence="constrained output needs an end-of-text token, and the tokenizer names none",
                remedy="give eos_token in its tokenizer_config.json",
            )
        try:
            self._tokenizer = library.LLTokenizer(tokenizer.json, eos_token=special)
        except ValueError as error:
            reason = _one_line(str(error))
            raise ArgumentError(
                "tokenizer", sentence=f"constrained output cannot read this tokenizer: {reason}"
            ) from error
        self._limits = library.LLParserLimits(**LIMITS)
        self._special = torch.tensor([token for token in special if token < vocab])
        self._vocab = vocab
        self._recent: OrderedDict[str, GrammarState] = OrderedDict()

    def begin(self, options: RequestOptions, end_ids: Collection[int]) -> GrammarState | None:
        """Return the state at an answer's beginning.

        None = it is unconstrained. Raises ArgumentError for unusable grammars.
        """
        if options.regex is None and options.json_schema is None:
            return None
        name, grammar = _grammar(options)
        state = self._recent.pop(grammar, None) or self._build(name, grammar)
        self._recent[grammar] = state
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        state = state.copy()  # a copy per request: the cached one stays at its beginning
        state.end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64)
        return state

    def _build(self, name: str, grammar: str) -> GrammarState:
        matcher = _library().LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)
        if matcher.is_error():
            raise _refusal(name, _error_text(matcher))
        state = GrammarState(matcher, self._vocab, self._special, torch.empty(0, dtype=torch.int64))
        # Compiling is lazy: the first look finds grammars that nothing fits.
        state.find_allowed()
        if matcher.is_error():
            raise _refusal(name, "nothing fits it" if "NoExtension" in state.failure else state.failure)
        state.failure = ""
        return state


def _grammar(options: RequestOptions) -> tuple[str, str]:
    """Return the option's name, and the library's grammar for it."""
    matcher = _library().LLMatcher
    if options.regex is not None:
        check_regex("regex", options.regex)
        return "regex", str(matcher.grammar_from_regex(options.regex))
    try:
        overrides: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        assert options.json_schema is not None
        return "json_schema", str(
            matcher.grammar_from_json_schema(schema_text(options.json_schema), overrides=overrides)
        )  # fmt: skip
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise _refusal("json_schema", str(error)) from error


def _refusal(name: str, error: str) -> ArgumentError:
    unknown = _UNIMPLEMENTED.search(error)
    if unknown is None:
        return ArgumentError(name, sentence=f"{name} cannot be followed: {_one_line(error)}")
    keywords = ", ".join(word.strip().strip('"') for word in unknown[1].split(","))
    return ArgumentError(name, sentence=f"{name} has {keywords}, which constrained output does not know: leave it out")


def _error_text(matcher: "LLMatcher") -> str:
    return str(matcher.get_error()).replace("<non-verbose/>", "")


def _one_line(text: str) -> str:
    """Return the text as one line of at most 300 letters, without arrows that point into the grammar."""
    lines = [line for line in text.splitlines() if line.strip(" ^")]
    return " ".join(" ".join(lines).split())[:300]


def _library() -> Any:
    require("grammar", "json_schema or regex", ", or leave them out", ArgumentError)
    import llguidance

    return llguidance

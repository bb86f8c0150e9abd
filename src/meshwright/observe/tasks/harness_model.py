"""A model as lm-evaluation-harness asks it: log-likelihoods of continuations, of whole texts, and generated answers.

Imports lm_eval (`pip install meshwright[eval]`): import this module only where a task is to be run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, final

from lm_eval.api.model import LM

from meshwright.data import Tokenizer
from meshwright.data.chat_template import ChatTemplate
from meshwright.model import Transformer
from meshwright.model.prompt_batch import ContinuationScore, score
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.serving_engine import ServingEngine
from meshwright.spec.errors import DataError

Item = TypeVar("Item")
MAX_NEW_TOKENS: Final = 256
"""Of an answer, where the task does not say; as in lm_eval's own models."""
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN: Final = {"until", "do_sample", "temperature", "top_k", "top_p", *_LENGTHS}
_TAIL: Final = 32
"""Tokens of an answer that are searched for its end, or as many as the longest end has bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A model with what is needed to ask it in words."""

    model: Transformer
    tokenizer: Tokenizer
    begin: Callable[[str], list[int]]
    """A text as a document of the model begins: ids, with a token in front where its documents have one."""
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    template: ChatTemplate | None = None
    """What writes conversations; None = prompts are plain text."""
    tokens_per_pass: int = 8192
    """Of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A prompt, its continuation, and whose turn it is."""

    number: int
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt that is to be answered."""

    prompt: tuple[int, ...]
    options: RequestOptions
    until: tuple[str, ...]


@final
class HarnessModel(LM):  # type: ignore[misc]  # lm_eval is an extra: without it LM is Any
    """Requests sorted by length and computed in batches; continuations of one prompt share its keys and values."""

    def __init__(self, text: TextModel, *, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress`: hears how many requests of how many are done."""
        super().__init__()
        self._text, self._progress = text, progress
        self._device = text.model.embed.weight.device
        self._positions = text.model.shape.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Of request caches, which are not used: what tells tokenizers apart."""
        return self._text.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template of the model; empty = prompts are plain text."""
        found = self._text.template
        return found.source if found is not None else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model reads it, up to where it answers; else up to the end of what is begun there."""
        template = self._text.template
        if template is None:
            raise DataError("the model has no chat template: ask without one")
        if add_generation_prompt:
            return template.render(chat_history, prompt=True).text
        return template.render(chat_history[:-1], prompt=True).text + chat_history[-1]["content"]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation): log p in nats, and whether each token is the likeliest."""
        pairs = [self._pair(number, *request.args) for number, request in enumerate(requests)]
        found = self._scores(pairs)
        return [(found[pair.number].logprob, found[pair.number].greedy) for pair in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of whole texts: log p in nats of every token, in windows as long as the model's positions."""
        pairs: list[_Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            for prompt, continuation in self._windows(self._text.tokenizer.encode(request.args[0], special=True)):
                pairs.append(_Pair(len(pairs), prompt, continuation))
                owners.append(owner)
        found = [0.0] * len(requests)
        for number, one in self._scores(pairs).items():
            found[owners[number]] += one.logprob
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers to (context, settings), cut where one of `until` begins; the engine computes them together."""
        questions = [self._question(number, *request.args) for number, request in enumerate(requests)]
        engine = self._engine
        asked = [engine.add(one.prompt, one.options) for one in questions]
        owners = {id(request.answers[0]): place for place, request in enumerate(asked)}
        ended = {place for place, request in enumerate(asked) if request.ended}
        while len(ended) < len(asked):
            for answer in engine.step():
                place = owners[id(answer)]
                if not answer.ending and self._said(answer.ids, questions[place].until):
                    engine.cancel(asked[place])
                if answer.ending:
                    ended.add(place)
                    self._tell(len(ended), len(asked))
        engine.run(asked)  # says so where logits were no numbers
        return [self._answer(request.answers[0].ids, one.until) for request, one in zip(asked, questions, strict=True)]

    def _ids(self, text: str) -> list[int]:
        """Of a text behind which something follows; a template writes what begins it."""
        if self._text.template is not None:
            return list(self._text.tokenizer.encode(text, special=True).tolist())
        return self._text.begin(text)

    def _pair(self, number: int, context: str, continuation: str) -> _Pair:
        """Tokens as the whole text has them, parted where those of the context end; blanks at its end go with what
        follows. A prompt loses its first tokens where both have more than the positions."""
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        if context:
            before, whole = self._ids(context), self._ids(context + continuation)
        else:
            before = [self._first]
            whole = before + self._text.tokenizer.encode(continuation, special=True).tolist()
        if len(whole) < 2:
            raise DataError(f"a continuation of the task has no tokens: {continuation!r} behind {context[-40:]!r}")
        border = min(max(1, len(before)), len(whole) - 1)
        prompt, follows = tuple(whole[:border]), tuple(whole[border:])
        if len(follows) > self._positions:
            raise DataError(
                f"a continuation of the task has {len(follows)} tokens, the model {self._positions} positions"
            )
        return _Pair(number, prompt[-max(1, self._positions + 1 - len(follows)) :], follows)

    @property
    def _first(self) -> int:
        """What stands before a text without a context."""
        found = self._text.tokenizer.bos
        if found is None:
            raise DataError("a first token cannot be scored: the tokenizer has no token that begins a text")
        return found

    def _windows(self, ids: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(context, tokens that are scored) of a text: each token once, the last window with a full context."""
        tokens, size = [self._first, *ids.tolist()], self._positions
        for begin in range(1, len(tokens), size):
            end = min(begin + size, len(tokens))
            yield tuple(tokens[max(0, end - 1 - size) : begin] or tokens[:1]), tuple(tokens[begin:end])

    def _scores(self, pairs: Sequence[_Pair]) -> dict[int, ContinuationScore]:
        groups: dict[tuple[int, ...], list[_Pair]] = {}
        for pair in pairs:
            groups.setdefault(pair.prompt, []).append(pair)
        found: dict[int, ContinuationScore] = {}
        for some in _batches(sorted(groups.values(), key=_length, reverse=True), _size, self._text.tokens_per_pass):
            asked = [[one.continuation for one in group] for group in some]
            scores = score(self._text.model, [group[0].prompt for group in some], asked)
            for group, own in zip(some, scores, strict=True):
                found |= {pair.number: one for pair, one in zip(group, own, strict=True)}
            self._tell(len(found), len(pairs))
        return found

    def _question(self, number: int, context: str, settings: Mapping[str, Any]) -> _Question:
        unknown = sorted(set(settings) - _KNOWN)
        if unknown:
            raise DataError(f"generation_kwargs: {unknown[0]} is not known here: take {', '.join(sorted(_KNOWN))}")
        length = next((int(settings[name]) for name in _LENGTHS if settings.get(name) is not None), MAX_NEW_TOKENS)
        until = settings.get("until") or ()
        samples = settings.get("do_sample", bool(settings.get("temperature")))
        options = RequestOptions(
            max_new_tokens=length, temperature=float(settings.get("temperature", 1.0)) if samples else 0.0,
            top_k=int(settings.get("top_k", 0)), top_p=float(settings.get("top_p", 1.0)), seed=number,
        )  # fmt: skip
        room = max(self._positions - length, self._positions // 2, 1)
        prompt = self._ids(context) or [self._first]
        ends = (until,) if isinstance(until, str) else tuple(until)
        return _Question(tuple(prompt[-room:]), options, tuple(end for end in ends if end))

    @cached_property
    def _engine(self) -> ServingEngine:
        """Exact on a CPU, so that an answer does not depend on the questions beside it."""
        exact = self._text.model.embed.weight.device.type == "cpu"
        return ServingEngine(
            self._text.model, EngineOptions(exact=exact, warm_start=False), end_ids=self._text.stop_ids
        )

    def _said(self, ids: Sequence[int], until: Sequence[str]) -> bool:
        """Whether an answer has one of its ends."""
        if not until:
            return False
        tail = self._text.tokenizer.decode(ids[-max(_TAIL, *(len(end.encode()) for end in until)) :])
        return any(end in tail for end in until)

    def _answer(self, ids: Sequence[int], until: Sequence[str]) -> str:
        """The text up to the first of its ends, without special tokens."""
        tokenizer = self._text.tokenizer
        spoken = [*ids[:-1], *(token for token in ids[-1:] if token not in self._text.stop_ids)]
        text = tokenizer.decode(spoken)
        text = text[: min((at for end in until if (at := text.find(end)) >= 0), default=None)]
        for token in tokenizer.special_ids.intersection(spoken):
            text = text.replace(tokenizer.spell(token), "")
        return text

    def _tell(self, done: int, wanted: int) -> None:
        if self._progress is not None:
            self._progress(done, wanted)


def _length(group: Sequence[_Pair]) -> tuple[int, int]:
    """Prompts of one length come together: they need no padding."""
    return len(group[0].prompt), max(len(pair.continuation) for pair in group)


def _size(group: Sequence[_Pair]) -> int:
    """Tokens of a prompt with all of its continuations, each of which has the prompt's keys and values."""
    prompt, longest = _length(group)
    return prompt + 1 if longest == 1 else len(group) * (prompt + longest)


def _batches(items: Sequence[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Runs of items whose number times the largest size stays within `most`; one at least."""
    some: list[Item] = []
    largest = 0
    for item in items:
        largest = max(largest, size(item))
        if some and (len(some) + 1) * largest > most:
            yield some
            some, largest = [], size(item)
        some.append(item)
    if some:
        yield some

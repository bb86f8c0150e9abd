"""A model for lm-evaluation-harness: log-likelihoods of continuations and texts, and generated answers.

This module imports lm_eval (`pip install meshwright[eval]`), so import it only to run a task.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, final

from lm_eval.api.model import LM

from meshwright.data import Tokenizer
from meshwright.data.chat.template import ChatTemplate
from meshwright.model import Transformer
from meshwright.model.generate import ContinuationScore, score
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.errors import DataError

Item = TypeVar("Item")
MAX_NEW_TOKENS: Final = 256
"""Default length of an answer, as in lm_eval's own models."""
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN: Final = {"until", "do_sample", "temperature", "top_k", "top_p", *_LENGTHS}
_TAIL: Final = 32
"""Tokens of an answer that are searched for its end, or as many as the longest end has bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A model with its tokenizer and templates."""

    model: Transformer
    tokenizer: Tokenizer
    begin: Callable[[str], list[int]]
    """Returns a text as the start of a document: ids, with a first token where documents have one."""
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    template: ChatTemplate | None = None
    """Template of conversations. None = prompts are plain text."""
    tokens_per_pass: int = 8192
    """Tokens of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A prompt, its continuation, and the number of its request."""

    number: int
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: tuple[int, ...]
    options: RequestOptions
    until: tuple[str, ...]


@final
class HarnessModel(LM):  # type: ignore[misc]  # lm_eval is an extra: without it LM is Any
    """Requests sorted by length and computed in batches. Continuations of one prompt share its keys and values."""

    def __init__(self, text: TextModel, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Prepare the model. `progress` is called with the number of requests done and of all."""
        super().__init__()
        self._text, self._progress = text, progress
        self._device = text.model.embed.weight.device
        self._positions = text.model.shape.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer, for lm_eval's request caches, which are not used."""
        return self._text.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template of the model. Empty = prompts are plain text."""
        template = self._text.template
        return template.source if template is not None else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation up to the answer, or up to the end of the last message, which is continued."""
        template = self._text.template
        if template is None:
            raise DataError("the model has no chat template: ask without one")
        if add_generation_prompt:
            return template.render(chat_history, prompt=True).text
        return template.render(chat_history[:-1], prompt=True).text + chat_history[-1]["content"]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return log p in nats of each (context, continuation), and True if each token is the likeliest."""
        pairs = [self._pair(number, *request.args) for number, request in enumerate(requests)]
        scores = self._scores(pairs)
        return [(scores[pair.number].logprob, scores[pair.number].greedy) for pair in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return log p in nats of whole texts, in windows as long as the model's positions."""
        pairs: list[_Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            for prompt, continuation in self._windows(self._text.tokenizer.encode(request.args[0], special=True)):
                pairs.append(_Pair(len(pairs), prompt, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for number, pair_score in self._scores(pairs).items():
            totals[owners[number]] += pair_score.logprob
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return answers to (context, settings), cut where one of `until` begins. The engine batches them."""
        questions = [self._question(number, *request.args) for number, request in enumerate(requests)]
        engine = self._engine
        asked = [engine.add(question.prompt, question.options) for question in questions]
        owners = {id(request.answers[0]): index for index, request in enumerate(asked)}
        ended = {index for index, request in enumerate(asked) if request.ended}
        while len(ended) < len(asked):
            for answer in engine.step():
                index = owners[id(answer)]
                if not answer.ending and self._has_end(answer.ids, questions[index].until):
                    engine.cancel(asked[index])
                if answer.ending:
                    ended.add(index)
                    self._report(len(ended), len(asked))
        engine.run(asked)  # raises if logits were not finite
        return [
            self._answer(request.answers[0].ids, question.until)
            for request, question in zip(asked, questions, strict=True)
        ]

    def _encode(self, text: str) -> list[int]:
        """Encode a text that something follows. A template writes its own beginning."""
        if self._text.template is not None:
            return list(self._text.tokenizer.encode(text, special=True).tolist())
        return self._text.begin(text)

    def _pair(self, number: int, context: str, continuation: str) -> _Pair:
        """Tokenize the whole text and split it where the tokens of the context end.

        Blanks at its end belong to the continuation. A prompt loses its first tokens if both exceed the positions.
        """
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        if context:
            before, whole = self._encode(context), self._encode(context + continuation)
        else:
            before = [self._first_id]
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
    def _first_id(self) -> int:
        """Token before a text without a context."""
        bos = self._text.tokenizer.bos
        if bos is None:
            raise DataError("a first token cannot be scored: the tokenizer has no token that begins a text")
        return bos

    def _windows(self, ids: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield (context, scored tokens) of a text: each token once, the last window with a full context."""
        tokens, size = [self._first_id, *ids.tolist()], self._positions
        for begin in range(1, len(tokens), size):
            end = min(begin + size, len(tokens))
            yield tuple(tokens[max(0, end - 1 - size) : begin] or tokens[:1]), tuple(tokens[begin:end])

    def _scores(self, pairs: Sequence[_Pair]) -> dict[int, ContinuationScore]:
        groups: dict[tuple[int, ...], list[_Pair]] = {}
        for pair in pairs:
            groups.setdefault(pair.prompt, []).append(pair)
        scores_by_number: dict[int, ContinuationScore] = {}
        for batch in _batches(sorted(groups.values(), key=_length, reverse=True), _size, self._text.tokens_per_pass):
            asked = [[pair.continuation for pair in group] for group in batch]
            scores = score(self._text.model, [group[0].prompt for group in batch], asked)
            for group, group_scores in zip(batch, scores, strict=True):
                scores_by_number |= {
                    pair.number: pair_score for pair, pair_score in zip(group, group_scores, strict=True)
                }
            self._report(len(scores_by_number), len(pairs))
        return scores_by_number

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
        prompt = self._encode(context) or [self._first_id]
        ends = (until,) if isinstance(until, str) else tuple(until)
        return _Question(tuple(prompt[-room:]), options, tuple(end for end in ends if end))

    @cached_property
    def _engine(self) -> ServingEngine:
        """Serving engine, exact on a CPU, so that an answer does not depend on its batch."""
        exact = self._text.model.embed.weight.device.type == "cpu"
        return ServingEngine(
            self._text.model, EngineOptions(exact=exact, warm_start=False), end_ids=self._text.stop_ids
        )

    def _has_end(self, ids: Sequence[int], until: Sequence[str]) -> bool:
        if not until:
            return False
        tail = self._text.tokenizer.decode(ids[-max(_TAIL, *(len(end.encode()) for end in until)) :])
        return any(end in tail for end in until)

    def _answer(self, ids: Sequence[int], until: Sequence[str]) -> str:
        """Return the text up to the first of its ends, without special tokens."""
        tokenizer = self._text.tokenizer
        spoken = [*ids[:-1], *(token for token in ids[-1:] if token not in self._text.stop_ids)]
        text = tokenizer.decode(spoken)
        text = text[: min((at for end in until if (at := text.find(end)) >= 0), default=None)]
        for token in tokenizer.special_ids.intersection(spoken):
            text = text.replace(tokenizer.spell(token), "")
        return text

    def _report(self, done: int, wanted: int) -> None:
        if self._progress is not None:
            self._progress(done, wanted)


def _length(group: Sequence[_Pair]) -> tuple[int, int]:
    """Return the key of sorting: prompts of one length need no padding."""
    return len(group[0].prompt), max(len(pair.continuation) for pair in group)


def _size(group: Sequence[_Pair]) -> int:
    """Return the tokens of a prompt with its continuations, each of which has the prompt's keys and values."""
    prompt, longest = _length(group)
    return prompt + 1 if longest == 1 else len(group) * (prompt + longest)


def _batches(items: Sequence[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield runs of entries whose number times the largest size is within `most`, at least one."""
    batch: list[Item] = []
    largest = 0
    for entry in items:
        largest = max(largest, size(entry))
        if batch and (len(batch) + 1) * largest > most:
            yield batch
            batch, largest = [], size(entry)
        batch.append(entry)
    if batch:
        yield batch

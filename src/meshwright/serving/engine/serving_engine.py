"""The serving engine: requests in, tokens out, one step at a time.

`sample_answers` runs it for a model in training.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.model.generate import check_prompt
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.answers.grammar import Grammars, GrammarState
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.answers.tool_calls import AnswerText
from meshwright.serving.engine.beams import BeamSearch
from meshwright.serving.engine.cache.blocks import BlockPool, BlockTables, HostTier
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.engine_start import start
from meshwright.serving.engine.rows.loaded_adapters import LoadedAdapters
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.rows.serving_ranks import ServingRanks
from meshwright.serving.engine.sampler import SampledRow
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.serving.engine.served_request import Decode, ServedAnswer, ServedRequest
from meshwright.serving.engine.serving_record import ServingRecorder
from meshwright.serving.engine.speculation import GuessCounts, Guesser
from meshwright.serving.engine.step_loop import DraftModel, StepLoop
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.memory.held import MOST_CACHE_BYTES, SAMPLING_BLOCK

SCORED_ROWS = 256
"""Positions whose logits are in memory at once."""


@dataclass(slots=True)
class PromptScores:
    """Scores of each token but the first."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each position, with log-probabilities."""


@torch.no_grad()
def score_prompt(model: Transformer, prompt: Sequence[int], top: int) -> PromptScores:
    """Return log-probabilities of a prompt's tokens given those before, and the `top` likeliest. Raises PlanError."""
    check_prompt(model, prompt)
    scores = PromptScores()
    if len(prompt) < 2:
        return scores
    tokens = torch.tensor([list(prompt)], device=model.embed.weight.device)
    x, _ = model.hidden(tokens[:, :-1])
    for states, targets in zip(x[0].split(SCORED_ROWS), tokens[0, 1:].split(SCORED_ROWS), strict=True):
        logs = model.kernels.linear(states, model.head_weight).float().log_softmax(-1)
        scores.logprobs += logs.gather(1, targets[:, None])[:, 0].tolist()
        best = logs.topk(min(top, logs.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        scores.top += [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
    return scores


class ServingEngine:
    """One model that answers many requests at once. For one thread.

    `add` requests, then `step` until they have ended, or let `run` or `stream` do so.
    """

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions | None = None,
        *,
        decode: Decode | None = None,
        end_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        adapters: Mapping[str, ServedAdapter] | None = None,
        ranks: ServingRanks | None = None,
    ) -> None:
        """Prepare the model, which is put into evaluation mode.

        Args:
            decode: Token ids -> text, in which stop strings are searched.
            end_ids: Tokens that end a text.
            tokenizer: Tokenizer that spells constrained answers.
            adapters: Adapters that requests may name.
            ranks: Ranks with the other parts of the model, which `follow`.

        Raises:
            ArgumentError: Options contradict each other, or an adapter cannot be served.
        """
        device = model.embed.weight.device
        self.options = options = (options or EngineOptions()).on_device(device, model.shape.hidden)
        self.model = model.eval()
        self._decode, self._end_ids = decode, frozenset(end_ids)
        self._tokenizer, self._ranks = tokenizer, ranks
        self._grammars: Grammars | None = None
        self._check(model)
        # Nothing that the engine holds may hold the engine: its cache is given back when its last user is gone.
        engine = weakref.ref(self)
        self.adapters = LoadedAdapters(
            model, lambda: () if (owner := engine()) is None else owner.scheduler.adapters, exact=options.exact,
            ranks=ranks,
        )  # fmt: skip
        started = start(model, options, self.adapters.by_number, ranks)
        self._longest, self.memory, runners = started.longest, started.memory, started.runners
        self.cache = runners[0].cache
        widest = [runner.cache.widest for runner in runners]
        host = HostTier(started.slots) if started.slots else None
        self.tables = BlockTables(BlockPool(started.blocks, host), options.block, max(widest) if all(widest) else 0)
        self.scheduler = Scheduler(
            self.tables, most_tokens=options.most_tokens, most_sequences=options.most_sequences,
            prompt_tokens=options.beside_answers(device),
        )  # fmt: skip
        self._guesser = Guesser(options.speculation) if options.speculation else None
        self._loop = StepLoop(
            runners[0], self.scheduler, draft=DraftModel(runners[1]) if runners[1:] else None, guesser=self._guesser,
            run_ahead=bool(options.run_ahead) and ranks is None,
        )  # fmt: skip
        for name, adapter in (adapters or {}).items():
            self.adapters.load(name, adapter)
        if options.record is not None:
            self.record(options.record)

    def add(self, prompt: Sequence[int], options: RequestOptions | None = None) -> ServedRequest:
        """Add a request for answers to prompt tokens. Raises ArgumentError or PlanError when there can be none."""
        options = options or RequestOptions()
        check_prompt(self.model, prompt)
        adapter = self.adapters.number(options.adapter)
        if len(prompt) > self._longest:
            raise ArgumentError(
                "prompt",
                sentence=f"the prompt has {len(prompt)} tokens and {argument('longest', self._longest)}: shorten it",
            )
        outside = [token for token in options.logit_bias if not 0 <= token < self.model.shape.vocab]
        if outside:
            raise ArgumentError(
                "logit_bias",
                sentence=(
                    f"logit_bias names token {outside[0]}, which is outside the model's vocabulary of "
                    f"{self.model.shape.vocab}"
                ),
            )
        if options.stop and self._decode is None:
            raise ArgumentError("stop", sentence="stop strings need a tokenizer, and there is none: give stop_ids")
        ends = frozenset(options.stop_ids) | (frozenset() if options.ignore_end else self._end_ids)
        grammar = self._grammar(options, ends)
        request = ServedRequest(tuple(prompt), options, [])
        request.answers = [self._answer(request, ends, number, grammar) for number in range(options.n)]
        room = self._room(request)
        if not room:
            for answer in request.answers:
                answer.ending = "length"
            return request
        salt = None if options.salt is None else options.salt.encode()
        copies, searched = max(options.n, options.beams), options.beams > 1
        sequence = request.sequence = self.scheduler.add(
            prompt, len(prompt) + room, priority=options.priority, salt=salt, adapter=adapter, copies=copies,
            together=searched,
        )  # fmt: skip
        if self._loop.recorder is not None:
            self._loop.recorder.note_request(sequence, request)
        if searched:
            self._loop.search(sequence, request, BeamSearch(options, ends, room), room)
        else:
            self._loop.begin(sequence, request)
        return request

    def score(self, prompt: Sequence[int], top: int, adapter: str | None = None) -> PromptScores:
        """Return what the model, or an adapter, predicts for a prompt's own tokens. Raises PlanError, ArgumentError."""
        if self._ranks is not None:
            raise ArgumentError(
                "logprobs", sentence="a prompt is scored by one rank alone: leave out echo with logprobs, or --tp"
            )
        number = self.adapters.number(adapter)
        with self.adapters.by_number.apply_to({number: slice(0, max(0, len(prompt) - 1))} if number else {}):
            return score_prompt(self.model, prompt, top)

    def cancel(self, request: ServedRequest, answers: Sequence[ServedAnswer] | None = None) -> None:
        """End all answers of a request, or these growing ones. Their blocks are free at once."""
        answers = request.answers if answers is None else answers
        self._loop.cancel(request, answers)
        self.adapters.release()
        for answer in answers:
            answer.ending = answer.ending or "cancelled"

    def record(self, path: Path | None) -> None:
        """Write each step from now on to a new file (serving_record.py). None = no longer. Raises ArgumentError."""
        if self._loop.recorder is not None:
            self._loop.recorder.close()
        self._loop.recorder = None
        if path is not None:
            sizes = {"longest": self._longest, "block_bytes": self.cache.bytes // (self.cache.number + 2)}
            self._loop.recorder = ServingRecorder(path, self.scheduler, sizes)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and answer, without the last, whose keys and values are never needed."""
        return self._longest

    @property
    def attention(self) -> str:
        """Kernel that attends for decoding rows, and why: `triton (sm_90, bf16: ...)`."""
        return self.cache.attention

    @property
    def cuda_graphs(self) -> str:
        """Numbers of rows of the CUDA graphs, or why there are none."""
        return self._loop.runner.graphs_words

    @property
    def graphs_bytes(self) -> int:
        """Memory that CUDA graphs of model and draft model hold so far, in addition to weights and cache."""
        draft = self._loop.draft
        runners = [self._loop.runner, *([draft.runner] if draft is not None else [])]
        return sum(runner.graphs.bytes for runner in runners if runner.graphs is not None)

    @property
    def rows_at_once(self) -> int:
        """Rows of the largest forward pass."""
        return self._loop.runner.most_rows

    @property
    def copies_bytes(self) -> int:
        """Memory of the matrix copies made so far (`EngineOptions.packed`)."""
        return self._loop.runner.copies_bytes

    @property
    def guesses(self) -> GuessCounts | None:
        """Numbers of guessed and of accepted tokens. None = there is no speculation."""
        return None if self._guesser is None else self._guesser.counts

    @property
    def idle(self) -> bool:
        """True when no answer grows."""
        return self._loop.idle

    @property
    def steps_ahead(self) -> int:
        """Steps that were launched before the tokens of the one before were read."""
        return self._loop.ahead

    @torch.no_grad()
    def step(self) -> list[ServedAnswer]:
        """Compute one step, and return the answers with one more token, or several after right guesses.

        Answers of beams are returned when they are complete.
        """
        if self.idle:
            return []
        grown = self._loop.step()
        self.adapters.release()
        return grown

    def run(self, requests: Iterable[ServedRequest]) -> None:
        """Step until these requests have ended.

        Raises RunError for logits that are not finite, or a grammar beyond its limits.
        """
        for request in requests:
            while not request.ended:
                self.step()
            request.check()

    def stream(self, request: ServedRequest) -> Iterator[ServedAnswer]:
        """Step until a request has ended, and yield its answers each time one has grown.

        A request that is not read to its end is cancelled. Raises RunError as `run` does.
        """
        try:
            while not request.ended:
                yield from (answer for answer in self.step() if answer in request.answers)
            request.check()
        finally:
            self.cancel(request)

    def _check(self, model: Transformer) -> None:
        options = self.options
        if options.exact and self._ranks is not None and self._ranks.row_multiple > 1:
            raise ArgumentError(
                "exact",
                True,
                "pads rows to numbers that expert parallel ranks cannot share",
                f"take {argument('ep', 1)}",
            )
        longest = options.longest or model.shape.max_positions
        if longest > model.shape.max_positions:
            raise ArgumentError(
                "longest", longest, f"is beyond the model's {model.shape.max_positions:,} positions", "ask for fewer"
            )
        if options.speculation is not None:
            options.speculation.check(model, longest)
        if model.embed.weight.device.type != "cpu":
            for name, other in {"exact": False, "head": "model"}.items():
                if getattr(options, name) != other:
                    setting = f"{name}={getattr(options, name)}"
                    raise ArgumentError(
                        name, sentence=f"{setting} is for CPUs: take {argument(name, other)}, or a model on the CPU"
                    )

    def _grammar(self, options: RequestOptions, ends: frozenset[int]) -> GrammarState | None:
        if not options.is_constrained:
            return None
        if self._grammars is None:
            if self._tokenizer is None:
                raise ArgumentError(
                    "json_schema",
                    sentence="json_schema and regex need a tokenizer, and the model has none: leave them out",
                )
            self._grammars = Grammars(self._tokenizer, self.model.shape.vocab)
        return self._grammars.begin(options, ends)

    def _answer(
        self, request: ServedRequest, ends: frozenset[int], number: int, grammar: GrammarState | None
    ) -> ServedAnswer:
        ids = list[int]()
        state = grammar.copy() if grammar else None
        row = SampledRow(request.options, request.options.seed + number, request.prompt, ids, state)
        text = self._decode and AnswerText(self._decode, request.prompt, request.options.stop, self._tokenizer)
        return ServedAnswer(request.options, row, ends, text, ids)

    def _room(self, request: ServedRequest) -> int:
        return min(request.options.max_new_tokens, self._longest - len(request.prompt) + 1)


def sample_answers(
    model: Transformer, prompts: Sequence[Sequence[int]], *, longest: int, most: Sequence[int], seeds: Sequence[int],
    temperature: float, stop_ids: Sequence[int], at_once: int,
) -> list[list[int]]:  # fmt: skip
    """Answer prompts by a model in training: at most `most` new tokens each, including one that ends the answer.

    The same call gives the same answers. The model is left in evaluation mode. Raises RunError for logits that are not
    finite.

    Args:
        longest: Tokens of prompt and answer.
        at_once: Answers that are generated together.
    """
    options = EngineOptions(
        cache_bytes=MOST_CACHE_BYTES, copies_bytes=0, block=SAMPLING_BLOCK, most_sequences=at_once,
        most_tokens=max(512, at_once + 1), longest=longest, warm_start=False,
    )  # fmt: skip
    with torch.no_grad():
        engine = ServingEngine(model, options, end_ids=stop_ids)
        requests = [
            engine.add(prompt, RequestOptions(max_new_tokens=number, temperature=temperature, seed=seed, salt=None))
            for prompt, number, seed in zip(prompts, most, seeds, strict=True)
        ]
        engine.run(requests)
    return [list(request.answers[0].ids) for request in requests]

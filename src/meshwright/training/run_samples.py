"""Samples of a run: the model's answers to a few prompts every so many steps, stored in the run folder.

When every rank has all weights, rank 0 alone continues the prompts, with cached keys and values. Under any other layout
all ranks compute the next token together by the passes of an evaluation, one pass per new token over rows as long as in
training. So no layout needs special code, and all ranks take the same steps in the same order.

Letters: B rows, S positions, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, final

import torch
from torch import Tensor

from meshwright.data import Corpus
from meshwright.data.chat.encoder import TRAINED
from meshwright.data.chat.rendering import template_of
from meshwright.data.corpus.corpus import TokenStream
from meshwright.model.generate import greedy
from meshwright.model.transformer import Predictions
from meshwright.parallel import Engine
from meshwright.spec import Plan
from meshwright.spec.errors import RunError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.units import many
from meshwright.spec.weights.boxes import share
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training.step.batches import Batch, Share, forms, select
from meshwright.training.step.evaluate import evaluating
from meshwright.training.step.step import EVALUATION, MicroPass

PROMPTS = 3
"""Prompts from the held-out part when the recipe names none."""
OPENING = 16
"""Tokens of a held-out text that form its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """A prompt, and its known continuation."""

    ids: tuple[int, ...]
    answer: tuple[int, ...] = ()
    """Continuation in the held-out part. Empty = unknown."""


def choose_prompts(plan: Plan, corpus: Corpus) -> list[SamplePrompt]:
    """Return the recipe's prompts, or the beginnings of held-out documents.

    A prompt is cut at its beginning to leave room for its answer.
    """
    recipe, tokenizer = plan.recipe, corpus.tokenizer
    if recipe.sample_prompts and plan.data.form == "samples":
        template = template_of(tokenizer)
        texts = [
            template.render([{"role": "user", "content": text}], prompt=True).text for text in recipe.sample_prompts
        ]
        prompts = [SamplePrompt(ids=tuple(tokenizer.encode(text, special=True).tolist())) for text in texts]
    elif recipe.sample_prompts:
        prompts = [SamplePrompt(ids=tuple(tokenizer.begin(text))) for text in recipe.sample_prompts]
    else:
        held_out = (_held_out_prompts(part, recipe.sample_tokens) for part in corpus.validation.parts)
        prompts = list(islice(chain.from_iterable(held_out), PROMPTS))
    # The end of a long prompt is what an answer continues.
    room = max(1, min(recipe.sequence, plan.model.max_positions) - recipe.sample_tokens)
    return [replace(prompt, ids=prompt.ids[-room:]) for prompt in prompts if prompt.ids]


def _held_out_prompts(stream: TokenStream, tokens: int) -> list[SamplePrompt]:
    """Return the prompts of samples, up to the first answer, or the first tokens of texts."""
    prompts: list[SamplePrompt] = []
    # Far more documents than prompts, since those without a prompt or an answer are passed over.
    borders = [*stream.starts[: PROMPTS * 64].tolist(), len(stream.tokens)]
    for number in range(0, min(len(stream.starts), PROMPTS * 64), 2 if stream.pairs else 1):
        begin, end = borders[number], borders[number + 1]
        ids = tuple(stream.read(begin, end).tolist())
        trained = [] if stream.marks is None else (stream.marks[begin:end] & TRAINED > 0).tolist()
        border = trained.index(True) if True in trained else OPENING
        # Only the first answer of a conversation is compared.
        length = next((count for count, is_trained in enumerate(trained[border:]) if not is_trained), tokens)
        if 0 < border < len(ids):
            prompts.append(SamplePrompt(ids=ids[:border], answer=ids[border : border + min(length, tokens)]))
        if len(prompts) == PROMPTS:
            break
    return prompts


def is_replicated(layout: Layout) -> bool:
    """Return whether every rank has all weights, whole."""
    return layout.world == 1 or (layout.zero == 0 and layout.tp == layout.cp == layout.pp == layout.ep == 1)


@final
class RunSamples:
    """The samples of a run. Inactive when the recipe asks for none."""

    def __init__(self, plan: Plan, corpus: Corpus, folder: RunFolder) -> None:
        self.plan, self.tokenizer, self.folder = plan, corpus.tokenizer, folder
        self.prompts = choose_prompts(plan, corpus) if plan.recipe.sample_every else []
        ends = (corpus.tokenizer.eos, *folder.end_ids())
        self.stop_ids = tuple(dict.fromkeys(token for token in ends if token is not None))

    def notes(self) -> list[str]:
        """Return what a user should know about the samples before the run."""
        recipe = self.plan.recipe
        if recipe.sample_every and not self.prompts:
            return ["no samples are taken: nothing is held out, and recipe.sample_prompts is empty"]
        if not self.prompts or is_replicated(self.plan.layout):
            return []
        passes = -(-len(self.prompts) // self._rows) * recipe.sample_tokens
        return [
            f"samples take up to {many(passes, 'forward pass', 'forward passes')} of a micro-batch every "
            f"{recipe.sample_every} steps, since weights or sequences are shared by ranks: a smaller "
            "recipe.sample_tokens takes fewer"
        ]

    @property
    def _rows(self) -> int:
        return self.plan.layout.micro_batch_of(self.plan.recipe.global_batch)

    def due(self, step: int) -> bool:
        """Return whether samples are taken after this step. They always are after the last one."""
        recipe = self.plan.recipe
        return bool(self.prompts) and (step == recipe.steps or step % recipe.sample_every == 0)

    def take(self, engine: Engine, step: int) -> None:
        """Answer all prompts greedily and store the answers. All ranks call this together."""
        problem = ""
        answers: list[list[int]] = [[] for _ in self.prompts]
        with evaluating(engine):
            try:
                if not is_replicated(self.plan.layout):
                    answers = self._answer_over_ranks(engine)
                # All ranks hold the same weights: the others wait at the next collective.
                elif engine.mesh.rank == 0:
                    prompts = [prompt.ids for prompt in self.prompts]
                    max_new_tokens = self.plan.recipe.sample_tokens
                    answers = greedy(engine.model, prompts, max_new_tokens=max_new_tokens, stop_ids=self.stop_ids)
            except RunError as error:
                # Non-finite weights end the run elsewhere, with a fuller message.
                problem = str(error)
        if engine.mesh.rank == 0:
            decode, continuation_text = self.tokenizer.decode, self.tokenizer.continuation_text
            samples = [
                {
                    "prompt": decode(prompt.ids),
                    "text": continuation_text(prompt.ids, answer),
                    "held_out": continuation_text(prompt.ids, prompt.answer),
                }
                for prompt, answer in zip(self.prompts, answers, strict=True)
            ]
            log = MetricsLog(self.folder.samples)
            log.append({"step": step, "samples": samples, **({"problem": problem} if problem else {})})
            log.close()

    def _answer_over_ranks(self, engine: Engine) -> list[list[int]]:
        """Compute each new token by whole passes. Ranks see the same logits, and so end at the same token."""
        texts = [list(prompt.ids) for prompt in self.prompts]
        unfinished = set(range(len(texts)))
        for _ in range(self.plan.recipe.sample_tokens):
            likeliest = self._logits(engine, texts).argmax(-1).tolist()
            for row in sorted(unfinished):
                texts[row].append(likeliest[row])
                # Its passes go on until all have ended: rows of a pass have one size.
                if likeliest[row] in self.stop_ids:
                    unfinished.discard(row)
            if not unfinished:
                break
        return [text[len(prompt.ids) :] for text, prompt in zip(texts, self.prompts, strict=True)]

    def _logits(self, engine: Engine, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return (B, V) fp32 behind the last token of each text, the same on every rank."""
        layout, vocab = self.plan.layout, self.plan.model.vocab
        columns = engine.columns(self.plan.recipe.sequence)
        groups = [texts[first : first + self._rows] for first in range(0, len(texts), self._rows)]
        passes = [
            NextTokenPass(self._batch(group, columns, engine), columns, [len(text) - 1 for text in group])
            for group in groups
        ]
        engine.evaluate(passes)
        first, number = share(vocab, layout.tp, engine.mesh["tp"].index)
        # Each rank fills in what it has. The sum over all ranks is the whole.
        logits = torch.zeros(len(texts), vocab, device=passes[0].batch.tokens.device)
        for index, token_pass in enumerate(passes):
            if token_pass.logits is not None:
                count = len(token_pass.positions)
                rows = slice(index * self._rows, index * self._rows + count)
                logits[rows, first : first + number] = token_pass.logits[:count]
        # All replicas had the same rows, so the sum has each logit dp times.
        return engine.mesh["world"].all_reduce(logits) / layout.dp

    def _batch(self, texts: Sequence[Sequence[int]], columns: tuple[int, ...] | None, engine: Engine) -> Batch:
        """Return this rank's part of rows of training's size, filled up with zeros, without targets."""
        rows = torch.zeros(self._rows, self.plan.recipe.sequence, dtype=torch.int64)
        for row, text in zip(rows, texts, strict=False):
            row[: len(text)] = torch.tensor(text)
        rows = rows.to(next(engine.model.parameters()).device)
        return select(Batch(tokens=rows, targets=torch.full_like(rows, -100)), Share(columns=columns))


class NextTokenLogits:
    """Stand-in for an objective that records the logits behind one token of each row."""

    figures: tuple[str, ...] = ()

    def __init__(self, columns: tuple[int, ...] | None, positions: Sequence[int]) -> None:
        """Take the `positions` of those tokens in whole rows. Further rows are filler."""
        self.columns, self.positions = columns, positions
        self.logits: Tensor | None = None

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Record logits (B, V or this rank's part), zero where another rank has the position. Return zero."""
        columns = self.columns if self.columns is not None else range(batch.tokens.shape[1])
        local_index = {column: index for index, column in enumerate(columns)}
        positions = [*self.positions, *[0] * (len(batch.tokens) - len(self.positions))]
        device = batch.tokens.device
        indices = torch.tensor([local_index.get(position, 0) for position in positions]).to(device)
        logits = predictions.logits_at(indices)
        is_local = torch.tensor([position in local_index for position in positions]).to(device)
        self.logits = logits.where(is_local[:, None], 0.0)
        return torch.zeros((), device=device)


@final
class NextTokenPass(MicroPass):
    """Rows on their way through the stages. The last stage records the logits behind the last token of each."""

    def __init__(self, batch: Batch, columns: tuple[int, ...] | None, positions: Sequence[int]) -> None:
        """Take the `positions` of the last tokens in whole rows."""
        self._recorder = NextTokenLogits(columns, positions)
        super().__init__(batch, EVALUATION, self._recorder)

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the last tokens in whole rows."""
        return self._recorder.positions

    @property
    def logits(self) -> Tensor | None:
        """Logits (B, V or this rank's part) fp32 when this rank has the last stage."""
        return self._recorder.logits

    def forms(self) -> dict[Hashable, MicroPass]:
        """Return the pass with and without documents, each with its own recorder."""
        return {
            (*self.size, packed): NextTokenPass(batch, self._recorder.columns, self.positions)
            for packed, batch in forms(self.batch).items()
        }

    def __copy__(self) -> "NextTokenPass":
        """Return a copy with its own logits, for warm-ups."""
        return NextTokenPass(self.batch, self._recorder.columns, self.positions)


def read_samples(path: Any) -> list[dict[str, Any]]:
    """Return the samples of a run, oldest first. Lines of another form are left out."""
    return [record for record in MetricsLog.read(path) if isinstance(record.get("samples"), list)]

"""What the model answers while it is trained: a few prompts, every so many steps, kept in the run folder.

Where every rank has all weights, the first one alone continues the prompts, with cached keys and values. Under any
other layout all ranks compute the next token together, by the passes of an evaluation: one pass for each new token,
over rows as long as in training, so that no layout needs a way of its own. All ranks take the same steps in the same
order.

Letters: B rows, S positions, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from meshwright.data import Corpus
from meshwright.data.chat_prompt import template_of
from meshwright.data.corpus import TokenStream
from meshwright.data.sample_encoder import TRAINED
from meshwright.model.predictions import Predictions
from meshwright.model.prompt_batch import greedy
from meshwright.parallel import Engine
from meshwright.spec import Plan
from meshwright.spec.boxes import share
from meshwright.spec.errors import RunError
from meshwright.spec.layout import Layout
from meshwright.spec.units import many
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training.batches import Batch, Share, forms, select
from meshwright.training.evaluate import evaluating
from meshwright.training.step import EVALUATION, MicroPass

PROMPTS = 3
"""Of the held-out part, where none are given."""
OPENING = 16
"""Tokens of a held-out text that are its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """What the model is asked."""

    ids: tuple[int, ...]
    answer: tuple[int, ...] = ()
    """What follows in the held-out part; empty = nobody knows."""


def prompts(plan: Plan, corpus: Corpus) -> list[SamplePrompt]:
    """Those of the recipe, or the beginnings of held-out documents; none where nothing is held out. A prompt is cut at
    its beginning where there is no room for it and its answer."""
    recipe, tokenizer = plan.recipe, corpus.tokenizer
    if recipe.sample_prompts and plan.data.form == "samples":
        template = template_of(tokenizer)
        said = [template.render([{"role": "user", "content": one}], prompt=True).text for one in recipe.sample_prompts]
        found = [SamplePrompt(ids=tuple(tokenizer.encode(text, special=True).tolist())) for text in said]
    elif recipe.sample_prompts:
        found = [SamplePrompt(ids=tuple(tokenizer.begin(one))) for one in recipe.sample_prompts]
    else:
        found = [one for part in corpus.validation.parts for one in _held_out(part, recipe.sample_tokens)][:PROMPTS]
    room = max(1, min(recipe.sequence, plan.model.max_positions) - recipe.sample_tokens)
    return [replace(one, ids=one.ids[-room:]) for one in found if one.ids]


def _held_out(stream: TokenStream, tokens: int) -> list[SamplePrompt]:
    """Of samples, what comes before the first answer; of texts, their first tokens."""
    found: list[SamplePrompt] = []
    borders = [*stream.starts[: PROMPTS * 64].tolist(), len(stream.tokens)]
    for number in range(0, min(len(stream.starts), PROMPTS * 64), 2 if stream.pairs else 1):
        begin, end = borders[number], borders[number + 1]
        ids = tuple(stream.read(begin, end).tolist())
        trained = [] if stream.marks is None else (stream.marks[begin:end] & TRAINED > 0).tolist()
        border = trained.index(True) if True in trained else OPENING
        length = next((place for place, one in enumerate(trained[border:]) if not one), tokens)
        if 0 < border < len(ids):
            found.append(SamplePrompt(ids=ids[:border], answer=ids[border : border + min(length, tokens)]))
        if len(found) == PROMPTS:
            break
    return found


def is_replicated(layout: Layout) -> bool:
    """Whether every rank has all weights, whole."""
    return layout.world == 1 or (layout.zero == 0 and layout.tp == layout.cp == layout.pp == layout.ep == 1)


@final
class RunSamples:
    """The samples of a run; inactive where the recipe asks for none."""

    def __init__(self, plan: Plan, corpus: Corpus, folder: RunFolder) -> None:
        self.plan, self.tokenizer, self.folder = plan, corpus.tokenizer, folder
        self.prompts = prompts(plan, corpus) if plan.recipe.sample_every else []
        ends = (corpus.tokenizer.eos, *folder.end_ids())
        self.stop_ids = tuple(dict.fromkeys(token for token in ends if token is not None))

    def notes(self) -> list[str]:
        """What a run should know of them before it begins."""
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
        """Whether samples are taken after this step; after the last one they are."""
        recipe = self.plan.recipe
        return bool(self.prompts) and (step == recipe.steps or step % recipe.sample_every == 0)

    def take(self, engine: Engine, step: int) -> None:
        """Answer all prompts, greedily, and keep what was said. All ranks call this together."""
        problem = ""
        found: list[list[int]] = [[] for _ in self.prompts]
        with evaluating(engine):
            try:
                if not is_replicated(self.plan.layout):
                    found = self._together(engine)
                elif engine.mesh.rank == 0:
                    found = self._alone(engine)
            except RunError as error:  # weights that make no numbers end a run elsewhere, with more to say
                problem = str(error)
        if engine.mesh.rank == 0:
            decode, behind = self.tokenizer.decode, self.tokenizer.text_behind
            said = [
                {"prompt": decode(one.ids), "text": behind(one.ids, ids), "held_out": behind(one.ids, one.answer)}
                for one, ids in zip(self.prompts, found, strict=True)
            ]
            log = MetricsLog(self.folder.samples)
            log.append({"step": step, "samples": said, **({"problem": problem} if problem else {})})
            log.close()

    def _alone(self, engine: Engine) -> list[list[int]]:
        """With cached keys and values."""
        asked = [one.ids for one in self.prompts]
        return greedy(
            engine.model, asked, max_new_tokens=self.plan.recipe.sample_tokens, stop_ids=self.stop_ids
        )  # fmt: skip

    def _together(self, engine: Engine) -> list[list[int]]:
        """Each new token by whole passes. Ranks see the same logits, and so end at the same token."""
        texts = [list(one.ids) for one in self.prompts]
        inside = set(range(len(texts)))
        for _ in range(self.plan.recipe.sample_tokens):
            likeliest = self._logits(engine, texts).argmax(-1).tolist()
            for row in sorted(inside):
                texts[row].append(likeliest[row])
                if likeliest[row] in self.stop_ids:
                    inside.discard(row)
            if not inside:
                break
        return [text[len(one.ids) :] for text, one in zip(texts, self.prompts, strict=True)]

    def _logits(self, engine: Engine, texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, V) fp32 behind the last token of each text, the same on every rank."""
        layout, vocab = self.plan.layout, self.plan.model.vocab
        columns = engine.columns(self.plan.recipe.sequence)
        passes = [
            NextTokenPass(self._batch(texts[first : first + self._rows], columns, engine), columns, [
                len(text) - 1 for text in texts[first : first + self._rows]
            ])
            for first in range(0, len(texts), self._rows)
        ]  # fmt: skip
        engine.evaluate(passes)
        first, number = share(vocab, layout.tp, engine.mesh["tp"].index)
        found = torch.zeros(len(texts), vocab, device=passes[0].batch.tokens.device)
        for place, one in enumerate(passes):
            if one.logits is not None:
                rows = slice(place * self._rows, place * self._rows + len(one.places))
                found[rows, first : first + number] = one.logits[: len(one.places)]
        return engine.mesh["world"].all_reduce(found) / layout.dp

    def _batch(self, texts: Sequence[Sequence[int]], columns: tuple[int, ...] | None, engine: Engine) -> Batch:
        """Rows of training's size, filled up with zeros, without targets: what this rank reads of them."""
        rows = torch.zeros(self._rows, self.plan.recipe.sequence, dtype=torch.int64)
        for row, text in zip(rows, texts, strict=False):
            row[: len(text)] = torch.tensor(text)
        rows = rows.to(next(engine.model.parameters()).device)
        return select(Batch(tokens=rows, targets=torch.full_like(rows, -100)), Share(columns=columns))


class NextTokenLogits:
    """An objective that scores nothing, and keeps the logits behind one token of each row."""

    by_position = True
    figures: tuple[str, ...] = ()

    def __init__(self, columns: tuple[int, ...] | None, places: Sequence[int]) -> None:
        """`places` of those tokens in whole rows; further rows are filling."""
        self.columns, self.places = columns, places
        self.logits: Tensor | None = None

    def count(self, batch: Batch) -> float:
        """Nothing is divided."""
        return 0.0

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """None; keeps logits (B, V or this rank's part), zero where another rank has the position."""
        own = self.columns if self.columns is not None else range(batch.tokens.shape[1])
        here = {column: place for place, column in enumerate(own)}
        filling = [0] * (len(batch.tokens) - len(self.places))
        device = batch.tokens.device
        logits = predictions.logits_at(torch.tensor([here.get(one, 0) for one in (*self.places, *filling)]).to(device))
        mine = torch.tensor([one in here for one in (*self.places, *filling)]).to(device)
        self.logits = logits.where(mine[:, None], 0.0)
        return torch.zeros((), device=device)


@final
class NextTokenPass(MicroPass):
    """Rows on their way through the stages, whose last one keeps the logits behind the last token of each."""

    def __init__(self, batch: Batch, columns: tuple[int, ...] | None, places: Sequence[int]) -> None:
        """As NextTokenLogits."""
        self._kept = NextTokenLogits(columns, places)
        super().__init__(batch, EVALUATION, self._kept)

    @property
    def places(self) -> Sequence[int]:
        """Of the tokens behind which it looks."""
        return self._kept.places

    @property
    def logits(self) -> Tensor | None:
        """(B, V or this rank's part) fp32 where this rank has the last stage."""
        return self._kept.logits

    def forms(self) -> dict[Hashable, MicroPass]:
        """As MicroPass."""
        found = forms(self.batch).items()
        return {(*self.size, packed): NextTokenPass(one, self._kept.columns, self.places) for packed, one in found}

    def __copy__(self) -> "NextTokenPass":
        """What a copy finds, as a warm-up does, is its own."""
        return NextTokenPass(self.batch, self._kept.columns, self.places)


def recorded(path: Any) -> list[dict[str, Any]]:
    """What is kept of a run's samples, oldest first; lines of another form are left out."""
    return [one for one in MetricsLog.read(path) if isinstance(one.get("samples"), list)]

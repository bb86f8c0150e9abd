"""Show: what is trained, as figures and as the first packed sequence; printed by `meshwright data show`."""

from dataclasses import dataclass

import numpy as np

from meshwright.data.corpus import Corpus, TokenStream
from meshwright.data.sources import Source
from meshwright.data.windows import IGNORED, Sampler
from meshwright.spec import Data, Recipe

_LOOKED_AT = 256
"""Samples searched for one that holds a border of documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """Counts of one side of the split."""

    documents: int
    bytes: int
    tokens: int
    windows: int
    """Whole sequences of an epoch; for the held-out side, with the last short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One place of a sequence."""

    id: int
    text: str
    document: int
    position: int
    target: int | None
    """None = ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataView:
    """Everything `data show` says."""

    source: str
    files: int
    passed_over: tuple[str, ...]
    """Binary files of the folder, which are not read."""
    tokenizer: str
    vocab: int
    bos: str | None
    eos: str | None
    sequence: int
    bytes_per_token: float
    train: StreamFigures
    validation: StreamFigures
    fingerprint: str
    sample: int
    """Number of the sample shown: the first of the run's that holds a border, else 0."""
    packed: bool
    tokens: tuple[Token, ...]


def view(data: Data, recipe: Recipe, corpus: Corpus) -> DataView:
    """Figures and a sample of a prepared corpus; DataError where it is shorter than one sequence."""
    source, tokenizer, both = Source(data), corpus.tokenizer, (corpus.train, corpus.validation)
    sampler = Sampler(corpus.train, sequence=recipe.sequence, tokenizer_separator=tokenizer.separator, seed=recipe.seed)
    short = -(-max(0, corpus.validation.num_tokens - 1) // recipe.sequence)
    sample, packed, tokens = _sample(corpus, sampler)
    num_bytes, num_tokens = (sum(getattr(stream, f"num_{what}") for stream in both) for what in ("bytes", "tokens"))
    return DataView(
        source=source.title,
        files=len(source.files),
        passed_over=tuple(str(path) for path in source.passed_over),
        tokenizer=data.tokenizer,
        vocab=tokenizer.vocab,
        bos=None if tokenizer.bos is None else tokenizer.spell(tokenizer.bos),
        eos=None if tokenizer.eos is None else tokenizer.spell(tokenizer.eos),
        sequence=recipe.sequence,
        bytes_per_token=num_bytes / num_tokens,
        train=_figures(corpus.train, len(sampler)),
        validation=_figures(corpus.validation, short),
        fingerprint=corpus.fingerprint,
        sample=sample,
        packed=packed,
        tokens=tokens,
    )


def _figures(stream: TokenStream, windows: int) -> StreamFigures:
    return StreamFigures(
        documents=stream.num_documents, bytes=stream.num_bytes, tokens=stream.num_tokens, windows=windows
    )


def _sample(corpus: Corpus, sampler: Sampler) -> tuple[int, bool, tuple[Token, ...]]:
    numbers = range(min(_LOOKED_AT, len(sampler)))
    chosen = next((number for number in numbers if sampler.take(number, 1).packed), 0)
    found = sampler.take(chosen, 1)
    rows = (found.tokens[0], found.documents[0], found.positions[0], found.targets[0])
    spell = corpus.tokenizer.spell
    tokens = tuple(
        Token(
            id=token,
            text=spell(token),
            document=document,
            position=position,
            target=None if target == IGNORED else target,
        )
        for token, document, position, target in zip(*(np.asarray(row).tolist() for row in rows), strict=True)
    )
    return chosen, found.packed, tokens

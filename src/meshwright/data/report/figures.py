"""Figures of the training data and its first packed sequence, printed by `meshwright data show`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from meshwright.data.chat.encoder import TRAINED
from meshwright.data.chat.rendering import ROLES
from meshwright.data.corpus.corpus import Corpus, Stream
from meshwright.data.report.run_reading import SourceReading, readings
from meshwright.data.sequences.mixed_rows import MixedRows
from meshwright.data.sequences.numbered_rows import NumberedRows, numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.data.sequences.windows import IGNORED, Sequences
from meshwright.data.text.rows import MalformedRows
from meshwright.data.text.sources import Source
from meshwright.spec import Data, Recipe
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, PREFERENCES

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_LOOKED_AT = 256
"""Samples searched for one that contains a border of documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """Counts of one side of the split."""

    documents: int
    bytes: int
    tokens: int
    windows: int
    """Whole sequences of an epoch. The held-out side includes the last short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One position of a sequence."""

    id: int
    text: str
    document: int
    position: int
    target: int | None
    """Target. None = ignored."""
    mark: Literal["", "trained", "masked", "padding"] = ""
    """Training state of a token of a sample. Empty = text, all of which is trained."""
    role: str = ""
    """Role that says it, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """One row of the run."""

    number: int
    packed: bool
    """A document ends in it."""
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Number of documents, or samples, with `begin` to `end` tokens, inclusive."""

    begin: int
    end: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTokens:
    """Tokens of one role in training samples."""

    role: str
    trained: int
    masked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFigures:
    """Figures of training samples."""

    trained_share: float
    """Share of trained tokens."""
    lengths: tuple[int, ...]
    """Tokens of a sample: minimum, quartiles, nine tenths, maximum."""
    overlong: int
    """Samples longer than a row."""
    policy: str
    """Treatment of these: data.overlong."""
    left_out: int
    """Samples that are in no row."""
    cut_tokens: int
    """Tokens behind the ends of rows."""
    waste: float
    """Share of positions that no sample fills."""
    roles: tuple[RoleTokens, ...]
    """Tokens of each role. `other` = text between turns, and plain texts."""
    pairs: bool = False
    """Each two documents of a row are a better and a worse answer."""
    same: int = 0
    """Pairs with two equal answers, which teach nothing."""

    @property
    def things(self) -> str:
        """Name of the rows of the file."""
        return "pairs" if self.pairs else "samples"

    def counted(self, documents: int) -> int:
        """Return the number of pairs or samples among `documents`."""
        return documents // 2 if self.pairs else documents


@dataclass(frozen=True, slots=True, kw_only=True)
class DataView:
    """Complete answer of `data show`."""

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
    """Number of the sample shown: the first of the run with a border, else 0."""
    packed: bool
    tokens: tuple[Token, ...]
    lengths: tuple[LengthBin, ...]
    """Lengths of the training documents before rows cut them."""
    samples: SampleFigures | None = None
    """Figures of samples. None = text."""
    more: tuple[ShownRow, ...] = ()
    """Rows of the run after the one shown."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Column that samples do not use -> number of rows that have it. Empty for text."""
    malformed: MalformedRows = field(default_factory=MalformedRows)
    """Rows that data.malformed=skip left out."""
    sources: tuple[SourceReading, ...] = ()
    """Reading of each source of a mixture by the run."""


def heading(tokens: Sequence[Token], pairs: bool) -> str:
    """Return the heading of a document of a row, from its tokens."""
    if all(token.mark == "padding" for token in tokens):
        return "padding"
    document = tokens[0].document
    return f"pair {document // 2}, {'rejected' if document % 2 else 'chosen'}" if pairs else f"document {document}"


def view(data: Data, recipe: Recipe, corpus: Corpus, *, rows: int = 1) -> DataView:
    """Return figures and `rows` rows of a prepared corpus. Raises DataError when it is shorter than one sequence."""
    pairs = any(part.pairs for part in corpus.train.parts)
    if pairs != recipe.traits.pairs:  # what is shown is the same under every objective over pairs
        recipe = replace(recipe, objective=PREFERENCES[0] if pairs else CROSS_ENTROPY)
    sources, tokenizer = [Source(source) for source in data.sources or (data,)], corpus.tokenizer
    sampler = numbered_rows(data, recipe, corpus, corpus.train, shuffle=True)
    aside = numbered_rows(data, recipe, corpus, corpus.validation, shuffle=False)
    short = sum(-(-max(0, part.num_tokens - 1) // recipe.sequence) for part in corpus.validation.parts)
    first, *more = _rows(corpus, sampler, rows)
    run = recipe.over(len(sampler))
    return DataView(
        source=data.title if data.mixture else sources[0].title,
        files=sum(len(source.files) for source in sources),
        passed_over=tuple(str(path) for source in sources for path in source.passed_over),
        tokenizer=data.tokenizer,
        vocab=tokenizer.vocab,
        bos="".join(map(tokenizer.spell, tokenizer.document_marks[0])) or None,
        eos=None if tokenizer.eos is None else tokenizer.spell(tokenizer.eos),
        sequence=recipe.sequence,
        bytes_per_token=_bytes_per_token(corpus),
        train=_figures(corpus.train, len(sampler)),
        validation=_figures(corpus.validation, len(aside) if data.form == "samples" else short),
        fingerprint=corpus.fingerprint,
        sample=first.number,
        packed=first.packed,
        tokens=first.tokens,
        lengths=_length_bins(corpus.train),
        more=tuple(more),
        samples=_sample_figures(corpus.train, sampler, data) if data.form == "samples" else None,
        unread=corpus.unread,
        malformed=corpus.malformed,
        sources=readings(data, run, corpus.train, sampler) if data.mixture else (),
    )


def _bytes_per_token(corpus: Corpus) -> float:
    num_bytes, num_tokens = (
        sum(getattr(stream, f"num_{what}") for stream in (corpus.train, corpus.validation))
        for what in ("bytes", "tokens")
    )
    return float(num_bytes / num_tokens)


def _sample_figures(stream: Stream, sampler: NumberedRows, data: Data) -> SampleFigures:
    """Return the figures of all sources together."""
    lengths = [np.diff(np.append(part.starts, part.size)) for part in stream.parts]
    each = sampler.rows if isinstance(sampler, MixedRows) else [sampler]
    parts = [rows for rows in each if isinstance(rows, SampleRows)]
    return SampleFigures(
        trained_share=stream.num_tokens / stream.size,
        lengths=tuple(np.quantile(np.concatenate(lengths), QUANTILES, method="nearest").tolist()),
        overlong=sum(rows.fitted.overlong for rows in parts),
        policy=data.overlong,
        left_out=sum(rows.fitted.left_out for rows in parts),
        cut_tokens=sum(rows.fitted.cut_tokens for rows in parts),
        waste=sum(rows.packed.waste * len(rows) for rows in parts) / len(sampler),
        roles=_role_tokens(stream),
        pairs=any(part.pairs for part in stream.parts),
        same=sum(part.same_pairs for part in stream.parts),
    )


def _role_tokens(stream: Stream) -> tuple[RoleTokens, ...]:
    counts = sum(
        (np.bincount(part.marks, minlength=256) for part in stream.parts if part.marks is not None),
        start=np.zeros(256, dtype=np.int64),
    )
    counts_by_role = (
        RoleTokens(role=role, trained=int(counts[number | TRAINED]), masked=int(counts[number]))
        for number, role in enumerate(ROLES)
    )
    return tuple(role_tokens for role_tokens in counts_by_role if role_tokens.trained or role_tokens.masked)


def _length_bins(stream: Stream) -> tuple[LengthBin, ...]:
    """Count lengths of 1, 2 to 3, 4 to 7 ... tokens, from the shortest to the longest."""
    lengths = np.concatenate([np.diff(np.append(part.starts, part.size)) for part in stream.parts])
    counts = np.bincount(np.frexp(np.maximum(lengths, 1))[1] - 1)
    present = np.flatnonzero(counts)
    powers = range(int(present[0]), int(present[-1]) + 1) if len(present) else range(0)
    return tuple(LengthBin(begin=2**power, end=2 ** (power + 1) - 1, count=int(counts[power])) for power in powers)


def _figures(stream: Stream, windows: int) -> StreamFigures:
    return StreamFigures(
        documents=stream.num_documents, bytes=stream.num_bytes, tokens=stream.num_tokens, windows=windows
    )


def _rows(corpus: Corpus, sampler: NumberedRows, rows: int) -> list[ShownRow]:
    """Return the first row with a border, and those after it."""
    numbers = range(min(_LOOKED_AT, len(sampler)))
    chosen = next((number for number in numbers if sampler.take(number, 1).packed), 0)
    last = min(max(len(sampler), chosen + 1), chosen + rows)
    return [_row(corpus, sampler, number) for number in range(chosen, last)]


def _row(corpus: Corpus, sampler: NumberedRows, number: int) -> ShownRow:
    batch = sampler.take(number, 1)
    rows = (batch.tokens[0], batch.documents[0], batch.positions[0], batch.targets[0])
    spell, marks = corpus.tokenizer.spell, _marks(batch, corpus.train.parts[0].marks is not None)
    roles = ["", *(ROLES[role] if role else "" for role in ([] if batch.roles is None else batch.roles[0].tolist()))]
    roles += [""] * len(marks)
    tokens = tuple(
        Token(
            id=token,
            text=spell(token),
            document=document,
            position=position,
            target=None if target == IGNORED else target,
            mark=mark,
            role="" if mark == "padding" else role,
        )
        for (token, document, position, target), mark, role in zip(
            zip(*(np.asarray(row).tolist() for row in rows), strict=True), marks, roles[: len(marks)], strict=True
        )
    )
    return ShownRow(number=number, packed=batch.packed, tokens=tokens)


def _marks(batch: Sequences, samples: bool) -> list[Literal["", "trained", "masked", "padding"]]:
    """Return the state of each token of the row. A token is trained if it is the target of the one before it."""
    size = batch.tokens.shape[1]
    if not samples:
        return [""] * size
    trained = np.append(False, batch.targets[0, :-1] != IGNORED)
    targets = np.flatnonzero(trained)
    last = batch.documents[0, -1]
    padding = (batch.documents[0] == last) & ~np.isin(batch.documents[0], batch.documents[0, targets])
    return [
        "trained" if is_trained else "padding" if is_padding else "masked"
        for is_trained, is_padding in zip(trained, padding, strict=True)
    ]

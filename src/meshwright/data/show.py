"""Show: what is trained, as figures and as the first packed sequence; printed by `meshwright data show`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from meshwright.data.corpus import Corpus, Stream
from meshwright.data.mixed_rows import MixedRows
from meshwright.data.numbered_rows import NumberedRows, numbered_rows
from meshwright.data.rendering import ROLES
from meshwright.data.rows import MalformedRows
from meshwright.data.run_reading import SourceReading, readings
from meshwright.data.sample_encoder import TRAINED
from meshwright.data.sample_rows import SampleRows
from meshwright.data.sources import Source
from meshwright.data.windows import IGNORED, Sequences
from meshwright.spec import Data, Recipe
from meshwright.spec.objective_traits import CROSS_ENTROPY, PREFERENCES

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
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
    mark: Literal["", "trained", "masked", "padding"] = ""
    """Of a sample's token: whether it is trained. Empty = text, all of which is."""
    role: str = ""
    """Who says it, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """One row of the run."""

    number: int
    packed: bool
    """Whether a document ends in it."""
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """How many documents, or samples, have `begin` to `end` tokens, the end included."""

    begin: int
    end: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTokens:
    """Of samples that are trained on: what one role says."""

    role: str
    trained: int
    masked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFigures:
    """Of samples that are trained on."""

    trained_share: float
    """Of their tokens."""
    lengths: tuple[int, ...]
    """Tokens of a sample: the shortest, a quarter, half, three quarters, nine tenths, the longest."""
    overlong: int
    """Longer than a row."""
    policy: str
    """What becomes of those: data.overlong."""
    left_out: int
    """Of which no row has anything."""
    cut_tokens: int
    """Behind the ends of rows."""
    waste: float
    """Share of all places that no sample fills."""
    roles: tuple[RoleTokens, ...]
    """Who says how much; `other` = what a template writes between, and texts."""
    pairs: bool = False
    """Each two documents of a row are a better and a worse answer."""
    same: int = 0
    """Pairs whose two answers are the same, which teach nothing."""

    @property
    def things(self) -> str:
        """What rows of the file are called."""
        return "pairs" if self.pairs else "samples"

    def counted(self, documents: int) -> int:
        """How many of those so many documents are."""
        return documents // 2 if self.pairs else documents


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
    lengths: tuple[LengthBin, ...]
    """Of what is trained on, before rows cut it."""
    samples: SampleFigures | None = None
    """None = text."""
    more: tuple[ShownRow, ...] = ()
    """The rows of the run after the one shown."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Of samples: columns that none is made of, and how many rows have each."""
    malformed: MalformedRows = field(default_factory=MalformedRows)
    """Rows that data.malformed=skip left out."""
    sources: tuple[SourceReading, ...] = ()
    """Of a mixture: each source, and what the run reads of it."""


def heading(tokens: Sequence[Token], pairs: bool) -> str:
    """What a document of a row is called, from its tokens."""
    if all(one.mark == "padding" for one in tokens):
        return "padding"
    document = tokens[0].document
    return f"pair {document // 2}, {'rejected' if document % 2 else 'chosen'}" if pairs else f"document {document}"


def view(data: Data, recipe: Recipe, corpus: Corpus, *, rows: int = 1) -> DataView:
    """Figures and `rows` rows of a prepared corpus; DataError where it is shorter than one sequence."""
    pairs = any(part.pairs for part in corpus.train.parts)
    if pairs != recipe.traits.pairs:  # what is shown is the same under every objective over pairs
        recipe = replace(recipe, objective=PREFERENCES[0] if pairs else CROSS_ENTROPY)
    sources, tokenizer = [Source(one) for one in data.sources or (data,)], corpus.tokenizer
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
    """Of all sources together."""
    lengths = [np.diff(np.append(part.starts, part.size)) for part in stream.parts]
    parts = [
        one for one in (sampler.rows if isinstance(sampler, MixedRows) else [sampler]) if isinstance(one, SampleRows)
    ]
    return SampleFigures(
        trained_share=stream.num_tokens / stream.size,
        lengths=tuple(np.quantile(np.concatenate(lengths), QUANTILES, method="nearest").tolist()),
        overlong=sum(one.fitted.overlong for one in parts),
        policy=data.overlong,
        left_out=sum(one.fitted.left_out for one in parts),
        cut_tokens=sum(one.fitted.cut_tokens for one in parts),
        waste=sum(one.packed.waste * len(one) for one in parts) / len(sampler),
        roles=_role_tokens(stream),
        pairs=any(part.pairs for part in stream.parts),
        same=sum(part.same_pairs for part in stream.parts),
    )


def _role_tokens(stream: Stream) -> tuple[RoleTokens, ...]:
    counts = sum(
        (np.bincount(part.marks, minlength=256) for part in stream.parts if part.marks is not None),
        start=np.zeros(256, dtype=np.int64),
    )
    found = (
        RoleTokens(role=role, trained=int(counts[number | TRAINED]), masked=int(counts[number]))
        for number, role in enumerate(ROLES)
    )
    return tuple(one for one in found if one.trained or one.masked)


def _length_bins(stream: Stream) -> tuple[LengthBin, ...]:
    """1, 2 to 3, 4 to 7 ... tokens, from the shortest to the longest."""
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
    """The first with a border, and those after it."""
    numbers = range(min(_LOOKED_AT, len(sampler)))
    chosen = next((number for number in numbers if sampler.take(number, 1).packed), 0)
    last = min(max(len(sampler), chosen + 1), chosen + rows)
    return [_row(corpus, sampler, number) for number in range(chosen, last)]


def _row(corpus: Corpus, sampler: NumberedRows, number: int) -> ShownRow:
    found = sampler.take(number, 1)
    rows = (found.tokens[0], found.documents[0], found.positions[0], found.targets[0])
    spell, marks = corpus.tokenizer.spell, _marks(found, corpus.train.parts[0].marks is not None)
    roles = ["", *(ROLES[role] if role else "" for role in ([] if found.roles is None else found.roles[0].tolist()))]
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
    return ShownRow(number=number, packed=found.packed, tokens=tokens)


def _marks(found: Sequences, samples: bool) -> list[Literal["", "trained", "masked", "padding"]]:
    """Of each token of the row: a token is trained where the one before it has it as its target."""
    size = found.tokens.shape[1]
    if not samples:
        return [""] * size
    trained = np.append(False, found.targets[0, :-1] != IGNORED)
    targets = np.flatnonzero(trained)
    last = found.documents[0, -1]
    padding = (found.documents[0] == last) & ~np.isin(found.documents[0], found.documents[0, targets])
    return ["trained" if one else "padding" if two else "masked" for one, two in zip(trained, padding, strict=True)]

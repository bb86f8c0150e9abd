"""Reports on training data for people: advice, the reading of each source by a run, and `meshwright data show`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Literal

import numpy as np

from meshwright.data.chat.encoder import TRAINED
from meshwright.data.chat.rendering import ROLES, fitting_formats
from meshwright.data.chat.template import DEFAULT, DEFAULT_WITHOUT_BOS
from meshwright.data.corpus.corpus import Corpus, MixedStream, Stream, TokenStream
from meshwright.data.sequences.numbered_rows import MixedRows, NumberedRows, numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows, trained_roles
from meshwright.data.sequences.windows import IGNORED, Sequences
from meshwright.data.text.rows import MalformedRows
from meshwright.data.text.sources import Source
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec import Data, Plan, Recipe
from meshwright.spec.plan.plan import SAMPLES, TEXT
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, PREFERENCES, UNREAD, DataRead
from meshwright.spec.units import count, many

MOST_TIMES = 4
"""Repetitions after which a text teaches ever less (Muennighoff et al. 2023, arXiv:2305.16264)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReading:
    """One source, and what the run reads of it."""

    path: str
    share: float
    """Share of the trained tokens, or of the pairs."""
    tokens: int
    """Tokens of one pass, trained or not."""
    bytes_per_token: float
    """UTF-8 bytes per trained token."""
    rows: int
    """Rows of one pass."""
    times: float
    """Passes that the run makes."""
    overlong: int = 0
    """Samples longer than a row. 0 for text."""
    left_out: int = 0
    """Samples that are in no row."""
    cut_tokens: int = 0
    """Tokens of samples behind the ends of rows."""
    pairs: bool = False
    """Its rows are preferences."""


def readings(
    data: Data, recipe: Recipe, stream: Stream, rows: NumberedRows, read: DataRead = UNREAD
) -> tuple[SourceReading, ...]:
    """Return what a run reads of each source, in the order of the mixture, or of its one source.

    `rows` are those of `stream`, shuffled. `read` is the progress of a resumed run.
    """
    number = recipe.tokens_of_run(read) // recipe.sequence
    if not isinstance(stream, MixedStream) or not isinstance(rows, MixedRows):
        assert isinstance(stream, TokenStream), "only a mixture has a mixed stream"
        return (_read_source(data, 1.0, stream, rows, number),)
    sources = zip(data.sources, stream.weights, stream.parts, rows.rows, rows.interleaving.counts(number), strict=True)
    whole = sum(stream.weights)
    return tuple(
        _read_source(source, weight / whole, part, source_rows, rows_read)
        for source, weight, part, source_rows, rows_read in sources
    )


def _read_source(data: Data, share: float, stream: TokenStream, rows: NumberedRows, rows_read: int) -> SourceReading:
    fitted = rows.fitted if isinstance(rows, SampleRows) else None
    return SourceReading(
        path=data.path,
        share=share,
        tokens=stream.size,
        bytes_per_token=stream.bytes_per_token,
        rows=len(rows),
        times=rows_read / len(rows),
        overlong=fitted.overlong if fitted else 0,
        left_out=fitted.left_out if fitted else 0,
        cut_tokens=fitted.cut_tokens if fitted else 0,
        pairs=isinstance(rows, SampleRows) and rows.pairs,
    )


def describe_run(
    data: Data, recipe: Recipe, stream: Stream, rows: NumberedRows, read: DataRead = UNREAD
) -> tuple[tuple[str, str], ...]:
    """Return (label, sentence) lines for the start of a run.

    They name each source of a mixture and the rows of samples, and note what does not fit, is repeated often, or is
    fewer rows than one step reads.
    """
    sources = readings(data, recipe, stream, rows, read)
    if isinstance(rows, MixedRows):
        lines = [("source", _describe_source(source)) for source in sources]
        parts = list(zip(sources, rows.rows, strict=True))
    else:
        lines = [("rows", _describe_rows(sources[0], rows))] if isinstance(rows, SampleRows) else []
        parts = [(sources[0], rows)]
    notes = [note for source, source_rows in parts for note in _source_notes(source, source_rows, data)]
    if isinstance(rows, SampleRows) and recipe.global_batch > len(rows):
        notes.append(
            f"a step reads {many(recipe.global_batch, 'row')}, and the samples fill {many(len(rows), 'row')}: "
            f"{many(recipe.steps, 'step')} may teach little; recipe.global_batch={len(rows)} makes more steps"
        )
    return (*lines, *(("note", note) for note in notes))


def _describe_source(source: SourceReading) -> str:
    what = "pairs" if source.pairs else "trained tokens"
    return (
        f"{source.path}: {source.share:.1%} of the {what}, {count(source.tokens)} tokens of "
        f"{source.bytes_per_token:.2f} bytes in {many(source.rows, 'row')}, {describe_times(source.times)}"
    )


def _describe_rows(source: SourceReading, rows: SampleRows) -> str:
    samples = many(rows.fitted.retained, "pair" if rows.pairs else "sample")
    return f"{samples} in {many(source.rows, 'row')}, {1 - rows.packed.waste:.1%} full, {describe_times(source.times)}"


def _source_notes(source: SourceReading, rows: NumberedRows, data: Data) -> Iterator[str]:
    name = f"{source.path}: " if data.mixture else ""
    if isinstance(rows, SampleRows):
        yield from (f"{name}{remark}" for remark in note_fit(rows, data))
    if data.mixture and source.times > MOST_TIMES:
        yield (
            f"{name}repeated {source.times:.1f} times, and beyond {MOST_TIMES} a repetition teaches little: take a "
            "lower weight, fewer steps, or more text"
        )


def note_plain_template(data: Data, corpus: Corpus) -> Iterator[str]:
    """Yield a note if the plain template writes the turns because the model has no chat template."""
    if data.form != SAMPLES or corpus.tokenizer.chat_template not in (DEFAULT, DEFAULT_WITHOUT_BOS):
        return
    # Only roles beyond "other" make the template matter.
    if trained_roles(corpus.train) not in ((), ("other",)):
        formats = fitting_formats(corpus.tokenizer)
        suggestion = f"data.template={formats[0]} is a format whose tokens the vocabulary has, and " if formats else ""
        yield (
            "turns are written by the plain template: headings (### user) and an end-of-text token behind answers; "
            f"{suggestion}data.template=FILE selects another, such as chat_template.jinja from a tuned model's folder"
        )


def note_unscored(data: Data, recipe: Recipe, corpus: Corpus) -> Iterator[str]:
    """Yield a note if samples are held out and none of them fits in a row: the run then evaluates nothing."""
    parts = zip(data.sources or (data,), corpus.validation.parts, strict=True)
    held = [
        (part, numbered_rows(source, recipe, corpus, part, shuffle=False))
        for source, part in parts
        if part.num_tokens > 1
    ]
    samples = sum(part.num_documents for part, rows in held if isinstance(rows, SampleRows))
    if samples and not any(len(rows) for _, rows in held):
        yield (
            f"none of {many(samples, 'held-out sample')} fits in a row of {recipe.sequence} tokens: nothing is "
            "evaluated; take a longer recipe.sequence, or data.overlong=truncate"
        )


def note_fit(rows: SampleRows, data: Data) -> Iterator[str]:
    """Yield notes on samples, or pairs, that do not fit, and on pairs with equal answers."""
    fitted, what = rows.fitted, "pair" if rows.pairs else "sample"
    if fitted.overlong and data.overlong == "truncate":
        yield (
            f"{many(fitted.overlong, what)} longer than a row lost {many(fitted.cut_tokens, 'token')} and the end "
            f"of an answer: a longer recipe.sequence keeps them, data.overlong=drop leaves such {what}s out"
        )
    if fitted.left_out:
        short = f", {fitted.untrained:,} of them without a trained token in a row's length" if fitted.untrained else ""
        yield f"{many(fitted.left_out, what)} left out{short}; `meshwright data show` has the lengths"
    if rows.same_pairs:
        has = "pair has" if rows.same_pairs == 1 else "pairs have"
        yield f"{rows.same_pairs:,} {has} two equal answers, which teach nothing"


FEW_BYTES = 2.0
"""Bytes per token below which a tokenizer hardly joins anything: one made for other scripts spells the text by
bytes."""
LEAST_BYTES = 20_000
"""Shortest text that advice is based on."""
IDLE = 4
"""Ratio of the model's rows to the tokenizer's tokens from which advice is given."""
UNITS = "bytes"
_COLUMNS_NAMED = 4
SEARCHED_TOKENS = 2**14
"""Tokens at the beginning of each source that are searched for spelled special tokens."""
LONGEST_OF_HTML = 4
"""Letters of `</s>`, which is a token of Llama 2 and a tag of HTML."""


def advice(plan: Plan, corpus: Corpus) -> tuple[str, ...]:
    """Return sentences for the first lines of a run. Empty = everything fits."""
    sentences = []
    streams, tokenizer = (corpus.train, corpus.validation), corpus.tokenizer
    text, tokens = (sum(getattr(stream, f"num_{what}") for stream in streams) for what in ("bytes", "tokens"))
    poor = tokens > 0 and text / tokens < FEW_BYTES and text >= LEAST_BYTES and plan.data.tokenizer != UNITS
    if poor:
        size = max(512, min(plan.model.vocab, 4096))
        sentences.append(
            f"the tokenizer does not fit this text: {text / tokens:.2f} bytes per token; data.tokenizer=bpe:{size} "
            "trains one on it, which puts more text into as many tokens"
        )
    elif plan.model.vocab >= IDLE * tokenizer.vocab:
        sentences.append(
            f"model.vocab={plan.model.vocab} has {plan.model.vocab - tokenizer.vocab:,} rows that the "
            f"{tokenizer.vocab:,} tokens of the tokenizer never use: model.vocab={tokenizer.vocab} saves them"
        )
    if spelled := spelled_tokens(plan, corpus):
        sentences.append(
            f"the text spells {' and '.join(spelled)} of the tokenizer, and data.form=text reads them as letters: "
            "data.form=samples reads them as tokens, as transformers does"
        )
    if corpus.unread:
        sentences.append(f"columns that are not read: {named_columns(corpus.unread)}")
    if corpus.malformed.malformed:
        sentences.append(corpus.malformed.note)
    return tuple(sentences)


def spelled_tokens(plan: Plan, corpus: Corpus) -> tuple[str, ...]:
    """Return at most two special tokens that the beginning of a text spells, where they are encoded as letters."""
    if plan.data.form != TEXT:
        return ()
    special = (corpus.tokenizer.decode([token]) for token in sorted(corpus.tokenizer.special_ids))
    names = [name for name in special if len(name) > LONGEST_OF_HTML]
    beginnings = "\n".join(_letters(corpus.tokenizer, part) for part in corpus.train.parts)
    return tuple(name for name in names if name in beginnings)[:2]


def _letters(tokenizer: Tokenizer, stream: TokenStream) -> str:
    """Decode the first tokens, with a line for each piece between special ones."""
    ids = stream.read(0, min(stream.size, SEARCHED_TOKENS)).tolist()
    pieces = groupby(ids, key=tokenizer.special_ids.__contains__)
    return "\n".join(tokenizer.decode(list(piece)) for special, piece in pieces if not special)


def named_columns(unread: Mapping[str, int]) -> str:
    """Name the first few columns with the number of rows that have them."""
    columns = [f"{name} ({many(rows, 'row')})" for name, rows in islice(unread.items(), _COLUMNS_NAMED)]
    return ", ".join(columns) + (f" and {len(unread) - _COLUMNS_NAMED} more" if len(unread) > _COLUMNS_NAMED else "")


def describe_times(times: float) -> str:
    """Say how many times a text is read."""
    return f"read {times:.1f} times" if times >= 1.05 else f"{times:.0%} of it is read"


QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_SEARCHED_ROWS = 256
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
    parts = list(zip(data.sources or (data,), corpus.train.parts, strict=True))
    sources, tokenizer = [Source(source) for source, part in parts if not part.is_stored], corpus.tokenizer
    sampler = numbered_rows(data, recipe, corpus, corpus.train, shuffle=True)
    aside = numbered_rows(data, recipe, corpus, corpus.validation, shuffle=False)
    short = sum(-(-max(0, part.num_tokens - 1) // recipe.sequence) for part in corpus.validation.parts)
    first, *more = _rows(corpus, sampler, rows)
    run, streams = recipe.over(len(sampler)), (corpus.train, corpus.validation)
    return DataView(
        source=sources[0].title if sources and not data.mixture else data.title,
        files=sum(len(source.files) for source in sources) + sum(part.files for _, part in parts),
        passed_over=tuple(str(path) for source in sources for path in source.passed_over),
        tokenizer=data.tokenizer,
        vocab=tokenizer.vocab,
        bos="".join(map(tokenizer.spell, tokenizer.document_marks[0])) or None,
        eos=None if tokenizer.eos is None else tokenizer.spell(tokenizer.eos),
        sequence=recipe.sequence,
        bytes_per_token=sum(stream.num_bytes for stream in streams) / sum(stream.num_tokens for stream in streams),
        train=_count_stream(corpus.train, len(sampler)),
        validation=_count_stream(corpus.validation, len(aside) if data.form == "samples" else short),
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


def _sample_figures(stream: Stream, sampler: NumberedRows, data: Data) -> SampleFigures:
    """Return the figures of all sources together."""
    lengths = [np.diff(np.append(part.starts, part.size)) for part in stream.parts]
    source_rows = sampler.rows if isinstance(sampler, MixedRows) else [sampler]
    parts = [rows for rows in source_rows if isinstance(rows, SampleRows)]
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


def _count_stream(stream: Stream, windows: int) -> StreamFigures:
    return StreamFigures(
        documents=stream.num_documents, bytes=stream.num_bytes, tokens=stream.num_tokens, windows=windows
    )


def _rows(corpus: Corpus, sampler: NumberedRows, rows: int) -> list[ShownRow]:
    """Return the first row with a border, and those after it."""
    numbers = range(min(_SEARCHED_ROWS, len(sampler)))
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

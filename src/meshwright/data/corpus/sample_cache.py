"""Cache of samples: a fine-tuning file is encoded once and its tokens are stored by content."""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat import samples
from meshwright.data.chat.encoder import TRAINED, EncodedSample, SampleSettings, unpack
from meshwright.data.chat.rendering import AUTO, check_format, named_template, template_text
from meshwright.data.corpus.corpus import (
    Corpus,
    Progress,
    TokenFile,
    TokenStream,
    lock,
    map_numbers,
    new_folder,
    read_json,
    sync,
    write_json,
)
from meshwright.data.corpus.pool import Pool, group_by_size
from meshwright.data.corpus.token_cache import STREAMS, load, malformed_entry
from meshwright.data.text.rows import Malformed, MalformedRows, Row
from meshwright.data.text.sources import Source
from meshwright.data.tokens.tokenizer import Tokenizer, choose
from meshwright.spec import Data
from meshwright.spec.errors import DataError, MalformedRowError

FORMAT: Final = 7
"""Version of the cache, raised whenever the same rows would be stored differently."""
_BATCH_CHARACTERS: Final = 2**17
_MALFORMED: Final = 0
"""Stand-in for the hash of a row's content. Hashes have 64 bits, and none is expected to be 0."""
_LIMIT_S: Final = 60.0
"""Time limit for the rows of a batch. A template needs less than a millisecond per row."""


def settings(data: Data, tokenizer: Tokenizer) -> SampleSettings:
    """Return the settings that decide tokens. Raises DataError for a missing template or one with unknown tokens."""
    check_format(data.template, tokenizer)
    return SampleSettings(
        template=named_template(data.template) or template_text(tokenizer),
        tool_template="" if data.template != AUTO else tokenizer.tool_template or "",
        special=tokenizer.spelled,
        begins=tokenizer.begins,
        eos=tokenizer.eos,
        today=date.today().isoformat(),
        train_on=data.train_on,
        thinking=data.thinking,
        template_file="" if data.template == AUTO else data.template,
    )


def prepare(data: Data, source: Source, root: Path, processes: int | None, progress: Progress | None) -> Corpus:
    """Return the samples, encoded now or read from the cache in `root`. Raises DataError, OSError."""
    tokenizer = choose(data.tokenizer, source.folder, iter(()))
    chosen = settings(data, tokenizer)
    if tokenizer.chat_template != chosen.template:  # a model goes with the template that it was trained by
        tokenizer = tokenizer.with_template(chosen.template)
    skips, signature = source.skips, source.signature()
    known, contents = _read_contents(root / "index" / f"samples-{signature}.json", source, skips=bool(skips))
    decides = {name: setting for name, setting in asdict(chosen).items() if name not in ("today", "template_file")}
    content = repr((FORMAT, known["content"], tokenizer.fingerprint, tokenizer.vocab, data.validation, decides, *skips))
    fingerprint = hashlib.blake2b(content.encode(), digest_size=20).hexdigest()
    name = fingerprint
    if skips:  # the folder holds complaints, which name a file and its lines: files with equal rows have one each
        named_by = data.path if source.is_in_memory else signature
        name = hashlib.blake2b(repr((fingerprint, named_by)).encode(), digest_size=20).hexdigest()
    folder = root / "samples" / name[:24]
    with lock(folder):
        if (corpus := load(folder, tokenizer, fingerprint, _open_stream)) is None:
            build = _SampleBuild(data, source, tokenizer, chosen, contents, processes, progress)
            try:
                build.into(folder, fingerprint)
            except _UnrenderedRows as error:
                replace(build, contents=error.contents).into(folder, fingerprint)
            corpus = load(folder, tokenizer, fingerprint, _open_stream)
    if corpus is None:
        raise DataError(f"token cache: {folder} was damaged while being created: rerun")
    return replace(corpus, unread=known["unread"])


def _read_contents(index: Path, source: Source, *, skips: bool) -> tuple[dict[str, Any], NDArray[np.uint64]]:
    """Return the contents of a file and a hash of each row. They are read once and stored next to the cache."""
    known, rows_file = read_json(index), index.with_suffix(".rows")
    whole = known.get("content") and "unread" in known and rows_file.is_file()
    if whole and rows_file.stat().st_size == 8 * known["rows"]:
        return known, np.fromfile(rows_file, np.uint64)
    known, contents = _count(source, skips=skips)
    index.parent.mkdir(parents=True, exist_ok=True)
    # Before the index, which names the number of rows: a crash in between is noticed.
    contents.tofile(rows_file)
    write_json(index, known)
    return known, contents


def _count(source: Source, *, skips: bool) -> tuple[dict[str, Any], NDArray[np.uint64]]:
    """Read all rows once and return number, hashes and unused columns. `skips` = malformed rows have no hash."""
    seen, contents, unread = hashlib.blake2b(digest_size=20), bytearray(), Counter[str]()
    for where, row in source.rows():
        # A malformed row has no content to hash, but it keeps its number in the file.
        if isinstance(row, Malformed) or (skips and not samples.is_sample((where, row))):
            seen.update(b"malformed")
            contents += np.uint64(_MALFORMED).tobytes()
            continue
        content = json.dumps(row, default=str).encode()
        seen.update(content)
        contents += hashlib.blake2b(content, digest_size=8).digest()
        unread.update(samples.find_unread_columns(row))
    if not contents:
        raise DataError(f"data.path={source.title} holds no rows")
    known = {"content": seen.hexdigest(), "rows": len(contents) // 8, "unread": dict(unread.most_common())}
    return known, np.frombuffer(bytes(contents), np.uint64)


def choose_held_out(contents: NDArray[np.uint64], share: float) -> frozenset[int]:
    """Return the numbers of the held-out rows, chosen by the hash of their content, whatever their order.

    Equal rows are held out together. At least one row is held out for a share above 0, but never all.
    """
    well_formed = contents[contents != _MALFORMED]
    # Hashes are in order after this: the smallest are held out, which is a random choice.
    distinct, times = np.unique(well_formed, return_counts=True)
    wanted = max(1, round(len(well_formed) * share)) if share else 0
    number = int(np.searchsorted(np.cumsum(times), wanted)) + 1 if wanted else 0
    # At least one distinct row stays for training, however large the share.
    aside = np.isin(contents, distinct[: min(number, len(distinct) - 1)])
    return frozenset(np.flatnonzero(aside).tolist())


class _UnrenderedRows(Exception):
    """Rows turned out to be malformed when they were rendered, after they had a part in the split."""

    def __init__(self, contents: NDArray[np.uint64]) -> None:
        self.contents = contents
        """Hash of each row, without those of these rows."""


@final
@dataclass(frozen=True, slots=True)
class _SampleBuild:
    """One encoding of all rows into a new cache folder."""

    data: Data
    source: Source
    tokenizer: Tokenizer
    settings: SampleSettings
    contents: NDArray[np.uint64]
    """Hash of each row."""
    processes: int | None
    progress: Progress | None

    def into(self, folder: Path, fingerprint: str) -> None:
        """Create the complete folder, or leave nothing."""
        with new_folder(folder) as new, contextlib.ExitStack() as open_files:
            streams = [open_files.enter_context(_SampleWriter(new / name, self.tokenizer)) for name in STREAMS]
            malformed = self._encode(streams)
            self._check(streams)
            meta = {name: stream.counts for name, stream in zip(STREAMS, streams, strict=True)}
            open_files.close()
            files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
            content = {"fingerprint": fingerprint, "files": files, "streams": meta}
            write_json(new / "meta.json", content | malformed_entry(malformed))

    def _encode(self, streams: list["_SampleWriter"]) -> MalformedRows:
        """Write the streams and return the rows that were left out. Raises _UnrenderedRows."""
        aside, malformed = choose_held_out(self.contents, self.data.validation), MalformedRows()
        unrendered: list[int] = []
        with Pool(self.tokenizer, self.processes, samples=json.dumps(asdict(self.settings)), limit_s=_LIMIT_S) as pool:
            batches = group_by_size(map(_serialize_row, self.source.rows()), len, _BATCH_CHARACTERS)
            for packed_rows in pool.map((bytes(len(batch)), batch) for batch in batches):
                for row in packed_rows:
                    try:
                        for group in unpack(row):
                            # True = 1 = the validation stream.
                            streams[malformed.rows in aside].write(group, malformed.rows)
                    except MalformedRowError as error:
                        malformed.add(str(error))
                        unrendered.append(malformed.rows)
                    malformed.rows += 1
                if self.progress is not None:
                    self.progress(malformed.rows, len(self.contents))
        if malformed.malformed and (self.data.malformed == "refuse" or malformed.malformed == malformed.rows):
            raise malformed.refusal("samples")
        # The split was chosen by row numbers of the first reading.
        if malformed.rows != len(self.contents):
            raise DataError(f"{self.source.title} changed while it was read: run again when nothing writes there")
        contents = self.contents.copy()
        contents[unrendered] = _MALFORMED
        if aside != choose_held_out(contents, self.data.validation):
            raise _UnrenderedRows(contents)
        return malformed

    def _check(self, streams: list["_SampleWriter"]) -> None:
        """Raise DataError for signs of a wrong mask: nothing is trained, everything is, or no answer ever ends."""
        tokens, trained, ends, samples = (
            sum(getattr(stream, name) for stream in streams) for name in ("tokens", "trained", "ends", "samples")
        )
        about = f"{self.source.title}, data.train_on={self.data.train_on}"
        if any(stream.pairs for stream in streams) and any(stream.singles for stream in streams):
            raise DataError(
                f"{self.source.title} has rows with chosen and rejected, and rows without: put them in two files"
            )
        roles = any(stream.roles for stream in streams)
        if not roles and self.data.train_on not in ("auto", "last", "all"):
            raise DataError(f"{about} names roles, and no row has any: take data.train_on=auto or all")
        if not trained:
            raise DataError(f"no token of {about} is trained: every one is masked; see `meshwright data show`")
        masked = tokens - trained - samples  # nothing predicts a sample's first token: that it is masked says nothing
        if masked <= 0 and roles and self.data.train_on != "all":
            raise DataError(f"every token of {about} is trained, prompts too: say data.train_on=all if that is meant")
        if not ends and masked > 0 and self.tokenizer.eos is None and not roles:
            raise DataError(
                f"no answer of {about} ends, so the model would not learn to stop. "
                f"data.tokenizer={self.data.tokenizer} names no end-of-text token: name eos_token in the "
                "tokenizer_config.json beside it"
            )
        if not ends and roles:
            raise DataError(
                f"no answer of {about} ends with a special token, so the model would not learn to stop: add "
                "eos_token after an answer in the chat template, inside of the generated part"
            )


def _serialize_row(row: Row) -> str:
    location, fields = row
    return json.dumps([location, fields.complaint if isinstance(fields, Malformed) else fields], default=str)


@final
class _SampleWriter:
    """Writer of one stream: ids, marks, first tokens and rows of samples to NAME.tokens, .marks, .starts, .rows."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._dtype = path, tokenizer.dtype
        ends = tokenizer.special_ids | ({tokenizer.eos} if tokenizer.eos is not None else set())
        self._special = np.array(sorted(ends), dtype=self._dtype)
        self.tokens = self.trained = self.ends = self.samples = self.bytes = self.same = 0
        self.roles = self.pairs = self.singles = False
        self._decode = tokenizer.decode

    def __enter__(self) -> "_SampleWriter":
        self._files: dict[str, BinaryIO] = {
            name: self._path.with_suffix(f".{name}").open("wb", buffering=2**20)
            for name in ("tokens", "marks", "starts", "rows")
        }
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            try:
                if error[0] is None:
                    sync(file)
            finally:
                file.close()

    def write(self, group: list[EncodedSample], row: int) -> None:
        """Append a group of samples made of one row of the file."""
        self.pairs |= len(group) == 2
        self.singles |= len(group) == 1
        # Equal answers teach a preference nothing. Their number is reported to the user.
        self.same += len(group) == 2 and group[0].ids == group[1].ids
        for sample in group:
            ids, marks = np.frombuffer(sample.ids, self._dtype), np.frombuffer(sample.marks, np.uint8)
            self._files["starts"].write(np.int64(self.tokens).tobytes())
            self._files["rows"].write(np.int64(row).tobytes())
            self._files["tokens"].write(sample.ids)
            self._files["marks"].write(sample.marks)
            # Only trained tokens count: bits per byte are of the text that the loss is about.
            chosen = ids[(marks & TRAINED) > 0]
            self.tokens += len(ids)
            self.samples += 1
            self.trained += len(chosen)
            self.bytes += len(self._decode(chosen).encode())
            self.ends += self._ends_whole(chosen)
            self.roles |= bool((marks & ~np.uint8(TRAINED)).any())

    def _ends_whole(self, chosen: NDArray[Any]) -> bool:
        """Return whether the last trained token, apart from blanks, is special."""
        for last in np.flatnonzero(np.isin(chosen, self._special))[-1:].tolist():
            return not self._decode(chosen[last + 1 :]).strip()
        return False

    @property
    def counts(self) -> dict[str, int]:
        """Counts for meta.json."""
        return {
            "tokens": self.tokens, "trained": self.trained, "samples": self.samples, "bytes": self.bytes,
            "pairs": int(self.pairs), "same_pairs": self.same,
        }  # fmt: skip


def _open_stream(path: Path, counts: Mapping[str, int], tokenizer: Tokenizer) -> TokenStream:
    file = path.with_suffix(".tokens")
    return TokenStream(
        tokens=map_numbers(file, tokenizer.dtype, counts["tokens"]),
        starts=map_numbers(path.with_suffix(".starts"), np.dtype(np.int64), counts["samples"]),
        rows=map_numbers(path.with_suffix(".rows"), np.dtype(np.int64), counts["samples"]),
        marks=map_numbers(path.with_suffix(".marks"), np.dtype(np.uint8), counts["tokens"]),
        num_tokens=counts["trained"],
        num_bytes=counts["bytes"],
        num_documents=counts["samples"],
        file=TokenFile(file, tokenizer.dtype) if hasattr(os, "pread") else None,
        pairs=bool(counts["pairs"]),
        same_pairs=counts["same_pairs"],
    )

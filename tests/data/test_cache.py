"""Tokens on disk: found again by content, whole or not there, made once by many."""

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import Sampler
from meshwright.data.corpus import corpus as corpus_module
from meshwright.data.corpus import pool, token_cache
from meshwright.data.corpus.corpus import Corpus
from meshwright.data.preparation import prepare
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec import Data, user_cache
from meshwright.spec.errors import DataError
from tests.data.tokenizers_for_tests import before


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        body = f"Document {number} says: na\u00efve \u65e5\u672c \U0001f600.\n" * (number + 1)
        (folder / f"{number:02}.txt").write_text(body, encoding="utf-8")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def decoded(corpus: Corpus) -> list[str]:
    """Every document of both streams, marks taken off and checked."""
    tokenizer, texts = corpus.tokenizer, []
    for stream in (corpus.train, corpus.validation):
        for tokens in np.split(stream.tokens, stream.starts[1:]) if stream.num_documents else ():
            if tokenizer.bos is not None:
                assert tokens[0] == tokenizer.bos
                tokens = tokens[1:]
            if tokenizer.eos is not None and not tokenizer.separator:
                assert tokens[-1] == tokenizer.eos
                tokens = tokens[:-1]
            texts.append(tokenizer.decode(tokens))
    return texts


def test_every_document_is_there_with_its_marks(texts: Path, root: Path) -> None:
    corpus = prepare(Data(path=str(texts), validation=0.1), cache_root=root)
    assert sorted(decoded(corpus)) == sorted(path.read_text(encoding="utf-8") for path in texts.iterdir())
    whole = sum(path.stat().st_size for path in texts.iterdir())
    assert corpus.train.num_bytes + corpus.validation.num_bytes == whole
    assert corpus.validation.num_bytes == pytest.approx(0.1 * whole, rel=0.1)
    assert corpus.train.tokens.dtype == np.uint16 and isinstance(corpus.train.tokens, np.memmap)
    assert (
        corpus.train.num_tokens == len(corpus.train.tokens) and len(corpus.train.starts) == corpus.train.num_documents
    )
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.tokens[0] = 1


def test_begin_and_end_marks_of_a_tokenizer_with_both(texts: Path, root: Path, tmp_path: Path) -> None:
    bytes_tokenizer = json.loads(Tokenizer.bytes().json)
    for index, name in enumerate(("<s>", "</s>")):
        token = {"id": 257 + index, "content": name, "special": True, "single_word": False}
        bytes_tokenizer["added_tokens"].append({**token, "lstrip": False, "rstrip": False, "normalized": False})
    bytes_tokenizer["post_processor"] = before(bytes_tokenizer, "<s>")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(bytes_tokenizer), encoding="utf-8")
    corpus = prepare(Data(path=str(texts), tokenizer=str(file)), cache_root=root)
    assert not corpus.tokenizer.separator
    assert sorted(decoded(corpus)) == sorted(path.read_text(encoding="utf-8") for path in texts.iterdir())
    assert corpus.train.num_tokens == corpus.train.num_bytes + 2 * corpus.train.num_documents


def test_processes_give_the_tokens_of_one(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_ALONE_BYTES", 0)
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 2000)
    seen: list[tuple[int, int]] = []
    alone = prepare(Data(path=str(texts)), cache_root=root / "1", processes=1)
    both = prepare(Data(path=str(texts)), cache_root=root / "2", processes=2, progress=lambda *at: seen.append(at))
    assert alone.fingerprint == both.fingerprint
    for name in ("train", "validation"):
        first, second = getattr(alone, name), getattr(both, name)
        assert np.array_equal(first.tokens, second.tokens) and np.array_equal(first.starts, second.starts)
    total = alone.train.num_bytes + alone.validation.num_bytes
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) > 5


def test_the_second_time_nothing_is_read(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(Data(path=str(texts)), cache_root=root)
    monkeypatch.setattr(token_cache.sources, "survey", lambda documents: pytest.fail("the text was read again"))
    assert prepare(Data(path=str(texts)), cache_root=root).key == first.key


def test_the_key_is_the_content(texts: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(Data(path=str(texts)), cache_root=root)
    moved = tmp_path / "moved"
    texts.rename(moved)
    (moved / "00.txt").touch()
    monkeypatch.setattr(token_cache._Build, "into", lambda *arguments: pytest.fail("equal text was encoded again"))
    assert prepare(Data(path=str(moved)), cache_root=root).key == first.key


def test_the_key_changes_with_whatever_changes_the_tokens(texts: Path, root: Path) -> None:
    def key(**settings: object) -> str:
        return prepare(Data(path=str(texts), **settings), cache_root=root).key  # type: ignore[arg-type]

    keys = [key(), key(tokenizer="bytes"), key(validation=0.2), key(limit_bytes=3000)]
    (texts / "00.txt").write_text("changed", encoding="utf-8")
    assert len({*keys, key()}) == 5


@pytest.mark.parametrize("damage", ["truncate", "grow", "remove", "meta", "foreign"])
def test_a_damaged_cache_is_made_anew(texts: Path, root: Path, damage: str) -> None:
    first = prepare(Data(path=str(texts)), cache_root=root)
    expected = np.array(first.train.tokens)
    folder = root / "tokens" / first.key
    tokens, meta = folder / "train.tokens", folder / "meta.json"
    if damage == "truncate":
        os.truncate(tokens, tokens.stat().st_size - 2)
    elif damage == "grow":
        os.truncate(tokens, tokens.stat().st_size + 2)
    elif damage == "remove":
        (folder / "validation.starts").unlink()
    elif damage == "meta":
        meta.write_text(meta.read_text(encoding="utf-8")[:40], encoding="utf-8")
    else:
        meta.write_text("[]", encoding="utf-8")
    again = prepare(Data(path=str(texts)), cache_root=root)
    assert again.key == first.key and np.array_equal(again.train.tokens, expected)
    assert sorted(path.name for path in (root / "tokens").iterdir() if path.is_dir()) == [first.key]


def test_no_held_out_part(texts: Path, root: Path) -> None:
    corpus = prepare(Data(path=str(texts), validation=0), cache_root=root)
    assert corpus.validation.num_tokens == corpus.validation.num_documents == len(corpus.validation.tokens) == 0
    assert corpus.train.num_documents == 40


def test_a_tokenizer_is_trained_once(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(Data(path=str(texts), tokenizer="bpe:270"), cache_root=root)
    assert first.tokenizer.vocab == 270
    monkeypatch.setattr(Tokenizer, "train", lambda *arguments: pytest.fail("trained again"))
    assert prepare(Data(path=str(texts), tokenizer="bpe:270"), cache_root=root).key == first.key


def _prepare_in_child(texts: str, root: str, barrier: "multiprocessing.synchronize.Barrier", out: str) -> None:
    barrier.wait()
    Path(out).write_text(prepare(Data(path=texts), cache_root=Path(root), processes=1).fingerprint, encoding="utf-8")


def test_several_at_once_all_end_well(texts: Path, root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    outs = [tmp_path / f"out{number}" for number in range(3)]
    children = [
        context.Process(target=_prepare_in_child, args=(str(texts), str(root), barrier, str(out))) for out in outs
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len({out.read_text(encoding="utf-8") for out in outs}) == 1
    assert len([path for path in (root / "tokens").iterdir() if path.is_dir()]) == 1


def test_two_without_file_locks_keep_one(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other finishes while this one still encodes: its folder is there already."""
    inner, once = token_cache._Build.into, []

    def into(self: token_cache._Build, folder: Path, fingerprint: str) -> None:
        if not once:
            once.append(True)
            inner(self, folder, fingerprint)
        inner(self, folder, fingerprint)

    monkeypatch.setattr(token_cache._Build, "into", into)
    corpus = prepare(Data(path=str(texts)), cache_root=root)
    assert len(decoded(corpus)) == 40
    assert len([path for path in (root / "tokens").iterdir() if path.is_dir()]) == 1


def test_nothing_half_written_stays(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache._Writer, "write", full)
    with pytest.raises(DataError, match="No space left on device; set XDG_CACHE_HOME to a folder with room"):
        prepare(Data(path=str(texts)), cache_root=root)
    assert [path.name for path in (root / "tokens").iterdir() if path.is_dir()] == []


def test_what_a_killed_process_left_is_removed(texts: Path, root: Path) -> None:
    key = prepare(Data(path=str(texts)), cache_root=root).key
    left = root / "tokens" / f".{key}.abcdef"
    left.mkdir()
    (left / "train.tokens").write_bytes(b"half")
    other = root / "tokens" / ".anotherkey.abcdef"
    other.mkdir()
    (root / "tokens" / key / "meta.json").unlink()
    assert prepare(Data(path=str(texts)), cache_root=root).key == key
    assert not left.exists() and other.exists()


def test_workers_end_without_a_word_when_their_parent_is_killed(tmp_path: Path) -> None:
    lines = [
        "import os",
        "from meshwright.data import Tokenizer",
        "from meshwright.data.corpus.pool import Pool",
        "with Pool(Tokenizer.bytes(), 2) as pool:",
        "    batches = ((b'\\0', ['x' * 1000000]) for _ in range(1000))",
        "    next(pool.map(batches))",
        "    os.kill(os.getpid(), 9)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    # stderr is inherited by the workers, so run() returns only when they are gone too.
    assert (done.returncode, done.stderr) == (-9, "")


def test_a_cache_that_cannot_be_written(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        prepare(Data(path=str(texts)), cache_root=tmp_path / "file")


def test_text_that_changes_while_it_is_read(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = token_cache.sources.choose

    def and_change(*arguments: object) -> object:
        (texts / "39.txt").write_text("other", encoding="utf-8")
        return choose(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(token_cache.sources, "choose", and_change)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(Data(path=str(texts)), cache_root=root)
    assert [path.name for path in (root / "tokens").iterdir() if path.is_dir()] == []


def test_empty_texts_are_refused(tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="holds no text: every document is empty"):
        prepare(Data(path=str(tmp_path / "empty.txt")), cache_root=root)


def test_an_encoding_process_that_dies(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_ALONE_BYTES", 0)
    monkeypatch.setattr(pool, "_START", "import sys; sys.stdin.buffer.readline(); sys.exit(7)")
    with pytest.raises(DataError, match="an encoding process ended with exit code 7"):
        prepare(Data(path=str(texts)), cache_root=root, processes=2)
    assert [path.name for path in (root / "tokens").iterdir() if path.is_dir()] == []


def test_an_error_in_an_encoding_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start = pool._START.replace("serve()", "w = sys.modules['meshwright.data.corpus.worker'].word_encoder; ") + (
        "w.encoder = lambda *a: (lambda texts, flags: 1 / 0); serve()"
    )
    monkeypatch.setattr(pool, "_START", start)
    with (
        pytest.raises(DataError, match="encoding failed: ZeroDivisionError: division by zero"),
        pool.Pool(Tokenizer.bytes(), 2) as encoders,
    ):
        list(encoders.map([(b"\0", ["text"])]))


def test_preparing_does_not_run_the_callers_script_again(texts: Path, tmp_path: Path) -> None:
    """Scripts without a main guard are common, and must not start themselves over and over."""
    script = tmp_path / "script.py"
    lines = [
        "from meshwright.data import prepare; from meshwright.data.corpus import token_cache",
        "from meshwright.spec import Data",
        "token_cache._ALONE_BYTES = 0",
        "print('once')",
        f"prepare(Data(path={str(texts)!r}), cache_root=token_cache.Path({str(tmp_path / 'c')!r}), processes=2)",
    ]
    script.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


def test_windows_are_read_past_the_mapping(texts: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_SMALL_BYTES", 0)
    stream = prepare(Data(path=str(texts)), cache_root=root).train
    assert np.array_equal(stream.read(3, 50), stream.tokens[3:50])
    starts = np.array(stream.starts)
    stream.release()
    assert np.array_equal(stream.starts, starts)
    sampler = Sampler(stream, sequence=16, tokenizer_separator=True, seed=0)
    plain = Sampler(dataclasses.replace(stream, file=None), sequence=16, tokenizer_separator=True, seed=0)
    assert np.array_equal(sampler.take(5, 9).targets, plain.take(5, 9).targets)


def test_a_file_truncated_in_use_is_told(texts: Path, root: Path) -> None:
    corpus = prepare(Data(path=str(texts)), cache_root=root)
    os.truncate(root / "tokens" / corpus.key / "train.tokens", 10)
    with pytest.raises(DataError, match="was truncated during reading: rerun"):
        corpus.train.read(0, 50)


def test_sampling_keeps_the_process_small(tmp_path: Path) -> None:
    """Half a gigabyte of tokens read at random all over; a mapping would make most of it resident."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux to tell resident memory")
    file, tokens = tmp_path / "big.tokens", 2**28
    with file.open("wb") as out:
        os.truncate(out.fileno(), 2 * tokens)
    lines = [
        "import sys, numpy as np",
        "from meshwright.data.corpus.corpus import TokenFile, TokenStream",
        "from meshwright.data import Sampler",
        f"file, n = {str(file)!r}, {tokens}",
        "stream = TokenStream(tokens=np.memmap(file, np.uint16, 'r'), starts=np.arange(0, n, 10**6), num_tokens=n,",
        "                     num_bytes=n, num_documents=n // 10**6 + 1, file=TokenFile(file, np.dtype('u2')))",
        "sampler = Sampler(stream, sequence=512, tokenizer_separator=True, seed=0)",
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096",
        "before = resident()",
        "for number in range(40): sampler.take(number * 64, 64)",
        "print(resident() - before)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**24


def test_the_cache_lies_where_the_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache.default_root() == tmp_path / "meshwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache.default_root() == Path.home() / ".cache" / "meshwright"


def test_a_cache_that_cannot_be_written_costs_time_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words " * 200)
    data = Data(path=str(tmp_path / "texts"), tokenizer="bytes")
    expected = prepare(data, cache_root=tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    corpora = [prepare(data) for _ in range(2)]
    assert all(corpus.fingerprint == expected.fingerprint for corpus in corpora)
    assert len(caplog.messages) == 1 and "text is encoded at each start" in caplog.text
    assert f"{tmp_path}/file/meshwright" in caplog.text

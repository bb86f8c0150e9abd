"""Samples on disk: made once by bounded processes, found again by content, refused in one sentence."""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.chat.encoder import TRAINED
from meshwright.data.corpus import sample_cache
from meshwright.data.corpus.corpus import Corpus
from meshwright.data.preparation import prepare
from meshwright.data.report import named_columns
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import CHATML, QWEN3, tokenizer_json, unmarked
from tests.data.test_rendering import turns
from tests.data.tokenizers_for_tests import made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with ChatML's tokens and template, as a model's folder has them."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("llama3"), encoding="utf-8")
    config = {"bos_token": None, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(unmarked(CHATML), encoding="utf-8")
    return tmp_path


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chats(number: int) -> list[Any]:
    return [
        {"messages": turns(f"question {index}", f"answer {index} \U0001f600" * (1 + index % 5))}
        for index in range(number)
    ]


def prepared(folder: Path, *, processes: int = 1, root: Path | None = None, **data: Any) -> Corpus:
    path = data.pop("path", folder / "chat.jsonl")
    settings = Data(path=str(path), form="samples", tokenizer=str(folder), **{"validation": 0.0, **data})
    return prepare(settings, cache_root=root or folder / "cache", processes=processes)


def trained_texts(corpus: Corpus) -> list[str]:
    texts = []
    for stream in (corpus.train, corpus.validation):
        assert stream.marks is not None
        for begin, end in pairwise([*stream.starts, len(stream.tokens)]):
            marks = np.asarray(stream.marks[begin:end])
            texts.append(corpus.tokenizer.decode(stream.read(int(begin), int(end))[marks & TRAINED > 0]))
    return texts


def refused(folder: Path, **more: Any) -> str:
    with pytest.raises(DataError) as error:
        prepared(folder, **more)
    return str(error.value)


def test_answers_are_on_disk_with_their_ends(folder: Path) -> None:
    write(folder, chats(20))
    corpus = prepared(folder, validation=0.25)
    assert (corpus.train.num_documents, corpus.validation.num_documents) == (15, 5)
    expected = [chat["messages"][1]["content"] + "<|im_end|>" for chat in chats(20)]
    assert sorted(trained_texts(corpus)) == sorted(expected)
    counted = corpus.train.num_bytes + corpus.validation.num_bytes
    assert counted == sum(len(text.encode()) for text in expected)


def test_equal_rows_are_held_out_together(folder: Path) -> None:
    """Whatever the order of a file: what is scored was never trained."""
    write(folder, chats(10) * 10)
    first = prepared(folder, validation=0.2)
    write(folder, [row for row in reversed(chats(10)) for _ in range(10)])
    second = prepared(folder, validation=0.2)
    for corpus in (first, second):
        texts = trained_texts(corpus)
        trained, scored = set(texts[: corpus.train.num_documents]), set(texts[corpus.train.num_documents :])
        assert len(scored) == 2 and not trained & scored and corpus.validation.num_documents == 20
    assert trained_texts(first)[-20:] != [] and set(trained_texts(first)[-20:]) == set(trained_texts(second)[-20:])


def test_rows_that_are_all_equal_are_trained(folder: Path) -> None:
    write(folder, chats(1) * 8)
    corpus = prepared(folder, validation=0.25)
    assert (corpus.train.num_documents, corpus.validation.num_documents) == (8, 0)


def test_roles_of_rows_without_any_are_refused(folder: Path) -> None:
    write(folder, [{"prompt": f"q{number}", "completion": f"a{number}"} for number in range(4)])
    assert "names roles, and no row has any: take data.train_on=auto or all" in refused(folder, train_on="user")


def test_samples_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    write(folder, [{"messages": turns(f"question {number} " * 80, f"answer {number}")} for number in range(300)])
    single, three = (prepared(folder, processes=number, root=folder / str(number)) for number in (1, 3))
    assert single.fingerprint == three.fingerprint
    for stream, other in ((single.train, three.train), (single.validation, three.validation)):
        assert np.array_equal(stream.tokens, other.tokens) and np.array_equal(stream.starts, other.starts)
        assert np.array_equal(stream.marks, other.marks)


def test_a_second_time_nothing_is_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content decides: a touched file is read but not encoded again, a changed one is."""
    path = write(folder, chats(6))
    first = prepared(folder)
    monkeypatch.setattr(sample_cache, "Pool", None)
    assert prepared(folder).key == first.key
    os.utime(path, (1, 1))
    assert prepared(folder).key == first.key
    monkeypatch.undo()
    write(folder, chats(7))
    changed = prepared(folder)
    assert changed.key != first.key and changed.train.num_documents == 7
    for setting in ({"train_on": "all"}, {"thinking": "drop"}, {"validation": 0.5}):
        assert prepared(folder, **setting).key not in (first.key, changed.key)
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert prepared(folder).key != changed.key


def test_a_template_of_ones_own(folder: Path) -> None:
    write(folder, [{"messages": turns("u", "<think>\nt\n</think>\n\na", "v", "b")}])
    (folder / "own.jinja").write_text(QWEN3, encoding="utf-8")
    assert trained_texts(prepared(folder, template=str(folder / "own.jinja"))) == [
        "<think>\nt\n</think>\n\na<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"
    ]  # fmt: skip
    missing = refused(folder, template=str(folder / "none.jinja"))
    assert missing.startswith(f"data.template={folder}/none.jinja cannot be read: No such file or directory; take auto")


def test_what_a_config_does_not_name_a_template_lacks(folder: Path) -> None:
    """No begin of text is made up for a model that has none."""
    write(folder, chats(2))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML, encoding="utf-8")
    first = prepared(folder).train
    assert first.tokens[0] == prepared(folder).tokenizer.encode("<|im_start|>", special=True)[0]


def test_answers_of_a_prompt_end_although_blanks_follow(folder: Path) -> None:
    """ChatML writes a line end behind the token that ends a turn."""
    write(folder, [{"prompt": turns("u"), "completion": turns("", "a")[1:]}])
    assert trained_texts(prepared(folder)) == ["a<|im_end|>\n"]


EVERYTHING = (
    "{% generation %}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}{% endgeneration %}"
)
ENDLESS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% generation %}{{ m.content }}{% endgeneration %}\
{% endfor %}"""
MISSING = "{% for m in messages %}\n{{ m.content + m.nothing.more }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "rows", "data", "sentence"),
    [
        (CHATML, [{"messages": turns("u")}], {},
         "no token of {path}, data.train_on=auto is trained: every one is masked; see `meshwright data show`"),
        (CHATML, chats(2), {"train_on": "tool"},
         "no token of {path}, data.train_on=tool is trained: every one is masked; see `meshwright data show`"),
        (EVERYTHING, chats(2), {},
         "every token of {path}, data.train_on=auto is trained, prompts too: say data.train_on=all if that is meant"),
        ("<|im_start|>" + EVERYTHING, chats(2), {},
         "every token of {path}, data.train_on=auto is trained, prompts too: say data.train_on=all if that is meant"),
        (ENDLESS, chats(2), {},
         "no answer of {path}, data.train_on=auto ends with a special token, so the model would not learn to stop: "
         "add eos_token after an answer in the chat template, inside of the generated part"),
        (MISSING, [*chats(1)], {},
         "{path}, line 1: the chat template fails in line 2: 'dict object' has no attribute 'nothing'"),
        (CHATML, [*chats(3), {"messages": turns("u", "a<|im_end|>")}], {},
         "{path}, line 4: <|im_end|> ends a turn twice: the file spells it and the template adds it; remove it from "
         "the file"),
        (CHATML, [*chats(3), {"messages": [{"content": "u"}]}], {},
         "{path}, line 4: message 1 of 'messages' has no role, it has: content"),
        (CHATML, [*chats(3), {"messages": [{"role": "critic", "content": "wrong!"}]}], {},
         "{path}, line 4: the chat template drops text of message 1 (critic): 'wrong!' is missing in the rendered "
         "text. Take another data.template, or another role"),
        (CHATML, [], {}, "data.path={path} holds no rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(
    folder: Path, template: str, rows: list[Any], data: Any, sentence: str
) -> None:
    path = write(folder, rows)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert refused(folder, **data) == sentence.format(path=path)
    assert not list((folder / "cache").glob("samples/[!.]*")), "a refused set leaves nothing"


def test_completions_that_never_end_are_refused(folder: Path) -> None:
    """A tokenizer without an end-of-text token cannot end them."""
    (folder / "tokenizer.json").write_text(made("llama3").replace("<|endoftext|>", "<|fin|>"), encoding="utf-8")
    (folder / "tokenizer_config.json").unlink()
    path = write(folder, [{"prompt": "2+2=", "completion": " 4"}])
    assert refused(folder) == (
        f"no answer of {path}, data.train_on=auto ends, so the model would not learn to stop. data.tokenizer={folder} "
        "names no end-of-text token: name eos_token in the tokenizer_config.json beside it"
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|fin|>"}', encoding="utf-8")
    assert trained_texts(prepared(folder)) == [" 4<|fin|>"]


NEST = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd") + "{% endfor %}" * 4
LONG = "{% for a in range(99999) %}{{ ('x' * 9999999) | upper | length }}{% endfor %}"
TIME = "ran for more than 2.5 s on 3 rows: it may never end; correct it"
SLOW = {
    "loops": (NEST, (TIME, "fails in line 1: it runs more than 262,144 rounds of loops for one conversation")),
    "a power": ("{{ 9 ** (9 ** 9) }}", ("fails in line 1: ** makes more than 16,777,216 characters",)),
    "words": ("{{ lipsum(n=99999, max=99999) | length }}", ("fails in line 1: 'lipsum' is undefined",)),
    "long rounds": (LONG, (TIME,)),
}


@pytest.mark.parametrize("attack", SLOW)
def test_an_endless_template_is_ended(folder: Path, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_cache, "_LIMIT_S", 2.5)
    path = write(folder, chats(3))
    template, sentences = SLOW[attack]
    (folder / "chat_template.jinja").write_text(template + CHATML, encoding="utf-8")
    begin = time.monotonic()
    assert refused(folder) in [f"{path}, line 1: the chat template {sentence}" for sentence in sentences]
    assert time.monotonic() - begin < 30


HUGE = {
    "text": "{% for a in range(99999) %}{% for b in range(99999) %}" + "word " * 200 + "{% endfor %}{% endfor %}",
    "a string": "{{ 'x' * 10 ** 10 }}",
    "a list": "{% set found = ['x'] * 10 ** 10 %}",
    "doubled": "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
}


@pytest.mark.parametrize("attack", HUGE)
def test_a_template_without_measure_is_ended_in_its_own_process(folder: Path, attack: str) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux to tell resident memory")
    import resource

    path = write(folder, chats(1))
    (folder / "chat_template.jinja").write_text(HUGE[attack] + CHATML, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refused(folder)
    assert message in (
        f"{path}, line 1: the chat template writes more than 16,777,216 characters for one conversation",
        f"{path}, line 1: the chat template fails in line 1: * makes more than 16,777,216 characters",
        f"{path}, line 1: the chat template fails in line 1: + makes more than 16,777,216 characters",
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17, "KiB"


def test_containers_do_not_matter(folder: Path) -> None:
    """A parquet file has every field in every message, null where a row has none."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    rows = [*chats(3), {"messages": [{"role": "system", "content": "S"}, *turns("u", "a")]}]
    rows[0]["messages"][1]["tool_calls"] = [{"function": {"name": "look", "arguments": {"at": "it"}}}]
    rows[0] |= {"tools": [{"name": "look", "parameters": {"at": {"type": "string"}}}]}
    rows[2] |= {"tools": [{"name": "find", "parameters": {"who": {"type": "string"}}}]}
    expected = trained_texts(prepared(folder, path=write(folder, rows)))
    (folder / "chat.json").write_text(json.dumps(rows), encoding="utf-8")
    write_table(pyarrow.Table.from_pylist(rows), folder / "chat.parquet")
    for name in ("chat.json", "chat.parquet"):
        corpus = prepared(folder, path=folder / name)
        assert trained_texts(corpus) == expected
        assert "null" not in corpus.tokenizer.decode(corpus.train.parts[0].tokens), "of the other row's tool"
    assert "look" in expected[0]


def test_a_folder_is_its_rows_and_not_the_files_of_its_tokenizer(folder: Path) -> None:
    write(folder, chats(3))
    root = folder.with_name(f"{folder.name}-cache")
    assert len(trained_texts(prepared(folder, path=folder, root=root))) == 3
    (folder / "notes.txt").write_text("hello")
    assert refused(folder, path=folder, root=root) == (
        f"{folder}/notes.txt holds no rows: fine-tuning reads .jsonl, .json and .parquet files, and hub datasets"
    )


def test_bad_rows_are_named_however_many_processes_read(folder: Path) -> None:
    rows = [{"messages": turns(f"question {number} " * 80, f"answer {number}")} for number in range(400)]
    for bad in (150, 250, 390):
        rows[bad] = {"messages": [{"role": "user"}]}
    path = write(folder, rows)
    for processes in (1, 3):
        named = f"{path}, 3 lines (151, 251, 391): message 1 of 'messages' (user) has neither content nor tool_calls"
        remedy = " (data.malformed=skip leaves them out)"
        assert refused(folder, processes=processes) == f"3 of 400 rows are no samples{remedy}: {named}"


def test_a_damaged_cache_is_made_anew(folder: Path) -> None:
    write(folder, chats(4))
    first = prepared(folder)
    texts = trained_texts(first)
    for name in ("train.tokens", "train.marks", "meta.json"):
        (folder / "cache" / "samples" / first.key / name).write_bytes(b"")
        assert trained_texts(prepared(folder)) == texts


def test_columns_that_are_not_read_are_counted(folder: Path) -> None:
    rows = [{**chat, "id": number} for number, chat in enumerate(chats(6))]
    rows[2]["mesages"] = "a slip"
    write(folder, rows)
    for _ in range(2):  # counted, and found in the cache
        corpus = prepared(folder)
        assert dict(corpus.unread) == {"id": 6, "mesages": 1}
        assert named_columns(corpus.unread) == "id (6 rows), mesages (1 row)"
    assert named_columns({name: 2 for name in "abcdef"}) == "a (2 rows), b (2 rows), c (2 rows), d (2 rows) and 2 more"


def test_a_template_that_is_named_is_named_where_it_fails(folder: Path) -> None:
    write(folder, chats(3))
    (folder / "own.jinja").write_text("{% for m in messages %}\n{{ m.nope.deeper }}{% endfor %}")
    assert refused(folder, template=str(folder / "own.jinja")) == (
        f"{folder}/chat.jsonl, line 1: the chat template {folder}/own.jinja fails in line 2: 'dict object' has no "
        "attribute 'nope'"
    )

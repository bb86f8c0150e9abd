"""`data show` says what is trained, and its sample is what the run will read."""

import json
from pathlib import Path

import pytest

from meshwright.data import Sampler, prepare
from meshwright.data.report import view
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from meshwright.verbs.data import command as verb
from meshwright.verbs.main import main


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.py").write_text(f"def f{number}():\n    return {number}\n" * 3, encoding="utf-8")
    (folder / "logo.png").write_bytes(b"\0")
    return folder


def test_the_view_is_the_run_s_own_sample(texts: Path, tmp_path: Path) -> None:
    data, recipe = Data(path=str(texts), validation=0.2), Recipe(sequence=32, seed=5)
    corpus = prepare(data, cache_root=tmp_path / "cache")
    shown = view(data, recipe, corpus)
    assert (shown.train.documents, shown.validation.documents) == (
        corpus.train.num_documents,
        corpus.validation.num_documents,
    )
    assert shown.files == 30 and [Path(name).name for name in shown.passed_over] == ["logo.png"]
    assert shown.bytes_per_token == pytest.approx(
        (corpus.train.num_bytes + corpus.validation.num_bytes)
        / (corpus.train.num_tokens + corpus.validation.num_tokens)
    )
    sampler = Sampler(corpus.train, sequence=32, tokenizer_separator=True, seed=5)
    batch = sampler.take(shown.sample, 1)
    assert shown.packed and [token.id for token in shown.tokens] == batch.tokens[0].tolist()
    assert shown.tokens[-1].document > 0
    assert shown.train.windows == len(sampler)
    assert shown.validation.windows == -(-(corpus.validation.num_tokens - 1) // 32)


def test_json_is_one_document(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "show", f"data.path={texts}", "recipe.sequence=16", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == "" and len(document["tokens"]) == 16 and document["vocab"] == 2048
    assert "".join(token["text"] for token in document["tokens"]).count("def f") >= 1


def test_people_see_borders(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb.show(None, [f"data.path={texts}", "recipe.sequence=64"], False)
    out = capsys.readouterr().out
    for text in ("trained on", "held out", "--- document 1 ---", "passed over as binary: 1 (logo.png)", "2,048 ids"):
        assert text in out
    assert "<|endoftext|> begins each document and ends the one before" in out


def test_ignored_targets_are_struck_through(tmp_path: Path) -> None:
    rich = pytest.importorskip("rich.text")
    from meshwright.data.report import Token

    tokens = [Token(id=n, text="ab"[n], document=n, position=0, target=(None, 1)[n]) for n in range(2)]
    assert ["strike" in verb._style(token, 0) for token in tokens] == [True, False]
    assert verb._style(tokens[0], 0).split()[0] != verb._style(tokens[1], 0).split()[0]
    assert rich.Text("a", style=verb._style(tokens[0], 1)).style == "cyan dim strike"


def test_bad_input_is_one_line(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blob.bin").write_bytes(bytes(range(256)))
    for words, says in [
        (["show", f"data.path={tmp_path / 'blob.bin'}"], "is binary, not text"),
        (["show", f"data.path={tmp_path / 'text'}"], f"the nearest name is {texts}"),
        (["show", f"data.path={texts}", "recipe.sequence=100000"], "recipe.sequence=100000 needs 100001 tokens"),
    ]:
        assert main(["data", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and says in err, err


def test_a_run_that_cannot_be_shown_says_so(texts: Path, tmp_path: Path) -> None:
    data = Data(path=str(texts))
    corpus = prepare(data, cache_root=tmp_path / "cache")
    with pytest.raises(DataError, match=r"recipe\.sequence=9999"):
        view(data, Recipe(sequence=9999), corpus)


def test_each_source_of_a_mixture_is_shown(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = (json.dumps({"text": f"line {number} of a file\n" * 4}) for number in range(40))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    word = f"data={texts}:3,{tmp_path / 'rows.jsonl'}:1"
    length = ["recipe.sequence=16", "recipe.steps=10", "recipe.global_batch=8"]
    assert main(["data", "show", word, *length, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [source["share"] for source in document["sources"]] == [0.75, 0.25]
    assert [source["times"] * source["rows"] for source in document["sources"]] == pytest.approx([60, 20])
    assert sum(source["tokens"] for source in document["sources"]) == document["train"]["tokens"]
    assert sum(source["rows"] for source in document["sources"]) == document["train"]["windows"]
    assert main(["data", "show", word, *length]) == 0
    out = capsys.readouterr().out
    assert "75.0%" in out and "25.0%" in out and "bytes per token" in out


def test_what_becomes_of_long_samples_and_of_columns_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a long answer " * 20}]
    short = [*turns[:1], {"role": "assistant", "content": "no"}]
    rows = [{"messages": turns if number % 2 else short, "id": number} for number in range(8)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"data={tmp_path / 'chat.jsonl'}", "data.form=samples", "recipe.sequence=32", "data.validation=0"]
    assert main(["data", "show", *words, "data.overlong=drop"]) == 0
    out = capsys.readouterr().out
    assert "longer than 32: 4 (data.overlong=drop); left out: 4" in out
    assert "columns that are not read: id (8 rows)" in out

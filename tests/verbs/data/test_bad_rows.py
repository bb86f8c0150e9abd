"""Rows that cannot be trained on: one line with file, line and column, and exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.verbs.main import main

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["data", "show", "data.form=samples", "recipe.sequence=64", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removeprefix("meshwright: ").removesuffix("\n")


def turns(*args: Any) -> str:
    return json.dumps({"messages": args})


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ('{"messages": [{"role": "user" "content": 1}]}', ", column 31: broken JSON, Expecting ',' delimiter"),
        ('{"messages": [', ", column 15: broken JSON, Expecting value"),
        ("[1]", ": a row is an object with fields, not list"),
        (turns({"content": "a"}), ": message 1 of 'messages' has no role, it has: content"),
        (turns({"role": None, "content": "a"}), ": message 1 of 'messages' has no role, it has: role (null), content"),
        (turns(), ": the conversation has no message"),
        (turns("a"), ": message 1 of 'messages' is str, not an object"),
        (turns({"role": "user", "content": 3}), ": message 1 of 'messages': the content is int, not text"),
        (
            '{"question": "a", "answer": null}',
            ": the columns (question, answer (null)) are none of: chosen + rejected; messages; conversations; "
            "completion + prompt; instruction + output; input_ids; text",
        ),
        ('{"input_ids": [1, 9999999]}', ": token 9999999 is outside the tokenizer's vocabulary of 2,048"),
        (turns({"role": "user", "content": "\ud800"}), ": the text holds half a surrogate pair, which is not valid "
                                                       "Unicode"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_row_is_named_with_its_line(row: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(GOOD), "", row, json.dumps(GOOD)]
    Path("chat.jsonl").write_text("\n".join(lines))
    assert refused(capsys, "data=chat.jsonl") == f"chat.jsonl, line 3{sentence}"


def test_a_row_of_a_mixture_is_named_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    Path("b.jsonl").write_text(json.dumps(GOOD) + "\n{")
    message = "b.jsonl, line 2, column 2: broken JSON, Expecting property name enclosed in double quotes"
    assert refused(capsys, "data=a.jsonl:1,b.jsonl:1") == message


def test_an_array_is_named_with_line_and_column(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.json").write_text(f"[{json.dumps(GOOD)},\n {{]")
    message = "chat.json, line 2, column 3: broken JSON, Expecting property name enclosed in double quotes"
    assert refused(capsys, "data=chat.json") == message


def test_a_template_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text(json.dumps(GOOD))
    Path("own.jinja").write_text("a\n{{ messages[9].role }}")
    message = "chat.jsonl, line 1: the chat template own.jinja fails in line 2: list object has no element 9"
    assert refused(capsys, "data=chat.jsonl", "data.template=own.jinja") == message


def test_samples_longer_than_a_row_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    message = refused(capsys, "data=chat.jsonl", "data.overlong=refuse", "recipe.sequence=8", "data.validation=0")
    assert message.startswith("data.path=chat.jsonl: 2 of 2 samples are longer than recipe.sequence=8 tokens")


def test_conversations_given_as_text_lead_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text(json.dumps(GOOD))
    message = refused(capsys, "data=chat.jsonl", "data.form=text")
    assert message == "chat.jsonl, line 1: no field 'text', it has: messages; `meshwright tune` trains on such rows"


def test_all_rows_that_are_no_samples_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    bad = turns({"role": "user", "content": 3})
    Path("chat.jsonl").write_text("\n".join([json.dumps(GOOD), bad, json.dumps(GOOD), turns("a")]))
    assert refused(capsys, "data=chat.jsonl") == (
        "2 of 4 rows are no samples (data.malformed=skip leaves them out): chat.jsonl, line 2: message 1 of "
        "'messages': the content is int, not text; chat.jsonl, line 4: message 1 of 'messages' is str, not an object"
    )
    Path("many.jsonl").write_text("\n".join([json.dumps(GOOD), *[bad] * 1234]))
    message = refused(capsys, "data=many.jsonl")
    remedy = " (data.malformed=skip leaves them out)"
    assert message.startswith(f"1,234 of 1,235 rows are no samples{remedy}: many.jsonl, 20 lines (2, 3, 4, ")
    assert ", 20, 21): message 1 of 'messages': the content is int" in message and message.endswith("; and 1,214 more")


def test_conversations_are_shown_without_being_told_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text("\n".join([json.dumps(GOOD)] * 8))
    shown = []
    for told in ([], ["data.form=samples"]):
        assert main(["data", "show", "data=chat.jsonl", "recipe.sequence=64", "--json", *told]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1] and shown[0]["samples"] is not None

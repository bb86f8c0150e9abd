"""Mixtures in a plan file and on the command line: every short form means the same list of sources."""

import re
from pathlib import Path

import pytest

from meshwright.planfile import absolute, read, schema, without_folders, write
from meshwright.spec import Data
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import MixtureSource

BOTH = (MixtureSource(path="a.jsonl", weight=0.7), MixtureSource(path="b.jsonl", weight=0.3))


@pytest.mark.parametrize(
    "word",
    [
        "data=a.jsonl:0.7,b.jsonl:0.3",
        "data.path=a.jsonl:0.7,b.jsonl:.3",
        "data.mixture=a.jsonl:7e-1,b.jsonl:0.3",
        "data=[a.jsonl:0.7, b.jsonl:0.3]",
        "data=[{path: a.jsonl, weight: 0.7}, b.jsonl:0.3]",
        "data.mixture=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]",
        "dataset=a.jsonl:0.7,b.jsonl:0.3",
    ],
)
def test_every_form_means_the_same(word: str) -> None:
    notes: list[str] = []
    actual = read(None, [word, "data.validation=0.1"], notes=notes).data
    assert actual == Data(mixture=BOTH, validation=0.1)
    assert actual.title == "a.jsonl:0.7,b.jsonl:0.3" and actual.path == ""
    assert notes == []


def test_each_source_has_the_settings_of_all() -> None:
    actual = read(None, ["data=[{path: a, weight: 1, text_field: body}, b:2]", "data.text_field=words"]).data
    assert actual.sources == (Data(path="a", text_field="body"), Data(path="b", text_field="words"))


@pytest.mark.parametrize("path", ["one.txt", "hub:name:2", "a,b", "a.txt:0.7", "[ab]*.txt", "C:1"])
def test_other_words_are_one_path(path: str) -> None:
    assert read(None, [f"data={path}"]).data == Data(path=path)


def test_a_change_of_one_takes_the_other_away(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("data: {mixture: [a:1, b:2], tokenizer: bytes}\n")
    assert read(plan, ["data=c.txt"]).data == Data(path="c.txt", tokenizer="bytes")
    plan.write_text("data: {path: a, tokenizer: bytes}\n")
    assert read(plan, ["data=c:1,d:1"]).data.title == "c:1,d:1"
    assert read(None, ["data=c:1,d:1", "data=e"]).data == Data(path="e")


def test_paths_are_of_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "plan.yaml").write_text("data:\n  - {path: a.txt, weight: 1}\n  - stdlib:2\n  - /c:3\n")
    monkeypatch.chdir(tmp_path)
    plan = read("here/plan.yaml")
    assert plan.data.title == "here/a.txt:1,stdlib:2,/c:3"
    write(plan, "there/plan.yaml")
    assert absolute(read("there/plan.yaml")) == absolute(plan)
    assert without_folders(plan).data.title == "a.txt:1,stdlib:2,c:3"
    write(plan, "here/again.yaml")
    monkeypatch.chdir(tmp_path / "here")
    assert read("again.yaml").data.title == "a.txt:1,stdlib:2,/c:3"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("data=a:0.7,b", "data='a:0.7,b': b has no weight: give each its own, as data=a.jsonl:0.7,b.jsonl:0.3"),
        ("data=[a, b]", "data: a has no weight: give {path: a, weight: 1}, or a:1"),
        ("data=[{path: a}]", "data.mixture.0.weight is missing: give it"),
        (
            "data=[{path: a, weigth: 1}]",
            "data.mixture.weigth is not known: the nearest known key is data.mixture.weight (and 1 more)",
        ),
        ("data=a:1,b:0", "data.mixture: weight=0 of b must be above 0: leave the source out, or give it a share"),
        ("data={path: z, mixture: [a:1]}", "data.path=z and data.mixture: give one of them"),
        (
            "data=a:1,b:1e-9",
            "data.mixture: weight=1e-09 of b is too small: its share is 1e-09, and the smallest is 1/65,536. Leave "
            "the source out, or raise its weight",
        ),
    ],
)
def test_what_is_wrong_is_said(word: str, sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        read(None, [word])
    assert str(error.value) == sentence


def test_a_source_twice_cannot_run() -> None:
    (actual,) = read(None, ["data=a:1,a:2"]).violations()
    assert actual == "data.mixture has a twice: give it once, with the sum of both weights"


def test_a_line_of_a_file_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("run: r\ndata:\n  - a:1\n  - {path: b, weight: lots}\n")
    with pytest.raises(PlanError, match=r"plan\.yaml:4: data\.mixture\.1\.weight=lots must be a number"):
        read(plan)


def test_editors_are_told_of_every_form() -> None:
    """The part of the schema that a list has, read as an editor reads it."""
    schema_document = schema()
    word, sections, listed = schema_document["properties"]["data"]["anyOf"]
    assert word["type"] == "string" and sections["$ref"] == "#/$defs/Data" and listed["type"] == "array"
    assert listed["items"] == schema_document["$defs"]["Data"]["properties"]["mixture"]["items"]
    pattern, source = listed["items"]["anyOf"]
    assert re.search(pattern["pattern"], "a.jsonl:0.7") and not re.search(pattern["pattern"], "a.jsonl:0.7 or so")
    assert set(schema_document["$defs"]["MixtureSource"]["properties"]) == {"path", "weight", "text_field"}
    assert source["$ref"] == "#/$defs/MixtureSource"

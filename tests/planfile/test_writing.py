"""Writing: whole files, the commented plan, the schema."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planfile import commented, dump, read, schema, write
from meshwright.planfile.keys import sections
from meshwright.planfile.writing import _sentences
from meshwright.spec import BatchStage, Plan, presets
from meshwright.spec.errors import PlanError
from meshwright.verbs.init.command import init
from meshwright.verbs.schema.command import schema as schema_verb


def test_the_commented_plan_is_the_default_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init()
    path = tmp_path / "plan.yaml"
    path.write_text(capsys.readouterr().out)
    assert read(path) == read(None)
    # The warm-up follows the steps here too, and the examples of the first lines work.
    assert read(path, ["recipe.steps=5"]).recipe.steps == 5
    [example] = re.findall(r"meshwright train plan\.yaml (.*)", path.read_text())
    assert read(path, example.split()).model.name == "llama-10m"


def test_every_key_has_a_comment() -> None:
    lines = [line for line in commented().splitlines() if re.match(r" *\w+:", line)]
    keys = [line.partition(":")[0].strip() for line in lines]
    assert keys == [
        *("model", "data", *sections()["data"], "run", "store", *sections()["store"]),
        *("recipe", *sections()["recipe"]),
        *("layout", *sections()["layout"], "cluster", "teacher"),
    ]
    assert all(re.search(r"  # \S", line) for line in lines)
    assert max(len(line) for line in commented().splitlines()) <= 120


def test_every_field_has_a_sentence() -> None:
    for section in sections():
        owner: Any = Plan
        if section:
            parent, _, key = section.rpartition(".")
            from meshwright.planfile.keys import part_of

            owner = part_of(sections()[parent][key])
        missing = [name for name, sentence in _sentences(owner).items() if not sentence]
        assert not missing, (section, missing)
        assert inspect.getdoc(owner)


def test_what_is_dumped_is_json() -> None:
    plan = replace(read(None), recipe=replace(read(None).recipe, batch_ramp=(BatchStage(tokens=1, global_batch=2),)))
    document = json.loads(json.dumps(dump(plan)))
    assert document["recipe"]["batch_ramp"] == [{"tokens": 1, "global_batch": 2}]
    assert list(document) == ["model", "data", "run", "recipe", "layout", "cluster"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    write(read(None), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PlanError, match="the plan cannot be written, no space left on device"):
        write(read(None, ["recipe.steps=9"]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the plan cannot be written, no such file or directory"):
        write(read(None), tmp_path / "nowhere" / "plan.yaml")


def test_the_schema_verb_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    schema_verb()
    assert json.loads(capsys.readouterr().out) == schema(), "the shipped file is old: make schema"


def test_the_schema_knows_every_key_with_its_sentence() -> None:
    schema_document = schema()
    assert schema_document["title"] == "Meshwright plan"
    assert schema_document["additionalProperties"] is False and "required" not in schema_document
    assert set(schema_document["properties"]) == set(sections()[""])
    assert all(entry["description"] for entry in schema_document["properties"].values())
    parts = {part["title"]: part for part in schema_document["$defs"].values()}
    of_teacher = [section for section in sections() if section.split(".")[0] == "teacher"]  # it is a model
    assert len(parts) == len(sections()) - 1 - len(of_teacher)
    for part in parts.values():
        assert part["additionalProperties"] is False and part["description"]
        assert all(entry["description"] for entry in part["properties"].values())
    assert set(parts["ModelShape"]["properties"]) == set(sections()["model"])
    assert "llama-tiny" in schema_document["properties"]["model"]["anyOf"][0]["examples"]
    json.dumps(schema_document)


def test_plans_fit_the_schema() -> None:
    schema_document = schema()
    for name in presets.model_names():
        plan = read(None, [f"model={name}", "cluster=h100x8", "recipe.batch_ramp=[{tokens: 1, global_batch: 2}]"])
        assert _misfits(dump(plan), schema_document) == []
    # YAML's own reading of `1.0e-08` and the rest is what an editor checks.
    assert _misfits(yaml.safe_load(commented()), schema_document) == []


@pytest.mark.parametrize(
    "plan",
    [
        {"recipe": {"stepz": 1}},
        {"recipe": {"steps": "x"}},
        {"recipe": {"precision": "bf8"}},
        {"model": {"layers": 2}},
        {"model": {"preset": "gpt2", "heads": None}},
        {"cluster": {"nodes": "two"}},
        {"foo": 1},
    ],
)
def test_mistakes_do_not_fit_the_schema(plan: dict[str, Any]) -> None:
    assert _misfits(plan, schema())


TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def _misfits(value: Any, part: dict[str, Any], whole: dict[str, Any] | None = None) -> list[str]:
    """A validator of the words of JSON Schema that ours uses; any other word is an error here."""
    whole = whole or part
    known = {"$schema", "$defs", "title", "description", "default", "examples", "type", "properties", "required"}
    assert set(part) <= known | {"additionalProperties", "anyOf", "$ref", "enum", "const", "items"}, set(part)
    if "$ref" in part:
        return _misfits(value, whole["$defs"][part["$ref"].rpartition("/")[2]], whole)
    actual = [
        f"{key} is missing" for key in part.get("required", ()) if not isinstance(value, dict) or key not in value
    ]
    if "anyOf" in part and all(_misfits(value, choice, whole) for choice in part["anyOf"]):
        actual.append(f"{value} fits no choice")
    if "enum" in part and value not in part["enum"]:
        actual.append(f"{value} is not among {part['enum']}")
    if part.get("type") == "object":
        if not isinstance(value, dict):
            return [f"{value} is no object"]
        actual += [f"{key} is not known" for key in value.keys() - part["properties"].keys()]
        for key in value.keys() & part["properties"].keys():
            actual += _misfits(value[key], part["properties"][key], whole)
    elif part.get("type") == "array":
        actual += [misfit for item in value for misfit in _misfits(item, part["items"], whole)]
    elif "type" in part:
        wrong = isinstance(value, bool) != (part["type"] == "boolean") or not isinstance(value, TYPES[part["type"]])
        actual += [f"{value} is no {part['type']}"] * wrong
    return actual

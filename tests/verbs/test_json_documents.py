"""Documents of `--json` are those that were recorded: names, kinds, and values where no machine changes them."""

import inspect
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from meshwright.interface.terminal.help import VERBS
from meshwright.verbs.commands import FOLDERS, FUNCTIONS
from tests.verbs.json_documents import COMMANDS, RECORDED, document, structure, workspace

ELSEWHERE = {"quickstart": "takes minutes: `make quickstart` runs it", "data": "its command is `data show`"}
"""Verbs with `--json` that are not called by their name here, and why."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[int, Any]]]:
    """Return a document by name. Commands run once and in order: each reads what those before it wrote."""
    documents: dict[str, tuple[int, Any]] = {}

    def run_up_to(name: str) -> tuple[int, Any]:
        for earlier, command in COMMANDS.items():
            if name in documents:
                break
            if earlier not in documents:
                documents[earlier] = document(command)
        return documents[name]

    with workspace(tmp_path_factory.mktemp("documents")):
        yield run_up_to


@pytest.mark.long(every=True)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_document_is_as_recorded(name: str, printed: Callable[[str], tuple[int, Any]]) -> None:
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    code, whole = printed(name)
    again = f"if it changed on purpose: python -m tests.verbs.json_documents {name}"
    assert code == recorded["exit_code"], again
    assert json.loads(json.dumps(whole)) == recorded["document"], again


def test_each_verb_that_prints_json_has_a_document() -> None:
    recorded = {command.words[0] for command in COMMANDS.values()}
    verbs = [verb for verb in VERBS if verb not in ELSEWHERE]
    modules = {verb: import_module(f"meshwright.verbs.{FOLDERS.get(verb, verb)}.command") for verb in verbs}
    functions = {verb: getattr(module, FUNCTIONS.get(verb, verb)) for verb, module in modules.items()}
    printing = {verb for verb, function in functions.items() if "json" in inspect.signature(function).parameters}
    assert printing <= recorded
    assert {path.stem for path in Path(RECORDED).glob("*.json")} == set(COMMANDS)


def test_a_structure_covers_all_entries_of_a_list() -> None:
    rows = [{"a": 1}, {"a": None, "b": "x"}, {"figures": {"cores": 2}, "0": [True]}]
    assert structure(rows) == [{"a": "null or number", "b": "text", "figures": "of the machine", "0": ["boolean"]}]
    assert structure({"3": 1.5, "4": "x"}) == {"0": "number or text"}

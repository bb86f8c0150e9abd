"""`import meshwright`: fast, without torch, and every public name resolves."""

import inspect
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import meshwright as mw
from meshwright.interface.answers.answer import Answer
from meshwright.spec.errors import PlanError
from meshwright.verbs.train import answer as training_run


class Table(Answer):
    """An answer with one row."""

    def to_dict(self) -> dict[str, Any]:
        return {}

    def rows(self) -> list[dict[str, Any]]:
        return [{"a": 1}]

    def _repr_html_(self) -> str:
        return ""


def fresh(code: str) -> str:
    """Return the output of a new process."""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_loads_next_to_nothing_and_takes_no_time() -> None:
    code = (
        "import sys, time\nbefore, began = set(sys.modules), time.process_time()\nimport meshwright as mw\n"
        "import json\nspent = time.process_time() - began\n"
        "print(json.dumps([spent, sorted(name.split('.')[0] for name in set(sys.modules) - before)]))"
    )
    spent, loaded = json.loads(fresh(code))
    assert not {"torch", "numpy", "pydantic", "typer", "yaml"} & set(loaded)
    assert spent < 0.1, "seconds of a core"


def test_a_plan_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys, time\nimport meshwright as mw\n"
        "ask = lambda: mw.plan('llama-3.1-8b', cluster='h100x8', nodes=4)\nask()\n"
        "def seconds():\n    began = time.process_time(); ask(); return time.process_time() - began\n"
        "spent = min(seconds() for _ in range(5)); answer = ask()\n"
        "html, words = answer._repr_html_(), repr(answer)\n"
        "print(spent, 'torch' in sys.modules)"
    )
    spent, torch_loaded = fresh(code).split()
    assert torch_loaded == "False"
    assert float(spent) < 0.6, "seconds of a core, warm, beside other tests; the claim plan-warm holds 0.3"


def test_every_public_name_is_there_and_documented() -> None:
    for name in mw.__all__:
        assert inspect.getdoc(getattr(mw, name)), name
        assert name in dir(mw)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mw.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "first",
    [
        "pass",
        "import meshwright.training.loop",
        "from meshwright.training.step import watch",
        "import meshwright.verbs.train.answer",
    ],
)
@pytest.mark.long
def test_train_is_a_function_whatever_was_imported_before(first: str) -> None:
    """The package of that name stays what it is."""
    code = (
        f"{first}\nimport meshwright as mw\n"
        "try:\n    mw.train('no.such=1')\nexcept mw.PlanError as error:\n    print(error)\n"
        "import meshwright.training.step.watch as watch\nassert watch.Summary and callable(mw.train)\n"
    )
    assert "no is not known" in fresh(code)


def test_trains_signature_is_that_of_the_function() -> None:
    assert inspect.signature(mw.train) == inspect.signature(training_run.train)


def test_pandas_is_asked_for_by_the_name_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    with pytest.raises(PlanError, match=r"pip install 'meshwright\[pandas\]', or take rows\(\)"):
        Table().to_pandas()


def test_pandas_is_given_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub(ModuleType):
        @staticmethod
        def DataFrame(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return rows

    monkeypatch.setitem(sys.modules, "pandas", Stub("pandas"))
    assert Table().to_pandas() == [{"a": 1}]

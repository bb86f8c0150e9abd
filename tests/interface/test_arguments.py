"""Wrong arguments of the Python interface raise an exception that names the argument."""

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import meshwright as mw
from meshwright.interface.answers.answer import checked
from meshwright.interface.terminal.help import VERBS
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.spec.errors import ArgumentError, PlanError, argument
from meshwright.verbs.commands import application, option_writer
from meshwright.verbs.main import main

SOURCE = Path(mw.__file__).parent
VARIABLES = {"key", "name", "where", "option", "word"}
EIGHT = {"cluster": "h100x8"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({**EIGHT, "nodes": "4"}, "nodes='4' must be a whole number or None"),
        ({**EIGHT, "nodes": 4.0}, "nodes=4.0 must be a whole number or None"),
        ({**EIGHT, "nodes": True}, "nodes=True must be a whole number or None"),
        ({"cluster": 8}, "cluster=8 must be text or None"),
        ({**EIGHT, "price": "2"}, "price='2' must be a number"),
        ({**EIGHT, "tokens": ["15T"]}, "tokens=['15T'] must be text or a number or None"),
        ({**EIGHT, "layout": 8}, "layout=8 must be text or a list of str or a dictionary or None or a layout"),
        ({**EIGHT, "listed": 0}, "listed=0 must be at least 1"),
        ({**EIGHT, "nodes": 0}, "nodes=0 must be at least 1"),
        ({**EIGHT, "layout": "tpp=2"}, "layout='tpp=2': 'tpp' is not a field of a layout"),
        (
            {**EIGHT, "layout": "saving=async"},
            "layout='saving=async': plan does not search saving; write layout.saving",
        ),
        ({**EIGHT, "layout": "kernels=fast"}, "layout.kernels='fast' is unknown: take one of auto, eager"),
        ({**EIGHT, "tokens": "many"}, "tokens='many' must be a number"),
        (
            {**EIGHT, "recipe": {"sequenc": 4}},
            "recipe.sequenc is not known: the nearest known key is recipe.sequence",
        ),
        ({}, "cluster= is missing: name a device and how many of it a node has, as cluster='h100x8'"),
    ],
)
def test_what_plan_refuses_is_named_as_python_names_it(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(mw.PlanError) as raised:
        mw.plan("llama-3.1-8b", **options)
    assert str(raised.value).startswith(sentence) and "--" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: mw.plan(5, cluster="h100x8"), "model=5 must be text or a path or a plan"),  # type: ignore[arg-type]
        (lambda: mw.load(5), "path=5 must be text or a path or an answer about a run"),  # type: ignore[arg-type]
        (lambda: mw.load("x", 16), "dtype=16 must be text or None"),  # type: ignore[arg-type]
        (lambda: mw.load("x", "fp8"), "dtype='fp8' is not known"),
        (lambda: mw.compare("x", tolerance="0.1"), "tolerance='0.1' must be a number"),  # type: ignore[arg-type]
        (lambda: mw.compare("x", tolerance=-1), "tolerance=-1 must be a number of 0 or more"),
        (lambda: mw.report("x", None), "runs=None must be text or a path"),  # type: ignore[arg-type]
        (lambda: mw.report("x", out="y.pdf"), "out='y.pdf': name a file that ends in .html, as out='y.html'"),
        (lambda: mw.dry_run(ranks=0), "ranks=0 must be a list of int"),  # type: ignore[arg-type]
        (lambda: mw.dry_run(ranks=["0"]), "ranks=['0'] must be a list of int"),  # type: ignore[list-item]
        (lambda: mw.dry_run(device="tpu"), "device='tpu' is not known: take cpu or cuda"),
        (lambda: mw.profile(steps="4"), "steps='4' must be a whole number"),  # type: ignore[arg-type]
        (lambda: mw.train(resume=True), "resume=True must be text"),  # type: ignore[arg-type]
        (lambda: mw.train(dry_run="no"), "dry_run='no' must be True or False"),  # type: ignore[arg-type]
        (lambda: mw.train("recipe.steps"), "recipe.steps does not exist: give a plan file"),
        (lambda: mw.train(5), "plan=5 must be text or a path or a plan"),  # type: ignore[arg-type]
        (lambda: mw.dry_run(5), "plan=5 must be text or a path or a plan"),  # type: ignore[arg-type]
        (lambda: mw.train(run=5), "run=5 must be text or a path"),
        (lambda: mw.train(watchers=[5]), "watchers=[5] must be a list of Watcher"),  # type: ignore[list-item]
        (lambda: mw.train(runn="x"), "runn is not known: the nearest known key is run"),
        (lambda: mw.plan("gpt2", clustr="h100"), "clustr= is not known to plan; nearest: cluster="),  # type: ignore[call-arg]
        (lambda: mw.plan(), "plan: missing a required argument: 'model'; it takes model, cluster"),  # type: ignore[call-arg]
        (lambda: mw.train(model="llama-tin"), "model='llama-tin' is not known"),
    ],
)
def test_so_is_what_the_other_functions_refuse(call: Any, sentence: str) -> None:
    with pytest.raises(mw.PlanError) as raised:
        call()
    assert str(raised.value).startswith(sentence)


def test_what_fits_goes_through() -> None:
    import numpy

    @checked
    def checked_call(*paths: Path, many: int = 1, share: float = 0.5, **keys: Any) -> tuple[Any, ...]:
        return (*paths, many, share, keys)

    assert checked_call(Path("a"), many=numpy.int64(3), share=1, other="x") == (Path("a"), 3, 1, {"other": "x"})
    with pytest.raises(ArgumentError, match=r"paths='a' must be a path$"):
        checked_call("a")  # type: ignore[arg-type]
    assert TrainedModel.generate.__doc__ and "temperature" in TrainedModel.generate.__doc__


def test_a_method_names_the_lists_it_takes_and_not_its_object() -> None:
    model = object.__new__(TrainedModel)
    with pytest.raises(ArgumentError, match=r"^prompts='def ' must be a list of text or a list of int$"):
        model.generate_many("def ")
    with pytest.raises(ArgumentError, match=r"^max_tokens= is not known to generate_many; known: prompts="):
        model.generate_many(["def "], max_tokens=4)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"it takes prompts, options, engine, adapters$"):
        model.generate_many()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("verb", "marked", "told"),
    [
        (["plan"], argument("cluster", "h100x8"), "--cluster h100x8"),
        (["plan"], argument("layout", "tp=2 zero=3"), "--layout 'tp=2 zero=3'"),
        (["plan"], argument("stack", "torchtitan"), "--for torchtitan"),
        (["plan"], argument("model", "gpt"), "MODEL gpt"),
        (["plan"], argument("tokens"), "--tokens"),
        (["compare"], argument("dry_run", False), "--no-dry-run"),
        (["train"], argument("anyway", True), "--anyway"),
        (["train"], argument("run", Path("runs/a")), "run=runs/a"),
        (["train"], argument("run"), "run="),
        (["data", "show"], argument("html", "a.html"), "--html a.html"),
        (["no-verb"], argument("tokens", "15T"), "tokens=15T"),
        ([], argument("tokens", "15T"), "tokens=15T"),
    ],
)  # fmt: skip
def test_the_command_line_names_its_options(verb: list[str], marked: str, told: str) -> None:
    assert PlanError(f"take {marked}: it is legal").written(option_writer(verb)) == f"take {told}: it is legal"


@pytest.mark.parametrize(
    ("marked", "told"),
    [
        (argument("tokens", "15T"), "tokens='15T'"),
        (argument("data", "PATH"), "data=PATH"),
        (argument("prices", "FILE.csv"), "prices=FILE.csv"),
        (argument("price", 2.0), "price=2"),
        (argument("out", Path("a/b")), "out='a/b'"),
        (argument("cluster"), "cluster="),
        (argument("anyway", True), "anyway=True"),
        (argument("run", "a\x02b\x1f\x03\nc"), r"run='a\x02b\x1f\x03\nc'"),
    ],
)
def test_python_names_its_keywords(marked: str, told: str) -> None:
    assert str(PlanError(f"take {marked}.")) == f"take {told}."


def test_an_error_carries_its_argument_and_keeps_its_marks() -> None:
    error = ArgumentError("price", 2, "is for the bill of a run", f"give {argument('tokens', '15T')}")
    assert (error.argument, error.value, error.rule) == ("price", 2, "is for the bill of a run")
    assert str(error) == "price=2 is for the bill of a run: give tokens='15T'"
    told = "beside: --price 2 is for the bill of a run: give --tokens 15T; or not"
    for copied in (error, copy.deepcopy(error)):
        again = copied.reworded("beside: ", "; or not")
        assert isinstance(again, ArgumentError) and again.argument == "price"
        assert again.written(option_writer(["plan"])) == told


def parameters() -> set[str]:
    """Names of all options and of all parameters and fields in the source."""
    names = {name for verb in VERBS for name in option_names(verb)}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def option_names(verb: str) -> Iterator[str]:
    command: Any = typer.main.get_command(application([verb]))
    for parameter in getattr(command.commands.get(verb), "params", ()):
        yield parameter.name
        yield from (option.lstrip("-").replace("-", "_") for option in parameter.opts)


def test_errors_name_arguments_that_exist() -> None:
    """Every name in `argument(...)` and ArgumentError(...) is an option or a parameter."""
    known, named = parameters(), set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("argument", "ArgumentError"):
                first = node.args[0]
                named.add(first.value if isinstance(first, ast.Constant) else ast.unparse(first))
    # Keys of a plan have dots, and a few helpers take the name as a variable.
    fields = {name.rpartition(".")[2] for name in named}
    assert len(named) > 60 and not fields - known - VARIABLES


def test_also_where_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "model=llama-tiny", "--load", "2"]) == 2
    errors = capsys.readouterr().err
    assert errors == "meshwright: --load 2 is for mixtures of experts, and llama-tiny has none: leave it out\n"

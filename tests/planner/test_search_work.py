"""How much work a search and a start are, counted: seconds differ from machine to machine, calls do not."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

COUNT = """
import json, sys
from collections import Counter

calls = Counter()

def count(frame, event, argument):
    if event == "call":
        calls[frame.f_code] += 1

before = set(sys.modules)
sys.setprofile(count)
exec(sys.argv[1])
sys.setprofile(None)
written = {code: number for code, number in calls.items()
           if "/meshwright/" in code.co_filename and not code.co_name.startswith("<")}
by_name = Counter()
for code, number in written.items():
    by_name[code.co_qualname] += number
print("COUNTED", json.dumps([sum(written.values()), by_name, len(set(sys.modules) - before)]))
"""
"""Of the package's functions. Comprehensions, generator expressions and what dataclasses generate are not counted:
Python 3.12 calls fewer of the first."""
SEARCH = """
from meshwright.planner.search.ranking import search
from meshwright.planner.search.recommend import recommend
from meshwright.planner.step.predict import build_estimator
from meshwright.spec import Plan, Recipe, presets

plan = Plan(model=presets.model({model!r}), recipe=Recipe(sequence=8192, global_batch={batch}, precision="bf16"),
            cluster=presets.cluster("h100x8", nodes={nodes}))
estimator = build_estimator(plan)
assert recommend(estimator, plan, search(estimator, plan)).best
"""
PAGE = """
from meshwright.verbs.explore.answer import explore

assert explore("llama-3.1-8b", cluster="h100x8", nodes=4).contents
"""
SERVING = """
from meshwright.verbs.plan_serve.answer import plan_serving

assert plan_serving("llama-3.1-8b", cluster="h100x8").best
"""
RENT = """
from meshwright.verbs.rent.answer import rent

assert rent("llama-3.1-8b", tokens=1e12, budget=120_000{more}).rows()
"""
HELP = """
from meshwright.verbs.main import main

assert main(["--help"]) == 0
"""


class Work(NamedTuple):
    """What a program does, at the most."""

    calls: int
    """Of functions of the package: a thirtieth above what they were when this was written."""
    layouts: int = 0
    """Whose step is timed, likewise; those that are listed also uncompiled, and in CUDA graphs."""
    modules: int = 10_000
    """That are imported, those of the standard library too."""


WORK: dict[str, tuple[str, Work]] = {
    "a small search": (SEARCH.format(model="llama-3.1-8b", batch=512, nodes=4), Work(344_000, 148)),
    "a large search": (SEARCH.format(model="llama-3.1-70b", batch=512, nodes=128), Work(984_000, 662)),
    "serving": (SERVING, Work(100_700)),  # who is admitted to a step is a function of its own
    "rent on few clusters": (RENT.format(more=", devices=['h100'], nodes=[1, 4, 16]"), Work(920_000, 138)),
    "--help": (HELP, Work(144, modules=29)),
    "import meshwright": ("import meshwright", Work(5, modules=14)),
}
LONG: dict[str, tuple[str, Work]] = {
    "671B of experts on 2,048 devices": (
        SEARCH.format(model="deepseek-v3", batch=512, nodes=256),
        Work(7_399_000, 1_718),
    ),
    "experts": (SEARCH.format(model="qwen3-30b-a3b", batch=512, nodes=8), Work(2_613_000, 912)),
    "405B on 16,384 devices": (SEARCH.format(model="llama-3.1-405b", batch=512, nodes=2048), Work(2_598_000, 724)),
    "rent": (RENT.format(more=""), Work(6_720_000, 5_340)),
    # Beside the search, the page has the times of some 2,200 layouts around its first one.
    "the page of all layouts": (PAGE, Work(2_790_000, 7_260)),
}


def counted(program: str) -> tuple[int, dict[str, int], int]:
    """(calls of functions of the package, the same by name, modules that were imported) of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, program], capture_output=True, text=True, check=True, timeout=600
    )  # fmt: skip
    calls, by_name, modules = json.loads(done.stdout.rpartition("COUNTED")[2])
    return calls, by_name, modules


def check(program: str, most: Work) -> None:
    calls, by_name, modules = counted(program)
    often = ", ".join(f"{name} {number:,}" for name, number in sorted(by_name.items(), key=lambda pair: -pair[1])[:8])
    looked = by_name.get("Estimator.time", 0)
    assert looked <= most.layouts, (
        f"{looked:,} layouts were timed, {most.layouts:,} at most: a bound of planner/search/bounds.py is further from "
        "the truth than it was, so that more regions are opened. Add to it what the step's time has gained"
    )
    assert calls <= most.calls, (
        f"{calls:,} calls of the package's functions, {most.calls:,} at most. Most often: {often}. Count once per "
        "shape, cell or region what they count again (cProfile says who calls them), or raise the bar and say why"
    )
    assert modules <= most.modules, (
        f"{modules} modules were imported, {most.modules} at most: import in the function what only it needs"
    )


@pytest.mark.parametrize("name", WORK)
def test_work_of_a_start_and_of_a_search(name: str) -> None:
    check(*WORK[name])


@pytest.mark.parametrize("name", LONG)
@pytest.mark.long(every=True)
def test_work_of_a_search_of_millions(name: str) -> None:
    check(*LONG[name])

"""The shape of the house: imports point down, torch is loaded only where it computes, and nothing unsafe is read.

The table of packages is in docs/packages.py. Most tests read the source, and name every offender at once;
the last ones start a fresh process and look at what it loaded.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.packages import BELOW, PACKAGE, PLANNER, packages

ROOT = PACKAGE.parent.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

LIBRARIES: dict[str, set[str]] = {
    "spec": set(),
    "planner": set(),
    "stacks": {"yaml"},
    "remote": {"fsspec", "huggingface_hub"},
    "planfile": {"pydantic", "yaml"},
    "data": {"jinja2", "numpy", "tokenizers", "pyarrow", "datasets", "zstandard"},
    "kernels": {"torch", "triton"},
}
"""Third-party imports of the lower layers; the others are free."""

LONG_ON_PURPOSE: dict[str, str] = {}
"""Modules of MOST_LINES and more, each with the reason why it is not two."""

MOST_LINES = 600
"""A module that tells one story may be long. From here on, look twice."""

MOST_MODULES = 20
"""Most modules of a folder, beside its __init__."""

MOST_FILES, MOST_LINES_OF_ALL, LEAST_COMMENTS = 580, 118_650, 0.02
"""Python files and lines of the whole package, and comments per line. 110,000 lines on 2026-11-28, 2,500 for the
rest of the lectures, 4,450 (15 files) for weeks on many machines, and 200 for what a sweep's rows hold, torch's
flight recorder and loops over parts of the keys: raise them with a reason."""

READS_ENVIRONMENT: dict[str, str] = {
    "compat/cpu.py": "oneDNN takes its instructions and cache size, and glibc a threshold, from the environment alone",
    "compat/torch_compile.py": "CC names the C compiler that Triton calls",
    "spec/hub_cache.py": "HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME name the cache of the Hugging Face Hub",
    "spec/user_cache.py": "XDG_CACHE_HOME names the user's cache folder",
}
"""Modules below verbs and interface that read the environment, each with the standard that demands it."""

ATTICS = {"utils", "util", "common", "helpers", "helper", "misc", "core"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}
MANY_DEVICES = re.compile(
    r"^(dist|distributed|ranks?|\w*_rank|rank_\w+|\w*mesh|world|world_size|environ|getenv|process_group|torchrun|"
    r"[dD]tensor|DTensor|DeviceMesh|all_reduce|all_gather|reduce_scatter)$"
)
DIRECTIVE = re.compile(r"# (type:|noqa|fmt:|ruff:|pragma:)")
"""Comments that speak to a tool."""
LOW_RANK = {"q_rank", "kv_rank", "low_rank"}
"""Ranks of matrices (multi-head latent attention), not of processes."""
ADAPTERS = ("model/low_rank.py", "formats/hub/adapter.py", "formats/hub/adapter_config.py")
"""Where `rank` is that of an adapter's matrices."""
HEAVY = {"torch", "transformers", "matplotlib", "pyarrow", "datasets"}


def part(path: Path) -> str:
    """The package or top module a file belongs to; empty for the package's own `__init__` and `__main__`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first.startswith("__") else first


def shown(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source(path), filename=str(path))))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of everything a module imports, at any depth of the code; relative ones resolved."""
    package = ("meshwright", *path.relative_to(PACKAGE).parts[:-1])
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{name}.{alias.name}" for alias in node.names}
    return frozenset(names)


def modules_below(*parts: str) -> Iterator[Path]:
    return (path for path in MODULES if part(path) in parts)


def test_every_part_has_its_place_in_the_table() -> None:
    assert {part(path) for path in MODULES} - {""} == set(BELOW)


def test_the_tour_passes_every_package() -> None:
    tour = source(ROOT / "CONTRIBUTING.md").partition("## A tour")[2].partition("\n## ")[0]
    steps = tour.partition("<!-- generated: packages -->")[0]
    assert not [name for name in BELOW if f"{name}/" not in steps], "say when to read it"
    assert packages() in tour, "run `make pages`"


def test_the_table_has_no_circle() -> None:
    order = list(BELOW)
    assert all(order.index(lower) < order.index(name) for name, below in BELOW.items() for lower in below)


def test_imports_point_down() -> None:
    up = []
    for path in modules_below(*BELOW):
        inside = {name.split(".")[1] for name in imports(path) if name.startswith("meshwright.")}
        up += [f"{shown(path)} imports {name}" for name in inside - BELOW[part(path)] - {part(path), "__version__"}]
    assert not up


def folder(module: str) -> str:
    """The folder in which a module lies, as planner.cost; a package is its own."""
    return module.rpartition(".")[0] or module


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """Which module imports which, as planner.cost.block."""
    known = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
    names = set()
    for path in MODULES:
        ours = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for name in imports(path):
            target = name.removeprefix("meshwright.") if name.startswith("meshwright.") else ""
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != ours:
                names.add((ours, target))
    return frozenset(names)


def circle(edges: set[tuple[str, str]]) -> list[str]:
    """The nodes that lie on a circle or between two: what is left when those without an arrow are taken away."""
    left = {node for edge in edges for node in edge}
    while True:
        among = {(entry, other) for entry, other in edges if {entry, other} <= left}
        ends = left - ({entry for entry, _ in among} & {other for _, other in among})
        if not ends:
            return sorted(left)
        left -= ends


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle(set(arrows()))


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Also between the folders of one package: planner.cost knows nothing of planner.search.

    The __init__ of a folder is its front: it names what lies in folders below, and is left out.
    """
    fronts = {".".join(path.parent.relative_to(PACKAGE).parts) for path in MODULES if path.name == "__init__.py"}
    between = {(folder(left), folder(right)) for left, right in arrows() if not {left, right} & fronts}
    assert not circle({(left, right) for left, right in between if left != right})


ROOMS = sorted(path.parent.name for path in PACKAGE.glob("verbs/*/__init__.py"))
OPEN_DOORS = {
    ("plan", "plan_from"): "one word, three questions: plan hands over to the rooms of --from and --serve",
    ("plan", "plan_serve"): "the same",
    ("plan", "plan_formula"): "the same, of --formula",
    ("distill", "train"): "train.start runs every verb that trains",
    ("tune", "train"): "the same",
    ("quickstart", "train"): "a walk through train: its display and its line on memory",
}
"""Rooms that use more of another room than its answer, each with the reason."""


def test_a_verb_uses_only_the_answer_of_another() -> None:
    between = [(left.split("."), right.split(".")) for left, right in arrows()]
    doors = {
        (left[1], right[1]): f"{'.'.join(left)} imports {'.'.join(right)}"
        for left, right in between
        if left[0] == right[0] == "verbs"
        and left[1] in ROOMS
        and right[1] in ROOMS
        and left[1] != right[1]
        and right[2:] != ["answer"]
    }
    assert not [line for rooms, line in doors.items() if rooms not in OPEN_DOORS]
    assert set(doors) == set(OPEN_DOORS), "strike off what is not used"


def test_every_room_has_a_command() -> None:
    assert [room for room in ROOMS if not (PACKAGE / "verbs" / room / "command.py").is_file()] == []


def test_folders_of_the_planner_keep_their_order() -> None:
    location = {f"planner.{name}": number for number, names in enumerate(PLANNER) for name in names}
    assert set(location) == {f"planner.{path.parent.name}" for path in PACKAGE.glob("planner/*/__init__.py")}
    between = {(folder(left), folder(right)) for left, right in arrows()}
    inside = {(left, right) for left, right in between if {left, right} <= set(location) and left != right}
    assert not [f"{left} imports {right}" for left, right in inside if location[right] >= location[left]]


def test_circles_are_found() -> None:
    assert circle({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == ["a", "b", "c"]
    assert circle({("a", "b"), ("b", "c"), ("a", "c")}) == []


def test_lower_layers_use_only_their_libraries() -> None:
    free = set(sys.stdlib_module_names) | {"meshwright"}
    outside = []
    for path in modules_below(*LIBRARIES):
        names = {name.split(".")[0] for name in imports(path)} - free - LIBRARIES[part(path)]
        outside += [f"{shown(path)} imports {name}" for name in names]
    assert not outside


def test_private_torch_names_live_in_compat() -> None:
    private = []
    for path in modules_below(*BELOW.keys() - {"compat"}):
        private += [f"{shown(path)} imports {name}" for name in imports(path) if re.match(r"torch\b.*\._[^_]", name)]
        private += [
            f"{shown(path)}:{node.lineno} uses {ast.unparse(node)}"
            for node in nodes(path)
            if isinstance(node, ast.Attribute) and re.match(r"torch\.(\w+\.)*_[^_]\w*$", ast.unparse(node))
        ]
    assert not private


def test_every_module_and_public_name_has_a_docstring() -> None:
    silent = []
    for path in MODULES:
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        public = [
            node
            for node in module.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        silent += [shown(path)] * (not ast.get_docstring(module))
        silent += [f"{shown(path)}: {node.name}" for node in public if not ast.get_docstring(node)]
    assert not silent


def test_no_module_is_an_attic() -> None:
    steps = {path: {step.removesuffix(".py") for step in path.relative_to(PACKAGE).parts} for path in MODULES}
    assert not [shown(path) for path, names in steps.items() if names & ATTICS]


def test_folders_stay_small() -> None:
    sizes = Counter(".".join(path.parent.relative_to(PACKAGE).parts) for path in MODULES if path.name != "__init__.py")
    assert {name: count for name, count in sizes.items() if count > MOST_MODULES} == {}


def test_modules_stay_small() -> None:
    long = {shown(path): lines for path in MODULES if (lines := len(source(path).splitlines())) >= MOST_LINES}
    assert not {name: lines for name, lines in long.items() if name not in LONG_ON_PURPOSE}, "cut it, or say why not"
    assert set(LONG_ON_PURPOSE) <= set(long), "a module of the list is short: strike it off"


def test_the_house_keeps_its_measures() -> None:
    """Files and lines stay within their numbers; a line of comment says why on each fifty lines."""
    lines = comments = 0
    for path in MODULES:
        lines += len(source(path).splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(source(path)).readline)
        comments += sum(token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string) for token in tokens)
    assert len(MODULES) <= MOST_FILES
    assert lines <= MOST_LINES_OF_ALL
    assert comments >= LEAST_COMMENTS * lines


def test_nothing_is_unpickled_or_loaded_unsafely() -> None:
    unsafe = []
    for path in MODULES:
        roots = {name.split(".")[0] for name in imports(path)}
        unsafe += [f"{shown(path)} imports {name}" for name in roots & UNSAFE_MODULES]
        for node in nodes(path):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                allows = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
                unsafe += [f"{shown(path)}:{node.lineno} calls {name}"] * (name in UNSAFE_CALLS or allows)
    assert not unsafe


def test_the_environment_is_read_by_verbs_alone() -> None:
    readers = {}
    for path in modules_below(*BELOW.keys() - {"verbs", "interface"}):
        named = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
        if (named | {name.split(".")[-1] for name in imports(path)}) & {"environ", "getenv"}:
            readers[shown(path)] = READS_ENVIRONMENT.get(shown(path), "take an argument instead")
    assert readers == READS_ENVIRONMENT


def test_the_model_is_arithmetic() -> None:
    """No name in the model or its kernels speaks of processes, meshes or the environment."""
    actual = []
    for path in modules_below("model", "kernels"):
        tokens = tokenize.generate_tokens(io.StringIO(source(path)).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME} - LOW_RANK
        names -= {"rank", "ranks", "most_rank"} if shown(path).endswith(ADAPTERS) else set()
        actual += [f"{shown(path)} speaks of {name}" for name in sorted(names) if MANY_DEVICES.match(name)]
    assert not actual


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after running `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint()\nprint('LOADED', *sorted(sys.modules))"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    last = finished.stdout.strip().splitlines()[-1]
    assert last.startswith("LOADED ")
    return {name.split(".")[0] for name in last.split()[1:]}


def test_reading_text_and_plans_loads_no_torch() -> None:
    steps = (
        ("meshwright", *path.relative_to(PACKAGE).with_suffix("").parts)
        for path in modules_below("spec", "planfile", "data")
    )
    lines = ["import " + ".".join(names).removesuffix(".__init__") for names in steps]
    assert not loaded_by("\n".join(lines)) & HEAVY


def test_the_http_process_loads_no_torch() -> None:
    """It starts beside the model's process, and there may be several servers on a machine."""
    assert not loaded_by("import meshwright.serving.http.front.front") & HEAVY


def test_spec_loads_only_the_standard_library() -> None:
    foreign = loaded_by("import meshwright.spec") - loaded_by("") - set(sys.stdlib_module_names)
    assert foreign == {"meshwright"}


@pytest.mark.parametrize("arguments", [["--help"], ["init"], ["schema"], ["train", "--help"]], ids=" ".join)
def test_verbs_that_compute_nothing_load_no_torch(arguments: list[str]) -> None:
    code = (
        "from meshwright.verbs.main import main\n"
        f"sys.argv = ['meshwright', *{arguments!r}]\n"
        "try:\n    status = main()\n"
        "except SystemExit as end:\n    status = end.code\n"
        "assert not status, status"
    )
    assert not loaded_by(code) & HEAVY

"""Every test runs on one torch thread, with a cache of its own and without a network."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports a Hugging Face library, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
for name in ("MESHWRIGHT_TEXT", "COLUMNS"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums are then taken in one order, and parallel test workers do not fight for cores."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def code_of_this_cpu() -> None:
    """Tests that compile by themselves meet no code of `make test-isa`, which has another width of vectors."""
    from meshwright.compat.torch_compile import keep_code_by_cpu

    keep_code_by_cpu()


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches of a test session never meet those of the user. C loops are compiled here, so that no test meets the line
    that says so."""
    from meshwright.kernels.c import serving_library, training_rows

    patch = pytest.MonkeyPatch()
    cache = tmp_path_factory.mktemp("cache")
    patch.setenv("XDG_CACHE_HOME", str(cache))
    serving_library.compiled()
    training_rows.is_compiled()
    yield cache
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """A connection beyond this machine is an error: the tests need nothing from outside."""
    patch = pytest.MonkeyPatch()
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            _refuse(address)
        connect(self, address)

    patch.setattr(socket.socket, "connect", local_only)
    yield
    patch.undo()


@pytest.fixture
def refusing_waits() -> Callable[[], AbstractContextManager[None]]:
    """A context in which the host's waiting for a GPU is an error. torch warns, once a process, that this mode is a
    prototype, and raises that warning after it has switched: the mode is put back even then."""
    import torch

    @contextmanager
    def refusing() -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode()

        def switch(to: int | str) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode(to)

        try:
            switch("error")
            yield
        finally:
            switch(mode)

    return refusing


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--strict-collectives SEED`: ranks that tests start run under tests/parallel/strict.py. `--fast`: see `fast`."""
    parser.addoption(
        "--strict-collectives", metavar="SEED", type=int, help="ranks communicate as strictly as with NCCL"
    )
    parser.addoption("--fast", action="store_true", help="the first test of each module, none marked long or slow")
    parser.addoption("--part", help="short, long, matrix, or several with commas: see `part`")


@pytest.fixture(autouse=True)
def strict_collectives(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the option asks for it, what a test runs on ranks runs inside of `strict(seed)`."""
    seed = request.config.getoption("--strict-collectives")
    if seed is None:
        return
    from meshwright.observe import ranks
    from tests.parallel.strict import under

    start = ranks.start

    def start_strictly(serve: Any, function: Any, arguments: Any, rank: int, folder: Any) -> Any:
        return start(serve, under, (seed, function, arguments), rank, folder)

    monkeypatch.setattr(ranks, "start", start_strictly)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is no CUDA device. `--fast`, `--part` take some."""
    wanted = config.getoption("--part")
    if wanted or config.getoption("--fast"):
        names = wanted.split(",") if wanted else []
        if unknown := set(names) - {"short", "long", "matrix"}:
            raise pytest.UsageError(f"--part {unknown.pop()} is not known: take short, long, matrix, or several")
        parts = (part(items, name) for name in names)
        chosen = fast(items) if config.getoption("--fast") else set().union(*parts)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def fast(items: list[pytest.Item]) -> set[pytest.Item]:
    """What `--fast` runs: of each module the first test that is not marked long or slow, of that its first case."""
    modules: dict[str, pytest.Item] = {}
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("long", "slow")):
            modules.setdefault(item.nodeid.partition("::")[0], item)
    return set(modules.values())


def part(items: list[pytest.Item], wanted: str) -> set[pytest.Item]:
    """`long`: tests marked so that have one case, and all cases of `long(every=True)`. `matrix`: cases of the others.

    `short`: the rest, and of the tests in the matrix the first case.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    parts: dict[str, set[pytest.Item]] = {"short": set(), "long": set(), "matrix": set()}
    for cases in functions.values():
        mark = cases[0].get_closest_marker("long")
        if mark is None:
            parts["short"].update(cases)
        elif len(cases) == 1 or mark.kwargs.get("every"):
            parts["long"].update(cases)
        else:
            parts["short"].add(cases[0])
            parts["matrix"].update(cases[1:])
    return parts[wanted]


def _is_local(host: object) -> bool:
    return str(host) in ("localhost", "::1") or str(host).startswith("127.")


def _refuse(address: object) -> NoReturn:
    raise AssertionError(f"a test tried to reach {address}: tests use no network")

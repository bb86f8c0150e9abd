"""Features that need an extra name it, before torch is imported, if its packages are not installed."""

import inspect
import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.formats.hub import config_from_shape
from meshwright.interface.terminal.help import VERBS
from meshwright.spec import presets
from meshwright.spec.errors import DataError
from meshwright.spec.extras import EXTRAS, require
from meshwright.spec.plan.execution import AttentionCall, GpuLibraries, attention_kernel
from meshwright.verbs.commands import FOLDERS, FUNCTIONS

FOR_DEVELOPERS = {"dev", "docs"}
IN_PYTHON = {
    "grammar": "fields of requests", "pandas": "to_pandas of answers", "gpu": "attention on a GPU",
    "gemlite": "products with 4-bit codes on a GPU",
}  # fmt: skip
"""Extras that no option of a verb asks for -> what does."""
READERS = {
    "train": "train model=llama-tiny data=", "tune": "tune model=llama-tiny model.init=random data=",
    "data": "data show data=", "eval": "eval hf --data ", "quantize": "quantize hf --scheme int4-gptq -o small --data ",
}  # fmt: skip
"""Verbs that read rows, up to the path."""
SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az", "hub": "hf"}
"""Extras of object stores -> their scheme."""
TRAINERS = {
    "train": "train model=llama-tiny data=texts", "tune": "tune model=llama-tiny model.init=random data=chat.jsonl",
    "distill": "distill --teacher hf --student teacher:layers=1 data=texts",
}  # fmt: skip
"""Verbs that report to services."""
RUN = """
import json, sys
from importlib.abc import MetaPathFinder

class Torch(BaseException):
    pass

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Torch

packages, words = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(packages))  # None: cannot be imported
sys.meta_path.insert(0, Finder())
from meshwright.verbs.main import main
try:
    sys.exit(main(words))
except Torch:
    sys.exit("torch is loaded before the missing package is named")
"""


def commands(extra: str) -> list[str]:
    """Yield every command that needs an extra. Signatures show which verbs have an option for it."""
    if extra == "serve":
        return ["serve hf"]
    if extra == "drill":
        return ["drill --only store-errors"]
    if extra == "eval":
        return ["eval hf --tasks hellaswag"]
    if extra == "zst":
        return [f"{READERS[verb]}rows.jsonl.zst data.tokenizer=bytes" for verb in ("train", "data")]
    if extra in ("parquet", "hf"):
        return [before + {"parquet": "rows.parquet", "hf": "hub:owner/name"}[extra] for before in READERS.values()]
    if extra in SCHEMES:
        url = f"{SCHEMES[extra]}://bucket/a"
        stored = [f"{trainer} store={url}" for trainer in TRAINERS.values()]
        return [f"runs {url}", f"export {url} out", f"report {url}", *stored]
    with_option = []
    for verb in VERBS.keys() - {"data"}:
        function = getattr(
            import_module(f"meshwright.verbs.{FOLDERS.get(verb, verb)}.command"), FUNCTIONS.get(verb, verb)
        )
        if extra in inspect.signature(function).parameters:
            with_option.append(f"{TRAINERS[verb]} --{extra}")
    return sorted(with_option)


def test_every_extra_of_pyproject_is_tried() -> None:
    """A new extra needs a row here, and its packages in one table."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - FOR_DEVELOPERS
    for extra, packages in EXTRAS.items():
        required = [line.split(">")[0].split("[")[0] for line in project["optional-dependencies"][extra]]
        modules = [name.replace("-", "_").removesuffix("_4") for name in required]
        assert sorted(modules) == sorted(packages)
        assert (extra in IN_PYTHON) == (not commands(extra))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("extras")
    for name in ("hf", "texts"):
        (made / name).mkdir()
    (made / "hf" / "config.json").write_text(
        json.dumps(config_from_shape(presets.model("llama-tiny"), dtype="float32"))
    )
    (made / "texts" / "a.txt").write_text("some text\n" * 400)
    (made / "rows.parquet").write_bytes(b"PAR1")
    (made / "rows.jsonl.zst").write_bytes(b"(")
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (made / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return made


@pytest.mark.parametrize(
    ("extra", "command"), [(extra, command) for extra in EXTRAS for command in commands(extra)]
)  # fmt: skip
def test_a_verb_names_the_extra_that_it_needs(extra: str, command: str, folder: Path) -> None:
    arguments = json.dumps([EXTRAS[extra], command.split()])
    ended = subprocess.run([sys.executable, "-c", RUN, arguments], cwd=folder, capture_output=True, text=True)
    message = f"needs {EXTRAS[extra][0]}, which is not installed: pip install 'meshwright[{extra}]'"
    assert message in ended.stderr and ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize(("extra", "package"), [(extra, package) for extra in EXTRAS for package in EXTRAS[extra]])
def test_each_package_of_an_extra_is_asked_for(extra: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
    require(extra, "this")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"^this needs {package}, which .*meshwright\[{extra}\]', or else$"):
        require(extra, "this", ", or else", DataError)


def test_a_choice_on_a_gpu_names_the_extra_that_it_lacks() -> None:
    from meshwright.kernels.quantized import device_products  # loads torch

    choice = attention_kernel(AttentionCall("documents", 4096, 128, 128, 0.0, False), GpuLibraries(9, 91900))
    assert "meshwright[gpu]" in choice.reason
    assert "meshwright[gemlite]" in device_products._gemlite_obstacle(None, None)  # type: ignore[arg-type]

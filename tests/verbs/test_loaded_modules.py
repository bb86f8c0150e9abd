"""Verbs import only what they use: packages that they avoid, and their number of modules."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

RUN = """
import inspect, json, os, signal, sys, threading, time, urllib.request
words, port, counts_runs = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
files_that_run = set()

def note_file(frame, event, _):
    # Functions alone: bodies of modules and classes run by an import, and so do their comprehensions, which are
    # functions up to Python 3.11.
    if event == "call" and is_function(frame) and (frame.f_code.co_name[0] != "<" or is_function(frame.f_back)):
        files_that_run.add(frame.f_code.co_filename)

def is_function(frame):
    return frame.f_code.co_flags & inspect.CO_OPTIMIZED

if counts_runs:
    sys.setprofile(note_file)
    threading.setprofile(note_file)

def interrupt_when_ready():
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return os.kill(os.getpid(), signal.SIGINT)
        except OSError:
            time.sleep(0.05)

if port:
    threading.Thread(target=interrupt_when_ready, daemon=True).start()
from meshwright.verbs.main import main
code = main(words)
sys.setprofile(None)
runs = len([file for file in files_that_run if "/meshwright/" in file])
ours = {name: hasattr(sys.modules[name], "__path__") for name in sys.modules if name.partition(".")[0] == "meshwright"}
print("LOADED", json.dumps([code, sorted(ours), sorted(name for name, is_folder in ours.items() if is_folder), runs]))
"""


class Loads(NamedTuple):
    """Limits of the imports of a verb."""

    words: tuple[str, ...]
    most: int
    """Modules of the package, folders not counted: a few above what they were when this was written."""
    never: tuple[str, ...]
    """Packages that it leaves alone, and modules."""
    most_run: int | None = None
    """Modules with a function that is called; None: not counted, since counting slows the verb down."""


ENGINE = ("compress", "kernels", "model", "formats", "parallel", "training", "observe", "serving")
"""What needs torch."""
FACES = ("interface.answers", "interface.planning", "interface.trained")
"""What the Python functions of verbs share."""
BESIDE = {"plan": ("plan_serve", "plan_from", "plan_formula")}
"""Verb -> rooms beside that of its name, which its command may load."""
TINY = ("model=llama-tiny", "recipe.sequence=64", "recipe.global_batch=2", "recipe.steps=1")
QUICK = {
    "the list of verbs": Loads(("--help",), 5, (*FACES, "spec.plan.plan", "spec.presets", "planner", *ENGINE)),
    "plan": Loads(
        ("plan", "llama-3.1-8b", "--cluster", "h100x8", "--nodes", "4"), 78, ("data", "stacks", *ENGINE), most_run=60
    ),
    "plan --serve": Loads(
        ("plan", "llama-3.2-1b", "--cluster", "h100x8", "--serve"), 79, ("data", "stacks", "planner.search", *ENGINE)
    ),
    "plan --for": Loads(("plan", "llama-3.2-1b", "--cluster", "h100x8", "--for", "torchtitan"), 97, ("data", *ENGINE)),
    "doctor --help": Loads(("doctor", "--help"), 13, (*FACES, "planner", "planfile", "data", *ENGINE)),
}
LONG = {
    "train": Loads(("train", *TINY, "data=texts", "run=runs/a"), 208, ("serving", "stacks", "compress"), most_run=151),
    "dryrun": Loads(("dryrun", *TINY), 195, ("serving", "stacks", "compress", "planner.serving")),
    "generate": Loads(
        ("generate", "runs/a", "--prompt", "the", "--max-new-tokens", "2"),
        175,
        ("planner", "stacks", "observe", "training.step.step", "training.loop", "formats.gguf.model"),
    ),
    "serve": Loads(
        ("serve", "runs/a", "--port"),
        179,
        ("planner", "stacks", "training.step.step", "training.loop", "observe.dryrun"),
    ),
}


class Loaded(NamedTuple):
    """What one call of a verb did."""

    code: int
    modules: list[str]
    folders: list[str]
    """Modules that are folders."""
    run: int
    """Modules with a function that was called; 0: not counted."""


def loaded(words: tuple[str, ...], folder: Path, counts_runs: bool = False) -> Loaded:
    """Run a verb in its own process and folder.

    A server is interrupted when it answers.
    """
    port = 0
    if words[0] == "serve":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = (*words, str(port))
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(words), str(port), str(counts_runs)],
        capture_output=True, text=True, check=False, timeout=300, cwd=folder,
    )  # fmt: skip
    assert "LOADED" in done.stdout, done.stderr
    return Loaded(*json.loads(done.stdout.rpartition("LOADED")[2]))


def check(verb: str, loads: Loads, folder: Path) -> None:
    code, modules, folders, run = loaded(loads.words, folder, counts_runs=loads.most_run is not None)
    assert code == 0 or loads.words[0] == "serve", verb
    names = [name.removeprefix("meshwright.") for name in modules]
    strangers = [name for name in names for package in loads.never if f"{name}.".startswith(f"{package}.")]
    assert not strangers, f"{verb} loads what it does not use: import it in the function that does"
    verbs = {name.split(".")[1] for name in names if name.startswith("verbs.") and name.endswith(".command")}
    count = len(modules) - len(folders)
    assert count <= loads.most, f"{verb} loads {count} modules: import what it seldom uses where it is used"
    assert run <= (loads.most_run or 0), f"{verb} runs code of {run} modules: merge those that tell one story"
    assert verbs <= {loads.words[0], *BESIDE.get(loads.words[0], ())}, verb


@pytest.mark.parametrize("verb", QUICK)
def test_a_verb_loads_what_it_uses(verb: str, tmp_path: Path) -> None:
    check(verb, QUICK[verb], tmp_path)


@pytest.mark.long
def test_verbs_of_the_engine_load_what_they_use(tmp_path: Path) -> None:
    """A run is trained, then asked and served."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("".join(f"line {n} of a short text\n" for n in range(400)))
    for verb, loads in LONG.items():
        check(verb, loads, tmp_path)


@pytest.mark.parametrize(
    ("run", "reason"),
    [("taken", "taken already holds a run: resume=auto"),
     ("/proc/x", "run=/proc/x cannot be written: /proc: No such file or directory"),
     ("file/x", "run=file/x cannot be written: ")],
)  # fmt: skip
def test_a_run_folder_that_cannot_be_used_is_refused_before_torch_is_loaded(
    run: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "taken" / "hf").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    call = (
        "import sys\nfrom meshwright.verbs.main import main\n"
        f"assert main(['train', {f'run={run}'!r}]) == 2\nassert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and reason in ended.stderr, ended.stderr


def test_what_is_wrong_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    """Within a second: errors in a path, a file or a checkpoint do not wait for torch."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk.bin").write_bytes(b"\1\0\2" * 100)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    chat = '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}'
    (tmp_path / "chat.jsonl").write_text(f"{chat}\n{{\n{chat}\n[1]\n")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n{\n{"text": "b"}\n')
    for words in (
        ("train", *TINY, "data=./nowhere"),
        ("train", *TINY, "data=empty"),
        ("train", *TINY, "data=junk.bin"),
        ("train", *TINY, "data=rows.jsonl"),
        ("train", *TINY, "data.tokenizer=./nowhere"),
        ("train", *TINY, "resume=nowhere"),
        ("train", "model=./nowhere"),
        ("tune", "model=llama-tiny", "model.init=random", "data=nowhere.jsonl"),
        ("tune", "model=llama-tiny", "model.init=random", "data=rows.jsonl"),
        ("tune", "model=llama-tiny", "model.init=random", "data=chat.jsonl"),
        ("train", *TINY, "data=text.jsonl"),
    ):
        code, modules, *_ = loaded(words, tmp_path)
        assert code == 2 and not [name for name in modules if name.split(".")[1:2] == ["training"]], words
        assert len(modules) < 120, words

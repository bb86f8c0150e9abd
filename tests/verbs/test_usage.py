"""Help texts, and errors of the parser: options, values and remedies, in one line."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.interface.terminal.help import VERBS
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.weights.gguf_schemes import GGUF_SCHEMES
from meshwright.verbs.compare.answer import compare_serving
from meshwright.verbs.main import main
from meshwright.verbs.plan_serve.answer import plan_serving
from meshwright.verbs.rent.answer import rent_serving

Capture = pytest.CaptureFixture[str]
MODEL = ["plan", "llama-3.2-1b", "--cluster", "h100x8"]


def helped(verb: str, capsys: Capture) -> str:
    capsys.readouterr()
    assert main([verb, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_help_is_as_wide_as_the_terminal(columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = [max(map(len, helped(verb, capsys).splitlines())) for verb in VERBS]
    assert max(longest) <= columns and max(longest) > 0.9 * columns


@pytest.mark.parametrize(
    ("verb", "asked"), [("plan", plan_serving), ("rent", rent_serving), ("compare", compare_serving)]
)
def test_help_has_the_defaults_of_its_own_verb(verb: str, asked: Any, capsys: Capture) -> None:
    message = " ".join(helped(verb, capsys).split())
    for name, option in inspect.signature(asked).parameters.items():
        if name in ("input_length", "output_length", "concurrency"):
            match = re.search(rf"--{name.replace('_', '-')} INT With --serve: [\w ]+\. \[default: (\d+)\]", message)
            assert match and int(match[1]) == option.default


def test_help_names_every_scheme_and_nothing_of_the_source(capsys: Capture) -> None:
    help_text = helped("quantize", capsys)
    assert set(re.findall(r"[\w-]+", help_text)) >= {*SCHEMES, *GGUF_SCHEMES}
    assert "make schema" not in helped("schema", capsys)
    for verb in VERBS:
        assert not re.search(r"x[<>]=|--output\b(?!-)|<\w+>", helped(verb, capsys)), verb


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plann"], "No such command 'plann'. Did you mean 'plan'? See meshwright --help"),
        (
            ["plan", "--detail"],
            "No such option: --detail. Did you mean --details, --repair? See meshwright plan --help",
        ),
        (
            ["tune", "--learning_rate", "2e-5"],
            'TRL\'s flags go in one pair of quotes: --from-trl "--learning_rate ...": see meshwright tune --help',
        ),
        ([*MODEL, "--nodes", "abc"], "--nodes abc must be a whole number: see meshwright plan --help"),
        ([*MODEL, "--nodes", "2", "--nodes=1.5"], "--nodes 1.5 must be a whole number: see meshwright plan --help"),
        ([*MODEL, "--price", "much"], "--price much must be a number of dollars: see meshwright plan --help"),
        ([*MODEL, "--memory", "40GB"], "--memory 40GB must be a number of GiB, as 40: see meshwright plan --help"),
        ([*MODEL, "layout.tp=2", "recipe.steps=3"], "layout.tp=2 is given as --layout tp=2: see meshwright plan"),
        ([*MODEL, "recipe.sequence=64"], "recipe.sequence=64 is given as --recipe sequence=64: see meshwright plan"),
        ([*MODEL, "--sweep", "recompute=none,ful"], "--sweep recompute=ful: recompute takes none or norms or "),
        ([*MODEL, "--sweep", "tp=1,two"], "--sweep tp=two: tp takes a whole number of 1 or more"),
        (["serve", "x", "--cache-mib", "-1"], "--cache-mib -1 must be at least 0: see meshwright serve --help"),
        ([*MODEL, "--for", "torchtitann"], "--for torchtitann is not known; nearest: torchtitan"),
        (["plan", "llama-3.1-8", "--cluster", "h100x8"], "MODEL llama-3.1-8 is not known; nearest: llama-3.1-8b, "),
        (["plan", "xyzzy", "--cluster", "h100x8"], "MODEL xyzzy is not known; known: "),
        ([*MODEL, "--layout", "zzz=3"], "--layout zzz=3: 'zzz' is not a field of a layout; known: dp, "),
        ([*MODEL, "--recipe", "qqqq=3"], "qqqq is not known: no key is like it; `meshwright init` prints them"),
        (["verify", "--case", "x=3"], "--case: 'x' is not known; known: family, vocab, "),
    ],
)
def test_refusals_name_the_option_and_a_remedy(words: list[str], message: str, capsys: Capture) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and not told.out
    assert len(told.err) < 300 and "pydantic" not in told.err and "?:" not in told.err


def play(folder: Path) -> None:
    """Make files that a user may name by mistake."""
    (folder / "text.txt").write_text("words\n" * 100)
    (folder / "run").mkdir()
    (folder / "run" / "plan.yaml").write_text("model: llama-tiny\n")
    (folder / "hf").mkdir()


WRONG = {
    "plan": "MODEL is missing: give a preset, a folder or a plan file, or --from FILE",
    "plan llama-3.2-1b --cluster h100x99999999": "--cluster h100x99999999: a node has 1 to 65,536 devices, as h100x8",
    "plan llama-3.2-1b --cluster no.toml": "--cluster no.toml cannot be read, no such file or directory: `",
    "plan llama-3.2-1b --cluster text.txt": "--cluster text.txt is not a cluster: name a device, as h100x8, or ",
    "plan llama-3.2-1b --cluster run": "--cluster run is not a cluster: name a device, as h100x8, or ",
    "plan llama-3.2-1b --cluster h100x8 --tune lora:0": "--tune lora:0: the rank must be at least 1 and ",
    "plan llama-3.2-1b --cluster h100x8 --teacher no": "--teacher no is not known; known: ",
    "plan llama-3.2-1b --cluster h100x8 --teacher text.txt": "--teacher text.txt is a file: give a preset, a folder ",
    "plan llama-3.2-1b --cluster h100x8 --serve --concurrency 0": "--concurrency 0 must be at least 1",
    "plan gpt2-124m --cluster t4x4 --for accelerate": "is counted in bf16: T4 has none, take another device",
    "plan llama-3.2-1b --cluster h100x8 --concurrency 0": "--concurrency is for serving: add --serve",
    "plan llama-3.2-1b --cluster h100x8 --serve --measure": "--measure runs the load on this machine: name it with ",
    "plan text.txt --cluster h100x8": "MODEL text.txt is a file: give a preset, a folder with config.json, or a plan",
    "plan --from nothing": "--from nothing is no file and no folder: give a configuration of torchtitan, ",
    "rent llama-3.2-1b --tokens 1B --devices ,": "--devices , is empty: list names with commas, as",
    "rent llama-3.2-1b --tokens 1B --nodes ,": "--nodes , is empty: list names with commas, as --nodes 1,2,4",
    "rent llama-3.2-1b --tokens 1B --mtbf -1": "--mtbf -1 must be at least 1 and at most 1,000,000,000",
    "train text.txt": "text.txt is not a plan: give text and conversations as data=text.txt",
    "data show chat.jsonl": "chat.jsonl is not a plan: give text and conversations as data=chat.jsonl",
    "export run out.safetensors": "OUT out.safetensors is a folder with the name of a file: take out, or NAME.gguf",
    "train run": "run: cannot be read, is a directory: give run/plan.yaml",
    "train hf": "hf: cannot be read, is a directory: give a plan file, or model=hf/ for a model's folder, or data=hf/ ",
    "train teacher=no": "teacher=no is not known; known: ",
    "distill --teacher run --student no": "--student no is not known; known: ",
    "distill --teacher run --sequences no/out.jsonl --prompts text.txt": "--sequences no/out.jsonl: there is no folder",
    "distill --teacher run --sequences text.txt --prompts text.txt": "--sequences text.txt is there already: name",
    "generate run --prompt a --top-p 2": "--top-p 2 must be above 0 and at most 1",
    "generate run --prompt a --samples 0": "--samples 0 must be at least 1",
    "generate run --prompts no": "--prompts no cannot be read as lines of prompts: No such file or directory",
    "verify --processes 0": "--processes 0 must be at least 1",
    "verify --seed 3": "--seed 3 chooses random cases: add --random N",
    "verify --only tp --page no/page.md": "--page no/page.md: there is no folder no; make it first",
    "dryrun model=llama-tiny --rank 5": "--rank 5 is not one of the 1 ranks of the plan",
    "serve hf --guess-tokens 0": "--guess-tokens 0 must be at least 1",
    "generate text.txt --prompt a": "text.txt is a file of another kind: give a run folder, one of its checkpoints, ",
}


@pytest.mark.parametrize("asked", WRONG)
def test_wrong_inputs_are_refused_before_anything_is_written(
    asked: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(asked.split()) == 2
    told = capsys.readouterr()
    assert WRONG[asked] in told.err and told.err.count("\n") == 1 and not told.out
    assert sorted(tmp_path.rglob("*")) == before


def test_python_still_names_its_arguments() -> None:
    with pytest.raises(mw.PlanError, match=r"^stack='torchtitann' is not known; nearest: torchtitan$"):
        mw.plan("llama-3.2-1b", cluster="h100x8", stack="torchtitann")


def test_the_former_name_of_an_option_is_still_read(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for option in ("-o", "--out", "--output"):
        assert main([*MODEL, "--for", "torchtitan", option, str(file)]) == 2
        assert capsys.readouterr().err == f"meshwright: --out {file} is a file: name a folder\n"


def test_a_dry_run_is_no_option_that_begins_to_train(tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", "model=llama-tiny", f"run={tmp_path / 'run'}", "--dry-run"]) == 2
    assert "`meshwright dryrun`" in capsys.readouterr().err and not (tmp_path / "run").exists()

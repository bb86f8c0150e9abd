"""What the help says, and what the parser refuses: options, values and remedies, in one line."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.api.renting_serving import rent_serving
from meshwright.api.serve_planning import plan_serving
from meshwright.api.serving_comparison import compare_serving
from meshwright.cli.commands import FUNCTIONS
from meshwright.cli.main import main
from meshwright.spec.gguf_schemes import GGUF_SCHEMES
from meshwright.spec.quantization_schemes import SCHEMES

Capture = pytest.CaptureFixture[str]
MODEL = ["plan", "llama-3.2-1b", "--cluster", "h100x8"]


def helped(verb: str, capsys: Capture) -> str:
    capsys.readouterr()
    assert main([verb, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_help_is_as_wide_as_the_terminal(columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = [max(map(len, helped(verb, capsys).splitlines())) for verb in FUNCTIONS]
    assert max(longest) <= columns and max(longest) > 0.9 * columns


@pytest.mark.parametrize(
    ("verb", "asked"), [("plan", plan_serving), ("rent", rent_serving), ("compare", compare_serving)]
)
def test_help_has_the_defaults_of_its_own_verb(verb: str, asked: Any, capsys: Capture) -> None:
    said = " ".join(helped(verb, capsys).split())
    for name, option in inspect.signature(asked).parameters.items():
        if name in ("input_length", "output_length", "concurrency"):
            found = re.search(rf"--{name.replace('_', '-')} INT With --serve: [\w ]+\. \[default: (\d+)\]", said)
            assert found and int(found[1]) == option.default


def test_help_names_every_scheme_and_nothing_of_the_source(capsys: Capture) -> None:
    said = helped("quantize", capsys)
    assert set(re.findall(r"[\w-]+", said)) >= {*SCHEMES, *GGUF_SCHEMES}
    assert "make schema" not in helped("schema", capsys)
    for verb in FUNCTIONS:
        assert not re.search(r"x[<>]=|--output\b(?!-)|<\w+>", helped(verb, capsys)), verb


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plann"], "No such command 'plann'. Did you mean 'plan'? See meshwright --help"),
        (["plan", "--detail"], "No such option: --detail. Did you mean --details? See meshwright plan --help"),
        ([*MODEL, "--nodes", "abc"], "--nodes abc must be a whole number: see meshwright plan --help"),
        ([*MODEL, "--nodes", "2", "--nodes=1.5"], "--nodes 1.5 must be a whole number: see meshwright plan --help"),
        ([*MODEL, "--price", "much"], "--price much must be a number: see meshwright plan --help"),
        (["serve", "x", "--cache-mib", "0"], "--cache-mib 0 must be at least 1: see meshwright serve --help"),
        ([*MODEL, "--for", "torchtitann"], "--for 'torchtitann' is not known; nearest: torchtitan"),
        (["plan", "llama-3.1-8", "--cluster", "h100x8"], "MODEL 'llama-3.1-8' is not known; nearest: llama-3.1-8b, "),
        (["plan", "xyzzy", "--cluster", "h100x8"], "MODEL 'xyzzy' is not known; known: "),
        ([*MODEL, "--layout", "zzz=3"], "--layout 'zzz=3': 'zzz' is no field of a layout; known: dp, "),
        ([*MODEL, "--recipe", "qqqq=3"], "qqqq is not known: no key is like it; `meshwright init` prints them"),
        (["verify", "--case", "x=3"], "--case: 'x' is not known; known: family, vocab, "),
    ],
)
def test_refusals_name_the_option_and_a_remedy(words: list[str], said: str, capsys: Capture) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out
    assert len(told.err) < 300 and "pydantic" not in told.err and "?:" not in told.err


def test_python_still_names_its_arguments() -> None:
    with pytest.raises(mw.PlanError, match=r"^stack='torchtitann' is not known; nearest: torchtitan$"):
        mw.plan("llama-3.2-1b", cluster="h100x8", stack="torchtitann")


def test_the_former_name_of_an_option_is_still_read(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for option in ("-o", "--out", "--output"):
        assert main([*MODEL, "--for", "torchtitan", option, str(file)]) == 2
        assert capsys.readouterr().err == f"meshwright: --out {file} is a file: name a folder\n"

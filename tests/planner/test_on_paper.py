"""Formulas of papers, row by row: sums, GPT-3's figures, and an arithmetic of the test's own for other models."""

import json

import pytest

import meshwright
from meshwright.spec import presets
from meshwright.spec.weights.inventory import num_parameters
from meshwright.verbs.main import main

S, H, A, L, V = 2048, 12288, 96, 96, 50257
"""GPT-3 175B (Brown et al. 2020, table 2.1)."""


def test_rows_of_gpt3_sum_to_the_closed_form() -> None:
    """Korthikanti et al. 2022, equation 1; the parts of section 4.1."""
    answer = meshwright.plan_formula("gpt3-175b", recipe={"sequence": S}, layout="micro_batch=2")
    sbh, asb = S * 2 * H, A * S**2 * 2
    assert answer.layer_bytes[0] == 34 * sbh + 5 * asb
    parts = {
        part: sum(row.paper_bytes for row in answer.layer if row.part == part) for part in ("attention", "MLP", "norms")
    }
    assert parts == {"attention": 11 * sbh + 5 * asb, "MLP": 19 * sbh, "norms": 4 * sbh}
    for row in answer.layer:
        numbers = [eval(number.replace("^", "**").replace(",", "")) for number in row.numbers.split(" x ")]
        product = 1
        for number in numbers:
            product *= number
        assert product == row.paper_bytes, row


def test_selective_saves_70_percent_of_gpt3_on_paper_and_here_with_plain_kernels() -> None:
    answer = meshwright.plan_formula(
        "gpt3-175b", recipe={"sequence": S, "dropout": 0.1}, layout="kernels=reference,compile=off"
    )
    for side, bound in ((0, 0.70), (1, 0.70)):
        assert 1 - answer.policies["selective"][side] / answer.policies["none"][side] > bound
    assert answer.policies["none"][0] == L * (34 * S * H + 5 * A * S**2)


def test_parameters_of_gpt3_by_component() -> None:
    answer = meshwright.plan_formula("gpt3-175b", recipe={"sequence": S})
    components = {row.component: row for row in answer.components}
    assert all(row.count == row.formula_count for name, row in components.items() if name != "positions")
    assert answer.parameters - components["positions"].count == H * V + L * (12 * H * H + 13 * H) + 2 * H
    assert all(sum(sizes.values()) == 16 * answer.parameters for sizes in answer.states.values())


def test_an_8b_llama_keeps_what_arithmetic_says() -> None:
    """Grouped heads, SwiGLU of 14,336, flash attention; uncompiled blocks keep the outputs of norms."""
    s, h = 4096, 4096
    answer = meshwright.plan_formula("llama-3.1-8b", recipe={"sequence": s}, layout={"compile": "off"})
    rows = {(row.part, row.operation): row for row in answer.layer}
    assert answer.layer_bytes[0] == 34 * s * h + 5 * 32 * s * s
    assert rows["attention", "Q and K"].engine_bytes == 2 * s * (4096 + 2 * 1024)
    assert rows["attention", "softmax"].engine_bytes == 4 * s * 32
    assert rows["MLP", "input of GELU"].engine_bytes == 2 * s * 2 * 14336
    assert rows["MLP", "input of the second matrix"].engine_bytes == 0
    assert answer.layer_bytes[1] == 2 * s * (6144 + 4096 + 2 * 14336) + 4 * s * 32 + 8 * s * h


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-2-2b"])
def test_every_kept_tensor_is_in_a_row(name: str) -> None:
    answer = meshwright.plan_formula(name, recipe={"sequence": 1024})
    assert answer.parameters == num_parameters(presets.model(name))
    layers = presets.model(name).layers
    if presets.model(name).moe is None:  # all layers are alike
        assert layers * answer.layer_bytes[1] == answer.policies["none"][1]
    assert all(row.why for row in answer.layer)


def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt3-175b", "--formula", "--recipe", "sequence=2048"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == meshwright.plan_formula("gpt3-175b", recipe="sequence=2048").to_dict()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "sum: 34 s b h + 5 a s^2 b" in shown and "N = h v + L (12 h^2 + 13 h) + 2 h, and positions" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--layout", "tp=2"], "has tp=2, and the formulas are of one device"),
        (["--nodes", "2"], "--nodes is for plans of a layout, and --formula counts one device"),
        (["--recipe", "sequence=0"], "sequence"),
        (["--serve"], "--serve is for plans of a layout"),
    ],
)
def test_other_questions_are_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--formula", *words]) == 2
    assert sentence in capsys.readouterr().err

"""The movable figures of the Learn pages: their numbers in another way, and how they look and move in a browser."""

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from docs import figures
from tests.planner.browser import CHROMIUM, Browser

PAGES = sorted((figures.ROOT / "docs").glob("**/*.md"))
WIDTHS = (360, 700, 1300)


def finite(shown: Any) -> bool:
    """Whether all numbers inside are finite."""
    if isinstance(shown, dict):
        return all(map(finite, shown.values()))
    if isinstance(shown, list | tuple):
        return all(map(finite, shown))
    return not isinstance(shown, float) or math.isfinite(shown)


def test_every_figure_is_on_one_page() -> None:
    asked = [name for page in PAGES for name in figures.FIGURE.findall(page.read_text(encoding="utf-8"))]
    written_about = figures.FIGURE.findall((figures.FOLDER / "README.md").read_text(encoding="utf-8"))
    for name in written_about:
        asked.remove(name)
    assert sorted(asked) == figures.names()


@pytest.mark.parametrize("name", figures.names())
def test_a_figure_has_finite_numbers_and_no_more_than_a_page_can_carry(name: str) -> None:
    title, shown = figures.numbers(name)
    assert title and finite(shown)
    assert len(json.dumps(shown)) < 400_000


def expected_after(name: str, ranks: int) -> list[list[int] | None]:
    """What ranks hold at the end, by the collective's definition: rank r starts with 10 (r + 1) + 1, + 2, ..."""
    inputs = [[10 * (rank + 1) + column + 1 for column in range(ranks)] for rank in range(ranks)]
    total = [sum(numbers) for numbers in zip(*inputs, strict=True)]
    diagonal = [inputs[rank][rank] for rank in range(ranks)]
    return {
        "broadcast": [inputs[0]] * ranks,
        "reduce": [total] + [None] * (ranks - 1),
        "all-reduce": [total] * ranks,
        "gather": [diagonal] + [None] * (ranks - 1),
        "scatter": [[number] for number in inputs[0]],
        "all-gather": [diagonal] * ranks,
        "reduce-scatter": [[number] for number in total],
        "all-to-all": [[inputs[source][rank] for source in range(ranks)] for rank in range(ranks)],
    }[name]  # type: ignore[return-value]


def test_collectives_end_as_defined_and_the_busiest_rank_sends_what_the_formula_says() -> None:
    _, shown = figures.numbers("collectives")
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1}
    for name, collective in shown.items():
        for ranks, run in collective["ranks"].items():
            assert run["after"] == expected_after(name, ranks), (name, ranks)
            sent = [0] * ranks
            for source, _, numbers in (send for step in run["steps"] for send in step):
                sent[source] += 4 * len(numbers)
            assert sent == run["sent"]
            assert max(sent) == pytest.approx(collective["shares"][ranks] * 4 * ranks)
            assert len(run["steps"]) == rounds.get(name, 1 / (ranks - 1)) * (ranks - 1)


def test_bars_of_memory_are_those_of_an_arithmetic_by_hand() -> None:
    """Llama-3.1-8B: 18 bytes of states per parameter, and per layer and token what plain arithmetic counts."""
    _, shown = figures.numbers("memory")
    gib, parameters, hidden, ffn = 2**30, 8_030_261_248, 4096, 14336
    flash = shown["models"]["llama-3.1-8b"]["1 GPU"]["flash attention"]
    for sequence in shown["sequences"]:
        for batch in shown["batches"]:
            weights, gradients, optimizer, activations, _ = flash[sequence][batch][0]
            assert weights == pytest.approx(2 * parameters / gib, abs=0.1)
            assert gradients == pytest.approx(4 * parameters / gib, abs=0.1)  # fp32 sums of two micro-batches
            assert optimizer == pytest.approx(12 * parameters / gib, abs=0.1)
            # Queries, keys, values; output of attention; halves of SwiGLU; the stream twice; a sum per head in fp32.
            token = 2 * (hidden + 2 * 1024 + hidden + 2 * ffn + 2 * hidden) + 4 * 32
            rows = 32 * sequence * batch * token / gib
            assert rows - 0.1 <= activations <= rows * 1.2 + 0.1, (sequence, batch)
    plain = shown["models"]["llama-3.1-8b"]["1 GPU"]["plain attention"][8192][1]
    scores = 32 * 4 * 32 * 8192**2 / gib  # fp32 weights of all layers and heads
    assert scores < plain[0][3] - plain[1][3] < 1.25 * scores


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as entry:
        yield entry


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", figures.names())
def test_a_figure_fits_and_moves_by_keyboard(name: str, browser: Browser, tmp_path: Path) -> None:
    """At three widths, light and dark: no complaint, nothing outside of the window, every control changes the view."""
    file = tmp_path / f"{name}.html"
    file.write_text(figures.page(name), encoding="utf-8")
    browser.complaints.clear()
    for width in WIDTHS:
        for dark in (False, True):
            browser.look(width, 900, dark=dark)
            browser.open(file)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.querySelector('.stage').textContent.length") > 10
    controls = browser.evaluate("document.querySelectorAll('.controls :is(input[type=range], select)').length")
    assert controls > 0
    for control in range(controls):
        focus = f"document.querySelectorAll('.controls :is(input[type=range], select)')[{control}]"
        last = f"({focus}.max ?? {focus}.length - 1) - ({focus}.selectedIndex ?? {focus}.value)"
        before = browser.evaluate("document.querySelector('.movable').innerHTML")
        key = "ArrowDown" if browser.evaluate(f"{focus}.tagName") == "SELECT" else "ArrowRight"
        backwards = {"ArrowDown": "ArrowUp", "ArrowRight": "ArrowLeft"}[key]
        browser.evaluate(f"{focus}.focus()")
        browser.press(key if browser.evaluate(last) > 0 else backwards)
        assert browser.evaluate("document.querySelector('.movable').innerHTML") != before, f"control {control}"
    assert not browser.complaints
    assert not re.findall(r"https?://(?!www\.w3\.org)", file.read_text(encoding="utf-8"))


def test_distillation_is_the_divergence_by_its_sum_and_the_gradient_by_differences() -> None:
    _, shown = figures.numbers("distillation")
    teacher = [3.0, 1.5, -1.0, -2.0, 0.0, 2.6, 1.0]

    def softmax(logits: list[float], heat: float) -> list[float]:
        powers = [math.exp(x / heat) for x in logits]
        return [power / sum(powers) for power in powers]

    def loss(logits: list[float], heat: float, beta: float) -> float:
        t, s = softmax(teacher, heat), softmax(logits, heat)
        m = [beta * a + (1 - beta) * b for a, b in zip(t, s, strict=True)]

        def kl(p: list[float], q: list[float]) -> float:
            return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

        if beta in (0, 1):
            return heat**2 * (kl(s, t) if beta else kl(t, s))
        return heat**2 * (beta * kl(t, m) + (1 - beta) * kl(s, m))

    betas = {"forward KL": 0.0, "between (beta 0.5)": 0.5, "reverse KL": 1.0}
    for key in ("2|1|1|forward KL", "4.5|0.6|2|reverse KL", "0|2.5|8|between (beta 0.5)", "3|1.5|0.5|reverse KL"):
        centre, width, heat, name = key.split("|")
        logits = [-((i - float(centre)) ** 2) / (2 * float(width) ** 2) for i in range(7)]
        probabilities, divergence, gradient = shown["students"][key]
        assert probabilities == pytest.approx(softmax(logits, float(heat)), abs=1e-4)
        assert divergence == pytest.approx(loss(logits, float(heat), betas[name]), abs=1e-3)
        assert shown["teacher"][heat] == pytest.approx(softmax(teacher, float(heat)), abs=1e-4)
        for i in range(7):
            ends = [[x + step * (j == i) for j, x in enumerate(logits)] for step in (1e-4, -1e-4)]
            up, down = (loss(each, float(heat), betas[name]) for each in ends)
            assert gradient[i] == pytest.approx((up - down) / 2e-4, abs=2e-3)


def test_the_page_of_distillation_states_what_its_formulas_give() -> None:
    page = (figures.ROOT / "docs/learn/distillation.md").read_text(encoding="utf-8")
    t, s = (0.7, 0.2, 0.1), (0.5, 0.25, 0.25)
    forward = sum(a * math.log(a / b) for a, b in zip(t, s, strict=True))
    reverse = sum(b * math.log(b / a) for a, b in zip(t, s, strict=True))
    for number in (f"{forward:.3f}", f"{reverse:.3f}", f"{-math.log(s[0]):.3f}"):
        assert f"= {number}" in page
    for heat in (1, 2):
        powers = [math.exp(x / heat) for x in (4, 2, 0)]
        row = " | ".join(f"{power / sum(powers):.3f}" for power in powers)
        assert f"| {heat} | {row} |" in page


def test_formats_of_numbers_have_the_limits_of_their_bits() -> None:
    """By the definition, from bits alone: IEEE's formats, and e4m3, whose top exponent still holds numbers."""
    _, shown = figures.numbers("number_formats")
    for name, form in shown["floats"].items():
        exponent, mantissa = form["exponent"], form["mantissa"]
        bias = 2 ** (exponent - 1) - 1
        ieee = (2 - 2.0**-mantissa) * 2.0**bias
        assert form["largest"] == (2.0**8 * 1.75 if name == "fp8 e4m3" else ieee), name
        assert form["smallest"] == 2.0 ** (1 - bias)
    assert len(shown["nf4"]) == 16 and shown["nf4"][0] == -1 and 0.0 in shown["nf4"] and shown["nf4"][-1] == 1


def test_absmax_and_zero_point_are_those_of_the_lecture() -> None:
    """By Python's own rounding, which takes the even one of two, in double precision."""
    _, shown = figures.numbers("linear_quantization")
    numbers = shown["example"]
    assert shown["methods"]["absmax"][8]["codes"] == [127, 1, 0, 8, 0]
    for bits in (8, 4, 3, 2):
        absmax, zero_point = (shown["methods"][name][bits] for name in ("absmax", "zero-point"))
        step = max(numbers) / (2 ** (bits - 1) - 1)
        assert absmax["scale"] == pytest.approx(step) and absmax["zero"] == 0
        assert absmax["codes"] == [round(number / step) for number in numbers]
        step = max(numbers) / (2**bits - 1)
        assert zero_point["scale"] == pytest.approx(step) and zero_point["zero"] == 0
        assert zero_point["codes"] == [round(number / step) for number in numbers]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_bits_of_any_number_are_torchs(browser: Browser, tmp_path: Path) -> None:
    """Signs, exponents and mantissas that the page shows: those of torch's casts, of numbers of every size."""
    file = tmp_path / "number_formats.html"
    file.write_text(figures.page("number_formats"), encoding="utf-8")
    browser.look(700, 900)
    browser.open(file)
    codes = {
        "fp32": (torch.float32, torch.int32, 32), "fp16": (torch.float16, torch.int16, 16),
        "bf16": (torch.bfloat16, torch.int16, 16), "fp8 e4m3": (torch.float8_e4m3fn, torch.uint8, 8),
        "fp8 e5m2": (torch.float8_e5m2, torch.uint8, 8),
    }  # fmt: skip
    chosen = random.Random(0)
    numbers = [0.0, 1.0, -2.5, 0.1, 65504.0, 448.0, -57344.0, 6.1e-5, 5.96e-8, 2**-9, 2**-10, 1.9999999, 70000.0, 1e-45]
    numbers += [chosen.choice((-1, 1)) * chosen.random() * 10.0 ** chosen.randint(-8, 5) for _ in range(40)]
    for number in numbers:
        browser.evaluate(
            f"(() => {{ const field = document.querySelector('input[type=text]'); field.value = '{number!r}';"
            "field.dispatchEvent(new Event('input')); })()"
        )
        rows = browser.evaluate("[...document.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => "
                                "cell.textContent))")  # fmt: skip
        shown = {row[0]: row[1].replace(" ", "") for row in rows}
        for name, (dtype, integer, width) in codes.items():
            cast = torch.tensor(number, dtype=torch.float64).to(dtype)
            if name == "fp8 e4m3" and abs(number) > 448:
                continue  # torch saturates or gives NaN by its version; the page says NaN
            code = int(cast.view(integer)) & (2**width - 1)
            assert shown[name] == format(code, f"0{width}b"), (name, number)

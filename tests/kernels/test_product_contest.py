"""Ways of multiplying with codes: the fastest that is right is taken, by times that a clock of the test gives."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compat import integers
from meshwright.kernels.quantized import device_products
from meshwright.kernels.quantized.device_products import CHECKED, CLASSES, ProductContest, ProductWay
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.serving.engine import engine_start
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.verbs.doctor import engine
from tests.model.shrunk import model

FP32 = torch.float32


def matrix(outputs: int = 80, name: str = "int4-rtn") -> QuantizedMatrix:
    weight = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(outputs)) * 0.1
    return quantize_matrix("some", weight, SCHEMES[name], None, torch.bfloat16)


def plain(x: Tensor, coded: QuantizedMatrix, bias: Tensor | None, _: Any) -> Tensor:
    y = x @ coded.dequantized().t()
    return y if bias is None else y + bias


def raises(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image\nis there")


class Clock:
    """Gives each way the time of a table, by the rows of the product that is timed."""

    def __init__(self, times: dict[str, Callable[[int], float]]) -> None:
        self.times, self.timed = times, list[tuple[str, int]]()

    def way(self, name: str, multiply: Callable[..., Tensor] = plain, **options: Any) -> ProductWay:
        def run(x: Tensor, coded: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
            self.last = name, len(x)
            return multiply(x, coded, bias, layout)

        return ProductWay(name, options.pop("missing", lambda *_: ""), run, **options)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.timed.append(self.last)
        name, rows = self.last
        return self.times[name](rows)


def contest(clock: Clock, ways: list[ProductWay], copies: bool = False) -> tuple[ProductContest, list[str]]:
    lines: list[str] = []
    return ProductContest(
        ways, lambda rows: "rule" if rows <= 128 else "other", copies=copies, seconds=clock, say=lines.append
    ), lines


def layout(size: int) -> Callable[..., tuple[Any, int]]:
    return lambda *_: ("made", size)


def test_the_fastest_is_taken_for_each_number_of_rows() -> None:
    clock = Clock({"rule": lambda rows: rows * 1e-6, "other": lambda rows: 1e-4 if rows > 100 else 1.0})
    held, lines = contest(clock, [clock.way("rule"), clock.way("other")])
    coded, bias = matrix(), torch.randn(80)
    for rows, expected in ((1, "rule"), (64, "rule"), (65, "other"), (129, "other"), (2048, "other")):
        x = torch.randn(rows, 64)
        y = held.product(x, coded, bias)
        assert y is not None and clock.last == (expected, rows)
        torch.testing.assert_close(y, plain(x, coded, bias, None))
    assert held.product(torch.randn(2049, 64), coded, None) is None, "above what was timed the rule holds"
    assert len(clock.timed) == 2 * len(CLASSES) and len(lines) == 1
    assert "rule up to 64 rows (64 us), other up to 2,048 rows (100 us)" in lines[0]


def test_a_form_is_timed_once() -> None:
    clock = Clock(dict.fromkeys(("rule", "other"), lambda _: 1e-5))
    held, lines = contest(clock, [clock.way("rule"), clock.way("other")])
    for outputs in (80, 80, 96):
        held.product(torch.randn(2, 64), matrix(outputs), None)
    assert len(lines) == 2 and len(clock.timed) == 2 * 2 * len(CLASSES)


def test_noise_does_not_choose() -> None:
    clock = Clock({"rule": lambda _: 1.0, "other": lambda _: 0.96})
    held, _ = contest(clock, [clock.way("rule"), clock.way("other")])
    held.product(torch.randn(2, 64), matrix(), None)
    assert clock.last[0] == "rule"


@pytest.mark.parametrize("bad", ["raises", "wrong", "not a number"])
def test_what_is_wrong_is_out_and_said(bad: str) -> None:
    factor = {"wrong": 1.1, "not a number": float("nan")}.get(bad)
    broken = raises if factor is None else lambda *inputs: plain(*inputs) * factor
    clock = Clock({"rule": lambda _: 1.0, "other": lambda _: 0.1})
    held, lines = contest(clock, [clock.way("rule"), clock.way("other", broken)])
    held.product(torch.randn(300, 64), matrix(), None)
    assert clock.last[0] == "rule"
    assert {"raises": "RuntimeError no kernel image", "wrong": "off by 0.1", "not a number": "off by nan"}[
        bad
    ] in lines[0]


def test_second_layouts_are_asked_for_and_counted() -> None:
    clock = Clock({"rule": lambda _: 1.0, "other": lambda rows: 0.5 if rows == 2 else 2.0, "third": lambda _: 3.0})

    def entrants() -> list[ProductWay]:
        return [
            clock.way("rule"), clock.way("other", layout=layout(1000)), clock.way("third", layout=layout(70)),
        ]  # fmt: skip

    held, lines = contest(clock, entrants())
    held.product(torch.randn(1, 64), matrix(), None)
    assert clock.last[0] == "rule" and held.copied_bytes == 0 and "not other: it needs a second layout" in lines[0]
    held, _ = contest(clock, entrants(), copies=True)
    coded, another = matrix(), matrix()
    for tensor in (coded, another, coded, replace(coded, prepared={})):
        held.product(torch.randn(1, 64), tensor, None)
    assert clock.last[0] == "other"
    assert held.copied_bytes == 2000, "of each matrix once, and none of a way that lost"


def test_layouts_go_with_their_contest_and_another_one_asks_anew() -> None:
    """A model outlives its engine, and the next engine may have no memory for second layouts."""
    clock = Clock({"rule": lambda _: 1.0, "other": lambda _: 0.5})

    def made(*_: Any) -> tuple[Tensor, int]:
        return torch.zeros(1), 4

    def entrants() -> list[ProductWay]:
        return [clock.way("rule"), clock.way("other", layout=made)]

    first, second = contest(clock, entrants(), copies=True)[0], contest(clock, entrants())[0]
    coded, rows = matrix(), torch.randn(1, 64)
    first.product(rows, coded, None)
    assert clock.last[0] == "other"
    layouts = [weakref.ref(layout) for _, _, layout in coded.prepared["ways"][2]]
    second.product(rows, coded, None)
    assert clock.last[0] == "rule" and second.copied_bytes == 0
    first.close()
    second.product(rows, coded, None)
    assert all(layout() is None for layout in layouts) and len(second._filled) == 1
    second.close()
    assert "ways" not in coded.prepared


def test_what_is_missing_is_said() -> None:
    clock = Clock({"rule": lambda _: 1.0})
    held, lines = contest(clock, [clock.way("rule"), clock.way("other", missing=lambda *_: "not installed")])
    held.product(torch.randn(1, 64), matrix(), None)
    assert lines[0].endswith("; not other: not installed")


def test_rows_of_another_dtype_have_a_contest_of_their_own() -> None:
    clock, coded = Clock({"rule": lambda _: 1.0}), matrix()
    held, lines = contest(clock, [clock.way("rule", lambda x, *rest: plain(x.float(), *rest).to(x.dtype))])
    for dtype in (torch.bfloat16, torch.float16, torch.float16):
        y = held.product(torch.randn(1, 64).to(dtype), coded, None)
        assert y is not None and y.dtype == dtype
    assert len(lines) == 2


def test_products_go_to_the_open_contest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"rule": lambda _: 1.0})
    held, _ = contest(clock, [clock.way("rule")])
    monkeypatch.setattr(device_products, "_is_contested", lambda rows, _: True)
    coded, x = matrix(), torch.randn(3, 64)
    assert device_products.packed(x, coded, None, {}) is None, "a CPU has no kernel for it"
    monkeypatch.setattr(device_products, "_contests", [held])
    assert device_products.packed(x, coded, None, {}) is not None and clock.last == ("rule", 3)
    device_products.close_contest(held)
    assert device_products.packed(x, coded, None, {}) is None


def test_a_contest_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds codes and second layouts, whose memory the next model needs. Another engine's goes on."""
    monkeypatch.setattr(engine_start, "times_products", lambda *_: True)
    options = EngineOptions(cache_bytes=2**20, second_layouts=True)
    engines = [ServingEngine(model("llama-3.1-8b"), options)]
    codes = torch.zeros(1)
    held = weakref.ref(codes)
    device_products._contests[0].layouts["some",] = codes, None
    del codes
    assert held() is not None
    engines.append(ServingEngine(model("llama-3.1-8b"), options))
    (second,) = device_products._contests
    engines.pop(0)
    assert held() is None and device_products._contests == [second]
    engines.clear()
    assert not device_products._contests


def test_a_contest_opens_for_auto_alone() -> None:
    opened = device_products.open_contest(copies=True, say=lambda _: None)
    try:
        assert [opened.rule(rows) for rows in (1, 512, 513)] == ["codes inside", "codes inside", "restored slabs"]
        for prefer in ("auto", "eager"):
            assert device_products.packed(torch.randn(3, 64), replace(matrix(), prefer=prefer), None, {}) is None
        assert not opened.results, "nothing is timed on a CPU"
    finally:
        device_products.close_contest(opened)


@pytest.mark.parametrize("name", ["int4-rtn", "int4-sym", "int4-hqq"])
def test_torchs_order_stands_for_the_same_numbers(name: str) -> None:
    """(q - 8) s + z of the scales and shifts, beside the restored matrix; codes of a byte change places."""
    coded = matrix(CHECKED, name)
    (scales, shifts), size = coded.scales_and_shifts().unbind(-1), coded.size_in // coded.scales.shape[1]
    numbers = (coded.whole_codes().float() - 8) * scales.t().float().repeat_interleave(size, 1)
    numbers += shifts.t().float().repeat_interleave(size, 1)
    torch.testing.assert_close(numbers, coded.dequantized(), rtol=0.02, atol=0.01)


def test_ways_say_what_they_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {way.name: way for way in device_products.WAYS}
    bf16, fp16 = torch.bfloat16, torch.float16
    assert not ways["torch's 4-bit product"].missing(matrix(), bf16)
    assert "bf16" in ways["torch's 4-bit product"].missing(matrix(), fp16)
    assert "whole numbers" in ways["torch's 4-bit product"].missing(matrix(name="nf4"), bf16)
    assert "multiples" in ways["torch's 4-bit product"].missing(matrix(81), bf16)
    monkeypatch.setattr(integers, "gemlite_version", lambda: "0.6")
    assert not ways["gemlite"].missing(matrix(), fp16)
    assert "whole numbers" in ways["gemlite"].missing(matrix(name="nf4"), bf16)
    monkeypatch.setattr(integers, "gemlite_version", lambda: "")
    assert "pip install" in ways["gemlite"].missing(matrix(), fp16)


@pytest.mark.parametrize("wrong", [False, True])
def test_doctor_holds_one_contest_and_names_who_was_there(wrong: bool) -> None:
    """Elsewhere than on a GPU none, unless ways are given."""
    clock = Clock({"inside": lambda _: 2.0, "slabs": lambda _: 1.0})

    def right(x: Tensor, coded: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
        return plain(x.float(), coded, bias, layout).to(x.dtype)

    multiply = raises if wrong else right
    ways = [clock.way("inside", multiply), clock.way("slabs", multiply)]
    ways.append(clock.way("gemlite", missing=lambda *_: "not installed"))

    def make(say: Callable[[str], None]) -> ProductContest:
        return ProductContest(ways, lambda _: "inside", copies=True, seconds=clock, say=say)

    finding = engine.check_quantized_products(torch.device("cpu"), make, size=128)
    assert finding.state == ("failure" if wrong else "ok")
    assert (
        "slabs up to 2,048 rows" in finding.observation and "not gemlite: not installed" in finding.observation
    ) is not wrong
    assert "s for each size of matrix" in finding.observation and len(clock.timed) == (0 if wrong else 2 * len(CLASSES))
    assert engine.check_quantized_products(torch.device("cpu")).state == "skipped"

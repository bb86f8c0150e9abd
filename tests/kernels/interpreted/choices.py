"""The chooser where kernels can run: each is tried first, and one that fails or is off is not taken."""

import pytest
import torch
from torch import Tensor

from meshwright.kernels import chooser
from meshwright.kernels.triton import gated, trials

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "_choices", {})


@pytest.mark.parametrize("operation", chooser.RULES)
def test_every_operation_passes_its_trial(operation: str) -> None:
    dtype = torch.float32 if torch.float32 in chooser.RULES[operation].dtypes else torch.float16
    assert trials.problem(operation, CPU, dtype) == ""
    actual = chooser.choice(operation, CPU, dtype, prefer="triton")
    assert actual.by == "triton" and actual.reason.startswith("interpreter, fp")


def test_a_kernel_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gate: Tensor, up: Tensor) -> Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gated, "swiglu", fails)
    actual = chooser.choice("swiglu", CPU, torch.float32, prefer="triton")
    assert (actual.by, actual.reason) == ("torch", "its trial failed: RuntimeError no kernel image")


def test_a_kernel_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "swiglu", lambda gate, up: gate * up)
    actual = chooser.choice("swiglu", CPU, torch.float32, prefer="triton")
    assert actual.by == "torch" and actual.reason.startswith("its trial was off by")


def test_reasons() -> None:
    assert chooser.choice("grouped", CPU, torch.float32, prefer="triton").reason == "the kernel takes no fp32"
    assert chooser.choice("gelu", CPU, torch.float32).reason == "torch's own is one kernel a pass already"
    assert chooser.choice("swiglu", CPU, torch.float32, prefer="eager").reason == "layout.kernels=eager"
    line = chooser.summarize([chooser.choice(name, CPU, torch.float32) for name in ("gelu", "swiglu", "rope")])
    assert line.startswith("swiglu, rope: triton (interpreter, fp32); gelu: torch (")

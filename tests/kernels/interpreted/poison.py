"""Memory that a kernel does not write shows: what torch.empty gives is not a number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*sizes: Any, **options: Any) -> Tensor:
        actual = make(*sizes, **options)
        return actual.fill_(float("nan")) if actual.is_floating_point() and actual.device.type == "cpu" else actual

    return filled


@pytest.fixture(autouse=True)
def nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))

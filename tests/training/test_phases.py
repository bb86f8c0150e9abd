"""The watchdog knows what a rank does by names of functions. Each must exist, so a renamed function is noticed."""

from functools import reduce
from importlib import import_module

import pytest
import torch

from meshwright.interface.process.launch import PHASES, READS


@pytest.mark.parametrize("name", sorted({*PHASES, *READS}))
def test_each_name_is_that_of_a_function(name: str) -> None:
    module, qualname = name.split(":")
    function = reduce(getattr, qualname.split("."), import_module(module))
    # Decorators such as torch.no_grad put a function around; its own frame is on the stack too.
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    assert (function.__globals__["__name__"], function.__code__.co_qualname) == (module, qualname)


def test_the_names_are_those_of_frames() -> None:
    assert torch.Tensor.backward.__code__.co_qualname == "Tensor.backward"

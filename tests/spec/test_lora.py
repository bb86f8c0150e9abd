"""Targets of adapters: names of matrices that a shape has, as its inventory has them."""

from dataclasses import replace

import pytest

from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.inventory import parameters
from meshwright.spec.lora import LoRAShape


@pytest.mark.parametrize("name", presets.model_names())
def test_a_shape_names_its_matrices(name: str) -> None:
    shape = replace(presets.model(name), lora=LoRAShape(rank=1))
    adapted = {one.adapts.removesuffix(".weight").rpartition(".")[2] for one in parameters(shape) if one.adapts}
    assert adapted == set(shape.matrices)


@pytest.mark.parametrize(("name", "target"), [("llama-3.1-8b", "q_down"), ("gpt2", "gate"), ("deepseek-v3", "k")])
def test_a_matrix_that_is_not_there_is_refused(name: str, target: str) -> None:
    with pytest.raises(PlanError, match=rf"model.lora.targets={target}: this model has no matrix '{target}'"):
        replace(presets.model(name), lora=LoRAShape(rank=1, targets=target))

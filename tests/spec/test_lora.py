"""Targets of adapters: names of matrices that a shape has, as its inventory has them."""

from dataclasses import replace

import pytest

from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.legal import layout_violations
from meshwright.spec.weights.inventory import parameters


@pytest.mark.parametrize("name", presets.model_names())
def test_a_shape_names_its_matrices(name: str) -> None:
    shape = replace(presets.model(name), lora=LoRAShape(rank=1))
    adapted = {
        parameter.adapts.removesuffix(".weight").rpartition(".")[2]
        for parameter in parameters(shape)
        if parameter.adapts
    }
    assert adapted == set(shape.matrices)


@pytest.mark.parametrize(("name", "target"), [("llama-3.1-8b", "q_down"), ("gpt2", "gate"), ("deepseek-v3", "k")])
def test_a_matrix_that_is_not_there_is_refused(name: str, target: str) -> None:
    with pytest.raises(PlanError, match=rf"model.lora.targets='{target}': this model has no matrix '{target}'"):
        replace(presets.model(name), lora=LoRAShape(rank=1, targets=target))


@pytest.mark.parametrize("targets", ["all", "mlp", "gate", "up", "o,down"])
def test_lengths_of_rows_beside_experts_are_refused_whichever_matrix_has_them(targets: str) -> None:
    experts = presets.model("mixtral-8x7b")
    with pytest.raises(PlanError, match="no form for stacks of experts"):
        replace(experts, lora=LoRAShape(rank=1, targets=targets, dora=True))
    replace(experts, lora=LoRAShape(rank=1, targets=targets))
    replace(experts, lora=LoRAShape(rank=1, targets="attention", dora=True))


@pytest.mark.parametrize("name", presets.model_names())
def test_frozen_matrices_between_hidden_states_are_codes(name: str) -> None:
    """All of them, whatever has an adapter; what is trained, and everything else, is not."""
    shape = replace(presets.model(name), lora=LoRAShape(rank=1, targets="o", base="nf4"))
    coded = {parameter.name for parameter in parameters(shape) if parameter.scheme}
    assert coded == {parameter.name for parameter in parameters(shape.base) if parameter.matrices}
    assert not any(parameter.trained for parameter in parameters(shape) if parameter.scheme)
    assert not any(parameter.scheme for parameter in parameters(replace(shape, lora=LoRAShape(rank=1))))


def test_bytes_of_codes_are_those_of_their_tensors() -> None:
    for scheme in SCHEMES.values():
        for size in ((64, 256), (3, 70)):
            assert scheme.nbytes((5, *size)) == 5 * scheme.nbytes(size)
            assert scheme.bits_per_weight(*size) == 8 * scheme.nbytes(size) / (size[0] * size[1])
    assert 4.12 < SCHEMES["nf4-double"].bits_per_weight(4096, 4096) < 4.14


def test_layouts_cut_codes_and_no_pass_keeps_restored_ones() -> None:
    coded = replace(presets.model("mixtral-8x7b"), lora=LoRAShape(rank=1, base="nf4"))
    sentence = "layout.cuda_graphs=on would keep room for all"
    assert any(sentence in refusal for refusal in layout_violations(coded, Recipe(), Layout(cuda_graphs="on")))
    for layout in (Layout(dp_shard=2, zero=3), Layout(tp=2), Layout(dp_shard=2, ep=2), Layout(tp=2, sp=True, ep=2)):
        assert not layout_violations(coded, Recipe(), layout)

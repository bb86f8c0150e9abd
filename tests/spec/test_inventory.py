"""Inventory: names, order, axes and counts of the parameters of every variant."""

from dataclasses import replace
from math import prod

import pytest

from meshwright.spec import num_active_parameters, num_parameters, parameters, presets

TINY = ["llama-tiny", "moe-tiny", "gpt2-124m", "qwen3-0.6b", "deepseek-v3"]
SHAPES = [replace(presets.model(name), layers=min(4, presets.model(name).layers)) for name in TINY]
LETTERS = {"V": "vocab", "D": "hidden"}


@pytest.mark.parametrize("shape", SHAPES, ids=TINY)
def test_every_parameter_is_consistent(shape: presets.ModelShape) -> None:
    listed = parameters(shape)
    assert len({p.name for p in listed}) == len(listed)
    for parameter in listed:
        assert len(parameter.dims) == len(parameter.shape) == len(parameter.axes)
        assert parameter.numel == prod(parameter.shape) > 0
        assert set(parameter.axes) <= {"", "tp", "ep"}
        for letter, size in zip(parameter.dims, parameter.shape, strict=True):
            assert letter not in LETTERS or getattr(shape, LETTERS[letter]) == size, parameter.name
        assert parameter.decays == (len(parameter.shape) > 1)
        assert (parameter.layer >= 0) == parameter.name.startswith("layers.")
    assert num_parameters(shape) == sum(p.numel for p in listed)


@pytest.mark.parametrize("shape", SHAPES, ids=TINY)
def test_layers_follow_each_other(shape: presets.ModelShape) -> None:
    layers = [p.layer for p in parameters(shape) if p.layer >= 0]
    assert layers == sorted(layers) and set(layers) == set(range(shape.layers))


def test_only_experts_are_split_by_ep() -> None:
    for shape in SHAPES:
        for parameter in parameters(shape):
            assert ("ep" in parameter.axes) == (parameter.group == "expert"), parameter.name


def test_a_tied_head_is_counted_once() -> None:
    shape = presets.model("llama-tiny")
    names = [p.name for p in parameters(shape)]
    assert "head.weight" not in names and names[-1] == "norm.weight"
    untied = replace(shape, tied=False)
    assert parameters(untied)[-1].name == "head.weight"
    assert num_parameters(untied) - num_parameters(shape) == shape.vocab * shape.hidden


def test_biases_are_split_like_the_rows_of_their_matrix() -> None:
    by_name = {p.name: p for p in parameters(SHAPES[TINY.index("gpt2-124m")])}
    assert by_name["layers.0.attention.q.bias"].axes == ("tp",)
    assert by_name["layers.0.attention.o.bias"].axes == ("",)
    assert by_name["layers.0.mlp.up.bias"].axes == ("tp",)
    assert by_name["layers.0.mlp.down.bias"].axes == ("",)


def test_a_token_meets_top_k_experts() -> None:
    shape = presets.model("moe-tiny")
    assert shape.moe is not None
    expert = 3 * shape.hidden * shape.moe.ffn
    unmet = shape.layers * (shape.moe.experts - shape.moe.top_k) * expert
    assert num_parameters(shape) - num_active_parameters(shape) == unmet
    assert num_active_parameters(presets.model("llama-tiny")) == num_parameters(presets.model("llama-tiny"))

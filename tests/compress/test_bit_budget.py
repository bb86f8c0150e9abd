"""Mixed precision under a budget of bytes: the choice against every choice, what it goes by, and the verb."""

import copy
import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compress.bit_budget import RUNGS, BitChoice, bits_of, choose_within, ladder
from meshwright.compress.quality import compare, measure_groups
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import build
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import ArgumentError, PlanError
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.verbs.main import main
from meshwright.verbs.quantize.options import bytes_of
from tests.compress.test_formats import SHAPES
from tests.compress.test_quantize import batch
from tests.compress.test_quantize import folder as folder  # a fixture


def groups_of(seed: int) -> list[list[BitChoice]]:
    """Four groups of other sizes, whose divergences fall by a quarter with each bit."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 30, (4,), generator=generator).tolist()
    losses = (torch.rand(4, generator=generator) ** 3).tolist()
    return [
        [BitChoice(bits * size, loss * 4.0 ** (3 - bits)) for bits in (3, 4, 5, 6)]
        for size, loss in zip(sizes, losses, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_but_for_what_one_step_costs(seed: int) -> None:
    groups = groups_of(seed)
    ways = list(product(range(4), repeat=4))

    def total(numbers: Any) -> tuple[int, float]:
        actual = [group[number] for group, number in zip(groups, numbers, strict=True)]
        return sum(entry.bytes for entry in actual), sum(entry.divergence for entry in actual)

    step = max(second.bytes - first.bytes for group in groups for first, second in pairwise(group))
    for budget in range(total([0] * 4)[0], total([3] * 4)[0] + 1, 7):
        bytes_, divergence = total(choose_within(groups, budget))
        assert bytes_ <= budget
        below = [total(way)[1] for way in ways if total(way)[0] <= max(budget - step, total([0] * 4)[0])]
        assert divergence <= min(below) + 1e-12
    assert choose_within(groups, 10**9) == [3] * 4 and choose_within(groups, 0) == [0] * 4


def test_groups_are_measured_one_by_one_and_the_model_stays_as_it_was() -> None:
    model = build(SHAPES["llama"]).eval().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rungs, names = ladder(SCHEMES["int4-gptq"]), list(quantizable(model.shape))
    actual = measure_groups(model, names, rungs, [batch(), batch(seed=1)])
    assert sorted(name for group in actual for name in group.names) == sorted(names)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for group in (actual[0], actual[3]):
        after = copy.deepcopy(model)
        for name in group.names:
            after.get_parameter(name).copy_(quantize_matrix(name, before[name], rungs[0]).dequantized())
        expected = compare(model, after, [batch(), batch(seed=1)]).kl
        assert group.choices[0].divergence == pytest.approx(expected, rel=1e-4)
        falling = [choice.divergence for choice in group.choices]
        assert falling == sorted(falling, reverse=True) and falling[-1] < falling[0] / 100
        assert [choice.bytes for choice in group.choices] == sorted(choice.bytes for choice in group.choices)
    sizes = quantizable(model.shape)
    stored = sum(tensor.nbytes for name in actual[0].names
                 for tensor in quantize_matrix(name, before[name], rungs[2]).tensors.values())  # fmt: skip
    assert actual[0].choices[2].bytes == stored and len(actual[0].choices) == len(RUNGS) and sizes


@pytest.mark.parametrize("scheme", ["int4-gptq", "int4-hqq"])
def test_the_files_stay_within_the_budget(scheme: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(folder / "hf"), "--scheme", scheme, "--data", str(folder / "text.txt"), "--sequences", "8"]
    least = mw.quantize(folder / "hf", "int3", folder / "three", group=32, quality=False).bytes
    most = mw.quantize(folder / "hf", "int8", folder / "eight", quality=False).bytes
    budget = (least + most) // 2
    assert main([*words, "--budget", str(budget), "-o", str(folder / "q"), "--json", "--max-kl", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    files = sum(path.stat().st_size for path in folder.glob("q/*.safetensors"))
    assert files == document["bytes"] == document["predicted_bytes"] <= budget == document["budget_bytes"]
    assert files > 0.9 * budget and len(document["bits"]) > 1
    assert {layer["scheme"] for layer in document["layers"]} == {f"int{bits}-{scheme[5:]}" for bits in document["bits"]}
    assert main(["generate", str(folder / "q"), "--prompt", "def", "--greedy", "--max-new-tokens", "2"]) == 0
    assert main([*words, "--budget", "100KiB", "-o", str(folder / "small")]) == 2
    printed = capsys.readouterr().err
    assert "--budget '0.1 MiB' is too small: with 3 bits for every matrix the files take" in printed.replace("\n", " ")
    assert not (folder / "small").exists()


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"budget": "much"}, ArgumentError, "budget='much' is not a size"),
    ({"budget": "1.2TiB"}, ArgumentError, "budget='1.2TiB' is not a size: give a number with B, KiB"),
    ({"budget": 0}, ArgumentError, "budget=0 is not a size"),
    ({"budget": "1GiB", "scheme": "int8"}, ArgumentError, "int8 has 8 for all"),
    ({"budget": "1GiB", "scheme": "nf4"}, ArgumentError, "nf4 has 4 for all"),
    ({"budget": "300KiB", "format": "compressed-tensors", "group": 32}, PlanError, "is written with one scheme"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(
    change: dict[str, Any], kind: type[Exception], message: str, folder: Path
) -> None:
    inputs = {
        "model": folder / "hf", "scheme": "int4-rtn", "out": folder / "q", "data": folder / "text.txt", "sequences": 8,
        **change,
    }  # fmt: skip
    with pytest.raises(kind, match=message):
        mw.quantize(**inputs)
    assert not (folder / "q").exists()


def test_sizes_in_words() -> None:
    assert bytes_of("1.5GiB") == 3 * 2**29 and bytes_of("800 MB") == 800 * 10**6 and bytes_of(7) == bytes_of("7B") == 7
    assert bits_of({"a": SCHEMES["int8"], "b": SCHEMES["int3"], "c": SCHEMES["nf4"], "d": SCHEMES["int4-rtn"]}) == {
        3: 1, 4: 2, 8: 1,
    }  # fmt: skip

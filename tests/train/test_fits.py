"""Plans that cannot fit are refused before anything is made; those that can are not."""

from dataclasses import replace

import pytest
import torch

from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import DoesNotFit
from meshwright.train import fits
from meshwright.train.fits import check_fits

CPU = torch.device("cpu")
TINY = Plan(model=presets.model("llama-tiny"), recipe=Recipe(), layout=Layout())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(TINY, model=presets.model("llama-3.1-405b")), ("optimizer states", "a smaller model")),
        (
            replace(TINY, model=replace(TINY.model, ffn=2**30), recipe=Recipe(sequence=16, global_batch=1)),
            ("optimizer states", "a smaller model"),
        ),
        (replace(TINY, recipe=Recipe(sequence=2**24, global_batch=4096)), ("activations", "layout.micro_batch")),
        (
            replace(TINY, recipe=Recipe(sequence=2**20, global_batch=2**22), layout=Layout(micro_batch=1)),
            ("tokens of a step", "recipe.global_batch"),
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_figures(plan: Plan, words: tuple[str, ...]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        check_fits(plan, CPU)
    assert all(word in str(refused.value) for word in (*words, "rank 0", "GiB"))
    assert refused.value.exit_code == 3


def test_a_micro_batch_that_nobody_meant() -> None:
    with pytest.raises(DoesNotFit, match="activations"):
        check_fits(replace(TINY, recipe=Recipe(sequence=64, global_batch=200_000)), CPU)


def test_sharding_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "capacity_bytes", lambda device: 30 * 2**30)
    large = replace(TINY, model=presets.model("llama-3.1-8b"), recipe=Recipe(precision="bf16", global_batch=64))
    with pytest.raises(DoesNotFit):
        check_fits(large, CPU)
    check_fits(replace(large, layout=Layout(dp_shard=8, zero=3, micro_batch=1)), CPU)
    check_fits(replace(large, layout=Layout(tp=4, pp=2, micro_batch=1)), CPU)


@pytest.mark.parametrize(("layers", "worst"), [(5, "rank 0"), (4, "rank 1")], ids=["three layers", "a norm more"])
def test_the_worst_stage_is_named(layers: int, worst: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "capacity_bytes", lambda device: 2**20)
    uneven = replace(
        TINY, model=replace(TINY.model, layers=layers, tied=False, vocab=256), layout=Layout(pp=2, micro_batch=1)
    )
    with pytest.raises(DoesNotFit, match=f"{worst} needs"):
        check_fits(uneven, CPU)

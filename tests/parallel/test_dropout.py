"""Masks of dropout under layouts: gathered from all ranks, they are those of one device, bit for bit.

Each rank records, for every place of dropout, which elements stay. Their samples and positions travel in a tensor of
the batch, which is cut as tokens are, so a mask of other elements would be noticed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.kernels.norm.dropout import AttentionDropout, dropout, features, keep_mask, mix
from meshwright.model import Transformer, low_rank, transformer
from meshwright.model import attention as attention_module
from meshwright.model.transformer import Block
from meshwright.observe.oracle import one_device
from meshwright.observe.oracle.one_device import Case, case_batch, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.spec.layout.layout import Layout
from meshwright.training.step.batches import Batch
from meshwright.training.step.step import MicroPass
from meshwright.verbs.verify.cases import DrawnCase, parse_case, random_case
from meshwright.verbs.verify.random_run import ALONE

Masks = dict[tuple[Any, ...], np.ndarray[Any, Any]]
"""Elements that stay, (features or keys,) bool, by place, number of the token and first feature or head."""


@contextmanager
def recorded(case: Case, masks: Masks) -> Iterator[None]:
    """Record masks of forward passes inside. Recomputation draws them again."""
    now: dict[str, Any] = {}

    def numbered_batch(case: Case, step: int) -> Batch:
        """The batch with the number of each token among all of the case."""
        batch = case_batch(case, step)
        numbers = torch.arange(batch.tokens.numel()).view(batch.tokens.shape) + 10**6 * step
        return replace(batch, more={**batch.more, "numbers": numbers})

    def add(label: tuple[Any, ...], numbers: Tensor, first: int, stays: Tensor) -> None:
        for number, stay in zip(numbers.flatten().tolist(), stays.flatten(0, 1), strict=True):
            masks[(*label, number, first)] = stay.numpy()

    def spy(x: Tensor, rate: float, rows: Tensor, site: int, first: int = 0) -> Tensor:
        out = dropout(x, rate, rows, site, first)
        if now and x.dim() == 3:
            numbers = now["numbers"] if x.shape[1] == now["numbers"].shape[1] else now["stream"]
            stays = keep_mask(mix(rows + site), features(first, x.shape[-1], x.device), rate)
            assert torch.equal(out.ne(0), stays & x.ne(0))
            add((now["layer"], site), numbers, first, stays)
        return out

    class Spy:
        @staticmethod
        def make(tokens: Tensor, rate: float, heads: int, first: int) -> AttentionDropout:
            drops = AttentionDropout.make(tokens, rate, heads, first)
            if now:
                stays = keep_mask(drops.rows, features(0, case.sequence, tokens.device), rate)
                for head in range(heads):
                    add((now["layer"], "weights"), now["numbers"], first + head, stays[:, :, head])
            return drops

    run_pass, run_block = MicroPass.__call__, Block.forward

    def watch_pass(self: MicroPass, model: Transformer, x: Tensor | None) -> Any:
        numbers = self.batch.more["numbers"]
        now.update(numbers=numbers, stream=model.seams.positions(numbers), layer="")
        names.update({id(block): name for name, block in model.layers.items()})
        try:
            return run_pass(self, model, x)
        finally:
            now.clear()

    def watch_block(self: Block, *arguments: Any) -> Any:
        if now:
            now["layer"] = names.get(id(self), "of the teacher")
        return run_block(self, *arguments)

    names: dict[int, str] = {}
    with (
        patch.object(transformer, "dropout", spy), patch.object(low_rank, "dropout", spy),
        patch.object(attention_module, "AttentionDropout", Spy), patch.object(MicroPass, "__call__", watch_pass),
        patch.object(Block, "forward", watch_block), patch.object(one_device, "case_batch", numbered_batch),
    ):  # fmt: skip
        yield


def run(drawn: list[DrawnCase]) -> list[Masks]:
    """Return the masks of each case on this rank."""
    masks_of_cases = []
    for case in drawn:
        masks: Masks = {}
        with recorded(case.case, masks):
            outcome(case.case, case.layout)
        masks_of_cases.append(masks)
    return masks_of_cases


def by_elements(masks: Masks) -> dict[tuple[Any, ...], bool]:
    """The same by single element, whatever part of the features a rank holds."""
    elements = {}
    for (layer, site, number, first), stays in masks.items():
        offset, head = (0, first) if site == "weights" else (first, -1)
        for feature, stay in enumerate(stays.tolist()):
            elements[layer, site, number, head, offset + feature] = stay
    return elements


def assert_equal_masks(drawn: list[DrawnCase], world: int) -> None:
    ranks = on_ranks(world, run, drawn)
    for number, case in enumerate(drawn):
        [alone] = run([DrawnCase(case=case.case, layout=ALONE)])
        elements, gathered = by_elements(alone), {}
        for rank in ranks:
            mine = by_elements(rank[number])
            assert all(gathered.get(key, stays) == stays for key, stays in mine.items()), "ranks agree"
            gathered |= mine
        assert elements and gathered == elements, case


COMMON = "sequence=8 global_batch=4 hidden=8 heads=4 kv_heads=2 ffn=10 steps=1 dropout=0.3"
TWO = (
    "tp=2", "tp=2 sp=true recompute=full", "cp=2", "cp=2 context_split=striped context=all-gather", "dp_shard=2 zero=3",
    "pp=2 micro_batch=1", "tp=2 sp=true tp_chunks=2 lora.rank=2 lora.dropout=0.5 norm=layernorm",
    "dp_replicate=2 micro_batch=1 positions=learned",
)  # fmt: skip


def test_masks_of_two_ranks_are_those_of_one_device() -> None:
    assert_equal_masks([parse_case(f"{COMMON} {layout}") for layout in TWO], 2)


@pytest.mark.long
def test_masks_of_four_ranks_are_those_of_one_device() -> None:
    assert_equal_masks([parse_case(f"{COMMON} {layout}") for layout in ("tp=2 cp=2 sp=true", "pp=2 tp=2 sp=true")], 4)


@pytest.mark.slow
def test_masks_of_forty_random_layouts_are_those_of_one_device() -> None:
    """Random shapes, degrees, schedules, recomputation and recipes of `verify --random 400 --seed 69`."""
    cases = (random_case(69, index) for index in range(400))
    drawn = [case for case in cases if case.layout.world > 1 and case.case.precision == "fp32" and case.case.dropout]
    drawn = drawn[:40]
    assert len(drawn) == 40
    for world in sorted({case.layout.world for case in drawn}):
        assert_equal_masks([case for case in drawn if case.layout.world == world], world)


def test_another_micro_batch_draws_the_same_masks() -> None:
    """On one device: neither micro-batches nor recomputation change a mask."""
    case = parse_case(COMMON).case
    ways = [Layout(micro_batch=size, compile="off", recompute=words) for size, words in ((4, "none"), (1, "full"))]  # type: ignore[arg-type]
    first, second = (by_elements(run([DrawnCase(case=case, layout=layout)])[0]) for layout in ways)
    assert first == second

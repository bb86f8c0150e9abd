"""Blocks of 8-bit states: however ranks share a parameter, each scale belongs to one of them."""

import pytest
import torch

from meshwright.spec import presets
from meshwright.spec.weights.boxes import Box, StateStorage, shard
from meshwright.spec.weights.inventory import parameters


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-1.5b", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [2, 3, 24, 64])
def test_scales_of_all_shards_are_those_of_the_whole(name: str, ranks: int) -> None:
    shape, kinds = presets.model(name), set()
    for parameter in parameters(shape):
        stored, whole = StateStorage("int8").format_of(parameter), parameter.shape
        if not stored.block or (whole, parameter.axes) in kinds:
            continue
        kinds.add((whole, parameter.axes))
        of_whole = Box(whole=whole, offsets=(0,) * len(whole), sizes=whole)
        seen = torch.zeros(stored.scale_sizes(whole), dtype=torch.int8)
        for index in range(ranks):
            box = stored.box("moment1_scale", shard(of_whole, ranks, index))
            assert box.whole == tuple(seen.shape)
            seen[box.slices] += 1
        assert bool((seen == 1).all()), parameter.name
    assert kinds

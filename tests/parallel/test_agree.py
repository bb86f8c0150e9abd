"""What ranks tell each other before they start: digests to all, whole texts only where those differ."""

import pickle
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.observe.ranks import on_ranks
from meshwright.parallel import make_mesh
from meshwright.parallel.groups.group import check_same, union_of_names
from meshwright.spec import Layout
from meshwright.spec.errors import MeshwrightError

TEXT = "".join(f"line {number}\n" for number in range(1000))


def names_of(rank: int) -> set[str]:
    """As two pipeline places of two replicas."""
    return {f"layers.{layer}.weight" for layer in range(300 * (rank // 2), 300 * (rank // 2 + 1))}


def asked(differs: int | None) -> tuple[str, bool, list[int], int]:
    """On one rank: the refusal, whether all names were found, bytes of what went to all, number of broadcasts."""
    world = make_mesh(Layout(dp_replicate=4))["world"]
    gathers: list[int] = []
    broadcasts = 0
    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list

    def gathering(objects: list[Any], mine: Any, **options: Any) -> None:
        gathers.append(len(pickle.dumps(mine)))
        gather(objects, mine, **options)

    def broadcasting(*arguments: Any, **options: Any) -> None:
        nonlocal broadcasts
        broadcasts += 1
        broadcast(*arguments, **options)

    dist.all_gather_object, dist.broadcast_object_list = gathering, broadcasting
    try:
        text, refusal = TEXT, ""
        try:
            check_same(world, "plans", text.replace("line 7\n", "line x\n") if world.index == differs else text)
        except MeshwrightError as error:
            refusal = str(error)
        union = union_of_names(names_of(world.index), world.process_group)
    finally:
        dist.all_gather_object, dist.broadcast_object_list = gather, broadcast
    return refusal, union == names_of(0) | names_of(2), gathers, broadcasts


@pytest.mark.parametrize(("differs", "broadcasts"), [(None, 2), (2, 4)])
def test_all_hear_digests_and_only_the_differing_texts(differs: int | None, broadcasts: int) -> None:
    for refusal, complete, gathers, told in on_ranks(4, asked, differs):
        assert complete and max(gathers) < 100 and len(gathers) == 2 and told == broadcasts
        if differs is None:
            assert refusal == ""
        else:
            assert "rank 0 and rank 2 disagree about plans: 'line 7' and 'line x'" in refusal

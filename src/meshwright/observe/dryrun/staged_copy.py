"""What a rank copies to host memory for a checkpoint that a thread writes, in a world that is not there.

Of equal pieces one rank writes each; torch deals them out over all ranks' lists, which only meet where ranks are real.
Here the lists of the others are made from their boxes (spec/held.py) and torch's own planner deals.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from meshwright import compat
from meshwright.spec import Plan
from meshwright.spec.boxes import Box
from meshwright.spec.held import HeldParameter, held
from meshwright.spec.optimizer_states import StateStorage
from meshwright.spec.places import place_of
from meshwright.store.tensor_piece import Piece, piece

MOST = 64
"""Ranks whose lists are made: more take minutes, and then every rank has near to an even share."""


def assigned_of(plan: Plan, rank: int, tensors: Mapping[str, Tensor]) -> set[str] | None:
    """As store.checkpoint.assigned among the ranks of this one's pipeline place; None where they are more than MOST.

    `tensors`: what this rank offers. Others of the place offer the same names.
    """
    layout = plan.layout
    place = place_of(layout, rank)["pp"]
    number = layout.world // layout.pp
    if number > MOST:
        return None
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in range(number)]
    lists = []
    with compat.real_tensors():
        for other, planner in zip(range(place * number, (place + 1) * number), planners, strict=True):
            theirs = {one.parameter.name: one for one in held(plan.model, layout, other)}
            planner.set_up_planner(_offered(tensors, theirs, plan.recipe.storage), is_coordinator=other == 0)
            lists.append(planner.create_local_plan())
        dealt, _ = planners[0].create_global_plan(lists)
    return {item.index.fqn for item in dealt[rank - place * number].items}


def _offered(
    tensors: Mapping[str, Tensor], theirs: Mapping[str, HeldParameter], storage: StateStorage
) -> dict[str, Tensor]:
    """The same names and dtypes with another rank's boxes, without memory."""
    found = {}
    for name, tensor in tensors.items():
        box = _box(name, theirs, storage)
        cut = box is not None and (isinstance(tensor, Piece) or tuple(tensor.shape) == box.whole)
        sizes = box.sizes if cut and box is not None else tuple(tensor.shape)
        dtype = tensor.held.dtype if isinstance(tensor, Piece) else tensor.dtype
        found[name] = piece(torch.empty(sizes, dtype=dtype, device="meta"), box if cut else None)
    return found


def _box(name: str, theirs: Mapping[str, HeldParameter], storage: StateStorage) -> Box | None:
    """Of a weight or an optimizer state, by its name in a checkpoint."""
    one = theirs.get(name.removeprefix("model."))
    if one is not None:
        return one.own_box
    _, state, parameter = (*name.split(".", 2), "", "")[:3]
    held = theirs.get(parameter)
    return storage.of(held.parameter).box(state, held.own_box) if held else None

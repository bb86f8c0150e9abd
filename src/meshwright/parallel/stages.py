"""Which part of the model a pipeline stage is, and what its ends have in common."""

from collections.abc import Sequence

from torch import nn

from meshwright.model import Transformer
from meshwright.parallel.group import Group
from meshwright.parallel.mesh import Mesh, make_group
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages
from meshwright.spec.schedule import stage_rank
from meshwright.spec.shape import ModelShape


def cut(model: Transformer, layout: Layout, stage: int) -> Transformer:
    """Leave of a whole model (a skeleton) what one stage holds. The last stage of a tied head keeps the embedding."""
    ranges = layers_of_stages(model.shape.layers, layout)
    layers = ranges[stage]
    model.first, model.last = stage == 0, stage == len(ranges) - 1
    for name in [name for name in model.layers if int(name) not in layers]:
        del model.layers[name]
    if not model.first:
        if not (model.last and model.shape.tied):
            del model.embed
        if model.shape.positions == "learned":
            del model.positions
    if not model.last:
        del model.norm
        if not model.shape.tied:
            del model.head
    return model


def share_embedding(stages: Sequence[Transformer]) -> None:
    """Both ends on one rank (the V placements): one matrix, whose gradient autograd adds up."""
    if len(stages) > 1 and stages[0].first and stages[-1].last and stages[-1].shape.tied:
        embed: nn.Embedding = stages[0].embed
        stages[-1].embed.weight = embed.weight


def ends_group(shape: ModelShape, mesh: Mesh) -> Group:
    """The two ranks that both hold a tied head's matrix, or this rank alone."""
    pp, layout = mesh["pp"], mesh.layout
    placement = stage_rank(layout.schedule, layout.pp, layout.vp) if layout.pp > 1 else (0,)
    ends = (pp.ranks[placement[0]], pp.ranks[placement[-1]])
    if not shape.tied or mesh.rank not in ends or ends[0] == ends[1]:
        return mesh["alone"]
    return make_group("pp", ends, mesh)

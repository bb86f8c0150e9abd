"""Which part of the model a pipeline stage is, and what its ends have in common."""

from collections.abc import Sequence

from torch import nn

from meshwright.model import Transformer
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages


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

"""The boxes of a rank of a mesh; the rule itself needs no torch and is spec's, so that planner and engine share it."""

from meshwright.parallel.mesh import Mesh
from meshwright.spec import boxes as rule
from meshwright.spec.boxes import Box, heads_of, share
from meshwright.spec.shape import ModelShape

__all__ = ["Box", "boxes", "heads_of", "share"]


def boxes(shape: ModelShape, mesh: Mesh) -> dict[str, Box]:
    """Parameter name -> what tensor and expert parallelism leave on this rank, for all layers (whatever the stage)."""
    return rule.boxes(shape, mesh.layout, mesh.rank)

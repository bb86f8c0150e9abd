"""The teacher of a case that distills: its student's architecture with other sizes, and distinctive weights."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.kernels.loss.linear_divergence import Divergence
from meshwright.parallel import Engine, Mesh
from meshwright.parallel.axes.data import local
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import NO_TARGETS, SAME_BASE, LoRAShape, ModelShape
from meshwright.spec.rules.objectives import teacher_layout
from meshwright.training.objectives.objectives import Distillation
from meshwright.training.objectives.teacher import lay_out, place_beside
from meshwright.training.step.step import CROSS_ENTROPY, Objective

SHARP = 6.0
"""Gain of the last norm. Random weights predict almost evenly, so their divergence would consist of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTeacher:
    """Sizes of a teacher, else equal to its student; beta, temperature and hard as in recipe.distillation_*."""

    layers: int = 2
    hidden: int = 24
    ffn: int = 40
    dense: bool = False
    """True if it has no experts although its student has."""
    filled: int = 0
    """Rows of padding in its vocabulary."""
    beta: float = 0.0
    temperature: float = 1.0
    hard: float = 0.0
    base: str = SAME_BASE
    """Same as teacher.lora.base: codes of its matrices."""

    def shape(self, student: ModelShape) -> ModelShape:
        """Return the teacher's shape. Raises PlanError when sizes contradict each other."""
        moe = None if self.dense or student.moe is None else student.moe
        codes = None if self.base == SAME_BASE else LoRAShape(rank=1, targets=NO_TARGETS, base=self.base)
        return replace(
            student, name="teacher", layers=self.layers, hidden=self.hidden, ffn=self.ffn, lora=codes,
            vocab=student.vocab + self.filled, window_from_layer=min(student.window_from_layer, self.layers),
            moe=moe and replace(moe, first_dense=min(moe.first_dense, self.layers)),
        )  # fmt: skip

    @property
    def form(self) -> Divergence:
        """The loss."""
        return Divergence(beta=self.beta, temperature=self.temperature, hard=self.hard)

    def objective(
        self, student: ModelShape, layout: Layout, mesh: Mesh, device: torch.device, dtype: torch.dtype, seed: int
    ) -> tuple[Distillation, Engine]:  # fmt: skip
        """Return the distillation that a case minimizes, and its teacher, initialized on this rank."""
        shape = self.shape(student)
        engine = lay_out(shape, teacher_layout(layout, shape), mesh, device, dtype, seed=seed)
        sharpen(engine)
        shared = student.vocab if self.filled else 0
        return Distillation(form=self.form, teacher=place_beside(engine, shared), shared=shared), engine


def case_objective(
    teacher: DrawnTeacher | None, student: ModelShape, layout: Layout, mesh: Mesh, device: torch.device,
    dtype: torch.dtype, seed: int,
) -> tuple[Objective, tuple[nn.Module, ...]]:  # fmt: skip
    """Return the objective of a case, and this rank's stages of its teacher."""
    if teacher is None:
        return CROSS_ENTROPY, ()
    objective, engine = teacher.objective(student, layout, mesh, device, dtype, seed + 1)
    return objective, engine.stages


@torch.no_grad()
def sharpen(engine: Engine) -> None:
    """Make the distributions of random weights distinct."""
    for name, parameter in engine.parameters.items():
        if name == "norm.weight":
            local(parameter).mul_(SHARP)

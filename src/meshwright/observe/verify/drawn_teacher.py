"""The teacher of a case that distills: a model like its student but for some sizes, with weights that say something."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.kernels.divergence_rows import Divergence
from meshwright.parallel import Engine, Mesh
from meshwright.parallel.data import local
from meshwright.spec.distillation_rules import teacher_layout
from meshwright.spec.layout import Layout
from meshwright.spec.lora import NONE, SAME, LoRAShape
from meshwright.spec.shape import ModelShape
from meshwright.training.distillation import Distillation
from meshwright.training.step import CROSS_ENTROPY, Objective
from meshwright.training.teacher import beside, lay_out

SHARP = 6.0
"""Gain of the last norm over that of drawn weights, whose distributions are almost even: a divergence between two of
those would be made of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTeacher:
    """Its sizes, and how it is learnt from; all else is as the student has it."""

    layers: int = 2
    """Of the teacher."""
    hidden: int = 24
    """As layers."""
    ffn: int = 40
    """As layers, of dense ones."""
    dense: bool = False
    """It has no experts, where its student has."""
    filled: int = 0
    """Rows that its vocabulary is filled up by."""
    beta: float = 0.0
    """As recipe.distillation_beta."""
    temperature: float = 1.0
    """As recipe.distillation_temperature."""
    hard: float = 0.0
    """As recipe.distillation_hard."""
    base: str = SAME
    """As teacher.lora.base: codes of its matrices."""

    def shape(self, student: ModelShape) -> ModelShape:
        """Of the teacher. PlanError where sizes contradict each other."""
        moe = None if self.dense or student.moe is None else student.moe
        codes = None if self.base == SAME else LoRAShape(rank=1, targets=NONE, base=self.base)
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
        """The distillation that a case minimizes, and its teacher, drawn on this rank."""
        shape = self.shape(student)
        engine = lay_out(shape, teacher_layout(layout, shape), mesh, device, dtype, seed=seed)
        sharpen(engine)
        shared = student.vocab if self.filled else 0
        return Distillation(form=self.form, teacher=beside(engine, shared), shared=shared), engine


def objective_of(
    teacher: DrawnTeacher | None, student: ModelShape, layout: Layout, mesh: Mesh, device: torch.device,
    dtype: torch.dtype, seed: int,
) -> tuple[Objective, tuple[nn.Module, ...]]:  # fmt: skip
    """What a case minimizes, and this rank's stages of the teacher that it reads."""
    if teacher is None:
        return CROSS_ENTROPY, ()
    made, engine = teacher.objective(student, layout, mesh, device, dtype, seed + 1)
    return made, engine.stages


@torch.no_grad()
def sharpen(engine: Engine) -> None:
    """Have drawn weights say something."""
    for name, parameter in engine.parameters.items():
        if name == "norm.weight":
            local(parameter).mul_(SHARP)

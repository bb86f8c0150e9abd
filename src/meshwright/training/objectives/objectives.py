"""The objective that a recipe names, and what it reads beside the text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.parallel import Engine
from meshwright.spec import Recipe
from meshwright.training.objectives.on_policy import OnPolicy
from meshwright.training.objectives.preference import DPO, IPO, ORPO
from meshwright.training.step.batches import AnswerReader, Batch, RowReader
from meshwright.training.step.step import CROSS_ENTROPY, Objective

BUILDERS: Mapping[str, Callable[[Recipe], Objective]] = {
    "cross-entropy": lambda recipe: CROSS_ENTROPY,
    "dpo": lambda recipe: DPO(
        sequence=recipe.sequence, beta=recipe.preference_beta, smoothing=recipe.preference_smoothing
    ),
    "ipo": lambda recipe: IPO(sequence=recipe.sequence, beta=recipe.preference_beta),
    "orpo": lambda recipe: ORPO(sequence=recipe.sequence, beta=recipe.preference_beta),
}
"""Every objective without a teacher. `teacher.build_distillation` makes the others."""


def objective_of(recipe: Recipe) -> Objective:
    """Return the objective of a recipe."""
    return BUILDERS[recipe.objective](recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The objective of a run, and the further inputs that it reads."""

    objective: Objective = CROSS_ENTROPY
    scored: Objective = CROSS_ENTROPY
    """The objective that scores held-out text. Distillations use cross-entropy, which compares across runs."""
    read_training_answers: AnswerReader | None = None
    """Further arrays of training answers, for the objective."""
    read_validation_answers: AnswerReader | None = None
    """Further arrays of held-out answers."""
    read_rows: RowReader | None = None
    """Further arrays of each position of a training row."""
    on_policy: OnPolicy | None = None
    """Rewrites answers in some steps. None = nothing is rewritten."""

    def rows(self, batch: Batch, engine: Engine, cursor: int) -> Batch:
        """Return the text that a step from sample `cursor` on reads, of this rank's part."""
        return batch if self.on_policy is None else self.on_policy.rows(batch, engine, cursor)


TEXT = Task()
"""Cross-entropy on plain text."""

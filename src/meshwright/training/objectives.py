"""The objective that a recipe names, and what it reads beside the text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.parallel import Engine
from meshwright.spec import Recipe
from meshwright.training.batches import Batch, OfAnswers, OfRows
from meshwright.training.on_policy import OnPolicy
from meshwright.training.orpo import ORPO
from meshwright.training.preference import DPO, IPO
from meshwright.training.step import CROSS_ENTROPY, Objective

MADE: Mapping[str, Callable[[Recipe], Objective]] = {
    "cross-entropy": lambda recipe: CROSS_ENTROPY,
    "dpo": lambda recipe: DPO(
        sequence=recipe.sequence, beta=recipe.preference_beta, smoothing=recipe.preference_smoothing
    ),
    "ipo": lambda recipe: IPO(sequence=recipe.sequence, beta=recipe.preference_beta),
    "orpo": lambda recipe: ORPO(sequence=recipe.sequence, beta=recipe.preference_beta),
}
"""Every objective but those with a teacher: `teacher.distillation` makes them, with it."""


def objective_of(recipe: Recipe) -> Objective:
    """What a step of this recipe minimizes."""
    return MADE[recipe.objective](recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run minimizes."""

    objective: Objective = CROSS_ENTROPY
    scored: Objective = CROSS_ENTROPY
    """What held-out text is scored by: of a distillation cross-entropy, so that runs compare."""
    of_training: OfAnswers | None = None
    """What the objective reads of answers that are trained on."""
    of_validation: OfAnswers | None = None
    """The same of those held out."""
    of_rows: OfRows | None = None
    """What it reads of each position of a row that is trained on."""
    on_policy: OnPolicy | None = None
    """What writes answers anew in some steps; None = nothing."""

    def rows(self, batch: Batch, engine: Engine, cursor: int) -> Batch:
        """What a step from sample `cursor` on reads, of this rank's part of the text."""
        return batch if self.on_policy is None else self.on_policy.rows(batch, engine, cursor)


TEXT = Task()
"""Cross-entropy."""

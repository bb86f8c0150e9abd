"""The objective that a recipe names, and what it reads beside the text."""

from dataclasses import dataclass

from meshwright.parallel import Engine
from meshwright.spec import Recipe
from meshwright.training.batches import Batch, OfAnswers, OfRows
from meshwright.training.on_policy import OnPolicy
from meshwright.training.orpo import ORPO
from meshwright.training.preference import DPO, IPO
from meshwright.training.step import CROSS_ENTROPY, Objective


def objective_of(recipe: Recipe) -> Objective:
    """What a step of this recipe minimizes."""
    if recipe.objective == "dpo":
        return DPO(sequence=recipe.sequence, beta=recipe.preference_beta, smoothing=recipe.preference_smoothing)
    if recipe.objective == "ipo":
        return IPO(sequence=recipe.sequence, beta=recipe.preference_beta)
    assert not recipe.traits.teacher, "teacher.distillation makes it, with its teacher"
    if recipe.objective == "orpo":
        return ORPO(sequence=recipe.sequence, beta=recipe.preference_beta)
    return CROSS_ENTROPY


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

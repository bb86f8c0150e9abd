"""Objectives: what a recipe may minimize, what each reads, and what it reports beside its loss."""

from dataclasses import dataclass
from typing import Literal

ObjectiveName = Literal["cross-entropy", "dpo", "ipo", "orpo", "distill"]
CROSS_ENTROPY: ObjectiveName = "cross-entropy"
DISTILL: ObjectiveName = "distill"
FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")
"""Means over pairs: rewards of the better and of the other answer, their difference, and how often it is positive."""
TAUGHT = ("divergence", "cross_entropy")
"""Means over tokens: of the teacher's distribution and the student's, times T^2; and of the text itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTraits:
    """What the rest of the program must know of an objective."""

    pairs: bool = False
    """It compares two answers to a prompt."""
    reference: bool = False
    """It reads the answers' log-probabilities under the first weights of the run."""
    teacher: bool = False
    """It reads the distributions of a teacher."""
    smooths: bool = False
    """It takes recipe.preference_smoothing."""
    figures: tuple[str, ...] = ()
    """Names of what it reports beside the loss."""


TRAITS: dict[ObjectiveName, ObjectiveTraits] = {
    "cross-entropy": ObjectiveTraits(),
    "dpo": ObjectiveTraits(pairs=True, reference=True, smooths=True, figures=FIGURES),
    "ipo": ObjectiveTraits(pairs=True, reference=True, figures=FIGURES),
    "orpo": ObjectiveTraits(pairs=True, figures=FIGURES),
    "distill": ObjectiveTraits(teacher=True, figures=TAUGHT),
}
PREFERENCES = tuple(name for name, traits in TRAITS.items() if traits.pairs)
"""Those that compare."""


def most_answers(sequence: int) -> int:
    """The most answers that a row of so many tokens may hold: each has a token before the one that is trained, and
    answers come in pairs."""
    return sequence // 4 * 2

"""Objectives of a recipe: their names, inputs, and figures reported beside the loss."""

from dataclasses import dataclass
from typing import Literal

ObjectiveName = Literal["cross-entropy", "dpo", "ipo", "orpo", "distill"]
CROSS_ENTROPY: ObjectiveName = "cross-entropy"
DISTILL: ObjectiveName = "distill"
FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")
"""Means over pairs: rewards of the better and of the other answer, their difference, and the share of positive
differences."""
TAUGHT = ("divergence", "cross_entropy")
"""Means over tokens: divergence of the student's distribution from the teacher's, times T^2, and cross-entropy of the
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTraits:
    """Properties of an objective that other parts of the program depend on."""

    pairs: bool = False
    """It compares two answers to a prompt."""
    reference: bool = False
    """It reads the answers' log-probabilities under the initial weights of the run."""
    teacher: bool = False
    """It reads the distributions of a teacher."""
    smooths: bool = False
    """It supports recipe.preference_smoothing."""
    figures: tuple[str, ...] = ()
    """Names of the figures reported beside the loss."""


TRAITS: dict[ObjectiveName, ObjectiveTraits] = {
    "cross-entropy": ObjectiveTraits(),
    "dpo": ObjectiveTraits(pairs=True, reference=True, smooths=True, figures=FIGURES),
    "ipo": ObjectiveTraits(pairs=True, reference=True, figures=FIGURES),
    "orpo": ObjectiveTraits(pairs=True, figures=FIGURES),
    "distill": ObjectiveTraits(teacher=True, figures=TAUGHT),
}
PREFERENCES = tuple(name for name, traits in TRAITS.items() if traits.pairs)
"""Objectives that compare two answers."""


def most_answers(sequence: int) -> int:
    """Return the most answers in a row of `sequence` tokens: pairs of answers, each of two tokens or more."""
    return sequence // 4 * 2

"""`meshwright plan --from FILE`: the configuration of other training software, judged."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.verbs.plan_from.answer import ConfigAnswer


def print_config(answer: "ConfigAnswer", *, details: bool, json: bool) -> None:
    """Print the answer to --from. Raises DoesNotFit, with its exit code, for a configuration that does not fit."""
    from meshwright.interface.terminal.screen_text import print_answer
    from meshwright.planner.step.prediction import usable_bytes
    from meshwright.spec.errors import DoesNotFit
    from meshwright.spec.units import short_gib
    from meshwright.verbs.plan_from.screen import config_lines

    print_answer(answer, config_lines(answer, details=details), json=json)
    if not answer.fits:
        peak, room = answer.prediction.peak_bytes, usable_bytes(answer.plan)
        bounds = answer.config.bounds
        need = f"needs {'at most ' * bool(bounds)}{short_gib(peak)} per device; {short_gib(room)} is usable"
        if bounds:
            raise DoesNotFit(
                f"does not fit as counted: {need}; settings that are not counted need less memory, so it may fit"
            )
        raise DoesNotFit(f"does not fit: {need}")
